"""Where on a host device a segment can be decrypted to without a stop in between.

A segment of a stream lies over one or more pieces. If each of them goes, unconverted and unstrided, to a stretch of a
tensor in host memory, the segment is decrypted straight to these stretches.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch

from appliance.placement import Target

# Pieces begin on multiples of this in their stream; between two of them are fewer bytes, which are zeros.
_ALIGN = 64
GAP_BYTES = _ALIGN


class HostTargets:
    """The targets of one stream, as memory.

    Args:
        targets: of the stream, in order of their bytes.
    """

    __slots__ = ("_memory", "_stops", "_targets")

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._stops = [target.stop for target in targets]
        self._memory: list[memoryview | None] = [None] * len(targets)

    def parts(self, start: int, stop: int, gap: memoryview) -> list[memoryview] | None:
        """Give the stretches that bytes ``start`` to ``stop`` of the stream fill, in order; None if copies are needed.

        Args:
            start: first byte in the stream.
            stop: behind the last one.
            gap: ``GAP_BYTES`` for what lies between pieces, which nobody reads.
        """
        parts: list[memoryview] = []
        position = start
        index = bisect.bisect_right(self._stops, start)
        while position < stop:
            if index == len(self._targets):
                return None
            target = self._targets[index]
            between = min(target.start, stop) - position
            if between >= GAP_BYTES:
                return None
            if between > 0:
                parts.append(gap[:between])
                position += between
                continue
            memory = self._memory[index] or self._map(index)
            if memory is None:
                return None
            end = min(target.stop, stop)
            parts.append(memory[position - target.start : end - target.start])
            position = end
            index += 1
        return parts

    def _map(self, index: int) -> memoryview | None:
        target = self._targets[index]
        if target.block.dtype != target.dtype or not target.block.is_contiguous():
            return None
        # Two threads may both make one; either is right.
        view: memoryview = target.block.view(-1).view(torch.uint8).numpy().data
        self._memory[index] = view
        return view
