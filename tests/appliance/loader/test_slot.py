"""Slots: what they give out, what the overwrite covers, and how it is read back."""

from __future__ import annotations

import ctypes
import mmap
import re
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from appliance import pages
from appliance.errors import ConfigError, DeviceFault
from appliance.slot import count_nonzero_bytes, fill_zero, open_slot
from appliance.slot_cpu import CpuSlot
from appliance.slot_cuda import CudaSlot, TorchCuda, _pci_address
from tests.sim.cuda import LazyCuda


def test_refuses_a_device_name_that_is_neither_cpu_nor_cuda() -> None:
    with pytest.raises(ConfigError) as refused:
        open_slot("cuda")
    assert refused.value.code == "slot.name"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_refuses_a_cuda_device_that_is_not_there() -> None:
    with pytest.raises(DeviceFault) as refused:
        open_slot("cuda:0")
    assert refused.value.code == "slot.absent"


@pytest.mark.parametrize("shape", [(0,), (), (3,), (5, 7), (2, 0, 3), (1 << 20, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_cpu_slot_gives_contiguous_aligned_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    slot = CpuSlot()
    slot.empty((1,), torch.uint8)
    tensor = slot.empty(shape, dtype)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0


def test_tensors_of_one_slot_do_not_overlap() -> None:
    slot = CpuSlot()
    tensors = [slot.empty((n * 1000 + 1,), torch.uint8) for n in range(50)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))


def test_zeroize_covers_every_tensor_and_its_padding() -> None:
    slot = CpuSlot()
    tensors = [slot.empty((size,), torch.uint8) for size in (1, 64, 100, 40 << 20)]
    for tensor in tensors:
        tensor.fill_(0xEE)
    result = slot.zeroize()
    assert result.overwritten_bytes == result.read_back_bytes == 64 + 64 + 128 + (40 << 20) == slot.held_bytes
    assert result.nonzero_bytes == 0
    assert all(int(torch.count_nonzero(tensor)) == 0 for tensor in tensors)


@pytest.mark.parametrize("make", [CpuSlot, lambda: CudaSlot(LazyCuda())])
def test_gives_nothing_after_zeroize(make: type[CpuSlot]) -> None:
    slot = make()
    slot.zeroize()
    with pytest.raises(RuntimeError, match="zeroized"):
        slot.empty((1,), torch.uint8)
    with pytest.raises(RuntimeError, match="zeroized"):
        slot.staging(4096)


def test_staging_is_page_aligned_locked_and_kept_from_dumps_and_children() -> None:
    staging = CpuSlot().staging(1 << 20)
    assert staging.data_ptr() % mmap.PAGESIZE == 0
    flags = _flags_of_mapping(staging.data_ptr())
    assert {"lo", "dd", "dc"} <= flags  # locked, do not dump, do not copy on fork
    assert "sh" not in flags


def test_device_memory_of_the_cpu_is_kept_from_dumps_and_children() -> None:
    tensor = CpuSlot().empty((10,), torch.float32)
    flags = _flags_of_mapping(tensor.data_ptr())
    assert {"dd", "dc"} <= flags
    assert "sh" not in flags


def _flags_of_mapping(address: int) -> set[str]:
    """Read the kernel's flags of the mapping that holds an address (proc(5), VmFlags)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= address < high
        elif inside and head == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError("no such mapping")


def test_refuses_a_ring_that_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def mlock(self, address: int, length: int) -> int:
            return -1

    monkeypatch.setattr(pages, "_libc", Refusing())
    with pytest.raises(ConfigError) as refused:
        CpuSlot().staging(1 << 20)
    assert refused.value.code == "ring.memlock"
    assert refused.value.exit_status == 78


def test_raises_the_soft_limit_before_locking() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, hard))
    try:
        CpuSlot().staging(4096)
        assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_reports_memory_that_the_kernel_does_not_have() -> None:
    with pytest.raises(DeviceFault) as refused:
        CpuSlot().empty((1 << 50,), torch.uint8)
    assert refused.value.code == "slot.memory"


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, (64 << 20) + 5])
def test_read_back_counts_every_byte_that_is_not_zero(size: int) -> None:
    block = torch.zeros(size, dtype=torch.uint8)
    places = {0, size // 2, size - 1}
    for place in places:
        block[place] = 1
    assert count_nonzero_bytes(block) == len(places)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 1001])
def test_fill_leaves_no_tail(size: int) -> None:
    block = torch.full((size,), 0xFF, dtype=torch.uint8)
    fill_zero(block)
    assert count_nonzero_bytes(block) == 0


def test_cuda_slot_zeroizes_tensors_and_scratch_blocks() -> None:
    port = LazyCuda()
    slot = CudaSlot(port)
    tensor = slot.empty((100,), torch.bfloat16)
    slot.lane(4096)
    result = slot.zeroize()
    assert result.overwritten_bytes == result.read_back_bytes == 200 + 4096 == slot.held_bytes
    assert result.nonzero_bytes == 0
    assert int(torch.count_nonzero(tensor)) == 0
    assert port.synchronized == 1


def test_cuda_lane_brings_bytes_in_one_copy_and_spreads_them_on_the_device() -> None:
    port = LazyCuda()
    slot = CudaSlot(port)
    target = slot.empty((4, 3), torch.float32)
    lane = slot.lane(4096)
    values = torch.arange(6, dtype=torch.bfloat16)
    staged = slot.staging(4096)
    staged[:12] = values.view(torch.uint8)
    seen: list[int] = []

    def place(landed: torch.Tensor) -> None:
        seen.append(landed.data_ptr())
        target[:2].copy_(landed.view(torch.bfloat16).view(2, 3))

    ticket = lane.deliver(staged[:12], place)
    assert not ticket.done()
    ticket.wait()
    assert ticket.done()
    assert seen == []
    staged.zero_()  # the host memory is free again before the spreading is over
    lane.close()
    assert target[:2].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert seen[0] != staged.data_ptr()


def test_cuda_lane_wipes_its_scratch_block_when_closed() -> None:
    slot = CudaSlot(LazyCuda())
    lane = slot.lane(64)
    lane.deliver(torch.full((64,), 9, dtype=torch.uint8), lambda _: None)
    lane.close()
    assert count_nonzero_bytes(slot._blocks[0]) == 0


def test_pinned_memory_falls_back_to_locked_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch, "empty", refuse)
    port = TorchCuda.__new__(TorchCuda)
    staging = port.pinned(8192)
    assert staging.numel() == 8192
    assert "lo" in _flags_of_mapping(staging.data_ptr())


def test_address_of_pages_is_that_of_their_first_byte() -> None:
    mapping = pages.map_private(4096)
    mapping[0] = 0x41
    assert ctypes.string_at(pages.address(mapping), 1) == b"A"


def test_host_pages_are_never_registered_with_a_device() -> None:
    # Confidential mode refuses it; staging memory comes from torch's allocator.
    root = Path(pages.__file__).parents[1]
    sources = [path for floor in ("appliance", "provisioning") for path in (root / floor).rglob("*.py")]
    assert len(sources) > 50
    named = [path.name for path in sources if re.search(r"(cuda|cuMem|hip)HostRegister|cudart\(\)", path.read_text())]
    assert named == []


def test_a_device_is_found_in_sysfs_by_its_address() -> None:
    named = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=2)
    assert _pci_address(named) == "0000:3b:02.0"
    assert _pci_address(SimpleNamespace(pci_bus_id=1)) is None
