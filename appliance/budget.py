"""How many threads load, and through how large a ring, where the configuration leaves that open.

Pure arithmetic over the machine's numbers, and one function that looks at them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from appliance import pages
from appliance.slot import Slot

# Reads past the page cache of one MiB reach two thirds of what reads of four do (docs/adr/0015-fast-sealed-loading.md).
READ_BYTES = 4 << 20
# So many reads under way keep a disk's queue filled; those of a cell for a GPU are longer.
_READERS_TO_MEMORY = 8
_READERS_TO_DEVICE = 4
# Openers beyond these only wait: for the memory of a host device, for the link to another one.
_MOST_TO_MEMORY = 8
_MOST_TO_DEVICE = 4
# torch rounds pinned memory up to a power of two.
_MOST_RING = 512 << 20
_LEAST_RING = 4 << 20
# Keys, the catalog's cell and the rest of the process lock memory too.
_RESERVE = 2 << 20


@dataclass(frozen=True, slots=True)
class Budget:
    """What a load may use.

    Attributes:
        ring_bytes: staging memory.
        readers: threads that read.
        openers: threads that decrypt and copy.
    """

    ring_bytes: int
    readers: int
    openers: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine gives this process.

    Attributes:
        cores: usable ones.
        ranks: processes that load at the same time on it, at least 1.
        lockable: bytes that may be locked; None for no limit.
    """

    cores: int
    ranks: int
    lockable: int | None


def decide(asked: Budget, machine: Machine, *, copy_bytes: int, in_host_memory: bool) -> Budget:
    """Fill in what is 0 in ``asked``.

    Args:
        asked: as the configuration says.
        machine: where it is to run.
        copy_bytes: what one copy to the device should bring.
        in_host_memory: the device is host memory: the ring is locked by this process and not by a driver.
    """
    readers = asked.readers or (_READERS_TO_MEMORY if in_host_memory else _READERS_TO_DEVICE)
    most = _MOST_TO_MEMORY if in_host_memory else _MOST_TO_DEVICE
    openers = asked.openers or max(1, min(most, machine.cores // machine.ranks))
    if asked.ring_bytes:
        return Budget(asked.ring_bytes, readers, openers)
    wanted = (readers + 2 * openers) * (max(READ_BYTES, copy_bytes) + pages.PAGE)
    if not in_host_memory:
        return Budget(min(_MOST_RING, 1 << (wanted - 1).bit_length()), readers, openers)
    room = _MOST_RING if machine.lockable is None else machine.lockable - _RESERVE
    return Budget(max(_LEAST_RING, min(wanted, room)), readers, openers)


def useful_ring(asked: int, *, data_bytes: int) -> int:
    """Give the ring to take when ``asked`` bytes are configured: one far beyond the ciphertext only takes memory."""
    return min(asked, max(_MOST_RING, data_bytes))


def cell_bytes(budget: Budget, *, segment: int, copy_bytes: int) -> int:
    """Give how much is read, and mostly copied, at once: whole segments, and cells enough to keep all threads busy.

    Args:
        budget: nothing in it is 0.
        segment: bytes of a segment of the bundle.
        copy_bytes: what one copy to the device should bring.
    """
    # Each reader fills one cell, each opener holds one and may have one more under way to the device.
    share = budget.ring_bytes // (budget.readers + 2 * budget.openers) - pages.PAGE
    return max(1, min(max(READ_BYTES, copy_bytes), share) // segment) * segment


def for_slot(asked: Budget, slot: Slot, *, ranks: int) -> Budget:
    """Fill in what is 0 in ``asked`` for a device of this machine, with the cores that this process may use now."""
    machine = Machine(len(os.sched_getaffinity(0)), ranks, pages.lockable())
    return decide(asked, machine, copy_bytes=slot.copy_bytes, in_host_memory=slot.in_host_memory)
