"""A CUDA runtime in host memory that does enqueued work as late as it may.

Nothing that a stream was given happens before somebody waits for it. So a staging cell that is wiped or reused before
its copy is over shows as zeros or foreign bytes in the destination, every time and not once in a thousand runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from appliance.slot import Ticket
from appliance.slot_cuda import Stream


class LazyTicket:
    """Everything that was enqueued on a stream up to some point."""

    def __init__(self, stream: LazyStream, position: int) -> None:
        self._stream = stream
        self._position = position

    def done(self) -> bool:
        """Say whether somebody has waited that far."""
        return self._stream.position >= self._position

    def wait(self) -> None:
        """Do the work up to here."""
        self._stream.advance(self._position)


class LazyStream:
    """A queue of work that is done only when waited for."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.position = 0

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue."""
        self._work.append(work)

    def mark(self) -> Ticket:
        """Give a ticket."""
        return LazyTicket(self, len(self._work))

    def advance(self, position: int) -> None:
        """Do all work before ``position``."""
        with self._lock:
            while self.position < position:
                self._work[self.position]()
                self.position += 1


class LazyCuda:
    """The port of a device that exists in host memory only."""

    def __init__(self) -> None:
        self.streams: list[LazyStream] = []
        self.synchronized = 0

    @property
    def device(self) -> torch.device:
        """Host memory stands for the device's."""
        return torch.device("cpu")

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Give page-aligned memory; a page more is taken for that."""
        block = torch.empty(nbytes + 4096, dtype=torch.uint8)
        start = -block.data_ptr() % 4096
        return block[start : start + nbytes]

    def empty(self, nbytes: int) -> torch.Tensor:
        """Give memory full of leftovers."""
        return torch.full((nbytes,), 0x5A, dtype=torch.uint8)

    def stream(self) -> Stream:
        """Make a stream."""
        self.streams.append(LazyStream())
        return self.streams[-1]

    def synchronize(self) -> None:
        """Do all work of all streams."""
        self.synchronized += 1
        for stream in self.streams:
            stream.mark().wait()
