"""A slot: one device as the target of loading.

Everything the model, its cache and the loader keep on a device comes from the slot, so that the slot can overwrite
all of it and read it back. Whoever allocates device memory past the slot escapes the wipe.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from appliance.errors import ConfigError
from appliance.zeroize import Overwritten


class Ticket(Protocol):
    """A delivery under way: the staging memory must not change until it is done."""

    def done(self) -> bool:
        """Say whether the device has taken everything."""
        ...

    def wait(self) -> None:
        """Wait until it has."""
        ...


class Delivered:
    """The ticket of a delivery that was over when it returned."""

    __slots__ = ()

    def done(self) -> bool:
        """It is."""
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""


class Lane(Protocol):
    """One opener thread's way onto the device; not shared between threads."""

    def deliver(self, staged: torch.Tensor, place: Callable[[torch.Tensor], None]) -> Ticket:
        """Bring staged plaintext to the device and put it in its places.

        Args:
            staged: ``[bytes] uint8`` staging memory, at most the lane's size.
            place: called once with the same bytes where they can be copied from without touching host memory
                again: the staging memory itself on a CPU, device memory on a GPU. It may only enqueue copies.
        """
        ...

    def close(self) -> None:
        """Wait for what is under way and wipe what the lane itself holds."""
        ...


class Slot(Protocol):
    """A device with a registry of everything allocated on it."""

    @property
    def name(self) -> str:
        """``cpu`` or ``cuda:N``."""
        ...

    @property
    def device(self) -> torch.device:
        """The device, for torch."""
        ...

    @property
    def in_host_memory(self) -> bool:
        """Say whether openers can write into its tensors: its memory is this process's own."""
        ...

    @property
    def copy_bytes(self) -> int:
        """How many bytes one copy to the device should bring, where there are that many."""
        ...

    @property
    def held_bytes(self) -> int:
        """Device memory that the wipe will cover."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Give a contiguous tensor of unset content that the wipe will cover.

        Raises:
            DeviceFault: ``slot.memory`` when the device has no room.
            RuntimeError: the slot was zeroized.
        """
        ...

    def staging(self, nbytes: int) -> torch.Tensor:
        """Give page-aligned host memory, ``[nbytes] uint8``, locked, for plaintext on its way to the device.

        Raises:
            ConfigError: ``ring.memlock`` when it cannot be locked.
        """
        ...

    def lane(self, nbytes: int) -> Lane:
        """Give a lane that can take ``nbytes`` at once."""
        ...

    def zeroize(self) -> Overwritten:
        """Overwrite all device memory of the slot, read it back, and refuse every later allocation."""
        ...

    def wipe_staging(self) -> Overwritten:
        """Overwrite all staging memory of the slot and read it back."""
        ...


def open_slot(name: str) -> Slot:
    """Open a device by its name, ``cpu`` or ``cuda:N``.

    Raises:
        ConfigError: ``slot.name`` for any other name.
        DeviceFault: ``slot.absent`` when there is no such device.
    """
    if name == "cpu":
        from appliance.slot_cpu import CpuSlot

        return CpuSlot()
    match = re.fullmatch(r"cuda:(\d{1,2})", name)
    if match:
        from appliance.slot_cuda import CudaSlot, TorchCuda

        return CudaSlot(TorchCuda(int(match[1])))
    raise ConfigError("slot.name", found=repr(name[:40]), expected="cpu or cuda:N", hint="change devices.slots")


# Chunks bound the temporary that counting needs on a GPU: one byte per word.
_CHUNK = 64 << 20


def fill_zero(block: torch.Tensor) -> None:
    """Overwrite a flat ``[bytes] uint8`` block."""
    words = block.numel() // 8 * 8
    block[:words].view(torch.int64).zero_()
    block[words:].zero_()


def count_nonzero_bytes(block: torch.Tensor) -> int:
    """Read a flat ``[bytes] uint8`` block and count its bytes that are not zero."""
    total = 0
    for start in range(0, block.numel(), _CHUNK):
        chunk = block[start : start + _CHUNK]
        words = chunk.numel() // 8 * 8
        # Eight bytes at a time; the exact count is wanted only when something is wrong.
        if int(torch.count_nonzero(chunk[:words].view(torch.int64))) or int(torch.count_nonzero(chunk[words:])):
            total += int(torch.count_nonzero(chunk))
    return total


def overwrite(blocks: Sequence[torch.Tensor], fill: Callable[[torch.Tensor], None]) -> Overwritten:
    """Fill every block, then read every block back; an error of the device loses only its own block.

    Args:
        blocks: flat ``[bytes] uint8`` blocks.
        fill: writes zeros over one block.
    """
    for block in blocks:
        # RuntimeError is all that torch raises for a device that has failed; the read-back below tells.
        with contextlib.suppress(RuntimeError):
            fill(block)
    read = nonzero = 0
    for block in blocks:
        with contextlib.suppress(RuntimeError):
            nonzero += count_nonzero_bytes(block)
            read += block.numel()
    return Overwritten(sum(block.numel() for block in blocks), read, nonzero)
