"""A GPU as a slot.

Theory of operation: staging memory comes from torch's host allocator (``cudaHostAlloc``), never from registering pages,
which confidential mode refuses. An opener thread has a lane: a stream and one scratch block on the device. A delivery
is one large copy of raw bytes into the scratch block, then device-side copies from there that convert and spread
them. Copying from the host straight into a tensor of another type, or into a strided one, would make torch build the
converted plaintext in ordinary host memory first. The staging memory may be wiped when the event after the large copy
has passed; the scratch block is safe because all of a lane's work is in stream order.

What this does not reach: memory that torch's caching allocator holds for activations, and bounce buffers of the driver;
both end with the process (docs/limitations.md).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Protocol

import torch

from appliance import numa, pages
from appliance.errors import DeviceFault
from appliance.slot import Lane, Ticket, fill_zero, overwrite
from appliance.zeroize import Overwritten

# In confidential mode every copy costs about a third of a millisecond, so few large ones are wanted; see
# docs/adr/0004-loader-pipeline.md.
_COPY = 32 << 20


class Port(Protocol):
    """The few calls of the CUDA runtime that the slot needs."""

    @property
    def device(self) -> torch.device:
        """The device, for torch."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Give page-aligned host memory that the device can read directly, or locked memory where there is none."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Give ``[nbytes] uint8`` device memory, aligned to at least 256 bytes."""
        ...

    def stream(self) -> Stream:
        """Make a stream of the device."""
        ...

    def synchronize(self) -> None:
        """Wait for everything on the device."""
        ...


class Stream(Protocol):
    """A queue of device work."""

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue what ``work`` launches on this stream."""
        ...

    def mark(self) -> Ticket:
        """Give a ticket for everything enqueued so far."""
        ...


class _CudaTicket:
    """An event recorded behind a delivery."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]  # torch gives it no annotation

    def wait(self) -> None:
        self._event.synchronize()


class _CudaStream:
    """A stream of torch."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no annotation

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Ticket:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no annotation
        event.record(self._stream)
        return _CudaTicket(event)


class TorchCuda:
    """The CUDA runtime as torch offers it.

    Raises:
        DeviceFault: ``slot.absent`` when there is no such device.
    """

    def __init__(self, ordinal: int) -> None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if ordinal >= count:
            raise DeviceFault(
                "slot.absent",
                found=f"{count} CUDA devices",
                expected=f"cuda:{ordinal}",
                hint="look at nvidia-smi, or change devices.slots",
            )
        self._device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self._device)
        # Before any staging memory is allocated: it comes from the node of the core that first touches it.
        if (address := _pci_address(torch.cuda.get_device_properties(ordinal))) is not None:
            numa.bind_near(address)

    @property
    def device(self) -> torch.device:
        """The device, for torch."""
        return self._device

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Give pinned host memory; where the driver refuses it, locked private pages, which copy more slowly."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return torch.frombuffer(pages.map_locked(nbytes), dtype=torch.uint8)[:nbytes]

    def empty(self, nbytes: int) -> torch.Tensor:
        """Give device memory."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            raise DeviceFault(
                "slot.memory",
                found=f"no room for {nbytes} bytes on {self._device}",
                expected="enough free memory for the model, its cache and the scratch blocks",
                hint="stop other programs on the device, or lower engine.kv_cache_mib or loading.ring_mib",
            ) from None

    def stream(self) -> Stream:
        """Make a stream."""
        return _CudaStream(self._device)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


def _pci_address(properties: object) -> str | None:
    """Give a device's address as sysfs writes it; None where this torch does not say. A GPU is function 0."""
    # torch's annotations leave these out.
    numbers = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if not all(isinstance(number, int) for number in numbers):
        return None
    domain, bus, device = numbers
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


class _CudaLane:
    """One opener thread's stream and scratch block."""

    def __init__(self, port: Port, scratch: torch.Tensor) -> None:
        self._port = port
        self._stream = port.stream()
        self._scratch = scratch

    def deliver(self, staged: torch.Tensor, place: Callable[[torch.Tensor], None]) -> Ticket:
        landed = self._scratch[: staged.numel()]
        self._stream.run(lambda: _copy(landed, staged))
        # Only the large copy reads host memory, so the staging memory is free again before the spreading is over.
        ticket = self._stream.mark()
        self._stream.run(lambda: place(landed))
        return ticket

    def close(self) -> None:
        self._stream.run(lambda: fill_zero(self._scratch))
        self._stream.mark().wait()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


class CudaSlot:
    """Device memory of one GPU."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._blocks: list[torch.Tensor] = []
        self._staging: list[torch.Tensor] = []
        self._zeroized = False

    @property
    def name(self) -> str:
        """``cuda:N``."""
        return str(self._port.device)

    @property
    def device(self) -> torch.device:
        """The device, for torch."""
        return self._port.device

    @property
    def in_host_memory(self) -> bool:
        """It is not."""
        return False

    @property
    def copy_bytes(self) -> int:
        """Bytes per copy that hide the toll of confidential mode."""
        return _COPY

    @property
    def held_bytes(self) -> int:
        """Bytes given out, scratch blocks of lanes included."""
        return sum(block.numel() for block in self._blocks)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Give a tensor; see :meth:`appliance.slot.Slot.empty`."""
        return self._take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def _take(self, nbytes: int) -> torch.Tensor:
        if self._zeroized:
            raise RuntimeError("the slot was zeroized; nothing can be allocated on it")
        block = self._port.empty(nbytes)
        self._blocks.append(block)
        return block

    def staging(self, nbytes: int) -> torch.Tensor:
        """Give pinned host memory; see :meth:`appliance.slot.Slot.staging`."""
        if self._zeroized:
            raise RuntimeError("the slot was zeroized; nothing can be allocated on it")
        block = self._port.pinned(nbytes)
        self._staging.append(block)
        return block

    def lane(self, nbytes: int) -> Lane:
        """Give a lane; its scratch block stays on the slot's list, so the wipe covers it."""
        return _CudaLane(self._port, self._take(nbytes))

    def zeroize(self) -> Overwritten:
        """Overwrite and read back; see :meth:`appliance.slot.Slot.zeroize`."""
        self._zeroized = True
        # Last given, first overwritten: the cache with its prompts goes before the weights.
        # A device that has failed must not keep its other blocks, or the staging memory, from being overwritten.
        with contextlib.suppress(RuntimeError):
            self._port.synchronize()
        return overwrite(self._blocks[::-1], fill_zero)

    def wipe_staging(self) -> Overwritten:
        """Overwrite and read back; see :meth:`appliance.slot.Slot.wipe_staging`."""
        return overwrite(self._staging, fill_zero)
