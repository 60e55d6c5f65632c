"""The CPU as a slot: weights in this process's own memory.

It serves confidential machines without a GPU, laptops and tests. Device memory comes in arenas of private pages that
are kept out of core dumps and children. Where the limit on locked memory is "unlimited", as in the shipped unit, the
arenas are locked too; elsewhere swap must be off, which ``lethe doctor`` looks at (docs/limitations.md).
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable

import torch

from appliance import pages
from appliance.slot import Delivered, Lane, Ticket, fill_zero, overwrite
from appliance.zeroize import Overwritten

_ARENA = 32 << 20
_ALIGN = 64
# Openers decrypt and copy one segment while it is in the core's own cache; more at once only spills.
_COPY = 1 << 20


class _CpuLane:
    """Copies at once, on the calling thread."""

    def deliver(self, staged: torch.Tensor, place: Callable[[torch.Tensor], None]) -> Ticket:
        place(staged)
        return Delivered()

    def close(self) -> None:
        return


class CpuSlot:
    """Device memory is host memory of this process."""

    def __init__(self) -> None:
        self._arenas: list[torch.Tensor] = []
        self._used: list[int] = []
        self._staging: list[torch.Tensor] = []
        self._zeroized = False

    @property
    def name(self) -> str:
        """Always ``cpu``."""
        return "cpu"

    @property
    def device(self) -> torch.device:
        """The device, for torch."""
        return torch.device("cpu")

    @property
    def in_host_memory(self) -> bool:
        """It is."""
        return True

    @property
    def copy_bytes(self) -> int:
        """One segment of the usual size."""
        return _COPY

    @property
    def held_bytes(self) -> int:
        """Bytes given out by :meth:`empty`, with their padding to 64."""
        return sum(self._used)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Give a tensor; see :meth:`appliance.slot.Slot.empty`."""
        if self._zeroized:
            raise RuntimeError("the slot was zeroized; nothing can be allocated on it")
        nbytes = math.prod(shape) * dtype.itemsize
        block = self._take(pages.round_up(nbytes, _ALIGN))
        return block[:nbytes].view(dtype).view(shape)

    def _take(self, nbytes: int) -> torch.Tensor:
        if not self._arenas or self._used[-1] + nbytes > self._arenas[-1].numel():
            mapping = pages.map_private(max(nbytes, _ARENA))
            if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
                pages.lock(mapping, len(mapping))
            self._arenas.append(torch.frombuffer(mapping, dtype=torch.uint8))
            self._used.append(0)
        start = self._used[-1]
        self._used[-1] += nbytes
        return self._arenas[-1][start : start + nbytes]

    def staging(self, nbytes: int) -> torch.Tensor:
        """Give locked host memory; see :meth:`appliance.slot.Slot.staging`."""
        if self._zeroized:
            raise RuntimeError("the slot was zeroized; nothing can be allocated on it")
        block = torch.frombuffer(pages.map_locked(nbytes), dtype=torch.uint8)[:nbytes]
        self._staging.append(block)
        return block

    def lane(self, nbytes: int) -> Lane:  # noqa: ARG002  # a CPU lane holds nothing, whatever it carries
        """Give a lane that copies on the calling thread."""
        return _CpuLane()

    def zeroize(self) -> Overwritten:
        """Overwrite and read back; see :meth:`appliance.slot.Slot.zeroize`."""
        self._zeroized = True
        # Last given, first overwritten: the cache with its prompts goes before the weights.
        return overwrite(self._blocks()[::-1], fill_zero)

    def _blocks(self) -> list[torch.Tensor]:
        return [arena[:used] for arena, used in zip(self._arenas, self._used, strict=True)]

    def wipe_staging(self) -> Overwritten:
        """Overwrite and read back; see :meth:`appliance.slot.Slot.wipe_staging`."""
        return overwrite(self._staging, fill_zero)
