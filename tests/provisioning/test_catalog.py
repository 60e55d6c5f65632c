"""The catalog: round trips, bounds, and refusal of all that a bundle cannot have."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attestation import strictjson
from provisioning.catalog import MAX_FILES, Catalog, CatalogFile
from provisioning.errors import BundleDamaged
from provisioning.geometry import Geometry
from tests.sim.planned import planned

SEGMENT = 256 << 10
TENSORS = [
    planned("model.embed_tokens.weight", "BF16", (64, 8)),
    planned("model.layers.0.self_attn.o_proj.weight", "F32", (16, 64)),
    planned("model.norm.weight", "F32", ()),
]
FILES = [CatalogFile("config.json", b'{"a": 1}'), CatalogFile("tokenizer.json", b""), CatalogFile("x", b"\0\xff")]


def geometry_of(catalog: Catalog) -> Geometry:
    streams = catalog.layout.stream_segments(len(catalog.encode()), SEGMENT)
    return Geometry(segment_size=SEGMENT, section_bytes=SEGMENT, file_bytes=SEGMENT, streams=streams)


CATALOG = Catalog(TENSORS, FILES, tiles=8)
GEOMETRY = geometry_of(CATALOG)


def padded(plain: bytes) -> bytes:
    return plain + bytes(-len(plain) % SEGMENT)


def header() -> dict[str, Any]:
    encoded = CATALOG.encode()
    (length,) = struct.unpack_from("<I", encoded)
    return strictjson.loads(encoded[4 : 4 + length], limit=1 << 20)


def with_header(members: dict[str, Any], files: bytes = b'{"a": 1}\0\xff') -> bytes:
    text = strictjson.dumps(members)
    return padded(struct.pack("<I", len(text)) + text + files)


def refusal(plain: bytes, geometry: Geometry = GEOMETRY) -> BundleDamaged:
    with pytest.raises(BundleDamaged) as refused:
        Catalog.decode(plain, geometry=geometry)
    assert refused.value.exit_status == 7
    return refused.value


def test_reads_back_tensors_files_and_layout() -> None:
    read = Catalog.decode(padded(CATALOG.encode()), geometry=GEOMETRY)
    assert read.tensors == tuple(TENSORS)
    assert read.files == ("config.json", "tokenizer.json", "x")
    assert [read.file(name) for name in read.files] == [b'{"a": 1}', b"", b"\0\xff"]
    assert read.layout.tiles == 8
    assert tuple(read.layout.streams) == tuple(CATALOG.layout.streams)


def test_what_parses_encodes_back_to_the_same_bytes() -> None:
    assert Catalog.decode(padded(CATALOG.encode()), geometry=GEOMETRY).encode() == CATALOG.encode()


def test_reads_from_a_buffer_that_can_be_wiped_afterwards() -> None:
    buffer = bytearray(padded(CATALOG.encode()))
    read = Catalog.decode(buffer, geometry=GEOMETRY)
    buffer[:] = bytes(len(buffer))
    assert read.file("config.json") == b'{"a": 1}'


def test_says_which_file_is_missing() -> None:
    with pytest.raises(BundleDamaged) as refused:
        CATALOG.file("chat_template.jinja")
    assert refused.value.code == "catalog.file.missing"
    assert "chat_template.jinja" in refused.value.found


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another type": ({"type": "manifest"}, "catalog.version"),
    "another version": ({"version": 2}, "catalog.version"),
    "unknown member": ({"more": 1}, "catalog.header"),
    "another number of tiles": ({"tiles": 4}, "catalog.layout"),
    "tensor that is text": ({"tensors": ["a"]}, "catalog.header"),
    "tensor of an unknown type": ({"tensors": [{"name": "a", "dtype": "Q", "shape": [1]}]}, "catalog.tensor"),
    "shape with text": ({"tensors": [{"name": "a", "dtype": "U8", "shape": ["1"]}]}, "catalog.tensor"),
    "shape with true": ({"tensors": [{"name": "a", "dtype": "U8", "shape": [True]}]}, "catalog.tensor"),
    "shape below zero": ({"tensors": [{"name": "a", "dtype": "U8", "shape": [-1]}]}, "catalog.tensor"),
    "shape beyond all memory": ({"tensors": [{"name": "a", "dtype": "U8", "shape": [2**50]}]}, "catalog.tensor"),
    "shape of nine sizes": ({"tensors": [{"name": "a", "dtype": "U8", "shape": [1] * 9}]}, "catalog.tensor"),
    "product beyond all memory": (
        {"tensors": [{"name": "a", "dtype": "U8", "shape": [2**40, 2**40]}]},
        "catalog.tensor",
    ),
    "cut along no dimension": (
        {"tensors": [{"name": "a", "dtype": "U8", "shape": [4], "parallel": 1}]},
        "catalog.tensor",
    ),
    "unknown member of a tensor": (
        {"tensors": [{"name": "a", "dtype": "U8", "shape": [1], "quant": 1}]},
        "catalog.header",
    ),
    "tensor twice": ({"tensors": [{"name": "a", "dtype": "U8", "shape": [1]}] * 2}, "catalog.tensor"),
    "another layout than the manifest's": (
        {"tensors": [{"name": "a", "dtype": "U8", "shape": [SEGMENT + 1]}]},
        "catalog.layout",
    ),
    "block of one element": (
        {"tensors": [{"name": "a", "dtype": "U8", "shape": [4], "parallel": 0, "block": 1}]},
        "catalog.tensor",
    ),
    "block without a cut": ({"tensors": [{"name": "a", "dtype": "U8", "shape": [4], "block": 2}]}, "catalog.header"),
    "column and cut": (
        {"tensors": [{"name": "a", "dtype": "U8", "shape": [4], "parallel": 0, "column": 0}]},
        "catalog.header",
    ),
    "column that there is not": (
        {"tensors": [{"name": "a", "dtype": "U8", "shape": [4], "column": 8}]},
        "catalog.tensor",
    ),
    "column below zero": ({"tensors": [{"name": "a", "dtype": "U8", "shape": [4], "column": -1}]}, "catalog.tensor"),
    "name that is a number": ({"tensors": [{"name": 1, "dtype": "U8", "shape": [4]}]}, "catalog.tensor"),
    "name with a zero byte": ({"tensors": [{"name": "a\0", "dtype": "U8", "shape": [4]}]}, "catalog.tensor"),
    "empty name": ({"tensors": [{"name": "", "dtype": "U8", "shape": [4]}]}, "catalog.tensor"),
    "size at the edge of integers": (
        {"tensors": [{"name": "a", "dtype": "U8", "shape": [2**63 - 1]}]},
        "catalog.tensor",
    ),
    "no elements with strides beyond all memory": (
        {"tensors": [{"name": "a", "dtype": "U8", "shape": [0, 2**40, 2**40]}]},
        "catalog.tensor",
    ),
    "file that is a path": ({"files": [{"name": "../x", "size": 10}]}, "catalog.file"),
    "file that is the directory": ({"files": [{"name": "..", "size": 10}]}, "catalog.file"),
    "file that is text": ({"files": ["x"]}, "catalog.header"),
    "file twice": ({"files": [{"name": "x", "size": 5}] * 2}, "catalog.file"),
    "file beyond the end": ({"files": [{"name": "x", "size": 60 << 20}]}, "catalog.file"),
    "file beyond the bound": ({"files": [{"name": "x", "size": 1 << 40}]}, "catalog.header"),
    "too many files": (
        {"files": [{"name": str(number), "size": 0} for number in range(MAX_FILES + 1)]},
        "catalog.header",
    ),
    "fewer files than bytes": ({"files": []}, "catalog.padding"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_refuses_what_no_bundle_can_have(change: str) -> None:
    members, code = CHANGES[change]
    assert refusal(with_header({**header(), **members})).code == code


def test_refuses_a_header_in_another_form_than_the_writers() -> None:
    text = json.dumps(header()).encode()
    assert refusal(padded(struct.pack("<I", len(text)) + text)).code == "catalog.header"


def test_refuses_more_entries_than_a_model_has_before_it_parses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [{"name": str(number), "dtype": "U8", "shape": [1]} for number in range(1 + MAX_FILES + 1)]
    plain = with_header({**header(), "tensors": tensors})
    monkeypatch.setattr("provisioning.catalog.MAX_TENSORS", 1)
    monkeypatch.setattr(strictjson, "loads", None)
    assert refusal(plain).code == "catalog.header"


def test_refuses_values_beside_the_tensors_before_it_parses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    text = strictjson.dumps({**header(), "tensors": [0] * 100_000})
    monkeypatch.setattr(strictjson, "loads", None)
    assert refusal(padded(struct.pack("<I", len(text)) + text)).code == "catalog.header"


@pytest.mark.parametrize("length", [0xFFFFFFFF, SEGMENT, SEGMENT - 3])
def test_refuses_a_header_beyond_the_end(length: int) -> None:
    assert refusal(struct.pack("<I", length) + bytes(SEGMENT - 4)).code == "catalog.header"


def test_refuses_a_header_that_is_not_json() -> None:
    assert refusal(padded(struct.pack("<I", 5) + b"hello")).code == "catalog.header"


def test_refuses_padding_that_is_not_zero() -> None:
    plain = bytearray(padded(CATALOG.encode()))
    plain[-1] = 1
    assert refusal(bytes(plain)).code == "catalog.padding"


def test_refuses_a_whole_segment_of_padding() -> None:
    streams = (2, *GEOMETRY.streams[1:])
    geometry = Geometry(segment_size=SEGMENT, section_bytes=SEGMENT, file_bytes=SEGMENT, streams=streams)
    assert refusal(padded(CATALOG.encode()) + bytes(SEGMENT), geometry).code == "catalog.padding"


def test_takes_just_the_whole_stream() -> None:
    with pytest.raises(ValueError, match="catalog stream"):
        Catalog.decode(CATALOG.encode(), geometry=GEOMETRY)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, len(CATALOG.encode()) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_changed_catalog_is_refused_or_is_a_whole_catalog(changes: list[tuple[int, int]]) -> None:
    # Invariant: any bytes give a catalog or BundleDamaged, never another error.
    plain = bytearray(padded(CATALOG.encode()))
    for place, value in changes:
        plain[place] = value
    try:
        read = Catalog.decode(plain, geometry=GEOMETRY)
    except BundleDamaged:
        return
    assert padded(read.encode()) == plain
