"""A sealed bundle on a medium: opened once, read by descriptor, and verified with no key.

``Bundle.open`` takes a directory's signed manifest and its table; ``verify`` reads every byte of ciphertext against the
table's digests. The loader needs no ``verify``: each segment is authentic or does not open. ``verify`` is for couriers
and operators, who want to know that a copy is whole before it travels or is loaded, and where it is not.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from attestation.errors import reason_of
from provisioning.errors import BundleDamaged
from provisioning.files import reading
from provisioning.geometry import DataFile
from provisioning.manifest import FILE_NAME, MAX_ENVELOPE_BYTES, SignedManifest
from provisioning.ownerkey import OwnerKey
from provisioning.table import DIGEST_BLOCK, Table, digest_blocks, table_bytes

TABLE_NAME: Final = "segments.idx"

_READ_BYTES: Final = 1 << 20
_COPY_AGAIN: Final = "copy the bundle again from the owner's medium"
_MOST_NAMED: Final = 8


class Bundle:
    """An open bundle: its signed manifest, its table, and one descriptor for each data file that is used.

    Made by :meth:`open`; a context manager that closes its descriptors.
    """

    __slots__ = ("_descriptors", "_directory", "_lock", "manifest", "path", "table")

    def __init__(self, path: Path, directory: int, manifest: SignedManifest, table: Table) -> None:
        self.path = path
        self.manifest = manifest
        self.table = table
        self._directory: int | None = directory
        self._descriptors: dict[int, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, directory: Path, owners: Sequence[OwnerKey]) -> Bundle:
        """Open a bundle: check its manifest's signature and its table's digest.

        Args:
            directory: the bundle; no name in it is followed if it is a link.
            owners: the configured owners.

        Raises:
            BundleDamaged: ``bundle.directory``, ``bundle.file.*``, ``bundle.table`` or ``table.*``.
            FormatError, SignatureRefused, ExchangeRefused: the manifest is refused.
        """
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise BundleDamaged(
                "bundle.directory",
                found=f"{directory}: {reason_of(error)}",
                expected="the directory of a sealed bundle",
                hint="check the path, and that the medium is mounted",
            ) from None
        try:
            envelope = _read_whole(descriptor, FILE_NAME, limit=MAX_ENVELOPE_BYTES)
            with reading(directory / FILE_NAME):
                manifest = SignedManifest.read(envelope, owners)
            table = cls._read_table(descriptor, manifest)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(directory, descriptor, manifest, table)

    @staticmethod
    def _read_table(directory: int, manifest: SignedManifest) -> Table:
        expected = table_bytes(manifest.geometry)
        data = _read_whole(directory, TABLE_NAME, limit=expected, exact=expected)
        if hashlib.sha384(data).digest() != manifest.table_sha384:
            _refuse("bundle.table", f"a {TABLE_NAME} with another digest than the manifest's", "the owner's table")
        return Table(data, manifest.geometry, bundle_id=manifest.bundle_id)

    def open_file(self, number: int) -> int:
        """Give the descriptor of a data file, opened once: what is checked is what is read later.

        The bundle closes it. Read with ``os.pread`` or ``os.preadv``, which need no position.

        Raises:
            BundleDamaged: ``bundle.file.missing``, ``bundle.file.kind`` or ``bundle.file.size``.
        """
        file = self.manifest.files[number]
        with self._lock:
            if self._directory is None:
                raise ValueError("this bundle is closed")
            if number not in self._descriptors:
                self._descriptors[number] = _open_regular(self._directory, file.name, size=file.size)
            return self._descriptors[number]

    def names(self) -> frozenset[str]:
        """Give the names of all that is in the directory now."""
        if self._directory is None:
            raise ValueError("this bundle is closed")
        return frozenset(os.listdir(self._directory))  # noqa: PTH208 - by descriptor, so the directory cannot be exchanged

    def close(self) -> None:
        """Close all descriptors. May be called again."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()
            if self._directory is not None:
                os.close(self._directory)
                self._directory = None

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse(code: str, found: str, expected: str, hint: str = _COPY_AGAIN) -> NoReturn:
    raise BundleDamaged(code, found=found, expected=expected, hint=hint)


def _open_regular(directory: int, name: str, *, size: int | None) -> int:
    """Open a regular file of exactly ``size`` bytes; never follows a link, never waits for a pipe."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ENOENT:
            _refuse("bundle.file.missing", f"no {name}", f"{name} in the bundle")
        if error.errno in (errno.ELOOP, errno.ENXIO):
            _refuse("bundle.file.kind", f"{name}, which is no regular file", "a regular file")
        _refuse("bundle.file.unreadable", f"{name}: {reason_of(error)}", "a readable file")
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            _refuse("bundle.file.kind", f"{name}, which is no regular file", "a regular file")
        if size is not None and state.st_size != size:
            _refuse("bundle.file.size", f"{name} of {state.st_size} bytes", f"{size} bytes")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read_whole(directory: int, name: str, *, limit: int, exact: int | None = None) -> bytes:
    descriptor = _open_regular(directory, name, size=exact)
    with os.fdopen(descriptor, "rb") as stream:
        try:
            data = stream.read(limit + 1)
        except OSError as error:
            _refuse("bundle.file.unreadable", f"{name}: {reason_of(error)}", "a readable file")
    if len(data) > limit or (exact is not None and len(data) != exact):
        _refuse("bundle.file.size", f"{name} of {len(data)} bytes or more", f"at most {limit} bytes")
    return data


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read and found whole.

    Attributes:
        files: data files.
        segments: segments in them.
        blocks: blocks of ciphertext whose digest was compared.
        bytes: bytes of ciphertext read.
        seconds: wall time.
    """

    files: int
    segments: int
    blocks: int
    bytes: int
    seconds: float

    def as_payload(self) -> dict[str, int]:
        """Give the report as JSON members, time in whole milliseconds."""
        return {
            "files": self.files,
            "segments": self.segments,
            "blocks": self.blocks,
            "bytes": self.bytes,
            "milliseconds": round(self.seconds * 1000),
        }


