"""The wipe: what it reports, and that a device which does not take it is found out."""

from __future__ import annotations

import pytest
import torch

from appliance import slot as slot_module
from appliance.errors import ZeroizeIncomplete
from appliance.protocol import Wiped
from appliance.slot import overwrite
from appliance.slot_cpu import CpuSlot
from appliance.zeroize import Overwritten, require_zero, zeroize
from attestation.clock import SystemClock
from tests.sim.slots import DeadSlot, StuckSlot


class TickClock(SystemClock):
    """Half a second passes between two looks."""

    def __init__(self) -> None:
        super().__init__()
        self._time = 0.0

    def monotonic(self) -> float:
        self._time += 0.5
        return self._time


def fill(slot: CpuSlot, nbytes: int) -> torch.Tensor:
    return slot.empty((nbytes,), torch.uint8).fill_(0xAB)


def test_reports_device_and_staging_bytes_and_the_time() -> None:
    slot = CpuSlot()
    fill(slot, 1000)
    slot.staging(4096).fill_(1)
    wiped = zeroize(slot, clock=TickClock())
    assert wiped == Wiped("cpu", 1024, 1024, 0, 4096, 0.5)
    require_zero(wiped)


def test_wiping_twice_is_harmless() -> None:
    slot = CpuSlot()
    fill(slot, 64)
    zeroize(slot, clock=TickClock())
    assert zeroize(slot, clock=TickClock()).nonzero_bytes == 0


def test_memory_that_keeps_its_bytes_is_found_by_reading_back() -> None:
    slot = StuckSlot(0, 7, 63, 999)
    fill(slot, 1000)
    wiped = zeroize(slot, clock=TickClock())
    assert wiped.nonzero_bytes == 4
    assert wiped.read_back_bytes == wiped.overwritten_bytes
    with pytest.raises(ZeroizeIncomplete) as refused:
        require_zero(wiped)
    assert refused.value.code == "zeroize.nonzero"
    assert refused.value.exit_status == 9
    assert "power the machine off" in refused.value.hint


def test_a_device_that_fails_to_overwrite_is_found_by_reading_back() -> None:
    slot = DeadSlot()
    fill(slot, 128)
    wiped = zeroize(slot, clock=TickClock())
    assert wiped.nonzero_bytes == 128


def test_staging_memory_that_keeps_its_bytes_counts_too() -> None:
    class StuckStaging(CpuSlot):
        def wipe_staging(self) -> Overwritten:
            super().wipe_staging()
            return Overwritten(4096, 4096, 3)

    slot = StuckStaging()
    assert zeroize(slot, clock=TickClock()).nonzero_bytes == 3


def test_a_failing_block_does_not_save_the_others() -> None:
    blocks = [torch.full((100,), 5, dtype=torch.uint8) for _ in range(3)]

    def fill_or_fail(block: torch.Tensor) -> None:
        if block is blocks[1]:
            raise RuntimeError("CUDA error: unspecified launch failure")
        block.zero_()

    assert overwrite(blocks, fill_or_fail) == Overwritten(300, 300, 100)
    assert [bool(block.any()) for block in blocks] == [False, True, False]


def test_bytes_that_could_not_be_read_back_are_refused() -> None:
    with pytest.raises(ZeroizeIncomplete) as refused:
        require_zero(Wiped("cuda:0", 100, 60, 0, 0, 0.1))
    assert refused.value.code == "zeroize.unread"
    assert refused.value.exit_status == 9


def test_memory_that_cannot_be_read_back_is_missing_from_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(block: torch.Tensor) -> int:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(slot_module, "count_nonzero_bytes", fail)
    slot = CpuSlot()
    fill(slot, 256)
    wiped = zeroize(slot, clock=TickClock())
    assert (wiped.overwritten_bytes, wiped.read_back_bytes) == (256, 0)
