"""How fast staged plaintext gets onto a device, by the size of one copy, the way the loader does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from appliance.errors import ConfigError
from appliance.probe.rate import Rate
from appliance.slot import Slot, Ticket

MIB = 1 << 20
SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_DEPTH = 2


def by_size(make_slot: Callable[[], Slot], *, sizes: Sequence[int] = SIZES, nbytes: int = 512 * MIB) -> dict[int, Rate]:
    """Measure copies from staging memory to the device, through one lane of a slot.

    Args:
        make_slot: opens the device anew for each size, so that no size keeps locked memory from the next.
        sizes: bytes of one copy, ascending; those for which staging memory cannot be locked are left out.
        nbytes: moved per size, at least; two copies of each size go first, outside the clock.

    Raises:
        ConfigError: ``ring.memlock`` when not even the first size can be locked.
        DeviceFault: ``slot.*``.
    """
    found: dict[int, Rate] = {}
    for size in sizes:
        try:
            found[size] = _one(make_slot(), size, max(2 * _DEPTH, nbytes // size))
        except ConfigError:
            if not found:
                raise
            break
    return found


def _one(slot: Slot, size: int, count: int) -> Rate:
    staged = slot.staging(size)
    staged.fill_(1)
    target = slot.empty((max(2, min(count, 256 * MIB // size)) * size,), torch.uint8)
    target.zero_()
    lane = slot.lane(size)
    try:
        tickets: list[Ticket] = []
        begin = 0.0
        for number in range(-_DEPTH, count):
            if number == 0:
                for ticket in tickets:
                    ticket.wait()
                begin = time.perf_counter()
            start = number * size % target.numel()
            tickets.append(lane.deliver(staged, partial(_put, target[start : start + size])))
            if len(tickets) > _DEPTH:
                tickets.pop(0).wait()
        for ticket in tickets:
            ticket.wait()
        return Rate(count * size, time.perf_counter() - begin)
    finally:
        lane.close()


def _put(target: torch.Tensor, landed: torch.Tensor) -> None:
    target.copy_(landed, non_blocking=True)
