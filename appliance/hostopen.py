"""Opening on the host: two ways to bring a run to a device (see :data:`appliance.stream.Bring`).

*To memory*: the device is host memory. A segment is decrypted straight to its tensors where that is possible. Otherwise
it is decrypted in the cell, or from a mapping into the cell's first segment, and copied from there, so that what is
copied is still in the core's cache. On a wrong tag the destinations are overwritten before anybody hears of it.

*Staged*: a run is decrypted in the cell, or from a mapping into it, and goes to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from appliance import placement
from appliance.direct import GAP_BYTES, HostTargets
from appliance.placement import Target
from appliance.reader import Reader
from appliance.ring import Cell
from appliance.slot import Lane, Ticket
from appliance.stream import Run
from appliance.unseal import Unsealer


class Way(AbstractContextManager["Way"], Protocol):
    """How runs become weights; wipes its keys at the end of a ``with`` block."""

    def bring(self, run: Run, cell: Cell, lane: Lane) -> Ticket:
        """Open a run and hand it to a lane; see :data:`appliance.stream.Bring`."""
        ...


class _Done:
    """A delivery that was over when it returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class _HostWay:
    """What both ways have in common."""

    def __init__(self, unsealer: Unsealer, *, reader: Reader, targets: Mapping[int, Sequence[Target]]) -> None:
        self._unsealer = unsealer
        self._reader = reader
        self._targets = targets

    def __exit__(self, *_: object) -> None:
        self._unsealer.close()


class StagedWay(_HostWay):
    """For devices that copy from staging memory.

    Args:
        unsealer: opens segments; closed at the end.
        reader: has brought the ciphertext.
        targets: of every stream, in order of their bytes.
    """

    def __enter__(self) -> StagedWay:
        return self

    def bring(self, run: Run, cell: Cell, lane: Lane) -> Ticket:
        """Open a run in its cell and let the lane spread it."""
        sealed = self._reader.show(run, cell)
        plaintext = cell.expose(0, run.length)
        size = run.length // run.count
        try:
            for index in range(run.count):
                self._unsealer.open(run, index, sealed, plaintext[index * size : (index + 1) * size])
        except BaseException:
            # Segments of the run that were opened before are as worthless now as the damaged one.
            cell.wipe()
            raise
        self._reader.drop(run)
        targets = self._targets[run.stream]
        return lane.deliver(cell.staged[: run.length], lambda plain: placement.place(targets, run.start, plain))


class MemoryWay(_HostWay):
    """For a device that is host memory.

    Args:
        unsealer: opens segments; closed at the end.
        reader: has brought the ciphertext.
        targets: of every stream, in order of their bytes.
    """

    def __init__(self, unsealer: Unsealer, *, reader: Reader, targets: Mapping[int, Sequence[Target]]) -> None:
        super().__init__(unsealer, reader=reader, targets=targets)
        self._memory = {stream: HostTargets(listed) for stream, listed in targets.items()}

    def __enter__(self) -> MemoryWay:
        return self

    def bring(self, run: Run, cell: Cell, lane: Lane) -> Ticket:
        """Open a run segment by segment."""
        sealed = self._reader.show(run, cell)
        memory = self._memory[run.stream]
        size = run.length // run.count
        # The end of the page behind the segments, of which a tag takes the beginning.
        gap = len(cell.view) - GAP_BYTES
        try:
            for index in range(run.count):
                start = run.start + index * size
                parts = memory.parts(start, start + size, cell.view[gap:])
                if parts is None:
                    self._copy(run, index, sealed, cell, lane)
                elif len(parts) == 1:
                    self._unsealer.open(run, index, sealed, parts[0])
                else:
                    cell.expose(gap, GAP_BYTES)
                    self._unsealer.open_parts(run, index, sealed, parts)
        except BaseException:
            cell.wipe()
            raise
        self._reader.drop(run)
        return _Done()

    def _copy(self, run: Run, index: int, sealed: memoryview, cell: Cell, lane: Lane) -> None:
        size = run.length // run.count
        offset = 0 if self._reader.is_mapped(run.file) else index * size
        self._unsealer.open(run, index, sealed, cell.expose(offset, size))
        targets, start = self._targets[run.stream], run.start + index * size

        def place(plain: torch.Tensor) -> None:
            placement.place(targets, start, plain)

        lane.deliver(cell.staged[offset : offset + size], place).wait()
