"""What must hold of every parser for any bytes whatever; two drivers feed it (test_fuzz.py and run.py).

Each check parses its input and either sees our own error with a code, or encodes what was read and compares. It returns
whether the input was accepted, and raises on every breach. Nothing here catches more than :class:`LetheError`.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from safetensors import SafetensorError, deserialize

from attestation import dsse, strictjson
from attestation.errors import FormatError, LetheError
from attestation.jsonshape import measure
from provisioning.catalog import Catalog
from provisioning.errors import BundleDamaged, ModelRefused
from provisioning.geometry import MIN_SEGMENT, Geometry
from provisioning.manifest import MAX_PAYLOAD_BYTES, Manifest
from provisioning.stheader import TensorInfo, parse_header, read_header
from provisioning.table import Table, digest_blocks, encode

BUNDLE_ID: Final = bytes(range(16))
# Data of more bytes than this is not made up for the second reader of safetensors.
_MOST_DATA: Final = 1 << 16


class Breach(Exception):
    """An invariant does not hold."""


def _demand(holds: object, what: str) -> None:
    if not holds:
        raise Breach(what)


def _check_refusal(error: LetheError, prefixes: tuple[str, ...]) -> bool:
    _demand(error.code.startswith(prefixes), f"{error.code} is no code of this parser")
    text = f"{error.found}{error.expected}{error.hint}"
    _demand(text.isprintable() and len(text) < 4096, f"{error.code} with a message that cannot be shown")
    return False


def check_json(data: bytes) -> bool:
    """One JSON object: what is read is written and read again; the counts bound what was made of it."""
    try:
        value = strictjson.loads(data, limit=1 << 20)
    except FormatError as error:
        return _check_refusal(error, ("json.",))
    written = strictjson.dumps(value)
    _demand(strictjson.loads(written, limit=1 << 22) == value, "written and read again it is another value")
    _demand(measure(written) == measure(data), "counts depend on how it is written")
    try:
        strictjson.check_form(value, data)
    except FormatError as error:
        _demand(error.code == "json.form" and written != data, "the one form is refused")
    else:
        _demand(written == data, "another form is accepted")
    return True


def check_envelope(data: bytes) -> bool:
    """The frame of a signed object, before any signature is looked at."""
    try:
        payload = dsse.unverified_payload(data, "manifest", limit=MAX_PAYLOAD_BYTES)
    except LetheError as error:
        return _check_refusal(error, ("json.", "envelope.", "signature."))
    _demand(len(payload) <= MAX_PAYLOAD_BYTES, "a payload beyond the bound")
    return True


def check_manifest(data: bytes) -> bool:
    """The payload of a manifest: it has one form."""
    try:
        manifest = Manifest.parse(data)
    except FormatError as error:
        return _check_refusal(error, ("manifest.", "json.", "object.", "owner.", "time."))
    _demand(manifest.encode() == data, "encodes to other bytes")
    return True


_TABLE_GEOMETRY: Final = Geometry(
    segment_size=MIN_SEGMENT, section_bytes=2 * MIN_SEGMENT, file_bytes=MIN_SEGMENT, streams=(1, 3, 1)
)


def check_table(data: bytes) -> bool:
    """``segments.idx`` of one small geometry: it has one form."""
    try:
        table = Table(data, _TABLE_GEOMETRY, bundle_id=BUNDLE_ID)
    except BundleDamaged as error:
        return _check_refusal(error, ("table.",))
    tags = b"".join(table.segment(number).tag for number in range(table.segments))
    digests = [
        table.digest(number, block)
        for number, file in enumerate(_TABLE_GEOMETRY.files)
        for block in range(digest_blocks(file))
    ]
    _demand(encode(_TABLE_GEOMETRY, bundle_id=BUNDLE_ID, tags=tags, digests=digests) == data, "encodes to other bytes")
    return True


def _small(*streams: int) -> Geometry:
    return Geometry(segment_size=MIN_SEGMENT, section_bytes=MIN_SEGMENT, file_bytes=MIN_SEGMENT, streams=streams)


# The first byte of the input chooses, so that layouts of a few bytes meet a manifest that fits them.
CATALOG_GEOMETRIES: Final = (
    _small(1, 0, 0),
    _small(1, 1, 0),
    _small(1, 0, 1),
    _small(1, 1, 1),
    _small(1, 1, 1, 1),
    _small(1, 1, 1, 0),
    _small(1, 0, 0, 1),
    _small(1, 0, 1, 1),
)


def check_catalog(data: bytes) -> bool:
    """The catalog: one byte for the geometry, then the plaintext of stream 0 without its padding."""
    if not data:
        return False
    geometry = CATALOG_GEOMETRIES[data[0] % len(CATALOG_GEOMETRIES)]
    plain = data[1 : 1 + MIN_SEGMENT]
    try:
        catalog = Catalog.decode(plain + bytes(MIN_SEGMENT - len(plain)), geometry=geometry)
    except BundleDamaged as error:
        return _check_refusal(error, ("catalog.",))
    _demand(catalog.encode().ljust(MIN_SEGMENT, b"\0") == plain.ljust(MIN_SEGMENT, b"\0"), "encodes to other bytes")
    for section in geometry.sections:
        _demand(len(catalog.layout.descriptor_digest(section, MIN_SEGMENT)) == 48, "no descriptor")
    for stream in catalog.layout.streams:
        end = 0
        for piece in stream.pieces:
            _demand(piece.offset % 64 == 0 and piece.offset >= end and piece.length > 0, "pieces that overlap")
            end = piece.offset + piece.length
    return True


def check_safetensors(data: bytes) -> bool:
    """A safetensors file: what is accepted, the safetensors package reads as the same model."""
    descriptor = os.memfd_create("fuzz")
    try:
        os.pwrite(descriptor, data, 0)
        tensors = read_header(descriptor)
    except ModelRefused as error:
        return _check_refusal(error, ("safetensors.",))
    finally:
        os.close(descriptor)
    ours = {item.name: (item.dtype, list(item.shape), data[item.start : item.stop]) for item in tensors}
    try:
        theirs = {name: (part["dtype"], part["shape"], bytes(part["data"])) for name, part in deserialize(data)}
    except SafetensorError as error:
        raise Breach(f"safetensors refuses what we accept: {error}") from None
    _demand(ours == theirs, "safetensors reads another model")
    return True


def check_header(data: bytes) -> bool:
    """The header of a safetensors file, with as many bytes of data behind it as its last tensor asks for."""
    length = _last_offset(data)
    try:
        tensors = parse_header(data, data_bytes=length)
    except ModelRefused as error:
        return _check_refusal(error, ("safetensors.",))
    written = _write_header(tensors, base=8 + len(data))
    moved = len(written) - len(data)
    again = parse_header(written, data_bytes=length)
    places = [(item.name, item.start + moved, item.stop + moved) for item in tensors]
    _demand([(item.name, item.start, item.stop) for item in again] == places, "written again it is another model")
    if length <= _MOST_DATA:
        _demand(check_safetensors(struct.pack("<Q", len(data)) + data + bytes(length)), "the whole file is refused")
    return True


def _last_offset(data: bytes) -> int:
    try:
        members = strictjson.loads(data, limit=1 << 20)
    except FormatError:
        return 0
    ends = [
        value["data_offsets"][1]
        for value in members.values()
        if isinstance(value, dict)
        and isinstance(value.get("data_offsets"), list)
        and len(value["data_offsets"]) == 2
        and isinstance(value["data_offsets"][1], int)
    ]
    return max([0, *ends])


def _write_header(tensors: tuple[TensorInfo, ...], *, base: int) -> bytes:
    members = {
        item.name: {
            "dtype": item.dtype,
            "shape": list(item.shape),
            "data_offsets": [item.start - base, item.stop - base],
        }
        for item in tensors
    }
    return json.dumps(members).encode()


@dataclass(frozen=True, slots=True)
class Target:
    """One parser to fuzz.

    Attributes:
        check: the invariant; gives whether the input was accepted.
        most: longest input that is worth a try, in bytes.
        words: byte strings that inputs are made of, to mutate with.
    """

    check: Callable[[bytes], bool]
    most: int
    words: tuple[bytes, ...] = ()


_MARKS: Final = (b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\u0000", b"\\ud800", b"\\\\")
_VALUES: Final = (
    b"9" * 19,
    b"-0",
    b"1e9",
    b"null",
    b"true",
    b"NaN",
    b"0",
    b"9223372036854775807",
    b"4611686018427387904",
)
_JSON_WORDS: Final = (*_MARKS, *_VALUES)
_TENSOR_WORDS: Final = (b'"dtype"', b'"shape"', b'"data_offsets"', b'"F4"', b'"U8"', b'"F32"', b'"__metadata__"')
_CATALOG_WORDS: Final = (
    b'"parallel":1',
    b'"block":128',
    b'"column":1',
    b'"tiles":',
    b'"files":',
    b'"size":',
    b'"name":',
)

TARGETS: Final[dict[str, Target]] = {
    "json": Target(check_json, 4096, _JSON_WORDS),
    "envelope": Target(check_envelope, 8192, (*_JSON_WORDS, b'"payloadType"', b'"signatures"', b'"keyid"', b'"sig"')),
    "manifest": Target(check_manifest, 8192, (*_JSON_WORDS, b'"streams"', b'"policy"', b'"unchecked"', b'"one_of"')),
    "table": Target(check_table, 1024, (b"LETHEIDX", b"\xff\xff\xff\xff", bytes(8), b"\x00\x00\x00\x80")),
    "catalog": Target(check_catalog, 4096, (*_JSON_WORDS, *_TENSOR_WORDS, *_CATALOG_WORDS)),
    "header": Target(check_header, 4096, (*_JSON_WORDS, *_TENSOR_WORDS)),
    "safetensors": Target(check_safetensors, 4096, (*_JSON_WORDS, *_TENSOR_WORDS, b"\xff" * 7 + b"\x7f")),
}
