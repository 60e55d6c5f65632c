"""Vectors of a faulty or hostile packer: authentic catalogs that no bundle can have, and plaintext in wrong places."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

from attestation import strictjson
from tests.vectors.good import CATALOG, GOOD, plaintext
from tests.vectors.sealed import LAB, SEGMENT, Plaintext, Vector, VectorSet, manifest_of, seal, signed

_FILES = b"".join(CATALOG.file(name) for name in CATALOG.files)
_MOST = 2**63 - 1


def _header() -> dict[str, Any]:
    encoded = CATALOG.encode()
    (length,) = struct.unpack_from("<I", encoded)
    members: dict[str, Any] = json.loads(encoded[4 : 4 + length])
    return members


def _framed(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text + _FILES


def _tensor(**members: Any) -> dict[str, Any]:
    return {"tensors": [{"name": "a", "dtype": "U8", "shape": [4], **members}]}


# what is wrong, members of the header that are changed, code
_MEMBERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "type": ("another type", {"type": "manifest"}, "catalog.version"),
    "version": ("a newer version", {"version": 2}, "catalog.version"),
    "member": ("a member that no version has", {"layers": 30}, "catalog.header"),
    "tiles": ("another number of tiles than the manifest's", {"tiles": 4}, "catalog.layout"),
    "layout": (
        "tensors that need more segments than the manifest gives",
        _tensor(shape=[3 * SEGMENT]),
        "catalog.layout",
    ),
    "tensor-member": ("an unknown member of a tensor", _tensor(strides=[1]), "catalog.header"),
    "dtype": ("an unknown type", _tensor(dtype="F128"), "catalog.tensor"),
    "name-empty": ("an empty name", _tensor(name=""), "catalog.tensor"),
    "name-nul": ("a name with a zero byte", _tensor(name="a\0b"), "catalog.tensor"),
    "name-long": ("a name of 513 characters", _tensor(name="a" * 513), "catalog.tensor"),
    "name-twice": ("a name twice", {"tensors": _tensor()["tensors"] * 2}, "catalog.tensor"),
    "shape-text": ("a size that is text", _tensor(shape=["4"]), "catalog.tensor"),
    "shape-true": ("a size that is true", _tensor(shape=[True]), "catalog.tensor"),
    "shape-below": ("a size below zero", _tensor(shape=[-4]), "catalog.tensor"),
    "shape-long": ("nine sizes", _tensor(shape=[1] * 9), "catalog.tensor"),
    "shape-huge": ("a size at the edge of 63 bits", _tensor(shape=[_MOST]), "catalog.tensor"),
    "shape-product": ("sizes whose product is 2^92", _tensor(shape=[2**46, 2**46]), "catalog.tensor"),
    "shape-empty": ("no elements, with strides of 2^92", _tensor(shape=[0, 2**46, 2**46]), "catalog.tensor"),
    "bits": ("three elements of four bits", _tensor(dtype="F4", shape=[3]), "catalog.tensor"),
    "parallel-none": ("cut along a dimension that there is not", _tensor(parallel=1), "catalog.tensor"),
    "parallel-one": ("cut along a dimension of one element", _tensor(shape=[1, 4], parallel=0), "catalog.tensor"),
    "parallel-bits": (
        "cut between the halves of a byte",
        _tensor(dtype="F4", shape=[6, 1], parallel=0),
        "catalog.tensor",
    ),
    "block-one": ("a block of one element, which is not written", _tensor(parallel=0, block=1), "catalog.tensor"),
    "block-huge": ("a block at the edge of 63 bits", _tensor(parallel=0, block=_MOST), "catalog.tensor"),
    "block-whole": ("blocks of a tensor that is not cut", _tensor(block=2), "catalog.header"),
    "column-none": ("in a column that there is not", _tensor(column=2), "catalog.tensor"),
    "column-cut": ("cut, and in one column", _tensor(parallel=0, column=0), "catalog.header"),
    "file-twice": (
        "a file twice",
        {"files": [{"name": "config.json", "size": 23}, {"name": "config.json", "size": 2}]},
        "catalog.file",
    ),
    "file-path": (
        "a file that is a path",
        {"files": [{"name": "../config.json", "size": 23}, {"name": "tokenizer.json", "size": 2}]},
        "catalog.file",
    ),
    "file-end": ("a file beyond the end", {"files": [{"name": "config.json", "size": 64 << 20}]}, "catalog.file"),
    "file-huge": (
        "a file at the edge of 63 bits",
        {"files": [{"name": "config.json", "size": _MOST}]},
        "catalog.header",
    ),
    "file-less": ("bytes of no file", {"files": [{"name": "config.json", "size": 23}]}, "catalog.padding"),
}

# what is wrong, plaintext of stream 0, code
_TEXTS: dict[str, tuple[str, bytes, str]] = {
    "length": ("a header longer than the stream", struct.pack("<I", SEGMENT), "catalog.header"),
    "length-huge": ("a header of 4 GiB", b"\xff" * 4, "catalog.header"),
    "json": ("a header that is no JSON", _framed(b"hello"), "catalog.header"),
    "depth": ("a header of a hundred levels", _framed(b'{"a":' + b"[" * 100 + b"]" * 100 + b"}"), "catalog.header"),
    "form": ("a header with spaces", _framed(json.dumps(_header(), sort_keys=True).encode()), "catalog.header"),
    "padding": ("a byte in the padding", CATALOG.encode() + bytes(9) + b"\1", "catalog.padding"),
}


def add(made: VectorSet, kept: Path) -> None:
    """Add these vectors."""
    for fault, (about, members, code) in _MEMBERS.items():
        text = strictjson.dumps({**_header(), **members})
        _add(made, kept, fault, _sound_streams(_framed(text)), about=about, loaded=code)
    for fault, (about, plain, code) in _TEXTS.items():
        _add(made, kept, fault, _sound_streams(plain), about=about, loaded=code)
    # {"a":[0,0, ... ,0]}, of more values than an entry for a tensor has
    values = plaintext(struct.pack("<I", 200_006) + b'{"a":[', streams=GOOD.streams, behind=(10, "302c", 100_000))
    _add(made, kept, "values", values, about="a hundred thousand values", loaded="catalog.header")
    longer = plaintext(CATALOG.encode(), streams=(2, *GOOD.streams[1:]))
    _add(made, kept, "segment", longer, about="a whole segment of padding", loaded="catalog.padding")
    fewer = plaintext(CATALOG.encode(), streams=(*GOOD.streams[:-1], 2))
    _add(made, kept, "streams", fewer, about="a column with a segment more than the layout", loaded="catalog.layout")
    nothing = _framed(strictjson.dumps({**_header(), "files": []})).removesuffix(_FILES)
    about = "a model without its config.json"
    _add(made, kept, "file-missing", _sound_streams(nothing), about=about, loaded="catalog.file.missing")
    # Somebody else's plan: each byte is authentic, and the reader must not put it anywhere.
    swapped = replace(GOOD, descriptors=(*GOOD.descriptors[:2], GOOD.descriptors[3], GOOD.descriptors[2]))
    _add(made, kept, "descriptor", swapped, about="sealed for another tile descriptor", loaded="segment.tag")


def _sound_streams(catalog: bytes) -> Plaintext:
    return plaintext(catalog, streams=GOOD.streams)


def _add(made: VectorSet, kept: Path, fault: str, plain: Plaintext, **expected: str) -> None:
    name = f"catalog-{fault}"
    table = seal(plain).table
    payload = strictjson.dumps(manifest_of(plain.geometry, table))
    made.plaintexts[name], made.tables[name] = plain, table
    made.manifests[name] = signed("manifest", payload, [LAB], kept=kept / f"{name}.dsse.json")
    made.vectors.append(Vector(name=name, plaintext=name, manifest=name, table=name, **expected))
