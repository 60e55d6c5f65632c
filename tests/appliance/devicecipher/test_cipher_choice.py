"""The form is chosen by device, tested before it is used, and takes its memory from the slot."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch

from appliance.devicecipher import choice
from appliance.devicecipher.plain import PlainCounter, scratch_words
from appliance.errors import DeviceFault
from appliance.slot import Slot
from appliance.slot_cpu import CpuSlot
from appliance.slot_cuda import CudaSlot
from tests.sim.cuda import LazyCuda


class _Gpu(CudaSlot):
    """A slot whose memory is the host's and whose device says that it is a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def _gpu() -> _Gpu:
    return _Gpu(LazyCuda())


def test_cpu_runs_the_torch_form() -> None:
    assert choice.choose(CpuSlot()).form == "torch"


def test_gpu_runs_the_triton_form(kernel: ModuleType) -> None:
    chosen = choice.choose(_gpu())
    assert chosen.form == "triton"
    assert isinstance(chosen.make(4096), kernel.KernelCounter)


def test_kernel_is_compiled_into_a_directory_that_is_new_private_and_gone_afterwards(kernel: ModuleType) -> None:
    usual = kernel.triton.knobs.cache.dir
    seen = []
    for _ in range(2):
        with kernel.compiling():
            place = Path(kernel.triton.knobs.cache.dir)
            seen.append(place)
            assert list(place.iterdir()) == []
            assert place.stat().st_mode & 0o777 == 0o700
            (place / "code").write_bytes(b"x")
        assert not place.exists()
    assert len({*seen, Path(usual)}) == 3
    assert kernel.triton.knobs.cache.dir == usual


def test_gpu_without_a_place_for_compiled_code_runs_the_torch_form(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_PLACES", (Path("/proc/absent"),))
    assert choice.choose(_gpu()).form == "torch"


def test_gpu_without_triton_runs_the_torch_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "appliance.devicecipher.kernel", None)
    chosen = choice.choose(_gpu())
    assert chosen.form == "torch"
    assert isinstance(chosen.make(4096), PlainCounter)


@pytest.mark.parametrize("error", [OSError("no directory"), RuntimeError("Failed to find C compiler")])
def test_gpu_on_which_triton_does_not_start_runs_the_torch_form(
    error: Exception, kernel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(kernel.KernelCounter, "apply", fail)
    assert choice.choose(_gpu()).form == "torch"


def test_wrong_kernel_is_a_fault_and_not_replaced(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.KernelCounter, "apply", lambda *_, **__: None)
    with pytest.raises(DeviceFault) as caught:
        choice.choose(_gpu())
    assert caught.value.code == "cipher.selftest"
    assert "triton" in caught.value.found


def test_one_wrong_byte_of_the_torch_form_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PlainCounter.apply

    def wrong(self: PlainCounter, data: torch.Tensor, planes: torch.Tensor, **place: int) -> None:
        right(self, data, planes, **place)
        data[-1] ^= 1

    monkeypatch.setattr(PlainCounter, "apply", wrong)
    with pytest.raises(DeviceFault) as caught:
        choice.choose(CpuSlot())
    assert caught.value.code == "cipher.selftest"


def test_a_choice_under_way_tells_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    right = choice.choose

    def slow(slot: Slot) -> choice.Choice:
        assert told.wait(30)
        return right(slot)

    monkeypatch.setattr(choice, "choose", slow)
    assert choice.Choosing(CpuSlot()).wait(told.set).form == "torch"


def test_a_choice_under_way_is_left_when_its_caller_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(choice, "choose", lambda _: never.wait(30))

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        choice.Choosing(CpuSlot()).wait(stop)
    never.set()


def test_a_choice_that_failed_raises_its_error_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainCounter, "apply", lambda *_, **__: None)
    with pytest.raises(DeviceFault) as caught:
        choice.Choosing(CpuSlot()).wait(lambda: None)
    assert caught.value.code == "cipher.selftest"


def test_scratch_of_the_torch_form_is_the_slots() -> None:
    slot = CpuSlot()
    chosen = choice.choose(slot)
    before = slot.held_bytes
    chosen.make(64 << 10)
    small = slot.held_bytes - before
    chosen.make(64 << 20)
    assert scratch_words(64 << 10) * 4 <= small < scratch_words(66 << 10) * 4
    # However large the lane, the scratch memory is bounded.
    assert slot.held_bytes - before - small < scratch_words(257 << 10) * 4


def test_torch_form_takes_no_memory_of_its_own() -> None:
    chunk = 64 << 10
    counter = PlainCounter(torch.zeros(scratch_words(chunk), dtype=torch.int32), chunk_bytes=chunk)
    data, planes = torch.zeros(2 * chunk, dtype=torch.uint8), torch.zeros(480, dtype=torch.int32)
    counter.apply(data, planes, first=0, segment_bytes=chunk, counter=2)
    with torch.profiler.profile(profile_memory=True) as profile:
        counter.apply(data, planes, first=0, segment_bytes=chunk, counter=2)
    # Numbers become tensors of a few bytes; a row of one bit of the state would be 2048.
    assert sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages()) < 1024


def test_scratch_of_another_size_is_not_taken() -> None:
    with pytest.raises(ValueError, match="scratch of"):
        PlainCounter(torch.zeros(7, dtype=torch.int32), chunk_bytes=4096)
