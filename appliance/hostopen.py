"""Opening on the host: two ways to bring a run to a device (see :data:`appliance.stream.Bring`).

*To memory*: the device is host memory. A segment is decrypted straight to its tensors as far as that is possible. The
rest of it is decrypted in the cell, or from a mapping into the cell's first segment, and copied from there when the tag
was found right. On a wrong tag all of it is overwritten before anybody hears of it.

*Staged*: a run is decrypted in the cell, or from a mapping into it, and goes to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from appliance import placement
from appliance.direct import HostTargets
from appliance.placement import Target
from appliance.reader import Reader
from appliance.ring import Cell
from appliance.slot import Delivered, Lane, Ticket
from appliance.stream import Run
from appliance.unseal import Unsealer


class Way(AbstractContextManager["Way"], Protocol):
    """How runs become weights; wipes its keys at the end of a ``with`` block."""

    def bring(self, run: Run, cell: Cell, lane: Lane) -> Ticket:
        """Open a run and hand it to a lane; see :data:`appliance.stream.Bring`."""
        ...


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
                self._unsealer.open(run, index, sealed, (plaintext[index * size : (index + 1) * size],))
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

    def bring(self, run: Run, cell: Cell, lane: Lane) -> Ticket:  # noqa: ARG002  # memory needs no lane
        """Open a run segment by segment."""
        sealed = self._reader.show(run, cell)
        mapped = self._reader.is_mapped(run.file)
        size = run.length // run.count
        try:
            for index in range(run.count):
                self._open(run, index, sealed, cell, 0 if mapped else index * size)
        except BaseException:
            cell.wipe()
            raise
        self._reader.drop(run)
        return Delivered()

    def _open(self, run: Run, index: int, sealed: memoryview, cell: Cell, staging: int) -> None:
        """Open one segment; what cannot go straight to a tensor goes to the cell, from byte ``staging`` on."""
        size = run.length // run.count
        start = run.start + index * size
        stretches = self._memory[run.stream].stretches(start, start + size)
        staged = [item for item in stretches if item.memory is None]
        if staged and sealed.readonly:
            cell.expose(0, size)  # used again for every segment of the run
        elif staged:
            for item in staged:
                cell.expose(staging + item.start, item.stop - item.start)
        self._unsealer.open(
            run,
            index,
            sealed,
            [
                cell.view[staging + item.start : staging + item.stop] if item.memory is None else item.memory
                for item in stretches
            ],
        )
        for item in staged:
            plain = cell.staged[staging + item.start : staging + item.stop]
            placement.place(self._targets[run.stream], start + item.start, plain)
