"""The pipeline: reader threads -> ring cells -> opener threads -> device.

Readers and openers are separate threads: a thread that did both would let the disk's queue run dry while it decrypts.
Readers take a free cell first and a run second, so runs are read in order and no reader holds work that it cannot do.
An opener brings a run to the device through its own lane, and returns the cell, wiped, as soon as the device has taken
it. How segments are opened is no matter of the pipeline: see :data:`Bring`.

The first error, in whichever thread, or one raised by ``on_progress``, stops all threads. The pipeline returns or
raises only when no opener is running, and with every cell wiped. A reader that hangs in a medium that does not answer
is left behind; it can write only ciphertext, and only into the ring.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from appliance.ring import Cell, Ring
from appliance.slot import Lane, Slot, Ticket

_T = TypeVar("_T")

# How often the caller of a running pipeline hears of progress, and may stop it, seconds.
_TICK = 0.02
# How long a stopped pipeline waits for a reader that is inside the kernel, seconds.
_HANG = 0.25
# Deliveries an opener leaves under way before it waits for the oldest.
_DEPTH = 2


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive segments of one section that lie one behind the other in one file.

    Attributes:
        file: number of the data file.
        offset: first byte in it.
        section: number of the section.
        first: number of the first segment in the section.
        base: number of the first segment in the bundle.
        count: how many segments.
        stream: stream they belong to.
        start: first byte in that stream.
        length: bytes of all segments together.
    """

    file: int
    offset: int
    section: int
    first: int
    base: int
    count: int
    stream: int
    start: int
    length: int


Read = Callable[[Run, Cell], None]
Bring = Callable[[Run, Cell, Lane], Ticket]
"""Open a run, whose ciphertext ``read`` has put into the cell, and hand it to a lane.

What an implementation guarantees:


- It is called by several threads at once, each with a lane and a cell that no other thread uses.
- When it returns, every segment of the run was found authentic and noted in the account of the load, which the loader
  settles after the pipeline. Nothing that it gave to the lane can put an unauthenticated byte into a tensor.
- The ticket is done when nothing that was enqueued reads the cell any more. The pipeline waits for it, wipes the whole
  cell and gives it to a reader. What still runs on the device then is waited for by the lane's ``close``.
- Plaintext on the host lies in the cell and nowhere else. It is counted (``cell.expose``) before it appears.
- On an error it raises, with the cell wiped, unless work that it enqueued still reads it: then ``close`` of the lane
  waits for that work, and the pipeline wipes all cells after it.
"""
Report = Callable[[int, int], None]
Locate = Callable[[Exception, Run], Exception]


class Pipeline:
    """One pass over a list of runs.

    Args:
        ring: where segments are opened.
        slot: where they go.
        read: fills a cell with a run's ciphertext.
        bring: opens it and hands it to the device.
        locate: gives the error to raise for one that happened while a run was under way.
        readers: reader threads.
        openers: opener threads.
        on_progress: called on the caller's thread with (bytes opened, bytes in all), many times a second also when
            nothing moves; an error it raises stops the pipeline.
    """

    def __init__(
        self,
        *,
        ring: Ring,
        slot: Slot,
        read: Read,
        bring: Bring,
        locate: Locate,
        readers: int,
        openers: int,
        on_progress: Report,
    ) -> None:
        self._ring = ring
        self._slot = slot
        self._read = read
        self._bring = bring
        self._locate = locate
        self._readers = readers
        self._openers = openers
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._over = threading.Event()
        self._free: queue.SimpleQueue[Cell | None] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[tuple[Run, Cell] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._opened = 0
        self._left = 0

    def run(self, runs: Sequence[Run]) -> None:
        """Bring all runs to the device; to be called once.

        Raises:
            Whatever the first failing step raised.
        """
        total = sum(run.length for run in runs)
        self._left = len(runs)
        for cell in self._ring.cells:
            self._free.put(cell)
        work = iter(runs)
        # Before any thread runs: a device without room for a lane must leave none behind.
        lanes = [self._slot.lane(self._ring.cell_bytes) for _ in range(self._openers)]
        readers: list[threading.Thread] = []
        openers: list[threading.Thread] = []
        try:
            # Inside: where no more threads are to be had, those that run already must end before the caller wipes.
            readers.extend(self._start(partial(self._reading, work)) for _ in range(self._readers))
            openers.extend(self._start(partial(self._opening, lane)) for lane in lanes)
            while self._left and not self._over.wait(_TICK):
                self._on_progress(self._opened, total)
        finally:
            self._finish(readers, openers)
        if self._error is not None:
            raise self._error
        self._on_progress(self._opened, total)

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, args=(work,), daemon=True)
        thread.start()
        return thread

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # carried over to the caller's thread, which raises it
            with self._lock:
                self._error = self._error or error
            self._stop.set()
            self._over.set()

    def _finish(self, readers: Sequence[threading.Thread], openers: Sequence[threading.Thread]) -> None:
        """End all threads and wipe the ring."""
        self._stop.set()
        for _ in readers:
            self._free.put(None)
        for _ in openers:
            self._filled.put(None)
        for thread in openers:
            thread.join()
        deadline = time.monotonic() + _HANG
        for thread in readers:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._ring.wipe()

    def _reading(self, work: Iterator[Run]) -> None:
        while (cell := self._free.get()) is not None and not self._stop.is_set():
            with self._lock:
                run = next(work, None)
            if run is None:
                # Another reader may be waiting for a cell, to learn the same.
                self._free.put(cell)
                return
            self._at(run, partial(self._read, run, cell))
            self._filled.put((run, cell))

    def _opening(self, lane: Lane) -> None:
        under_way: deque[tuple[Run, Cell, Ticket]] = deque()
        close = lane.close
        try:
            while (item := self._next(under_way)) is not None and not self._stop.is_set():
                run, cell = item
                under_way.append((run, cell, self._at(run, partial(self._bring, run, cell, lane))))
                close = partial(self._at, run, lane.close)
                self._reclaim(under_way, _DEPTH)
            self._reclaim(under_way, 0)
        except BaseException:
            # The first error is the one to tell. A device that has failed may well fail here again.
            with contextlib.suppress(RuntimeError):
                lane.close()
            raise
        close()

    def _at(self, run: Run, step: Callable[[], _T]) -> _T:
        try:
            return step()
        except Exception as error:
            named = self._locate(error, run)
            if named is error:
                raise
            raise named from None

    def _next(self, under_way: deque[tuple[Run, Cell, Ticket]]) -> tuple[Run, Cell] | None:
        """Give the next filled cell; the openers must not wait for one while they hold all cells themselves."""
        if under_way:
            try:
                return self._filled.get_nowait()
            except queue.Empty:
                self._reclaim(under_way, 0)
        return self._filled.get()

    def _reclaim(self, under_way: deque[tuple[Run, Cell, Ticket]], keep: int) -> None:
        """Wipe and free the cells that the device has taken; wait for the oldest ones beyond ``keep``."""
        while under_way and (len(under_way) > keep or under_way[0][2].done()):
            run, cell, ticket = under_way.popleft()
            self._at(run, ticket.wait)
            cell.wipe()
            self._free.put(cell)
            with self._lock:
                self._opened += run.length
                self._left -= 1
            if not self._left:
                self._over.set()
