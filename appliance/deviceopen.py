"""Opening on the device: the CPU authenticates ciphertext, the device turns it into plaintext.

Theory of operation: a run lies in its cell as ciphertext. Every segment of it is authenticated there
(provisioning/authenticate.py), and only then the run is copied to the lane's scratch block on the device, decrypted in
it, and spread to its tensors, all in the order of the lane's stream. The cell is private memory, so what was
authenticated is what is copied. Nothing on the host ever is plaintext, and nothing that was not authenticated is
decrypted.

The key schedules of all sections lie in one block of the slot's memory and are overwritten and read back when
the load is over, however it ends; so is the scratch memory of the cipher. The wipe of the slot covers both once more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from appliance import placement
from appliance.account import Account
from appliance.devicecipher.choice import FIRST_COUNTER, Choice, Counter
from appliance.devicecipher.schedule import PLANE_BYTES, PLANE_WORDS, write_planes
from appliance.errors import ConfigError, DeviceFault
from appliance.placement import Target
from appliance.ring import Cell
from appliance.slot import Lane, Slot, Ticket, fill_zero, overwrite
from appliance.stream import Run
from provisioning.authenticate import SectionAuthenticator
from provisioning.geometry import Section
from provisioning.manifest import SignedManifest
from provisioning.table import Table


class DeviceWay:
    """A way to bring runs (:data:`appliance.stream.Bring`) whose plaintext appears on the device.

    Args:
        key: the bundle key; it is read here and not kept.
        slot: where; its memory must not be the host's.
        choice: the form of the cipher, which passed its test on that device.
        manifest: of the bundle.
        table: of the bundle.
        descriptors: for each section to be opened, the digest of what lies in it.
        account: where authentic segments are noted.
        targets: of every stream, in order of their bytes.

    Raises:
        ConfigError: ``loading.open_on`` when the slot's memory is host memory.
        DeviceFault: ``slot.memory``; at the end of the ``with`` block ``cipher.wipe``.
    """

    def __init__(
        self,
        key: memoryview,
        *,
        slot: Slot,
        choice: Choice,
        manifest: SignedManifest,
        table: Table,
        descriptors: Mapping[Section, bytes],
        account: Account,
        targets: Mapping[int, Sequence[Target]],
    ) -> None:
        check_choice("device", slot)
        self._name = slot.name
        self._table = table
        self._size = manifest.segment_size
        self._account = account
        self._targets = {stream: tuple(listed) for stream, listed in targets.items()}
        self._choice = choice
        self._counters: dict[Lane, Counter] = {}
        self._lock = threading.Lock()
        self._authenticators: dict[int, SectionAuthenticator] = {}
        self._planes: dict[int, torch.Tensor] = {}
        self._secret: list[torch.Tensor] = []
        self._left = 0
        with ExitStack() as stack:
            stack.callback(self._forget)
            for section, descriptor in descriptors.items():
                authenticator = SectionAuthenticator(
                    key,
                    bundle_id=manifest.bundle_id,
                    section=section,
                    segment_size=self._size,
                    descriptor=descriptor,
                )
                self._authenticators[section.number] = stack.enter_context(authenticator)
            self._send_keys(slot)
            self._stack = stack.pop_all()

    def _send_keys(self, slot: Slot) -> None:
        """Write the key schedules to the device, by way of staging memory that is overwritten at once."""
        count = len(self._authenticators)
        block = slot.empty((count, PLANE_WORDS), torch.int32)
        self._secret.append(_flat(block))
        staged = slot.staging(count * PLANE_BYTES)
        try:
            view = staged.numpy().data
            for index, (number, authenticator) in enumerate(self._authenticators.items()):
                self._planes[number] = block[index]
                with authenticator.expose() as (key, nonce):
                    write_planes(key, nonce, view[index * PLANE_BYTES : (index + 1) * PLANE_BYTES])
            # A copy that the host waits for: the staging memory is overwritten behind it.
            _flat(block).copy_(staged)
        finally:
            fill_zero(staged)

    def bring(self, run: Run, cell: Cell, lane: Lane) -> Ticket:
        """Authenticate a run, send it as ciphertext, and let the device decrypt and spread it."""
        authenticator = self._authenticators[run.section]
        for index in range(run.count):
            tag = self._table.segment(run.base + index).tag
            authenticator.authenticate(run.first + index, cell.view[index * self._size : (index + 1) * self._size], tag)
            self._account.note(run.base + index)
        return lane.deliver(cell.staged[: run.length], partial(self._open, run, self._counter(lane, cell)))

    def _counter(self, lane: Lane, cell: Cell) -> Counter:
        """Give the lane's own form of the cipher: its scratch memory is in use as long as the lane's stream runs."""
        with self._lock:
            counter = self._counters.get(lane)
            if counter is None:
                counter = self._counters[lane] = self._choice.make(len(cell.view))
            return counter

    def _open(self, run: Run, counter: Counter, landed: torch.Tensor) -> None:
        counter.apply(
            landed,
            self._planes[run.section],
            first=run.first,
            segment_bytes=self._size,
            counter=FIRST_COUNTER,
        )
        placement.place(self._targets[run.stream], run.start, landed)

    def _forget(self) -> None:
        """Overwrite on the device what a key or a key stream can be had from, and read it back."""
        blocks = self._secret + [block for counter in self._counters.values() for block in counter.secret_blocks()]
        done = overwrite(blocks, fill_zero)
        self._left = done.overwritten_bytes - done.read_back_bytes + done.nonzero_bytes

    def __enter__(self) -> DeviceWay:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        if kind is None and self._left:
            raise DeviceFault(
                "cipher.wipe",
                found=f"{self._left} bytes of key schedules on {self._name} that could not be shown to be overwritten",
                expected="zeros",
                hint="power the machine off, and look at the device before it is used again",
            )


def check_choice(open_on: str, slot: Slot) -> None:
    """Check who is to decrypt: ``host``, or ``device`` where that has memory of its own.

    Raises:
        ConfigError: ``loading.open_on``.
    """
    if open_on == "host" or (open_on == "device" and not slot.in_host_memory):
        return
    raise ConfigError(
        "loading.open_on",
        found=f"opening on {open_on[:40]!r} with the device {slot.name}",
        expected="host, or device where that has memory of its own",
        hint="set loading.open_on to host",
    )


def _flat(block: torch.Tensor) -> torch.Tensor:
    return block.view(-1).view(torch.uint8)
