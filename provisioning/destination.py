"""A directory that a copy is written to: every file in it is this run's alone, or it is refused.

No link is followed, and nothing is written to a file that has a second name, since the other name may be somebody
else's.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final, NoReturn

from attestation.errors import reason_of
from provisioning.errors import OutputFailed
from provisioning.files import names_in
from provisioning.medium import Road, read_whole, write_all

_OPEN: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def refuse_write(error: OSError, name: str) -> NoReturn:
    """Turn a failed write into a refusal.

    Raises:
        OutputFailed: ``copy.full``, ``copy.limit``, or ``copy.output`` for every other reason.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise OutputFailed(
            "copy.full",
            found=f"no room for {name} ({reason_of(error)})",
            expected="room for the whole bundle",
            hint="free space and run the command again; what was copied is kept",
        ) from None
    if error.errno == errno.EFBIG:
        refuse_limit(name, reason_of(error))
    raise OutputFailed(
        "copy.output",
        found=f"{name}: {reason_of(error)}",
        expected="a directory that can be written",
        hint="check the medium, its mount options and its permissions, then run the command again",
    ) from None


def refuse_limit(name: str, reason: str) -> NoReturn:
    """Refuse a file that its file system, or a limit of the shell, does not let grow."""
    raise OutputFailed(
        "copy.limit",
        found=f"{name}: {reason}",
        expected="a file system and limits that take files of this size",
        hint="format the medium with ext4, XFS or exFAT, or raise the limit (ulimit -f)",
    ) from None


def refuse_foreign(path: Path, found: str) -> NoReturn:
    """Refuse a directory in which something is not ours.

    Raises:
        OutputFailed: ``copy.partial``.
    """
    raise OutputFailed(
        "copy.partial",
        found=f"{path}, {found}",
        expected="no such directory, or a copy of this bundle that broke off",
        hint="look what is in it, and move it away or choose another name",
    )


def refuse_taken(destination: Path, what: str) -> NoReturn:
    """Refuse a destination that is there and is no copy of this bundle.

    Raises:
        OutputFailed: ``copy.exists``.
    """
    raise OutputFailed(
        "copy.exists",
        found=f"{destination}, {what}",
        expected="a new path, or the same bundle",
        hint="name a new directory for the copy, such as one inside of it; nothing was overwritten",
    ) from None


class Destination:
    """An open directory to write to.

    Args:
        path: for messages; names are looked up by descriptor.
        directory: its descriptor, which stays the caller's.
    """

    def __init__(self, path: Path, directory: int) -> None:
        self.path = path
        self.directory = directory

    def names(self) -> frozenset[str]:
        """Give the names of all that is in the directory now."""
        return names_in(self.directory)

    def size(self, name: str) -> int:
        """Give the size of a file, 0 of one that is not there."""
        try:
            return os.stat(name, dir_fd=self.directory, follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def allocated(self, name: str) -> int:
        """Give the bytes of the medium that a file takes, 0 of one that is not there."""
        try:
            return os.stat(name, dir_fd=self.directory, follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            return 0

    def open(self, name: str, flags: int) -> int:
        """Open a file for reading and writing; ``flags`` may say that it is made.

        Raises:
            OutputFailed: ``copy.partial`` when it is no plain file of one name, or as :func:`refuse_write`.
        """
        try:
            descriptor = os.open(name, _OPEN | flags, 0o644, dir_fd=self.directory)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                refuse_foreign(self.path, f"where {name} is no regular file")
            refuse_write(error, f"{self.path / name}")
        state = os.fstat(descriptor)
        # What has a second name, elsewhere, is not ours alone to write to.
        if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1:
            os.close(descriptor)
            refuse_foreign(self.path, f"where {name} is no regular file of one name")
        return descriptor

    def rename(self, name: str, new: str) -> None:
        """Give a file another name; what had that name is gone."""
        try:
            os.rename(name, new, src_dir_fd=self.directory, dst_dir_fd=self.directory)
        except OSError as error:
            refuse_write(error, f"{self.path / new}")

    def write_small(self, name: str, data: bytes) -> None:
        """Write a file whole and sync it.

        Raises:
            OutputFailed: as :func:`refuse_write`.
        """
        descriptor = self.open(name, os.O_CREAT)
        try:
            os.ftruncate(descriptor, 0)
            write_all(descriptor, memoryview(data), 0)
            os.fsync(descriptor)
        except OSError as error:
            refuse_write(error, f"{self.path / name}")
        finally:
            os.close(descriptor)

    def read_small(self, name: str, size: int) -> tuple[bytes, Road]:
        """Read a file of about ``size`` bytes back; of one that is longer, one byte more.

        Raises:
            OutputFailed: ``copy.partial`` or as :func:`refuse_write`.
        """
        descriptor = self.open(name, 0)
        try:
            return read_whole(descriptor, size)
        except OSError as error:
            refuse_write(error, f"{self.path / name}")
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        """Make the names in the directory survive a power cut.

        Raises:
            OutputFailed: as :func:`refuse_write`.
        """
        try:
            sync_names(self.directory)
        except OSError as error:
            refuse_write(error, f"{self.path}")


def sync_names(directory: int) -> None:
    """Make the names in an open directory survive a power cut."""
    try:
        os.fsync(directory)
    except OSError as error:
        # Some network and FUSE file systems cannot sync directories; the files themselves are synced.
        if error.errno != errno.EINVAL:
            raise
