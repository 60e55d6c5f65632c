"""The process of one device: takes an order and a key, loads, serves, and forgets.

``python -s -P -m appliance.rank --control FD --key FD [--engine FD]``

Phases: wait for the order; load; serve; wipe; wait to be dismissed. In every phase the agent is heard within
milliseconds, or at the next step of the engine: it may order the wipe, or it may have died, which orders it too. A
failure of any kind is reported, everything is overwritten, and the process stays, with nothing in it, until the agent
has heard of both. Signals that mean "stop" to other programs are ignored: the agent decides.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from appliance.engine.config import ModelConfig
from appliance.engine.engine import Engine
from appliance.engine.model import Decoder
from appliance.errors import AgentUnreachable, DeviceFault, ModelUnsupported, ProtocolError, ZeroizeIncomplete
from appliance.hardening import harden_process
from appliance.loader import SealedLoader
from appliance.mailbox import Mailbox
from appliance.placement import TORCH_DTYPES
from appliance.protocol import (
    Exit,
    Load,
    Message,
    ModelReady,
    Progress,
    RankFailed,
    Resident,
    Wiped,
    Zeroize,
    misdirected,
)
from appliance.resident import ResidentModel
from appliance.ring import Tally
from appliance.serving import EngineLoop
from appliance.slot import Slot, open_slot
from appliance.watch import Watch
from appliance.zeroize import require_zero, zeroize
from attestation.clock import SystemClock
from attestation.errors import LetheError
from provisioning.bundle import Bundle
from provisioning.catalog import Catalog
from provisioning.errors import BundleDamaged
from provisioning.grant import Grant
from provisioning.manifest import SignedManifest
from provisioning.ownerkey import OwnerKey

_CONTROL_FRAME = 1 << 20
# A prompt of a million tokens.
_ENGINE_FRAME = 16 << 20
_PROGRESS_SECONDS = 0.1
_LAST_WORD_SECONDS = 5.0
# The agent is gone: nobody reads this status but whoever collects orphans.
_ORPHANED = AgentUnreachable.exit_status


class _ZeroizeOrder(Exception):  # an order, not an error
    """The agent says Zeroize."""


class _Dismissed(Exception):  # an order, not an error
    """The agent says Exit, or is gone."""


class Rank:
    """One run of the process.

    Args:
        control: to the agent.
        key: descriptor of the pipe that brings the bundle key.
        engine: to the API process; None where another rank speaks to it.
    """

    def __init__(self, control: socket.socket, key: int, engine: socket.socket | None) -> None:
        self._control = Mailbox(control, max_frame=_CONTROL_FRAME)
        self._api = Mailbox(engine, max_frame=_ENGINE_FRAME) if engine is not None else None
        self._key = key
        self._clock = SystemClock()
        self._slot: Slot | None = None
        self._resident: ResidentModel | None = None
        self._engine: Engine | None = None
        self._last_progress = 0.0

    def run(self) -> int:
        """Run all phases; gives the exit status."""
        status = 0
        with Watch(self._control.fileno(), at_last=self._overwrite_blindly, status=_ORPHANED):
            try:
                self._work()
            except _ZeroizeOrder:
                pass
            except _Dismissed:
                status = _ORPHANED if not self._control.is_open() else 0
            except Exception as error:  # noqa: BLE001  # whatever happened, everything is overwritten, then reported
                failed = _describe(error)
                status = failed.exit_status
                self._tell(failed)
            wiped = self._wipe()
            self._tell(wiped)
            self._await_dismissal()
        try:
            require_zero(wiped)
        except ZeroizeIncomplete as error:
            return error.exit_status
        return status

    def _work(self) -> None:
        order = self._await_order()
        resident, catalog = self._load(order)
        self._resident = resident
        self._serve(order, resident, catalog)

    # --- the agent -----------------------------------------------------------------------------------------------

    def _heard(self) -> list[Message]:
        """Give what the agent said, unless it said that this is over.

        Raises:
            _ZeroizeOrder, _Dismissed: it did.
            ProtocolError: it said something that is no message.
        """
        messages = self._control.receive()
        for message in messages:
            if isinstance(message, Zeroize):
                raise _ZeroizeOrder
            if isinstance(message, Exit):
                raise _Dismissed
        if not self._control.is_open():
            raise _Dismissed
        return messages

    def _obey(self) -> None:
        """Hear the agent in a phase in which only an end can come."""
        for message in self._heard():
            raise misdirected(message, expected="Zeroize or Exit while loading or serving")

    def _wait(self, *descriptors: int) -> None:
        """Wait until the agent says something, or one of the descriptors can be read."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            for descriptor in descriptors:
                selector.register(descriptor, selectors.EVENT_READ)
            selector.select()

    def _await_order(self) -> Load:
        while True:
            self._wait()
            match self._heard():
                case []:
                    continue
                case [Load() as order]:
                    return order
                case [*_, last]:
                    raise misdirected(last, expected="one Load, and nothing else before the end")

    # --- load ----------------------------------------------------------------------------------------------------

    def _load(self, order: Load) -> tuple[ResidentModel, Catalog]:
        if order.world != 1:
            raise ModelUnsupported(
                "engine.devices",
                found=f"an order for {order.world} devices",
                expected="one device",
                hint="this engine runs on one device; see docs/limitations.md",
            )
        # Arithmetic threads would only take cores from the openers while nothing is computed.
        compute_threads = order.compute_threads or torch.get_num_threads()
        torch.set_num_threads(1)
        slot = self._slot = open_slot(order.device)
        with ExitStack() as stack:
            bundle = stack.enter_context(Bundle.open(Path(order.bundle), [OwnerKey.read(order.owner_key)]))
            _require_digest(bundle.manifest, order.manifest_digest)
            grant = stack.enter_context(self._take_grant(bundle.manifest))
            loader = SealedLoader(
                grant,
                bundle,
                slot,
                ring_bytes=order.ring_bytes,
                reader_threads=order.reader_threads,
                opener_threads=order.opener_threads,
                rank=order.rank,
                world=order.world,
                open_on=order.open_on,
                clock=self._clock,
            )
            catalog = loader.catalog()
            config = ModelConfig.from_json(catalog.file("config.json"))
            model = Decoder(config, empty=slot.empty, dtype=_dtype(order, catalog))
            resident = loader.make_resident(model, on_progress=partial(self._on_progress, loader.plaintext))
        torch.set_num_threads(compute_threads)
        self._control.send(
            Resident(
                device=slot.name,
                weight_bytes=resident.weight_bytes,
                segments=resident.segments,
                seconds=resident.seconds,
                ring_bytes=resident.ring_bytes,
                peak_plaintext_bytes=resident.peak_plaintext_bytes,
                peak_rss_bytes=_peak_rss(),
            )
        )
        return resident, catalog

    def _take_grant(self, manifest: SignedManifest) -> Grant:
        while not _readable(self._key):
            self._wait(self._key)
            self._obey()
        key, self._key = self._key, -1
        return Grant.inherit(key, manifest)

    def _on_progress(self, plaintext: Tally, done: int, total: int) -> None:
        self._obey()
        now = self._clock.monotonic()
        if done == total or now - self._last_progress >= _PROGRESS_SECONDS:
            self._last_progress = now
            self._control.send(Progress(done, total, plaintext.alive, plaintext.peak))

    # --- serve ---------------------------------------------------------------------------------------------------

    def _serve(self, order: Load, resident: ResidentModel, catalog: Catalog) -> None:
        config = resident.model.config
        max_context = min(order.max_context, config.max_context)
        engine = self._engine = Engine(
            resident,
            kv_cache_bytes=order.kv_cache_bytes,
            max_context=max_context,
            max_concurrent=order.max_concurrent,
        )
        if self._api is None:
            while True:
                self._wait()
                self._obey()
        self._api.send(
            ModelReady(
                max_context=max_context,
                vocabulary=config.vocabulary,
                eos_ids=list(config.end_ids(_optional(catalog, "generation_config.json"))),
                tokenizer=catalog.file("tokenizer.json"),
                tokenizer_config=_optional(catalog, "tokenizer_config.json"),
                chat_template=_optional(catalog, "chat_template.jinja"),
            )
        )
        EngineLoop(engine, control=self._control, api=self._api, obey=self._obey).run()

    # --- forget --------------------------------------------------------------------------------------------------

    def _wipe(self) -> Wiped:
        """Overwrite everything and read it back."""
        if self._key >= 0:
            os.close(self._key)
        if self._resident is not None:
            self._resident.give_up()
        if self._slot is None:
            return Wiped("none", 0, 0, 0, 0, 0.0)
        wiped = zeroize(self._slot, clock=self._clock)
        if self._engine is not None:
            # Beside the tensors, math libraries keep packed panels of the weights; zeros now take their place.
            self._engine.wipe_caches()
        return wiped

    def _overwrite_blindly(self) -> None:
        """Overwrite without telling anybody, on another thread than the one that is stuck."""
        if self._slot is not None:
            self._slot.zeroize()
            self._slot.wipe_staging()

    def _tell(self, message: Message) -> None:
        self._control.send(message)
        self._control.drain(_LAST_WORD_SECONDS)

    def _await_dismissal(self) -> None:
        """Stay until the agent says Exit or is gone, so that it can look at a wiped process first."""
        try:
            while self._control.is_open():
                self._wait()
                if any(isinstance(message, Exit) for message in self._control.receive()):
                    return
        except ProtocolError:
            return


