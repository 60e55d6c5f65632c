"""``segments.idx``: the tag of every segment, and a digest of every 64 MiB of ciphertext.

A binary table of fixed framing (docs/spec/bundle.md). Its SHA-384 is in the signed manifest, and the caller checks that
before it parses; so what is parsed here is the owner's, and is still held to the one form that the manifest's geometry
allows: same bytes in, same bytes out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NoReturn

from provisioning.errors import BundleDamaged
from provisioning.geometry import DataFile, Geometry
from provisioning.segment import BUNDLE_ID_BYTES, TAG_BYTES

MAGIC: Final = b"LETHEIDX"
VERSION: Final = 1
DIGEST_BLOCK: Final = 64 << 20
BLOCK_DIGEST_BYTES: Final = 32

# magic, version, reserved, segment size, digest block, files, segments, digests, bundle id, reserved
_HEADER: Final = struct.Struct("<8sHHIIIQQ16s8x")
# file, length, offset, tag
_RECORD: Final = struct.Struct("<IIQ16s")


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """Where one segment lies.

    Attributes:
        file: number of its data file.
        offset: of its first byte in the file, a multiple of the segment size and so of 4096.
        length: bytes of ciphertext, which is also the length of the plaintext.
        tag: its authentication tag, 16 bytes.
    """

    file: int
    offset: int
    length: int
    tag: bytes


def digest_blocks(file: DataFile) -> int:
    """Give how many digests a data file has."""
    return -(-file.size // DIGEST_BLOCK)


def table_bytes(geometry: Geometry) -> int:
    """Give the size that a table must have."""
    digests = sum(digest_blocks(file) for file in geometry.files)
    return _HEADER.size + geometry.segments * _RECORD.size + digests * BLOCK_DIGEST_BYTES


def _refuse(code: str, found: str, expected: str) -> NoReturn:
    raise BundleDamaged(code, found=found, expected=expected, hint="copy segments.idx again from the owner's medium")


def _header(geometry: Geometry, bundle_id: bytes, digests: int) -> bytes:
    return _HEADER.pack(
        MAGIC,
        VERSION,
        0,
        geometry.segment_size,
        DIGEST_BLOCK,
        len(geometry.files),
        geometry.segments,
        digests,
        bundle_id,
    )


def encode(geometry: Geometry, *, bundle_id: bytes, tags: bytes | bytearray, digests: Iterable[bytes]) -> bytes:
    """Write a table.

    Args:
        geometry: of the bundle.
        bundle_id: 16 bytes.
        tags: 16 bytes for each segment, in the bundle's order.
        digests: SHA-256 of each block of each file, in order.

    Raises:
        ValueError: the parts do not fit the geometry.
    """
    blocks = b"".join(digests)
    if len(tags) != geometry.segments * TAG_BYTES or len(bundle_id) != BUNDLE_ID_BYTES:
        raise ValueError(f"{len(tags)} bytes of tags for {geometry.segments} segments")
    table = bytearray(_header(geometry, bundle_id, len(blocks) // BLOCK_DIGEST_BYTES))
    size = geometry.segment_size
    for number, file in enumerate(geometry.files):
        for index in range(file.size // size):
            start = (file.base + index) * TAG_BYTES
            table += _RECORD.pack(number, size, index * size, tags[start : start + TAG_BYTES])
    table += blocks
    if len(table) != table_bytes(geometry):
        raise ValueError(f"{len(blocks)} bytes of digests")
    return bytes(table)


class Table:
    """A parsed table; records are unpacked when asked for, so a large one costs its bytes and no more.

    Args:
        data: the whole file, whose digest the caller has checked.
        geometry: of the signed manifest.
        bundle_id: of the signed manifest.

    Raises:
        BundleDamaged: ``table.size``, ``table.header`` or ``table.record``.
    """

    __slots__ = ("_data", "_digests", "_files", "_first", "segments")

    def __init__(self, data: bytes, geometry: Geometry, *, bundle_id: bytes) -> None:
        expected = table_bytes(geometry)
        if len(data) != expected:
            _refuse("table.size", f"{len(data)} bytes", f"{expected} bytes")
        files = geometry.files
        blocks = [digest_blocks(file) for file in files]
        header = _header(geometry, bundle_id, sum(blocks))
        if data[: len(header)] != header:
            _refuse("table.header", "a header that does not fit the manifest", "the manifest's numbers and bundle id")
        self._data = data
        self.segments = geometry.segments
        self._files = files
        self._digests = self._check_records(geometry.segment_size)
        # Number of the first digest of each file.
        self._first = list(accumulate(blocks, initial=0))

    def _check_records(self, size: int) -> int:
        """Check the place of every record; gives the offset behind the last one."""
        position = _HEADER.size
        for number, file in enumerate(self._files):
            stop = position + file.size // size * _RECORD.size
            offset = 0
            for found, length, where, _ in _RECORD.iter_unpack(memoryview(self._data)[position:stop]):
                if found != number or length != size or where != offset:
                    place = f"file {found}, offset {where}, length {length}"
                    _refuse("table.record", place, f"file {number}, offset {offset}, length {size}")
                offset += size
            position = stop
        return position

    def segment(self, index: int) -> SegmentRecord:
        """Give the record of a segment by its number in the bundle (``section.base`` + number in the section)."""
        if not 0 <= index < self.segments:
            raise ValueError(f"segment {index} of {self.segments}")
        file, length, offset, tag = _RECORD.unpack_from(self._data, _HEADER.size + index * _RECORD.size)
        return SegmentRecord(file, offset, length, tag)

    def digest(self, file: int, block: int) -> bytes:
        """Give the SHA-256 of one 64 MiB block of a data file (the last block may be shorter)."""
        if not 0 <= block < digest_blocks(self._files[file]):
            raise ValueError(f"block {block} of file {file}")
        start = self._digests + (self._first[file] + block) * BLOCK_DIGEST_BYTES
        return self._data[start : start + BLOCK_DIGEST_BYTES]
