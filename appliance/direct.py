"""Where on a host device the plaintext of a segment goes.

A segment of a stream lies over one or more pieces. What of it belongs, unconverted and unstrided, to a stretch of a
tensor in host memory is decrypted straight to there. The rest is decrypted to staging memory and copied from it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from appliance.placement import Target


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive bytes of a segment that go to one place.

    Attributes:
        start: first byte, from the beginning of the segment.
        stop: behind the last one.
        memory: of a tensor; None for what goes to staging memory.
    """

    start: int
    stop: int
    memory: memoryview | None


class HostTargets:
    """The targets of one stream, as memory.

    Args:
        targets: of the stream, in order of their bytes.
    """

    __slots__ = ("_memory", "_stops", "_storages", "_targets")

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._stops = [target.stop for target in targets]
        self._memory: dict[int, memoryview | None] = {}
        self._storages: dict[int, memoryview] = {}

    def stretches(self, start: int, stop: int) -> list[Stretch]:
        """Give the stretches of the stream's bytes ``start`` to ``stop``, in order and without gaps between them."""
        found: list[Stretch] = []
        staged = position = start
        for index in range(bisect.bisect_right(self._stops, start), len(self._targets)):
            target = self._targets[index]
            if target.start >= stop:
                break
            memory = self._map(index)
            if memory is None:
                continue
            position, end = max(start, target.start), min(stop, target.stop)
            if staged < position:
                found.append(Stretch(staged - start, position - start, None))
            part = memory[position - target.start : end - target.start]
            found.append(Stretch(position - start, end - start, part))
            staged = end
        if staged < stop:
            found.append(Stretch(staged - start, stop - start, None))
        return found

    def _map(self, index: int) -> memoryview | None:
        # Two threads may both make one; either is right.
        if index not in self._memory:
            self._memory[index] = self._flat(self._targets[index])
        return self._memory[index]

    def _flat(self, target: Target) -> memoryview | None:
        block = target.block
        if block.dtype != target.dtype or not block.is_contiguous():
            return None
        storage = block.untyped_storage()
        if (whole := self._storages.get(storage.data_ptr())) is None:
            # One view for all tensors of an arena: making one takes longer than decrypting a small tensor.
            whole = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data
            self._storages[storage.data_ptr()] = whole
        begin = block.storage_offset() * block.itemsize
        return whole[begin : begin + block.numel() * block.itemsize]
