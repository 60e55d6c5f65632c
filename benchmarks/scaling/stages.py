"""What each step of a load costs, measured by itself on the files of a bundle.

The simulator (benchmarks/scaling/pipeline.py) puts a load together from steps; here every step is measured alone, so
that its prediction of the whole is a prediction and not a fit. A cost is seconds of a core per 1e9 bytes, from the
thread's own processor clock, so that a busy machine does not change it much. All steps are measured with as many
threads as the loader has openers, because threads that run side by side share caches and memory.

Tags are checked with a key that is not the bundle's: that costs the same, and needs no secret.

``python -m benchmarks.scaling.stages BUNDLE THREADS`` prints the costs as JSON; :func:`measure_apart` runs that in a
process of its own. ``benchmarks/sealed_load.py`` puts them into its results as ``stages``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from appliance import pages, placement
from appliance.probe import cache
from appliance.window import Window
from benchmarks.scaling import bookkeeping

ROOT: Final = Path(__file__).resolve().parents[2]
SEGMENT: Final = 1 << 20
_TAG = 16
_NO_TAG = bytes(_TAG)
# As many bytes of additional data as a segment of a bundle has, about.
_AAD = bytes(96)
_ROW = 28 << 10  # bytes of a row of a wide matrix
_CELL = 4 << 20
_AHEAD = 3
# Source and destination together fit the second-level cache of every server core of the last years.
_CACHED = 128 << 10


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of a core per 1e9 bytes, but for the last three.

    Attributes:
        map: bring a window of a mapped file in, and let go of it.
        open_mapped: authenticate and decrypt from such a window to a destination.
        open_staged: the same to a cell that is used again and again.
        read_direct: read past the page cache.
        open_cell: authenticate and decrypt what a disk has just put into a cell, to a destination.
        open_in_place: the same to where the ciphertext was.
        authenticate: check a segment as GMAC does, without decrypting.
        open_cached: authenticate and decrypt, source and destination in the core's own cache.
        copy: copy from a cell to a destination.
        place_rows: copy to a tile of columns, an eighth of a row of 28 KiB each, as the loader does it.
        wipe: overwrite a cell.
        segment_s: seconds of a core per segment for all but the cipher: planning, calls, accounts.
        cores: cores that as many busy threads as there are openers really got.
        threads: how many threads.
    """

    map: float
    open_mapped: float
    open_staged: float
    read_direct: float
    open_cell: float
    open_in_place: float
    authenticate: float
    open_cached: float
    copy: float
    place_rows: float
    wipe: float
    segment_s: float
    cores: float
    threads: int