@dataclass(frozen=True, slots=True)
class _Damage:
    """One block of ciphertext that is not what the owner wrote."""

    code: str
    where: str


def verify(bundle: Bundle, progress: Callable[[int, int], None] | None = None, *, threads: int = 2) -> VerifyReport:
    """Read every byte of ciphertext and compare it with the signed digests; needs no key.

    Args:
        bundle: opened, so that manifest and table are the owner's.
        progress: told (bytes read, bytes in all) now and then, from one thread at a time.
        threads: how many blocks are hashed at once.

    Raises:
        BundleDamaged: ``bundle.file.extra``, ``bundle.file.missing``, ``bundle.file.kind``, ``bundle.file.size``,
            ``bundle.file.unreadable`` or ``bundle.digest``; the last three name each damaged file, the bytes and the
            segments in them.
    """
    started = time.monotonic()
    files = bundle.manifest.files
    _refuse_extra(bundle)
    for number in range(len(files)):
        bundle.open_file(number)
    total = bundle.manifest.geometry.data_bytes
    done = 0
    damages: list[_Damage] = []
    with contextlib.closing(_blocks(bundle, threads)) as results:
        for size, damage in results:
            done += size
            if damage is not None:
                damages.append(damage)
            if progress is not None:
                progress(done, total)
    if damages:
        named = "; ".join(damage.where for damage in damages[:_MOST_NAMED])
        more = f"; and {len(damages) - _MOST_NAMED} more blocks" if len(damages) > _MOST_NAMED else ""
        _refuse(
            damages[0].code,
            named + more,
            "the ciphertext that the owner signed",
            "copy those files again from the owner's medium",
        )
    return VerifyReport(
        files=len(files),
        segments=bundle.manifest.geometry.segments,
        blocks=sum(digest_blocks(file) for file in files),
        bytes=total,
        seconds=time.monotonic() - started,
    )


def _refuse_extra(bundle: Bundle) -> None:
    known = {FILE_NAME, TABLE_NAME, *(file.name for file in bundle.manifest.files)}
    extra = sorted(bundle.names() - known)
    if extra:
        shown = ", ".join(ascii(name)[:80] for name in extra[:_MOST_NAMED])
        _refuse(
            "bundle.file.extra",
            f"{len(extra)} more names: {shown}",
            "the files of the manifest only",
            "remove what does not belong there",
        )


def _blocks(bundle: Bundle, threads: int) -> Generator[tuple[int, _Damage | None], None, None]:
    """Check blocks on several threads, in order, never more than a few ahead of the caller."""
    work = [
        (number, block) for number, file in enumerate(bundle.manifest.files) for block in range(digest_blocks(file))
    ]
    with ThreadPoolExecutor(threads) as pool:
        # At most 65,536 blocks (4 TiB) of two numbers: submitted at once, they cost less than a window would.
        futures = [pool.submit(_check_block, bundle, number, block) for number, block in work]
        try:
            for future in futures:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _check_block(bundle: Bundle, number: int, block: int) -> tuple[int, _Damage | None]:
    file = bundle.manifest.files[number]
    start = block * DIGEST_BLOCK
    stop = min(file.size, start + DIGEST_BLOCK)
    descriptor = bundle.open_file(number)
    buffer = bytearray(_READ_BYTES)
    digest = hashlib.sha256()
    position = start
    with memoryview(buffer) as view:
        while position < stop:
            try:
                count = os.preadv(descriptor, [view[: min(_READ_BYTES, stop - position)]], position)
            except OSError as error:
                where = f"{_where(bundle, file, position, stop)}, {reason_of(error)}"
                return stop - start, _Damage("bundle.file.unreadable", where)
            if count == 0:
                # The file shrank after it was opened.
                return stop - start, _Damage("bundle.file.size", _where(bundle, file, position, stop) + ", cut off")
            digest.update(view[:count])
            position += count
    if digest.digest() != bundle.table.digest(number, block):
        return stop - start, _Damage("bundle.digest", _where(bundle, file, start, stop))
    return stop - start, None


def _where(bundle: Bundle, file: DataFile, start: int, stop: int) -> str:
    size = bundle.manifest.segment_size
    first = file.base + start // size
    last = file.base + (stop - 1) // size
    return f"{file.name} bytes {start} to {stop - 1} (segments {first} to {last})"
