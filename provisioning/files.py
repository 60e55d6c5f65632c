"""Files in and out: read whole within a bound, written whole or not at all, and never over another file.

Only ciphertext, signed objects and the owner's encrypted key files pass through here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from attestation.errors import FormatError, SignatureRefused, reason_of
from provisioning.errors import InputFailed, OutputFailed


def read_bounded(path: Path, *, limit: int) -> bytes:
    """Read a regular file of at most ``limit`` bytes.

    Raises:
        InputFailed: ``input.missing``, ``input.kind``, ``input.size`` or ``input.failed``.
    """
    try:
        # Non-blocking, so that a pipe in place of the file is refused and not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        _input_failed(path, error)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InputFailed(
                "input.kind", found=f"{path} is no regular file", expected="a file", hint="check the path"
            )
        with os.fdopen(os.dup(descriptor), "rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        _input_failed(path, error)
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise InputFailed(
            "input.size",
            found=f"{path} of more than {limit} bytes",
            expected=f"at most {limit} bytes",
            hint="this is probably another kind of file; check the path",
        )
    return data


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file in every refusal of its content that is raised inside.

    The parsers see bytes and not files, and a command reads several.
    """
    try:
        yield
    except (FormatError, SignatureRefused) as error:
        error.found = f"{error.found} in {path}"
        raise


def _input_failed(path: Path, error: OSError) -> NoReturn:
    missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
    raise InputFailed(
        "input.missing" if missing else "input.failed",
        found=f"{path}: {reason_of(error)}",
        expected="a readable file",
        hint="check the path and its permissions",
    ) from None


def refuse_existing(path: Path) -> None:
    """Refuse early what :func:`write_new` would refuse late.

    Raises:
        OutputFailed: ``output.exists``.
    """
    if os.path.lexists(path):
        raise _exists(path)


def _exists(path: Path) -> OutputFailed:
    return OutputFailed(
        "output.exists",
        found=f"{path} is already there",
        expected="a new file name",
        hint="choose another name, or move the old file away",
    )


class NewFile:
    """A file that can be written, but is not there yet; made by :func:`reserve_file`."""

    __slots__ = ("_descriptor", "_part", "path")

    def __init__(self, path: Path, part: Path, descriptor: int) -> None:
        self.path = path
        self._part = part
        self._descriptor = descriptor

    def publish(self, data: bytes) -> None:
        """Write the content, sync it and give it its name; once.

        Raises:
            OutputFailed: ``output.exists`` when the name is taken, ``output.failed`` for every other reason.
        """
        with _writing(self.path):
            with os.fdopen(os.dup(self._descriptor), "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            _publish(self._part, self.path)
            sync_directory(self.path.parent)


class NewDirectory:
    """A directory of files that can be made, but is not there yet; made by :func:`reserve_directory`."""

    __slots__ = ("_part", "path")

    def __init__(self, path: Path, part: Path) -> None:
        self.path = path
        self._part = part

    def publish(self, files: dict[str, bytes]) -> list[Path]:
        """Write all files, then give the directory its name; once. Gives the files' paths.

        Raises:
            OutputFailed: ``output.exists`` when the name is taken, ``output.failed`` for every other reason.
        """
        for name, data in files.items():
            write_new(self._part / name, data)
        refuse_existing(self.path)
        with _writing(self.path):
            self._part.rename(self.path)
            sync_directory(self.path.parent)
        return [self.path / name for name in files]


@contextlib.contextmanager
def reserve_file(path: Path, *, mode: int = 0o644) -> Iterator[NewFile]:
    """Prove that a new file can be written, before its content costs something that cannot be taken back.

    The bytes will go to a sibling, which is made here; its link to the final name is the step that publishes it, and
    that step fails if the name is taken. Without it nothing is left.

    Raises:
        OutputFailed: ``output.exists`` when the name is taken, ``output.failed`` for every other reason.
    """
    refuse_existing(path)
    part = _part_of(path)
    with _writing(path):
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        yield NewFile(path, part, descriptor)
    finally:
        os.close(descriptor)
        with _writing(path):
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def reserve_directory(path: Path) -> Iterator[NewDirectory]:
    """Do for a directory of files what :func:`reserve_file` does for a file.

    Raises:
        OutputFailed: ``output.exists`` when the name is taken, ``output.failed`` for every other reason.
    """
    refuse_existing(path)
    part = _part_of(path)
    with _writing(path):
        part.mkdir(mode=0o755)
    try:
        yield NewDirectory(path, part)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_new(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a new file: complete and synced, or absent.

    Raises:
        OutputFailed: ``output.exists`` when the name is taken, ``output.failed`` for every other reason.
    """
    with reserve_file(path, mode=mode) as place:
        place.publish(data)


def _part_of(path: Path) -> Path:
    # A path such as .. or / has no name to make a sibling of.
    return path.parent / f".{path.name}.{secrets.token_hex(8)}.part"


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        raise OutputFailed(
            "output.failed",
            found=f"{path}: {reason_of(error)}",
            expected="a directory that is there, with room and permission to write",
            hint="check the disk and the directory, then try again",
        ) from None


def _publish(part: Path, path: Path) -> None:
    try:
        os.link(part, path)
    except OSError as error:
        # FAT on a USB stick has no links: take the name first, then replace what is our own empty file.
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        part.replace(path)


def names_in(directory: int) -> frozenset[str]:
    """Give the names of all that is in an open directory now, whatever happened to its own name."""
    # Opened once more: btrfs shows a descriptor only what was there when it was opened.
    fresh = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return frozenset(os.listdir(fresh))  # noqa: PTH208 - by descriptor
    finally:
        os.close(fresh)


def sync_directory(directory: Path) -> None:
    """Make names made in a directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems cannot sync directories; the file itself is synced.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def make_private_directory(directory: Path) -> None:
    """Make a directory for keys, mode 0700, or take an existing one that only its owner can enter.

    Raises:
        OutputFailed: ``output.failed``, or ``output.mode`` when others can enter it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = directory.stat().st_mode & 0o777
    except OSError as error:
        raise OutputFailed(
            "output.failed",
            found=f"{directory}: {reason_of(error)}",
            expected="a directory for keys",
            hint="check the path and its permissions",
        ) from None
    if mode & 0o077:
        raise OutputFailed(
            "output.mode",
            found=f"{directory} with mode {mode:04o}",
            expected="mode 0700",
            hint=f"chmod 0700 {directory}, or name a new directory",
        )
