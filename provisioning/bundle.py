"""A sealed bundle on a medium: opened once and read by descriptor.

``Bundle.open`` takes a directory's signed manifest and its table. A courier who has no owner's key can still copy a
bundle and compare its digests: ``open_unsigned`` gives the same files without the claim that an owner signed them, as
another type, so that nothing which loads can be given it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn, Self

from attestation import dsse
from attestation.errors import reason_of
from provisioning.errors import BundleDamaged
from provisioning.files import names_in, reading
from provisioning.geometry import DataFile
from provisioning.manifest import FILE_NAME, KIND, MAX_ENVELOPE_BYTES, MAX_PAYLOAD_BYTES, Manifest, SignedManifest
from provisioning.ownerkey import OwnerKey
from provisioning.table import Table, table_bytes

TABLE_NAME: Final = "segments.idx"

_COPY_AGAIN: Final = "copy the bundle again from the owner's medium"


class SealedFiles:
    """The files of an open bundle: contents, table, and one descriptor for each data file that is used.

    A context manager that closes its descriptors.

    Attributes:
        path: the directory.
        contents: the manifest's content; only a :class:`Bundle` says that an owner signed it.
        files: the data files, in order.
        table: tags and digests; its own digest is the one in the manifest.
        envelope: ``manifest.dsse.json`` as it was read.
        table_data: ``segments.idx`` as it was read.
    """

    __slots__ = ("_descriptors", "_directory", "_lock", "contents", "envelope", "files", "path", "table", "table_data")

    def __init__(self, path: Path, directory: int, *, contents: Manifest, envelope: bytes, table_data: bytes) -> None:
        self.path = path
        self.contents = contents
        self.files: tuple[DataFile, ...] = contents.geometry.files
        self.table = Table(table_data, contents.geometry, bundle_id=contents.bundle_id)
        self.envelope = envelope
        self.table_data = table_data
        self._directory: int | None = directory
        self._descriptors: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def directory(self) -> int:
        """The directory's descriptor."""
        if self._directory is None:
            raise ValueError("this bundle is closed")
        return self._directory

    def open_file(self, number: int) -> int:
        """Give the descriptor of a data file, opened once: what is checked is what is read later.

        The bundle closes it. Read with ``os.pread`` or ``os.preadv``, which need no position.

        Raises:
            BundleDamaged: ``bundle.file.missing``, ``bundle.file.kind`` or ``bundle.file.size``.
        """
        file = self.files[number]
        with self._lock:
            directory = self.directory
            if number not in self._descriptors:
                self._descriptors[number] = _open_regular(directory, file.name, size=file.size)
            return self._descriptors[number]

    def close_file(self, number: int) -> None:
        """Close a data file that is not read any more; a bundle may have more files than a process may open."""
        with self._lock:
            descriptor = self._descriptors.pop(number, None)
            if descriptor is not None:
                os.close(descriptor)

    def names(self) -> frozenset[str]:
        """Give the names of all that is in the directory now."""
        return names_in(self.directory)

    def close(self) -> None:
        """Close all descriptors. May be called again."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()
            if self._directory is not None:
                os.close(self._directory)
                self._directory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Bundle(SealedFiles):
    """An open bundle of a configured owner. Made by :meth:`open`.

    Attributes:
        manifest: whose signature was checked.
    """

    __slots__ = ("manifest",)

    def __init__(
        self, path: Path, directory: int, *, manifest: SignedManifest, envelope: bytes, table_data: bytes
    ) -> None:
        super().__init__(path, directory, contents=manifest.manifest, envelope=envelope, table_data=table_data)
        self.manifest = manifest

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
        descriptor = _open_directory(directory)
        try:
            envelope = _read_whole(descriptor, FILE_NAME, limit=MAX_ENVELOPE_BYTES)
            with reading(directory / FILE_NAME):
                manifest = SignedManifest.read(envelope, owners)
            table = cls._read_table(descriptor, manifest.manifest)
            return cls(directory, descriptor, manifest=manifest, envelope=envelope, table_data=table)
        except BaseException:
            os.close(descriptor)
            raise

    @staticmethod
    def _read_table(directory: int, manifest: Manifest) -> bytes:
        return _read_table(directory, manifest)


def open_unsigned(directory: Path) -> SealedFiles:
    """Open a bundle without asking who signed its manifest: digests can be compared, and nothing else is known.

    Args: as :meth:`Bundle.open`.

    Raises:
        BundleDamaged: ``bundle.directory``, ``bundle.file.*``, ``bundle.table`` or ``table.*``.
        FormatError: the manifest is malformed.
    """
    descriptor = _open_directory(directory)
    try:
        envelope = _read_whole(descriptor, FILE_NAME, limit=MAX_ENVELOPE_BYTES)
        with reading(directory / FILE_NAME):
            contents = Manifest.parse(dsse.unverified_payload(envelope, KIND, limit=MAX_PAYLOAD_BYTES))
        table = _read_table(descriptor, contents)
        return SealedFiles(directory, descriptor, contents=contents, envelope=envelope, table_data=table)
    except BaseException:
        os.close(descriptor)
        raise


def _open_directory(directory: Path) -> int:
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BundleDamaged(
            "bundle.directory",
            found=f"{directory}: {reason_of(error)}",
            expected="the directory of a sealed bundle",
            hint="check the path, and that the medium is mounted",
        ) from None


def _read_table(directory: int, manifest: Manifest) -> bytes:
    expected = table_bytes(manifest.geometry)
    data = _read_whole(directory, TABLE_NAME, limit=expected, exact=expected)
    if hashlib.sha384(data).digest() != manifest.table_sha384:
        _refuse("bundle.table", f"a {TABLE_NAME} with another digest than the manifest's", "the owner's table")
    return data


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
