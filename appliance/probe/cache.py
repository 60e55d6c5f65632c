"""The page cache around a measurement: put files into it, take them out, and look at what is in it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from appliance import pages

_WINDOW = 64 << 20
_READ = 4 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def fill(files: Iterable[Path]) -> None:
    """Read files through the page cache, so that it holds them."""
    buffer = bytearray(_READ)
    for path in files:
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def evict(files: Iterable[Path]) -> None:
    """Write files back and take them out of the page cache; what a process has mapped may stay."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def share(files: Iterable[Path]) -> float:
    """Give which share of all bytes of some files is in the page cache, 0 to 1, by looking at every page.

    The kernel tells only who owns the files or may write them (mincore(2)); to others all seems cached.
    """
    seen = cached = 0
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            for offset in range(0, size, _WINDOW):
                length = min(_WINDOW, size - offset)
                seen += -(-length // pages.PAGE)
                cached += _resident(descriptor, offset, length)
        finally:
            os.close(descriptor)
    return cached / seen if seen else 1.0


def _resident(descriptor: int, offset: int, length: int) -> int:
    count = -(-length // pages.PAGE)
    residency = (ctypes.c_ubyte * count)()
    # Private and writable only so that ctypes gives its address; nothing is written.
    with mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=offset) as window:
        first = ctypes.c_ubyte.from_buffer(window)
        failed = _libc.mincore(ctypes.addressof(first), length, residency) != 0
        del first
    return count if failed else sum(page & 1 for page in residency)
