"""Vectors of a faulty packer: tables that an owner signed and that do not fit the manifest or the data."""

from __future__ import annotations

import struct
from pathlib import Path

from attestation import strictjson
from tests.vectors.good import GOOD, parts
from tests.vectors.sealed import LAB, SEGMENT, Vector, VectorSet, manifest_of, signed

_RECORDS = 64
_DIGESTS = _RECORDS + 32 * 5

# offset in the table, bytes that are put there, what they are, code when it is opened
_PATCHES: dict[str, tuple[int, bytes, str, str]] = {
    "magic": (0, b"LETHEIDY", "another magic", "table.header"),
    "version": (8, struct.pack("<H", 2), "another version", "table.header"),
    "reserved": (10, b"\1", "a reserved field that is not zero", "table.header"),
    "segment-size": (12, struct.pack("<I", 2 * SEGMENT), "another segment size", "table.header"),
    "digest-block": (16, struct.pack("<I", 1 << 20), "another digest block", "table.header"),
    "files": (20, struct.pack("<I", 0xFFFFFFFF), "a number of files at the edge of 32 bits", "table.header"),
    "segments": (24, struct.pack("<Q", 2**63 - 1), "a number of segments at the edge of 63 bits", "table.header"),
    "digests": (32, struct.pack("<Q", 2**64 - 1), "a number of digests at the edge of 64 bits", "table.header"),
    "bundle": (40, bytes(16), "another bundle's id", "table.header"),
    "tail": (63, b"\1", "a byte behind the header's fields that is not zero", "table.header"),
    "record-file": (_RECORDS + 32, struct.pack("<I", 2), "a segment in another file", "table.record"),
    "record-length": (_RECORDS + 36, struct.pack("<I", SEGMENT - 1), "a shorter segment", "table.record"),
    "record-offset": (_RECORDS + 40, struct.pack("<Q", 2**63), "an offset at the edge of 63 bits", "table.record"),
    "record-twice": (_RECORDS + 72, struct.pack("<Q", 0), "two segments in one place", "table.record"),
}


def add(made: VectorSet, kept: Path) -> None:
    """Add these vectors."""
    sound = parts().table
    for fault, (offset, data, about, code) in _PATCHES.items():
        _add(made, kept, f"table-{fault}", _patched(sound, offset, data), about=about, opened=code)
    _add(
        made,
        kept,
        "table-tag",
        _patched(sound, _RECORDS + 48, bytes(16)),
        about="a tag that is not the segment's: verify cannot know",
        loaded="segment.tag",
    )
    _add(
        made,
        kept,
        "table-sha256",
        _patched(sound, _DIGESTS, bytes(32)),
        about="a digest that is not the file's: a load does not need it",
        verified="bundle.digest",
    )


def _add(made: VectorSet, kept: Path, name: str, table: bytes, **expected: str) -> None:
    payload = strictjson.dumps(manifest_of(GOOD.geometry, table))
    made.tables[name] = table
    made.manifests[name] = signed("manifest", payload, [LAB], kept=kept / f"{name}.dsse.json")
    made.vectors.append(Vector(name=name, manifest=name, table=name, **expected))


def _patched(table: bytes, offset: int, data: bytes) -> bytes:
    return table[:offset] + data + table[offset + len(data) :]
