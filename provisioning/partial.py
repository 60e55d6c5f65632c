"""The destination of a copy while it grows: a directory ``DEST.partial``, which no program takes for a bundle.

Until all is there it has no manifest under its own name, and the directory does not have its name either; both are
given at the end, each in one rename. ``manifest.partial`` says whose copy it is, so that a later run goes on with its
own work and with nothing else: a directory with any other content is refused, and no file that has a second name is
written to. No mark says which blocks are good; only their digests do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from provisioning.blocks import Block
from provisioning.bundle import TABLE_NAME, SealedFiles
from provisioning.destination import (
    Destination,
    refuse_foreign,
    refuse_limit,
    refuse_taken,
    refuse_write,
    sync_names,
)
from provisioning.errors import InputFailed, OutputFailed
from provisioning.files import sync_directory
from provisioning.manifest import FILE_NAME
from provisioning.medium import PIECE, file_system, is_fat, write_all, write_past_cache
from provisioning.table import DIGEST_BLOCK

SUFFIX: Final = ".partial"
IDENTITY: Final = "manifest.partial"
_IDENTITY_NEW: Final = "manifest.partial.new"

_FAT_FILE: Final = (4 << 30) - 1
# A sync that takes longer than this makes the next one come after fewer bytes, so that progress and Ctrl-C stay honest.
_SYNC_SECONDS: Final = 1.0
# File systems without locks: then nothing keeps two runs apart.
_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def partial_path(destination: Path) -> Path:
    """Give the directory in which a copy to ``destination`` grows.

    Raises:
        InputFailed: ``copy.place`` when the destination has no name of its own.
    """
    if destination.name in ("", ".."):
        raise InputFailed(
            "copy.place",
            found=f"{destination}, which has no name",
            expected="the path that the copy is to have",
            hint="name a new directory, such as /media/stick/bundle",
        )
    return destination.with_name(destination.name + SUFFIX)


class Partial(Destination):
    """An open destination. Made by :func:`open_partial`.

    Attributes:
        destination: the name it will get.
    """

    def __init__(self, path: Path, destination: Path, directory: int, source: SealedFiles) -> None:
        super().__init__(path, directory)
        self.destination = destination
        self._source = source
        self._descriptors: dict[int, int] = {}
        self._lock = threading.Lock()
        self._unsynced = 0
        self._most_unsynced = DIGEST_BLOCK

    def identify(self) -> None:
        """Refuse a directory that is not a copy of this bundle that broke off.

        Raises:
            OutputFailed: ``copy.partial``.
        """
        names = self.names()
        known = {IDENTITY, _IDENTITY_NEW, FILE_NAME, TABLE_NAME, *(file.name for file in self._source.files)}
        foreign = sorted(names - known)
        if foreign:
            refuse_foreign(self.path, f"which also holds {ascii(foreign[0])[:80]}")
        identities = names & {IDENTITY, FILE_NAME}
        if not identities and names - {_IDENTITY_NEW}:
            refuse_foreign(self.path, f"which has no {IDENTITY}")
        for name in identities:
            if self.read_small(name, len(self._source.envelope))[0] != self._source.envelope:
                refuse_foreign(self.path, f"whose {name} is another bundle's")

    def require_room(self) -> None:
        """Refuse at once what would fail after hours.

        Raises:
            OutputFailed: ``copy.full`` or ``copy.limit``.
        """
        largest = max(self._source.files, key=lambda file: file.size)
        if is_fat(file_system(self.directory)) and largest.size > _FAT_FILE:
            refuse_limit(largest.name, f"{largest.size} bytes on a FAT file system")
        sizes = {file.name: file.size for file in self._source.files} | {
            TABLE_NAME: len(self._source.table_data),
            FILE_NAME if FILE_NAME in self.names() else IDENTITY: len(self._source.envelope),
        }
        state = os.statvfs(self.directory)
        unit = max(state.f_frsize, 1)
        needed = sum(max(0, -(-size // unit) * unit - self.allocated(name)) for name, size in sizes.items())
        free = state.f_bavail * unit
        if free < needed:
            raise OutputFailed(
                "copy.full",
                found=f"{free} bytes free in {self.path.parent}",
                expected=f"{needed} bytes for what is still to be copied",
                hint="free space, or name a destination on another medium",
            )

    def begin(self) -> None:
        """Write whose copy this is, before anything else.

        Raises:
            OutputFailed: as :func:`refuse_write`, or ``copy.names`` when the file system changes names.
        """
        if FILE_NAME in self.names():
            # A run was stopped between the two renames, or a finished copy is to be mended: it is no bundle until then.
            self.rename(FILE_NAME, IDENTITY)
        elif IDENTITY not in self.names():
            self.write_small(_IDENTITY_NEW, self._source.envelope)
            self.rename(_IDENTITY_NEW, IDENTITY)
        self.sync()
        if IDENTITY not in self.names():
            raise OutputFailed(
                "copy.names",
                found=f"{', '.join(sorted(ascii(name) for name in self.names()))} in place of {IDENTITY}",
                expected="a file system that keeps names as they are",
                hint="mount a FAT medium as vfat, or format it with ext4, XFS or exFAT",
            )

    def present(self, blocks: list[Block]) -> list[Block]:
        """Give the blocks of which the directory has any version."""
        sizes = [self.size(file.name) for file in self._source.files]
        return [block for block in blocks if block.stop <= sizes[block.file]]

    def open_file(self, number: int) -> int:
        """Give the descriptor of a data file, made when it is not there; of a file that is longer the end is cut off.

        Raises:
            OutputFailed: ``copy.partial`` when it is no plain file of one name, or as :func:`refuse_write`.
        """
        file = self._source.files[number]
        with self._lock:
            if number not in self._descriptors:
                descriptor = self.open(file.name, os.O_CREAT)
                self._descriptors[number] = descriptor
                try:
                    if os.fstat(descriptor).st_size > file.size:
                        os.ftruncate(descriptor, file.size)
                    # What a killed run left unwritten in memory would otherwise be read from there.
                    os.fdatasync(descriptor)
                except OSError as error:
                    refuse_write(error, f"{self.path / file.name}")
            return self._descriptors[number]

    def write_block(self, block: Block, data: memoryview) -> None:
        """Write a block in its place and send it on its way to the medium.

        Raises:
            OutputFailed: as :meth:`open_file` and :func:`refuse_write`.
        """
        descriptor = self.open_file(block.file)
        write_past_cache(descriptor)
        try:
            for position in range(block.start, block.stop, PIECE):
                piece = data[position - block.start : min(position + PIECE, block.stop) - block.start]
                write_all(descriptor, piece, position)
                self._unsynced += len(piece)
                if self._unsynced >= self._most_unsynced:
                    self._flush(descriptor)
            # Only what is on the medium leaves the cache by this; the rest does when the file is closed.
            os.posix_fadvise(descriptor, block.start, block.stop - block.start, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            refuse_write(error, f"{self.path / self._source.files[block.file].name}")

    def _flush(self, descriptor: int) -> None:
        started = time.monotonic()
        os.fdatasync(descriptor)
        self._unsynced = 0
        if time.monotonic() - started > _SYNC_SECONDS:
            self._most_unsynced = max(PIECE, self._most_unsynced // 2)

    def close_file(self, number: int) -> None:
        """Sync a data file and close it.

        Raises:
            OutputFailed: as :func:`refuse_write`.
        """
        with self._lock:
            descriptor = self._descriptors.pop(number, None)
        if descriptor is None:
            return
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            refuse_write(error, f"{self.path / self._source.files[number].name}")
        finally:
            os.close(descriptor)

    def publish(self) -> None:
        """Give manifest and directory their names. Only for a copy that was read back.

        Raises:
            OutputFailed: ``copy.exists`` when the name was taken in the meantime, or as :func:`refuse_write`.
        """
        self.rename(IDENTITY, FILE_NAME)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_IDENTITY_NEW, dir_fd=self.directory)
            sync_names(self.directory)
            if os.path.lexists(self.destination):
                refuse_taken(self.destination, "which appeared while the copy was made")
            self.path.rename(self.destination)
            sync_directory(self.destination.parent)
        except OSError as error:
            refuse_write(error, f"{self.destination}")

    def close(self) -> None:
        """Close all descriptors, without any sync."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()
        os.close(self.directory)


@contextlib.contextmanager
def open_partial(source: SealedFiles, destination: Path) -> Iterator[Partial]:
    """Open the directory in which a copy grows, or make it; no other run may have it open.

    What was copied stays there, whatever happens; a directory in which nothing came to be is removed.

    Raises:
        InputFailed: ``copy.place``.
        OutputFailed: ``copy.partial``, ``copy.busy``, or as :func:`refuse_write`.
    """
    path = partial_path(destination)
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o755)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and os.path.lexists(path):
            refuse_foreign(path, "which is no directory")
        refuse_write(error, f"{path}")
    partial = Partial(path, destination, directory, source)
    try:
        _lock(directory, path)
        partial.identify()
        yield partial
    finally:
        partial.close()
        with contextlib.suppress(OSError):
            path.rmdir()


def _lock(directory: int, path: Path) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputFailed(
            "copy.busy",
            found=f"{path}, into which another run is copying",
            expected="one run at a time",
            hint="wait for the other run, or name another destination",
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            refuse_write(error, f"{path}")
