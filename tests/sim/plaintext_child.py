"""A process that loads a bundle, stops at the first moment with weights in its memory, and searches that memory.

Run by test_plaintext_count.py: a process of its own has no leftovers of other tests.
"""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from appliance import reader as reader_module
from appliance.hostopen import MemoryWay, StagedWay
from appliance.loader import SealedLoader
from appliance.slot_cpu import CpuSlot
from appliance.slot_cuda import CudaSlot
from attestation.clock import SystemClock
from provisioning._seal import MINT
from provisioning.bundle import Bundle
from provisioning.grant import Grant
from provisioning.ownerkey import OwnerKey
from provisioning.secret import SecretBytes
from tests.sim.cuda import LazyCuda

Words = npt.NDArray[np.uint64]

# Pieces begin on multiples of this in their streams, and streams on pages in their cells: so do their lines in memory.
LINE = 64
# The list of known lines must not be found as plaintext.
MASK = np.uint64(0xA5C3_96F0_1234_8765)
_STEP = 4 << 20


def regions(skip: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Give the writable memory of this process (proc(5), maps), without some of it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        low, high = (int(part, 16) for part in span.split("-"))
        if "w" not in rights:
            continue
        for begin, end in sorted((max(low, a), min(high, b)) for a, b in skip if a < high and b > low):
            if low < begin:
                yield low, begin
            low = max(low, end)
        if low < high:
            yield low, high


def search(known: Words, skip: list[tuple[int, int]]) -> int:
    """Count the bytes of all lines of known plaintext."""
    found = 0
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for low, high in regions(skip):
            for start in range(low, high, _STEP):
                memory.seek(start)
                try:
                    block = memory.read(min(_STEP, high - start))
                except OSError:
                    continue  # memory that the kernel shows to nobody
                lines = np.frombuffer(block[: len(block) // LINE * LINE], np.uint64)[:: LINE // 8] ^ MASK
                at = np.searchsorted(known, lines).clip(max=len(known) - 1)
                found += int((known[at] == lines).sum()) * LINE
                # What was read is itself a copy; the next regions hold it.
                del lines, block
    return found


class Pause:
    """Searches once."""

    def __init__(self, known: Words, slot: CpuSlot | CudaSlot, loader: SealedLoader) -> None:
        self._known = known
        self._slot = slot
        self._loader = loader
        self._once = threading.Lock()
        self.found = self.counted = -1

    def look(self) -> None:
        if not self._once.acquire(blocking=False):
            return
        self.counted = self._loader.plaintext.alive
        blocks = self._slot._arenas if isinstance(self._slot, CpuSlot) else []
        self.found = search(self._known, [(block.data_ptr(), block.data_ptr() + block.numel()) for block in blocks])


def pause_at(moment: str, look: Callable[[], None]) -> None:
    """Look when the first run of a column is staged, when a part of one is, or when a segment went straight."""
    if moment == "run":
        bring = StagedWay.bring

        def brought(self: StagedWay, run, cell, lane):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            ticket = bring(self, run, cell, lane)
            if run.stream > 1:
                look()
            return ticket

        StagedWay.bring = brought  # type: ignore[method-assign]
    else:
        opening = MemoryWay._open

        def opened(self: MemoryWay, run, index, sealed, cell, staging):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            opening(self, run, index, sealed, cell, staging)
            # What was staged is still in the cell now, and was copied from there.
            if run.stream > 1 and bool(cell._exposed) == (moment == "part"):
                look()

        MemoryWay._open = opened  # type: ignore[method-assign]


def main() -> None:
    """Take bundle, owner key, known lines, device, type, road and moment; the bundle key is on the standard input."""
    directory, owner, marks, device, dtype, road, moment = sys.argv[1:]
    known: Words = np.load(marks)
    torch.set_num_threads(1)
    reader_module.cached_share = lambda *_: 1.0
    reader_module.may_map = lambda *_: road == "mapped"  # type: ignore[assignment]
    with Bundle.open(Path(directory), [OwnerKey.read(bytes.fromhex(owner))]) as bundle:
        grant = Grant(
            MINT,
            key=SecretBytes.read(0, 32),
            bundle_id=bundle.manifest.bundle_id,
            terms=bundle.manifest.policy.grant,
            deadline=math.inf,
            clock=SystemClock(),
        )
        slot = CpuSlot() if device == "cpu" else CudaSlot(LazyCuda())
        with SealedLoader(
            grant, bundle, slot, ring_bytes=6 << 20, reader_threads=1, opener_threads=1, rank=0, world=1
        ) as loader:
            layout = loader.catalog().layout
            made = {spec.name: slot.empty(spec.shape, getattr(torch, dtype)) for spec in layout.tensors}
            pause = Pause(known, slot, loader)
            pause_at(moment, pause.look)
            loader.load(made, skip=lambda _: False, on_progress=lambda *_: None)
            left = loader.plaintext.alive
        blocks = slot._arenas if isinstance(slot, CpuSlot) else slot._blocks
        after = search(known, [(block.data_ptr(), block.data_ptr() + block.numel()) for block in blocks])
    print(json.dumps({"found": pause.found, "counted": pause.counted, "left": left, "after": after}))


if __name__ == "__main__":
    main()
