"""Devices that misbehave, for drills. They stand in for hardware and are not importable by the product."""

from __future__ import annotations

import torch

from appliance.slot import fill_zero, overwrite
from appliance.slot_cpu import CpuSlot
from appliance.zeroize import Overwritten


class StuckSlot(CpuSlot):
    """Its device memory does not take the overwrite in some places.

    Args:
        stuck: offsets in the first block of device memory that keep what they hold.
    """

    def __init__(self, *stuck: int) -> None:
        super().__init__()
        self._stuck = torch.tensor(stuck)

    def zeroize(self) -> Overwritten:
        """Overwrite, but for the stuck bytes."""
        self._zeroized = True
        return overwrite(self._blocks(), self._fill)

    def _fill(self, block: torch.Tensor) -> None:
        kept = block[self._stuck].clone()
        fill_zero(block)
        block[self._stuck] = kept


class DeadSlot(CpuSlot):
    """Its device memory answers every overwrite with an error of the runtime and changes nothing."""

    def zeroize(self) -> Overwritten:
        """Fail to overwrite."""
        self._zeroized = True
        return overwrite(self._blocks(), self._fail)

    def _fail(self, block: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: the device has fallen off the bus")
