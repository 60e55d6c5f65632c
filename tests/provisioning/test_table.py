"""``segments.idx``: one form only. What parses encodes back to the same bytes; every misplaced record is refused."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioning.errors import BundleDamaged
from provisioning.geometry import Geometry
from provisioning.table import DIGEST_BLOCK, Table, digest_blocks, encode, table_bytes

SEGMENT = 256 << 10
BUNDLE = bytes(range(16))
GEOMETRY = Geometry(segment_size=SEGMENT, section_bytes=3 * SEGMENT, file_bytes=2 * SEGMENT, streams=(1, 5, 0))
TAGS = b"".join(bytes([number]) * 16 for number in range(6))
DIGESTS = [hashlib.sha256(bytes([number])).digest() for number in range(4)]
TABLE = encode(GEOMETRY, bundle_id=BUNDLE, tags=TAGS, digests=DIGESTS)
HEADER_BYTES = 64
RECORD_BYTES = 32


def parse(data: bytes, geometry: Geometry = GEOMETRY, bundle_id: bytes = BUNDLE) -> Table:
    return Table(data, geometry, bundle_id=bundle_id)


def encode_again(table: Table) -> bytes:
    tags = b"".join(table.segment(index).tag for index in range(table.segments))
    digests = [
        table.digest(number, block)
        for number, file in enumerate(GEOMETRY.files)
        for block in range(digest_blocks(file))
    ]
    return encode(GEOMETRY, bundle_id=BUNDLE, tags=tags, digests=digests)


def test_gives_the_place_and_the_tag_of_every_segment() -> None:
    table = parse(TABLE)
    places = [(record.file, record.offset) for record in map(table.segment, range(6))]
    # stream 0: one file; stream 1: a section of three (files of two and one), and a section of two
    assert places == [(0, 0), (1, 0), (1, SEGMENT), (2, 0), (3, 0), (3, SEGMENT)]
    assert [record.tag[0] for record in map(table.segment, range(6))] == list(range(6))
    assert {record.length for record in map(table.segment, range(6))} == {SEGMENT}


def test_gives_the_digest_of_every_block() -> None:
    table = parse(TABLE)
    assert [table.digest(number, 0) for number in range(4)] == DIGESTS[:4]


def test_files_longer_than_a_block_have_several_digests() -> None:
    size = 1 << 20
    geometry = Geometry(segment_size=size, section_bytes=200 * size, file_bytes=130 * size, streams=(1, 131, 0))
    assert [digest_blocks(file) for file in geometry.files] == [1, 3, 1]
    digests = [bytes([number]) * 32 for number in range(5)]
    table = Table(encode(geometry, bundle_id=BUNDLE, tags=bytes(16 * 132), digests=digests), geometry, bundle_id=BUNDLE)
    assert [table.digest(1, block)[0] for block in range(3)] == [1, 2, 3]
    assert table.digest(2, 0)[0] == 4
    assert DIGEST_BLOCK == 64 << 20


def test_encodes_back_to_the_same_bytes() -> None:
    assert encode_again(parse(TABLE)) == TABLE


@settings(deadline=None)
@given(place=st.integers(0, len(TABLE) - 1), change=st.integers(1, 255))
def test_a_changed_byte_is_refused_or_encodes_back_to_itself(place: int, change: int) -> None:
    data = bytearray(TABLE)
    data[place] ^= change
    try:
        table = parse(bytes(data))
    except BundleDamaged:
        return
    assert encode_again(table) == bytes(data)


@pytest.mark.parametrize("place", range(HEADER_BYTES))
def test_refuses_every_change_of_the_header(place: int) -> None:
    data = bytearray(TABLE)
    data[place] ^= 1
    with pytest.raises(BundleDamaged) as refused:
        parse(bytes(data))
    assert refused.value.code == "table.header"


def swap(first: int, second: int) -> bytes:
    records = [TABLE[HEADER_BYTES + n * RECORD_BYTES : HEADER_BYTES + (n + 1) * RECORD_BYTES] for n in range(6)]
    records[first], records[second] = records[second], records[first]
    return TABLE[:HEADER_BYTES] + b"".join(records) + TABLE[HEADER_BYTES + 6 * RECORD_BYTES :]


def patched(offset: int, value: bytes) -> bytes:
    at = HEADER_BYTES + offset
    return TABLE[:at] + value + TABLE[at + len(value) :]


MISPLACED = {
    "swapped segments": swap(1, 2),
    "swapped files": swap(0, 3),
    "repeated segment": patched(2 * RECORD_BYTES + 8, struct.pack("<Q", 0)),
    "another file": patched(RECORD_BYTES, struct.pack("<I", 2)),
    "another length": patched(RECORD_BYTES + 4, struct.pack("<I", SEGMENT - 1)),
    "an offset far out": patched(8, struct.pack("<Q", 1 << 62)),
    "a file far out": patched(0, struct.pack("<I", 0xFFFFFFFF)),
}


@pytest.mark.parametrize("fault", MISPLACED)
def test_refuses_misplaced_records(fault: str) -> None:
    with pytest.raises(BundleDamaged) as refused:
        parse(MISPLACED[fault])
    assert refused.value.code == "table.record"


@pytest.mark.parametrize("data", [b"", TABLE[:-1], TABLE + b"\0", TABLE[:HEADER_BYTES]], ids=len)
def test_refuses_tables_of_another_size(data: bytes) -> None:
    with pytest.raises(BundleDamaged) as refused:
        parse(data)
    assert refused.value.code == "table.size"


def test_refuses_the_table_of_another_bundle() -> None:
    with pytest.raises(BundleDamaged) as refused:
        parse(TABLE, bundle_id=bytes(16))
    assert refused.value.code == "table.header"


def test_refuses_the_table_of_another_geometry_of_one_size() -> None:
    other = Geometry(segment_size=512 << 10, section_bytes=3 << 19, file_bytes=1 << 20, streams=(1, 5, 0))
    assert table_bytes(other) == len(TABLE)
    with pytest.raises(BundleDamaged) as refused:
        parse(TABLE, geometry=other)
    assert refused.value.code == "table.header"


@pytest.mark.parametrize("index", [-1, 6])
def test_has_no_segments_beyond_its_own(index: int) -> None:
    with pytest.raises(ValueError, match="of 6"):
        parse(TABLE).segment(index)


@pytest.mark.parametrize("block", [-1, 1])
def test_has_no_blocks_beyond_its_own(block: int) -> None:
    with pytest.raises(ValueError, match="block"):
        parse(TABLE).digest(0, block)


def test_is_written_only_when_all_parts_are_there() -> None:
    with pytest.raises(ValueError, match="tags"):
        encode(GEOMETRY, bundle_id=BUNDLE, tags=TAGS[:-16], digests=DIGESTS[:4])
    with pytest.raises(ValueError, match="digests"):
        encode(GEOMETRY, bundle_id=BUNDLE, tags=TAGS, digests=DIGESTS[:3])
