"""Bring runs of ciphertext from the files of a bundle to where they can be opened.

A file that is not in the page cache is read past it (``O_DIRECT``): the cache would cost a copy of every byte, and more
CPU time than the decryption. A file that is mostly there already is mapped, where its file system allows it
(appliance/filesystem.py), and else read through the cache. Which of the three a file is, is looked at once, before the
load. Only ciphertext passes here.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Mapping

import numpy as np

from appliance import pages
from appliance.filesystem import may_map
from appliance.ring import Cell
from appliance.stream import Run
from appliance.window import Window, can_populate
from attestation.errors import reason_of
from provisioning.errors import BundleDamaged

# A file is looked at through this many windows of this many pages, so that a look at 64 GiB costs no more than one at
# 64 MiB.
_WINDOWS = 16
_WINDOW_PAGES = 16
# Above this share of cached pages the cache wins.
_WARM = 0.5

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def cached_share(descriptor: int, size: int) -> float:
    """Estimate which share of a file is in the page cache, 0 to 1; 1 where the kernel does not tell."""
    if not size:
        return 1.0
    window = _WINDOW_PAGES * pages.PAGE
    step = max(window, size // _WINDOWS // pages.PAGE * pages.PAGE)
    starts = range(0, size, step)
    if not _is_told(descriptor):
        return sum(_reads_at_once(descriptor, start) for start in starts) / len(starts)
    try:
        view = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    except (OSError, ValueError):  # the file system maps nothing, or the file has become shorter
        return 1.0
    seen = cached = 0
    with view:
        # numpy gives the address of a read-only mapping; a writable private one would count as memory to be had.
        start = np.frombuffer(view, np.uint8).ctypes.data
        for offset in starts:
            count = -(-min(window, size - offset) // pages.PAGE)
            residency = (ctypes.c_ubyte * count)()
            if _libc.mincore(start + offset, count * pages.PAGE, residency) != 0:
                return 1.0
            seen += count
            cached += sum(page & 1 for page in residency)
    return cached / seen


def _is_told(descriptor: int) -> bool:
    """Say whether mincore(2) answers truly: of files that one neither owns nor may write it says that all is cached."""
    return os.fstat(descriptor).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{descriptor}", os.W_OK)


def _reads_at_once(descriptor: int, offset: int) -> bool:
    """Say whether a page can be read without waiting for a medium."""
    try:
        return os.preadv(descriptor, [bytearray(pages.PAGE)], offset, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError:  # the file system has no such reads
        return True


def _direct(descriptor: int) -> int | None:
    """Open the same file again for direct reads; None where its filesystem has none."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None


class _PerThread(threading.local):
    """What each opener thread has of its own."""

    def __init__(self) -> None:
        self.window = Window()


class Reader:
    """The data files of a bundle, open for reading by several threads at once.

    Args:
        files: number of a file to its open descriptor, which stays the caller's.
        mapping: who opens the runs can take ciphertext from a mapping as well as from a cell.

    Attributes:
        direct_files: how many files are read past the page cache.
        mapped_files: how many are mapped.
    """

    def __init__(self, files: Mapping[int, int], *, mapping: bool = False) -> None:
        self._files = dict(files)
        self._sizes = {number: os.fstat(descriptor).st_size for number, descriptor in files.items()}
        self._direct: dict[int, int] = {}
        self._mapped: set[int] = set()
        self._threads = _PerThread()
        mapping = mapping and can_populate()
        for number, descriptor in files.items():
            if cached_share(descriptor, self._sizes[number]) < _WARM:
                if (direct := _direct(descriptor)) is not None:
                    self._direct[number] = direct
            elif mapping and may_map(descriptor):
                self._mapped.add(number)
        self.direct_files = len(self._direct)
        self.mapped_files = len(self._mapped)

    def is_mapped(self, file: int) -> bool:
        """Say whether runs of a file are opened from a mapping; else they are read into a cell."""
        return file in self._mapped

    def fill(self, run: Run, cell: Cell) -> None:
        """Read a run into a cell, unless its file is mapped.

        Raises:
            BundleDamaged: ``bundle.read`` when the file ends early or the medium fails.
        """
        if run.file not in self._mapped:
            self.read(run.file, run.offset, cell.view, run.length)

    def show(self, run: Run, cell: Cell) -> memoryview:
        """Give the ciphertext of a run: its cell, with room behind it, or read-only pages of its file.

        Raises:
            BundleDamaged: ``bundle.read`` when a mapped file ends early or the medium fails.
        """
        if run.file not in self._mapped:
            return cell.view
        size = self._sizes[run.file]
        if run.offset + run.length > size:
            raise _unreadable(run.file, run.offset, f"a file of {size} bytes")
        try:
            return self._threads.window.show(self._files[run.file], size, run.offset, run.length)
        except OSError as error:
            raise _unreadable(run.file, run.offset, reason_of(error)) from None

    def drop(self, run: Run) -> None:
        """Give back the pages of a run that this thread has shown."""
        if run.file in self._mapped:
            self._threads.window.drop(run.offset, run.length)

    def read(self, file: int, offset: int, view: memoryview, length: int) -> None:
        """Fill the first ``length`` bytes of ``view`` from a file.

        Args:
            file: number of the file.
            offset: where in it, a multiple of the page size.
            view: page-aligned memory with room for ``length`` rounded up to whole pages.
            length: how many bytes.

        Raises:
            BundleDamaged: ``bundle.read`` when the file ends early or the medium fails.
        """
        try:
            done = self._read(file, offset, view, length)
        except OSError as error:
            raise _unreadable(file, offset, reason_of(error)) from None
        if done < length:
            raise _unreadable(file, offset, f"only {done} of {length} bytes")

    def _read(self, file: int, offset: int, view: memoryview, length: int) -> int:
        direct = self._direct.get(file)
        if direct is not None:
            padded = pages.round_up(length, pages.PAGE)
            try:
                return _fill(lambda at: os.preadv(direct, [view[at:padded]], offset + at), length)
            except OSError as error:
                # A file system may take the flag and then refuse what its device cannot do.
                if error.errno != errno.EINVAL:
                    raise
        return _fill(lambda at: os.preadv(self._files[file], [view[at:length]], offset + at), length)

    def close(self) -> None:
        """Close what was opened here. Windows go with their threads."""
        self._threads.window.close()
        while self._direct:
            os.close(self._direct.popitem()[1])

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fill(pread: Callable[[int], int], length: int) -> int:
    done = 0
    while done < length:
        count = pread(done)
        if count == 0:
            break
        done += count
    return done


def _unreadable(file: int, offset: int, found: str) -> BundleDamaged:
    return BundleDamaged(
        "bundle.read",
        found=f"{found} at byte {offset} of data file {file}",
        expected="readable ciphertext",
        hint="run lethe-owner verify on the bundle; copy it again from its medium",
    )
