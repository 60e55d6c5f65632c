"""Read and hash the 64 MiB blocks of a bundle's data files on all cores, in order, in bounded memory.

A block is hashed by one thread; reading and hashing run outside of the interpreter's lock. Where seeking costs
nothing, each thread reads its block in pieces and hashes them as they come, and there are twice as many threads as
cores, so that the medium never waits. Where it does cost, threads take turns at reading whole blocks, so that the
medium is read from front to back, and hash outside of their turn.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, Protocol

from attestation.errors import reason_of
from provisioning import table
from provisioning.geometry import DataFile
from provisioning.medium import PIECE, MediumFile, Road, map_pages

# 64 threads with their pieces take 264 MiB.
_MOST_THREADS: Final = 64
# With whole blocks in memory: one is read, two are hashed or written.
_TURN_THREADS: Final = 3
_TICK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Block:
    """A digest block of a data file.

    Attributes:
        file: number of the file.
        number: of the block in its file.
        start: its first byte in the file.
        stop: behind its last one.
    """

    file: int
    number: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a block could not be read whole.

    Attributes:
        code: ``bundle.file.unreadable`` or ``bundle.file.size``.
        start: the first byte that did not come.
        reason: for people.
    """

    code: str
    start: int
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of reading one block.

    Attributes:
        block: which.
        digest: SHA-256 of its bytes; empty when there is a fault.
        road: where the bytes came from.
        fault: why there is no digest.
    """

    block: Block
    digest: bytes
    road: Road
    fault: Fault | None


class Files(Protocol):
    """Whose data files are read."""

    def open_file(self, number: int) -> int:
        """Give the descriptor of a data file, which stays theirs; called from several threads."""

    def close_file(self, number: int) -> None:
        """Close it, since its last block was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How blocks are read.

    Attributes:
        threads: how many blocks are read or hashed at once.
        window: bytes of memory for each, whole pages; blocks that fit in it are read in turns and kept whole.
    """

    threads: int
    window: int

    @classmethod
    def streaming(cls, threads: int | None = None) -> Plan:
        """For media on which any place is as near as any other."""
        return cls(threads=threads or min(2 * usable_cores(), _MOST_THREADS), window=PIECE)

    @classmethod
    def in_turns(cls, threads: int | None = None) -> Plan:
        """For media that must be read from front to back, and for who needs the bytes."""
        return cls(threads=threads or min(usable_cores() + 1, _TURN_THREADS), window=table.DIGEST_BLOCK)


def usable_cores() -> int:
    """Give how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def blocks_of(files: Sequence[DataFile]) -> list[Block]:
    """Give all blocks of a bundle's files, in order."""
    size = table.DIGEST_BLOCK
    return [
        Block(number, block, block * size, min(file.size, (block + 1) * size))
        for number, file in enumerate(files)
        for block in range(table.digest_blocks(file))
    ]


def read_blocks(
    files: Files, blocks: Iterable[Block], plan: Plan, on_bytes: Callable[[int], None]
) -> Generator[tuple[Outcome, memoryview], None, None]:
    """Read blocks on several threads and give what came of each, in order.

    Close the generator (``contextlib.closing``): that stops the threads, also in the middle of a block.

    Args:
        files: whose blocks they are.
        blocks: in the order of files; a file is closed when a block of a later one is given.
        plan: how.
        on_bytes: told now and then how many bytes were read so far, by the calling thread.

    Yields:
        The outcome, and the memory that the block was read into, which is the caller's until the next one is asked for.
        It holds the whole block if the plan's window does.

    Raises:
        LetheError: a file could not be opened.
    """
    reading = _Reading(files, plan)
    free = [map_pages(plan.window) for _ in range(plan.threads + 1)]
    todo = iter(blocks)
    pending: deque[tuple[Future[Outcome], memoryview]] = deque()
    last: int | None = None
    with ThreadPoolExecutor(plan.threads, thread_name_prefix="blocks") as pool, contextlib.closing(reading):
        while True:
            while free and (block := next(todo, None)) is not None:
                memory = free.pop()
                pending.append((pool.submit(reading.read, block, memory), memory))
            if not pending:
                break
            future, memory = pending.popleft()
            while not wait([future], timeout=_TICK_SECONDS).done:
                on_bytes(reading.done)
            outcome = future.result()
            if last is not None and last != outcome.block.file:
                files.close_file(last)
            last = outcome.block.file
            on_bytes(reading.done)
            yield outcome, memory
            free.append(memory)
    if last is not None:
        files.close_file(last)


class _Reading:
    """What the threads of one run share."""

    def __init__(self, files: Files, plan: Plan) -> None:
        self._files = files
        self._whole = plan.window >= table.DIGEST_BLOCK
        self._turn = threading.Lock()
        self._count = threading.Lock()
        self._stopping = threading.Event()
        self.done = 0

    def close(self) -> None:
        self._stopping.set()

    def read(self, block: Block, memory: memoryview) -> Outcome:
        # After a stop nobody looks at outcomes any more.
        if self._stopping.is_set():
            return _unread(block)
        descriptor = self._files.open_file(block.file)
        digest = hashlib.sha256()
        try:
            with MediumFile(descriptor, block.start, block.stop) as file:
                if self._whole:
                    with self._turn:
                        fault = self._read_whole(file, block, memory)
                    digest.update(memory[: block.stop - block.start])
                else:
                    fault = self._read_pieces(file, block, memory, digest.update)
                return Outcome(block, b"" if fault else digest.digest(), file.road, fault)
        except OSError as error:
            return Outcome(block, b"", Road.CACHE, Fault("bundle.file.unreadable", block.start, reason_of(error)))

    def _read_whole(self, file: MediumFile, block: Block, memory: memoryview) -> Fault | None:
        for position in range(block.start, block.stop, PIECE):
            place = position - block.start
            fault = self._fill(file, position, memory[place : place + min(PIECE, block.stop - position)])
            if fault is not None:
                return fault
        return None

    def _read_pieces(
        self, file: MediumFile, block: Block, memory: memoryview, update: Callable[[memoryview], None]
    ) -> Fault | None:
        for position in range(block.start, block.stop, PIECE):
            piece = memory[: min(PIECE, block.stop - position)]
            fault = self._fill(file, position, piece)
            if fault is not None:
                return fault
            update(piece)
        return None

    def _fill(self, file: MediumFile, position: int, piece: memoryview) -> Fault | None:
        if self._stopping.is_set():
            return Fault("bundle.file.unreadable", position, "stopped")
        try:
            count = file.read_into(piece, position)
        except OSError as error:
            return Fault("bundle.file.unreadable", position, reason_of(error))
        with self._count:
            self.done += count
        if count < len(piece):
            # The file shrank after it was opened.
            return Fault("bundle.file.size", position + count, "cut off")
        return None


def _unread(block: Block) -> Outcome:
    return Outcome(block, b"", Road.CACHE, Fault("bundle.file.unreadable", block.start, "stopped"))
