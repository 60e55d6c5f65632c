"""Read what lies on a medium and not what the kernel remembers of it, and say how far that was possible; write there.

After a write the page cache holds the bytes that were written, whatever the medium made of them; a check that reads
the cache checks nothing. So a file is read with ``O_DIRECT`` where its file system has that; elsewhere its pages are
dropped first and the kernel is asked whether they are gone. Neither can look behind the drive's own cache, nor behind a
server or a host that owns the disk (docs/limitations.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Final

# Largest single read: below it O_DIRECT is slower, above it nothing is gained (benchmarks/verify_copy.py).
PIECE: Final = 4 << 20

_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
_REMOTE: Final = frozenset({"9p", "afs", "ceph", "cifs", "gfs2", "lustre", "nfs", "nfs4", "smb3", "smbfs", "virtiofs"})
_FAT: Final = frozenset({"msdos", "umsdos", "vfat"})
_PAGE: Final = mmap.PAGESIZE
_HUGE: Final = 2 << 20
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


class Road(enum.IntEnum):
    """Where read bytes came from, best first; of several roads the worst counts."""

    MEDIUM = 0  # past the page cache
    DROPPED = 1  # through the page cache, after the kernel said that nothing of them was in it
    REMOTE = 2  # from a server or another program, which may remember them
    CACHE = 3  # perhaps out of the page cache
    MEMORY = 4  # the file system is memory: there is no medium

    @property
    def word(self) -> str:
        """The road as results name it."""
        return self.name.lower()


class MediumFile:
    """One open file for reading a range of it; a context manager.

    Args:
        descriptor: open for reading; it stays the caller's.
        start: first byte that will be read, a multiple of the page size.
        stop: behind the last one.

    Attributes:
        road: how the bytes come, known best after the last read.
    """

    __slots__ = ("_descriptor", "_direct", "_remote", "_size", "_start", "_stop", "road")

    def __init__(self, descriptor: int, start: int, stop: int) -> None:
        self._descriptor = descriptor
        self._start = start
        self._stop = stop
        self._size = os.fstat(descriptor).st_size
        kind = file_system(descriptor)
        self._remote = kind in _REMOTE or kind.startswith("fuse")
        self._direct = _open_direct(descriptor)
        self.road = self._direct_road(kind)

    def _direct_road(self, kind: str) -> Road:
        if kind in _IN_MEMORY:
            return Road.MEMORY
        if self._direct is None:
            return self._drop(self._start)
        return Road.REMOTE if self._remote else Road.MEDIUM

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fill a buffer; gives fewer bytes only at the end of the file.

        Args:
            target: begins on a page of memory and is whole pages long, so that a device can write to it.
            offset: in the file, a multiple of the page size.

        Raises:
            OSError: the medium does not give the bytes.
        """
        done = 0
        # No read is tried at a file's odd end, where O_DIRECT would be refused.
        while done < len(target) and offset + done < self._size:
            count = self._read(target[done:], offset + done)
            if count == 0:
                break
            done += count
        return done

    def _read(self, target: memoryview, offset: int) -> int:
        if self._direct is not None:
            try:
                return os.preadv(self._direct, [target], offset)
            except OSError as error:
                # A file system may take the flag and then refuse sizes that its device cannot do, or a file's odd end.
                if error.errno != errno.EINVAL:
                    raise
            self._close_direct()
            self.road = max(self.road, self._drop(offset - offset % _PAGE))
        return os.preadv(self._descriptor, [target], offset)

    def _drop(self, start: int) -> Road:
        os.posix_fadvise(self._descriptor, start, self._stop - start, os.POSIX_FADV_DONTNEED)
        if _any_resident(self._descriptor, start, self._stop):
            return Road.CACHE
        return Road.REMOTE if self._remote else Road.DROPPED

    def _close_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None

    def __enter__(self) -> MediumFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._direct is None:
            # What was read once is not read again; the cache is for others.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, self._start, self._stop - self._start, os.POSIX_FADV_DONTNEED)
        self._close_direct()