def _readable(descriptor: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(0))


def _require_digest(manifest: SignedManifest, expected: bytes) -> None:
    if manifest.digest != expected:
        raise BundleDamaged(
            "bundle.changed",
            found=f"a manifest with digest {manifest.digest.hex()[:16]}",
            expected=f"{expected.hex()[:16]}, which the grant is for",
            hint="the bundle was exchanged after the request was made; make a new request",
        )


def _dtype(order: Load, catalog: Catalog) -> torch.dtype:
    """Choose the type of weights and arithmetic; ``auto`` on a GPU is that of the largest tensor in the bundle."""
    if order.dtype != "auto":
        chosen = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(order.dtype)
        if chosen is None:
            raise ModelUnsupported(
                "rank.dtype",
                found=repr(order.dtype[:40]),
                expected="auto, float32, bfloat16 or float16",
                hint="change devices.dtype",
            )
        return chosen
    if order.device == "cpu":
        return torch.float32
    largest = max(catalog.tensors, key=lambda spec: spec.nbytes)
    return TORCH_DTYPES.get(largest.dtype, torch.bfloat16)


def _optional(catalog: Catalog, name: str) -> bytes:
    return catalog.file(name) if name in catalog.files else b""


def _peak_rss() -> int:
    """Give the most memory that this process ever had resident, bytes (proc(5), VmHWM)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def _describe(error: Exception) -> RankFailed:
    """Give what the agent may know of an error; texts of foreign errors are left out, they may quote anything."""
    if not isinstance(error, LetheError):
        device = isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError)
        error = DeviceFault(
            "device.fault" if device else "rank.internal",
            found=type(error).__name__,
            expected="a rank without errors",
            hint="look at the device, then start again" if device else "report this; start again with a new grant",
        )
    return RankFailed(error.code, error.found, error.expected, error.hint, error.exit_status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; gives its exit status."""
    harden_process()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="appliance.rank", description="one device of a Lethe appliance")
    parser.add_argument("--control", type=int, required=True, help="descriptor of the channel to the agent")
    parser.add_argument("--key", type=int, required=True, help="descriptor of the pipe that brings the bundle key")
    parser.add_argument("--engine", type=int, help="descriptor of the channel to the API process")
    given = parser.parse_args(arguments)
    engine = socket.socket(fileno=given.engine) if given.engine is not None else None
    return Rank(socket.socket(fileno=given.control), given.key, engine).run()


if __name__ == "__main__":
    sys.exit(main())
