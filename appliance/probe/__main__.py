"""The probe's process: ``python -m appliance.probe``, started by ``lethe bench load``.

It takes one JSON object on standard input and writes events to standard output, one JSON object a line: ``stage`` and
``progress`` for people, then ``result`` or ``error``. It removes what it wrote when it is told to stop, and is told so
by the kernel when the command line dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from appliance.budget import Budget, for_slot
from appliance.config import Loading
from appliance.errors import ConfigError
from appliance.probe import aead, copying, medium
from appliance.probe.findings import CipherRate, CopyRate, Findings, ReadRate
from appliance.probe.throwaway import Throwaway
from appliance.slot import open_slot
from attestation import strictjson
from attestation.errors import LetheError
from attestation.strictjson import Fields
from provisioning.errors import InputFailed
from provisioning.medium import file_system_at

_PR_SET_PDEATHSIG = 1
_LIMIT = 1 << 16
_READ_SECONDS = 0.75
_CIPHER_BYTES = 256 << 20
_COPY_BYTES = 256 << 20
_MEMORY_MARGIN = 1 << 30
# How often progress is told, seconds.
_TICK = 0.2
# A cold file has a page or two in the cache at most.
_COLD_SHARE = 0.01


def main() -> None:
    """Serve the one request of standard input."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, _stop)
    try:
        fields = Fields(strictjson.loads(sys.stdin.buffer.readline(_LIMIT), limit=_LIMIT), "probe")
        findings = measure(
            Path(fields.text("directory", limit=4096)),
            nbytes=fields.integer("bytes"),
            device=fields.text("device", limit=16),
            loading=Loading(
                ring_mib=fields.integer("ring_mib"),
                readers=fields.integer("readers"),
                openers=fields.integer("openers"),
                open_on=fields.text("open_on", limit=16),
            ),
        )
    except LetheError as error:
        _leave_in_peace()
        _tell("error", {"error": error.as_payload() | {"exit_status": error.exit_status}})
    except KeyboardInterrupt:
        sys.exit(130)
    else:
        _leave_in_peace()
        _tell("result", {"findings": findings.as_payload()})


def measure(directory: Path, *, nbytes: int, device: str, loading: Loading) -> Findings:
    """Measure all stages and then the load itself.

    Args:
        directory: on the medium.
        nbytes: about how large the throw-away model is.
        device: ``cpu`` or ``cuda:N``.
        loading: the loader's settings as they are configured; 0 lets it choose, as a rank does.

    Raises:
        LetheError: a stage cannot be measured; nothing is left behind.
    """
    # As in a rank that loads: threads for arithmetic would only take cores from the openers.
    torch.set_num_threads(1)
    slot = open_slot(device)
    budget = for_slot(Budget(loading.ring_mib << 20, loading.readers, loading.openers), slot, ranks=1)
    _require_memory(nbytes)
    cores = len(os.sched_getaffinity(0))
    progress = _Progress()
    with Throwaway(directory, nbytes) as bundle:
        _stage(f"writing and packing a throw-away model of {nbytes / 1e9:.1f} GB in {directory}")
        bundle.seal(progress)
        bundle.chill()
        reads = _reads(bundle.files)
        _stage("measuring AES-256-GCM")
        counts = sorted({1, 2, budget.openers, cores})
        ciphers = aead.scaling(
            nbytes=_CIPHER_BYTES, threads=counts, open_on="device" if loading.open_on == "device" else "host"
        )
        _stage(f"measuring copies to {device}")
        copies = copying.by_size(partial(open_slot, device), nbytes=_COPY_BYTES)
        destinations = bundle.destinations(slot)
        cold = None
        if bundle.chill() < _COLD_SHARE:
            _stage("loading, cold")
            cold = bundle.load(slot, destinations, loading, progress)
        _stage("loading, warm")
        bundle.warm()
        warm = bundle.load(slot, destinations, loading, progress)
        return Findings(
            directory=str(directory),
            file_system=file_system_at(directory),
            device=device,
            cores=cores,
            open_on=loading.open_on,
            readers=budget.readers,
            openers=budget.openers,
            reads=reads,
            ciphers=tuple(CipherRate(count, rate.bytes_per_second) for count, rate in ciphers.items()),
            copies=tuple(CopyRate(size, rate.bytes_per_second) for size, rate in copies.items()),
            cold=cold,
            warm=warm,
        )


def _reads(files: list[Path]) -> tuple[ReadRate, ...]:
    try:
        found = medium.sweep(files, seconds=_READ_SECONDS, tell=lambda way: _stage(f"reading the medium: {way}"))
    except InputFailed as error:
        if error.code != "probe.direct":
            raise
        _stage("the file system has no direct reads, so the medium itself cannot be measured")
        return ()
    return tuple(ReadRate(one.block_bytes, one.threads, one.rate.bytes_per_second) for one in found)


def _require_memory(nbytes: int) -> None:
    """Refuse what would have the kernel kill a process of this machine."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    free = next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("MemAvailable:"))
    if free < nbytes + _MEMORY_MARGIN:
        raise ConfigError(
            "bench.memory",
            found=f"{free} bytes of memory free",
            expected=f"{nbytes + _MEMORY_MARGIN} bytes for the weights and the measurement",
            hint="stop other programs, or give a smaller --gb",
        )


class _Progress:
    """Tells of progress, not oftener than somebody could read."""

    def __init__(self) -> None:
        self._told = 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._told >= _TICK:
            self._told = now
            _tell("progress", {"label": label, "done": done, "total": total})


def _stage(text: str) -> None:
    _tell("stage", {"text": text})


def _tell(event: str, members: Mapping[str, Any]) -> None:
    sys.stdout.buffer.write(strictjson.dumps({"event": event, **members}) + b"\n")
    sys.stdout.buffer.flush()


def _leave_in_peace() -> None:
    """All is removed, so nobody needs to stop this process any more; a library's last steps are not interrupted."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
