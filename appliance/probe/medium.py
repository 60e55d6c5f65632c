"""How fast a medium gives its bytes: plain reads on several threads, past the page cache or through it.

Nothing is done with the bytes, so this is what no loader of the same files can pass, unless the cache already has them.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from appliance import pages
from appliance.probe.rate import Rate, run_together
from attestation.errors import reason_of
from provisioning.errors import InputFailed

MIB = 1 << 20
# Sizes and thread counts between which media differ: one USB stick is best at one reader, NVMe at many.
BLOCKS = (1 * MIB, 4 * MIB, 16 * MIB)
THREADS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class MediumRate:
    """The rate of one way of reading.

    Attributes:
        block_bytes: bytes per read.
        threads: reads under way at once.
        rate: what it gave.
    """

    block_bytes: int
    threads: int
    rate: Rate


@dataclass(frozen=True, slots=True)
class _Piece:
    """One read: ``length`` bytes of an open file, which belong at ``place`` of the whole."""

    descriptor: int
    offset: int
    length: int
    place: int


def room(files: Sequence[Path]) -> int:
    """Give how many bytes of memory :func:`read_whole` fills: each file begins on a page."""
    return sum(pages.round_up(path.stat().st_size, pages.PAGE) for path in files)


def places(files: Sequence[Path]) -> list[int]:
    """Give where in that memory each file begins."""
    sizes = [pages.round_up(path.stat().st_size, pages.PAGE) for path in files]
    return list(itertools.accumulate(sizes, initial=0))[:-1]


def read_whole(files: Sequence[Path], memory: memoryview, *, block_bytes: int, threads: int, direct: bool) -> Rate:
    """Read whole files one behind the other into memory.

    Args:
        files: read from their first byte to their last.
        memory: page-aligned, writable, of at least :func:`room` bytes.
        block_bytes: bytes per read, a multiple of the page size.
        threads: how many read at once.
        direct: past the page cache.

    Raises:
        InputFailed: ``probe.read``.
    """
    return _read(
        files,
        lambda _thread, piece: memory[piece.place : piece.place + pages.round_up(piece.length, pages.PAGE)],
        block_bytes=block_bytes,
        threads=threads,
        direct=direct,
        seconds=float("inf"),
    )


def read_through(
    files: Sequence[Path], *, block_bytes: int, threads: int, direct: bool, seconds: float = float("inf")
) -> Rate:
    """Read files into one block of memory per thread, over and over, and look at nothing.

    Args:
        files: read from their first byte on.
        block_bytes: bytes per read, a multiple of the page size.
        threads: how many read at once.
        direct: past the page cache.
        seconds: no read begins after this time.

    Raises:
        InputFailed: ``probe.read``.
    """
    mappings = [pages.map_private(block_bytes) for _ in range(threads)]
    for mapping in mappings:
        mapping[:] = bytes(
            len(mapping)
        )  # pages that are faulted in while the clock runs would be charged to the medium
    views = [memoryview(mapping) for mapping in mappings]
    return _read(
        files,
        lambda thread, piece: views[thread][: pages.round_up(piece.length, pages.PAGE)],
        block_bytes=block_bytes,
        threads=threads,
        direct=direct,
        seconds=seconds,
    )


def sweep(
    files: Sequence[Path],
    *,
    seconds: float,
    blocks: Sequence[int] = BLOCKS,
    threads: Sequence[int] = THREADS,
    tell: Callable[[str], None] = lambda _: None,
) -> list[MediumRate]:
    """Measure direct reads by size and number of threads.

    Args:
        files: to read; each way reads from the first byte on.
        seconds: about how long one way may take.
        blocks: bytes per read.
        threads: reads at once.
        tell: told of each size before it is measured.

    Raises:
        InputFailed: ``probe.read``, ``probe.direct`` where the file system has no direct reads.
    """
    found = []
    for block in blocks:
        tell(f"{block // MIB} MiB reads")
        for count in threads:
            rate = read_through(files, block_bytes=block, threads=count, direct=True, seconds=seconds)
            found.append(MediumRate(block, count, rate))
    return found


def best(found: Sequence[MediumRate]) -> MediumRate:
    """Give the fastest way; among equals the one that takes least memory."""
    return max(found, key=lambda one: (one.rate.bytes_per_second, -one.block_bytes * one.threads))


def _read(
    files: Sequence[Path],
    target: Callable[[int, _Piece], memoryview],
    *,
    block_bytes: int,
    threads: int,
    direct: bool,
    seconds: float,
) -> Rate:
    with ExitStack() as stack:
        pieces = iter(list(_pieces(files, block_bytes, direct=direct, stack=stack)))
        deadline = time.monotonic() + seconds

        def work(thread: int) -> int:
            done = 0
            # A list iterator hands out each piece once, whichever thread asks: the interpreter's lock is held.
            for piece in pieces:
                if time.monotonic() > deadline:
                    break
                done += _fill(piece, target(thread, piece))
            return done

        return run_together([partial(work, thread) for thread in range(threads)])


def _pieces(files: Sequence[Path], block_bytes: int, *, direct: bool, stack: ExitStack) -> Iterator[_Piece]:
    for path, start in zip(files, places(files), strict=True):
        descriptor = _open(path, direct=direct)
        stack.callback(os.close, descriptor)
        size = os.fstat(descriptor).st_size
        for offset in range(0, size, block_bytes):
            yield _Piece(descriptor, offset, min(block_bytes, size - offset), start + offset)


def _open(path: Path, *, direct: bool) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    try:
        return os.open(path, flags)
    except OSError as error:
        if direct and path.exists():
            raise InputFailed(
                "probe.direct",
                found=f"{path.parent}: {reason_of(error)}",
                expected="a file system with direct reads",
                hint="this one keeps its files in memory or has no direct reads; name a directory on the medium itself",
            ) from None
        raise _failed(path.name, reason_of(error)) from None


def _fill(piece: _Piece, view: memoryview) -> int:
    done = 0
    while done < piece.length:
        try:
            count = os.preadv(piece.descriptor, [view[done:]], piece.offset + done)
        except OSError as error:
            raise _failed(f"at byte {piece.offset + done}", reason_of(error)) from None
        if count == 0:
            raise _failed(f"at byte {piece.offset + done}", "the file ended early")
        done += count
    return done


def _failed(where: str, reason: str) -> InputFailed:
    return InputFailed(
        "probe.read", found=f"{where}: {reason}", expected="a medium that can be read", hint="look at the medium"
    )
