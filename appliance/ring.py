"""The ring: the only host memory that ever holds plaintext weights.

It is cut into cells. A cell takes a run of ciphertext from a reader, or the plaintext of segments opened from a
mapping, and is handed to a device and wiped. What can be opened straight into a device's memory leaves nothing in it.
The ring counts the plaintext bytes that are alive in it and their peak; the peak can never pass the ring's capacity
because there is no other place to open a segment in.
"""

from __future__ import annotations

import ctypes
import threading

import torch

from appliance import pages
from appliance.errors import ConfigError
from appliance.slot import Slot


class Tally:
    """Counts the plaintext bytes that are alive, and their peak.

    Attributes:
        alive: bytes now.
        peak: most bytes at once.
    """

    __slots__ = ("_lock", "alive", "peak")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.alive = 0
        self.peak = 0

    def add(self, nbytes: int) -> None:
        """Note that plaintext appeared, or with a negative number was overwritten."""
        with self._lock:
            self.alive += nbytes
            self.peak = max(self.peak, self.alive)


class Cell:
    """One place of the ring: room for segments, and a page behind them for the last tag.

    Attributes:
        view: all of its bytes, writable.
        staged: the same memory as ``[bytes] uint8``, for a device.
    """

    __slots__ = ("_exposed", "_tally", "staged", "view")

    def __init__(self, block: torch.Tensor, tally: Tally) -> None:
        self._tally = tally
        self._exposed: dict[int, int] = {}
        self.staged = block
        self.view = block.numpy().data

    def expose(self, start: int, nbytes: int) -> memoryview:
        """Count a stretch as plaintext from now on, before anything is decrypted to it, and give it.

        Stretches of one use of a cell are the same or apart; one that is used again counts once.
        """
        if start not in self._exposed:
            self._exposed[start] = nbytes
            self._tally.add(nbytes)
        return self.view[start : start + nbytes]

    def wipe(self) -> None:
        """Overwrite every stretch that was exposed; its plaintext is no longer alive."""
        while self._exposed:
            start, nbytes = self._exposed.popitem()
            ctypes.memset(self.staged.data_ptr() + start, 0, nbytes)
            self._tally.add(-nbytes)

    def clear(self) -> None:
        """Overwrite the whole cell, whatever is in it."""
        ctypes.memset(self.staged.data_ptr(), 0, len(self.view))
        self.wipe()


class Ring:
    """Locked staging memory of a slot, in cells.

    Args:
        slot: gives the memory.
        ring_bytes: most memory that is taken and locked, and so the bound on plaintext in host memory.
        cell_bytes: plaintext capacity of one cell, a multiple of the page size.

    Raises:
        ConfigError: ``ring.size`` when not even one cell fits, ``ring.memlock`` when the memory cannot be locked.
    """

    def __init__(self, slot: Slot, *, ring_bytes: int, cell_bytes: int) -> None:
        # A page more than the segments, so that every cell starts on a page and a tag fits behind the last segment.
        stride = pages.round_up(cell_bytes, pages.PAGE) + pages.PAGE
        count = ring_bytes // stride
        if count < 1:
            raise ConfigError(
                "ring.size",
                found=f"a ring of {ring_bytes} bytes",
                expected=f"at least {stride}, one segment of this bundle and a page",
                hint="raise loading.ring_mib",
            )
        self.bytes = count * stride
        self.cell_bytes = cell_bytes
        self._tally = Tally()
        memory = slot.staging(self.bytes)
        self.cells = tuple(Cell(memory[n * stride : (n + 1) * stride], self._tally) for n in range(count))

    @property
    def tally(self) -> Tally:
        """Count of the plaintext in the ring, which goes on counting."""
        return self._tally

    @property
    def alive_bytes(self) -> int:
        """Plaintext in the ring now."""
        return self._tally.alive

    @property
    def peak_bytes(self) -> int:
        """Most plaintext that was in the ring at once."""
        return self._tally.peak

    def wipe(self) -> None:
        """Overwrite every byte of every cell. No thread may be using one."""
        for cell in self.cells:
            cell.clear()