def read_whole(descriptor: int, size: int) -> tuple[bytes, Road]:
    """Read a file of ``size`` bytes from its medium; of a longer one, one byte more.

    Raises:
        OSError: the medium does not give the bytes.
    """
    pages = map_pages(size + 1)
    with MediumFile(descriptor, 0, len(pages)) as file:
        count = file.read_into(pages, 0)
        return bytes(pages[: min(count, size + 1)]), file.road


def _open_direct(descriptor: int) -> int | None:
    """Open the same file once more, past the page cache; None where its file system cannot do that."""
    try:
        # By descriptor, so that no name is looked up again.
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT, errno.EACCES, errno.EPERM):
            return None
        raise


def _any_resident(descriptor: int, start: int, stop: int) -> bool:
    """Say whether the page cache holds any page of a range; also when the kernel does not tell."""
    length = min(stop, os.fstat(descriptor).st_size) - start
    if length <= 0:
        return False
    address: int | None = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, start)
    if address in (None, _MAP_FAILED):
        return True
    try:
        pages = ctypes.create_string_buffer(-(-length // _PAGE))
        # For a file of somebody else that may not be written, the kernel says "resident" of all pages.
        return bool(_libc.mincore(address, length, pages) != 0 or any(byte & 1 for byte in set(pages.raw)))
    finally:
        _libc.munmap(address, length)


def write_past_cache(descriptor: int) -> None:
    """Let :func:`write_all` go past the page cache where the file system has that.

    Such writes cost no copy and push nothing out of the cache. They need whole pages, in memory and in the file.
    """
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of the data at a place of a file.

    Raises:
        OSError: it cannot be written.
    """
    while data:
        count = _write_some(descriptor, data, offset)
        data = data[count:]
        offset += count


def _write_some(descriptor: int, data: memoryview, offset: int) -> int:
    try:
        return os.pwrite(descriptor, data, offset)
    except OSError as error:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        # A limit may leave an odd rest, and some file systems take the flag and then refuse what it asks for.
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return os.pwrite(descriptor, data, offset)


def map_pages(size: int) -> memoryview:
    """Map memory that a device can read and write itself; at least ``size`` bytes."""
    # Huge pages, where they are to be had: a direct read of 4 MiB then pins two pages and not a thousand.
    unit = _HUGE if size >= _HUGE else _PAGE
    # Private, since mmap's default is shared memory, which would count and outlive as such.
    pages = mmap.mmap(-1, -(-size // unit) * unit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE:
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


def file_system(descriptor: int) -> str:
    """Give the type of the file system that an open file is on, such as ``ext4``; empty when it is not to be found."""
    # By mount and not by device number: the latter is another one in a subvolume of btrfs.
    try:
        mount = _field(Path(f"/proc/self/fdinfo/{descriptor}").read_text("ascii"), "mnt_id:")
        for line in Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines():
            if line.split(" ", 1)[0] == mount:
                return line.partition(" - ")[2].split(" ", 1)[0]
    except OSError:
        return ""
    return ""


def file_system_at(directory: Path) -> str:
    """Give the type of the file system that a directory is on; empty when it is not to be found."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return file_system(descriptor)
    finally:
        os.close(descriptor)


def _field(text: str, name: str) -> str:
    return next((line.removeprefix(name).strip() for line in text.splitlines() if line.startswith(name)), "")


def is_fat(kind: str) -> bool:
    """Say whether files of this type of file system end at 4 GiB."""
    return kind in _FAT


def seeks(descriptor: int) -> bool:
    """Say whether the file is on a disk or disc that turns, or on something that says so, as most USB sticks do.

    Several readers at different places would make it slower. Virtual disks call themselves turning, and are not.
    """
    device = os.fstat(descriptor).st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    with contextlib.suppress(OSError):
        device_path = place.resolve(strict=True)
        queue = device_path if (device_path / "queue").is_dir() else device_path.parent
        turning = (queue / "queue" / "rotational").read_text("ascii").strip() == "1"
        return turning and "/virtio" not in str(device_path) and "/virtual/" not in str(device_path)
    return False