class _Costs:
    """Adds up what threads spend on named steps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.spent: dict[str, float] = {}
        self.moved: dict[str, int] = {}
        self.wall: dict[str, float] = {}

    def add(self, step: str, seconds: float, nbytes: int) -> None:
        with self._lock:
            self.spent[step] = self.spent.get(step, 0.0) + seconds
            self.moved[step] = self.moved.get(step, 0) + nbytes

    def per_gb(self, step: str) -> float:
        return self.spent[step] / self.moved[step] * 1e9


class _Clock:
    """The processor clock of the thread that uses it, read between steps."""

    def __init__(self, costs: _Costs) -> None:
        self._costs = costs
        self._last = time.thread_time()

    def step(self, name: str, nbytes: int) -> None:
        now = time.thread_time()
        self._costs.add(name, now - self._last, nbytes)
        # The bookkeeping is nobody's step.
        self._last = time.thread_time()


def _nonce(number: int, start: int) -> bytes:
    return (number << 32 | start).to_bytes(12, "big")


def _spans(files: Mapping[int, int], window: int, limit: int) -> Iterator[tuple[int, int]]:
    """Give (descriptor, offset) of whole windows, file after file, from descriptors and sizes."""
    left = limit
    for descriptor, size in files.items():
        for offset in range(0, size - window + 1, window):
            if left < window:
                return
            left -= window
            yield descriptor, offset


class _Probe:
    """One round over all steps.

    Args:
        files: data files of a bundle.
        threads: how many threads do each step.
        window_bytes: what is mapped at once, and what a cell holds.
        limit: most bytes per step.
    """

    def __init__(self, files: Sequence[Path], *, threads: int, window_bytes: int, limit: int) -> None:
        self.files, self.threads, self.window, self.limit = files, threads, window_bytes, limit
        key = AESGCM.generate_key(256)
        self.aead = AESGCM(key)
        self.aes = algorithms.AES256(key)
        self.memory = pages.map_private(max(16 * SEGMENT, min(limit, sum(path.stat().st_size for path in files))))
        self.target = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.target.zero_()
        self.lock = threading.Lock()
        self.costs = _Costs()

    def together(self, work: Callable[[Iterator[tuple[int, int, int]], _Clock], None]) -> float:
        """Run ``work`` on all threads over one list of windows; give the cores they got."""
        with ExitStack() as stack:
            # Open until all threads are done: one may still be at a file when another has gone on to the next.
            opened = [stack.enter_context(path.open("rb", buffering=0)) for path in self.files]
            files = {stream.fileno(): path.stat().st_size for stream, path in zip(opened, self.files, strict=True)}
            spans = _spans(files, self.window, self.limit)
            numbered = ((number, *span) for number, span in enumerate(spans))
            with ThreadPoolExecutor(self.threads) as pool:
                begin = time.perf_counter()
                parts = [pool.submit(self.timed, work, numbered) for _ in range(self.threads)]
                spent = sum(part.result() for part in parts)
                return spent / (time.perf_counter() - begin)

    def timed(
        self,
        work: Callable[[Iterator[tuple[int, int, int]], _Clock], None],
        numbered: Iterator[tuple[int, int, int]],
    ) -> float:
        """Run ``work`` on the windows that this thread gets hold of; give what it took of a core."""

        def shared() -> Iterator[tuple[int, int, int]]:
            while True:
                with self.lock:
                    item = next(numbered, None)
                if item is None:
                    return
                yield item

        begin = time.thread_time()
        work(shared(), _Clock(self.costs))
        return time.thread_time() - begin

    def open(self, source: memoryview, number: int, *, parts: range, into: memoryview | None = None) -> None:
        """Open some segments of a window, tag behind the ciphertext, out of place or to ``into``."""
        target = memoryview(self.memory)
        for start in parts:
            sealed = source[start : start + SEGMENT]
            at = self.place(number, start)
            plain = (target[at : at + SEGMENT] if into is None else into[start : start + SEGMENT])[:-_TAG]
            kept = bytes(sealed[-_TAG:])
            sealed[-_TAG:] = _NO_TAG
            with contextlib.suppress(InvalidTag):
                self.aead.decrypt_into(_nonce(number, start), sealed, _AAD, plain)
            sealed[-_TAG:] = kept

    def open_detached(self, source: memoryview, number: int, *, parts: range, cell: memoryview | None = None) -> None:
        """Open some segments of a window that may not be written to, out of place or all to one cell."""
        target = memoryview(self.memory)
        for start in parts:
            at = self.place(number, start)
            cipher = Cipher(self.aes, modes.GCM(_nonce(number, start), _NO_TAG)).decryptor()
            cipher.authenticate_additional_data(_AAD)
            cipher.update_into(source[start : start + SEGMENT], target[at : at + SEGMENT] if cell is None else cell)
            with contextlib.suppress(InvalidTag):
                cipher.finalize()

    def place(self, number: int, start: int) -> int:
        """Give the place of a segment in the destination, which may be smaller than what is read."""
        return (number * self.window + start) % (len(self.memory) // SEGMENT * SEGMENT)

    def tiles(self) -> list[placement.Target]:
        """Give the eight tiles of a matrix that is cut by columns, each as large as the destination allows."""
        rows = min(4096, len(self.memory) // _ROW)
        matrix = self.target[: rows * _ROW].view(torch.bfloat16).view(rows, -1)
        wide = _ROW // 16
        blocks = [matrix[:, tile * wide : (tile + 1) * wide] for tile in range(8)]
        return [placement.Target(0, rows * _ROW // 8, torch.bfloat16, block) for block in blocks]

    def halves(self, size: int) -> tuple[range, range]:
        """Give the segments of some bytes in two halves, at least one segment each."""
        middle = max(SEGMENT, size // SEGMENT // 2 * SEGMENT)
        return range(0, middle, SEGMENT), range(middle % size, size, SEGMENT)

    def mapped(self, items: Iterator[tuple[int, int, int]], clock: _Clock) -> None:
        first, second = self.halves(self.window)
        cell = memoryview(pages.map_private(SEGMENT))
        cell[:] = bytes(SEGMENT)
        window = Window()
        for number, descriptor, offset in items:
            clock.step("other", 0)
            view = window.show(descriptor, os.fstat(descriptor).st_size, offset, self.window)
            clock.step("map", 0)
            self.open_detached(view, number, parts=first)
            clock.step("open_mapped", len(first) * SEGMENT)
            self.open_detached(view, number, parts=second, cell=cell)
            clock.step("open_staged", len(second) * SEGMENT)
            window.drop(offset, self.window)
            clock.step("map", self.window)
        window.close()

    def direct(self, items: Iterator[tuple[int, int, int]], clock: _Clock) -> None:
        """Read as far ahead of the opening as readers with a ring do, so that caches hold what they hold then."""
        size = min(_CELL, self.window)
        free = deque(memoryview(pages.map_private(size))[:size] for _ in range(_AHEAD + 1))
        filled: deque[memoryview] = deque()
        descriptors: dict[int, int] = {}
        pieces = ((descriptor, offset + at) for _, descriptor, offset in items for at in range(0, self.window, size))
        for number, (plain, offset) in enumerate(pieces):
            if plain not in descriptors:
                descriptors[plain] = os.open(f"/proc/self/fd/{plain}", os.O_RDONLY | os.O_DIRECT)
            clock.step("other", 0)
            cell = free.popleft()
            os.preadv(descriptors[plain], [cell], offset)
            clock.step("read_direct", size)
            filled.append(cell)
            if not free:
                free.append(self.open_both_ways(filled.popleft(), number, clock))
        for number, cell in enumerate(filled):
            self.open_both_ways(cell, number, clock)
        for descriptor in descriptors.values():
            os.close(descriptor)

    def open_both_ways(self, cell: memoryview, number: int, clock: _Clock) -> memoryview:
        """Open one half of a cell to a destination and the other where it is; give the cell back."""
        clock.step("other", 0)
        first, second = self.halves(len(cell))
        self.open(cell, number, parts=first)
        clock.step("open_cell", len(first) * SEGMENT)
        self.open(cell, number, parts=second, into=cell)
        clock.step("open_in_place", len(second) * SEGMENT)
        return cell

    def in_memory(self, items: Iterator[tuple[int, int, int]], clock: _Clock) -> None:
        cell = torch.frombuffer(pages.map_private(SEGMENT), dtype=torch.uint8)
        cell.fill_(1)
        tiles = self.tiles()
        small, result = memoryview(bytes(_CACHED)), memoryview(bytearray(_CACHED - _TAG))
        for number, _, _ in items:
            clock.step("other", 0)
            for start in range(0, self.window, SEGMENT):
                into = self.place(number, start)
                self.target[into : into + SEGMENT].copy_(cell)
            clock.step("copy", self.window)
            for start in range(0, self.window, SEGMENT):
                at = (number * self.window + start) % (tiles[0].stop - SEGMENT + 1) // SEGMENT * SEGMENT
                placement.place(tiles[number % 8 : number % 8 + 1], at, cell)
            clock.step("place_rows", self.window)
            for _ in range(0, self.window, SEGMENT):
                ctypes.memset(cell.data_ptr(), 0, SEGMENT)
            clock.step("wipe", self.window)
            view = memoryview(self.memory)
            for start in range(0, self.window, SEGMENT):
                source = self.place(number, start)
                self.aead.encrypt(_nonce(number, start), b"", view[source : source + SEGMENT])
            clock.step("authenticate", self.window)
            for index in range(0, self.window, _CACHED):
                with contextlib.suppress(InvalidTag):
                    self.aead.decrypt_into(index.to_bytes(12, "big"), small, _AAD, result)
            clock.step("open_cached", self.window)


def measure(
    files: Sequence[Path], *, threads: int, window_bytes: int = 8 * SEGMENT, limit: int = 512 << 20, rounds: int = 2
) -> Stages:
    """Measure every step, median of some rounds.

    Args:
        files: data files of a bundle, at least one of them with a whole segment, on the disk that is to be measured;
            the first of them, as many as hold ``limit`` bytes, are used and end outside of the page cache.
        threads: the loader's openers.
        window_bytes: a multiple of the segment size.
        limit: most bytes that a step goes over, per round.
        rounds: how often.
    """
    behind = accumulate(path.stat().st_size for path in files)
    used = files[: next((number for number, size in enumerate(behind, 1) if size >= limit), len(files))]
    largest = max(path.stat().st_size for path in used)
    window = min(window_bytes, largest // SEGMENT * SEGMENT)
    taken: list[Stages] = []
    for _ in range(rounds):
        probe = _Probe(used, threads=threads, window_bytes=window, limit=limit)
        cache.fill(used)
        cores = probe.together(probe.mapped)
        probe.together(probe.in_memory)
        cache.evict(used)
        probe.together(probe.direct)
        costs = {step.name: probe.costs.per_gb(step.name) for step in fields(Stages)[:-3]}
        taken.append(Stages(**costs, segment_s=bookkeeping.per_segment(), cores=cores, threads=threads))
    return Stages(**median([asdict(row) for row in taken]))


def median(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Give the median of each member of several results."""
    return {name: float(f"{statistics.median(row[name] for row in rows):.4g}") for name in rows[0]}


def measure_apart(bundle: Path, *, threads: int) -> dict[str, Any]:
    """Measure in a process of its own, whose memory is gone afterwards; give the members of :class:`Stages`."""
    command = [sys.executable, "-m", "benchmarks.scaling.stages", str(bundle), str(threads)]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    members: dict[str, Any] = json.loads(output)
    return members


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    files = sorted(Path(arguments[0]).glob("data-*.seal"))
    stages = measure(files, threads=int(arguments[1]))
    print(json.dumps(asdict(stages)))


if __name__ == "__main__":
    main(sys.argv[1:])
