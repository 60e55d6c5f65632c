"""Reader of safetensors headers, from the format's published rules; it reads no tensor.

Layout of a file: 8 bytes, little endian, the header's length N; N bytes of UTF-8 JSON that begin with ``{`` and may end
in spaces; then the data. Every freedom that the rules leave is removed here, because two readers that differ on one
file are an attack: names occur once, tensors neither overlap nor leave holes, the last one ends where the file ends.
The ``safetensors`` package is the second opinion that the command line asks for (provisioning/cli/bundle.py).
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from attestation import strictjson
from attestation.errors import FormatError
from attestation.jsonshape import measure
from provisioning.collector import resting
from provisioning.errors import ModelRefused

# Element sizes in bits, by the names of safetensors 0.8 (safetensors/src/tensor.rs, enum Dtype).
DTYPE_BITS: Final[dict[str, int]] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

# The largest header seen in practice, of 120,000 tensors in one file, is about 15 MiB.
MAX_HEADER_BYTES: Final = 32 << 20
# The largest open model known has 208,000 (70,000 experts' matrices, each packed, with scales and a shape).
MAX_TENSORS: Final = 1 << 19
MAX_NAME_CHARACTERS: Final = 512
MAX_RANK: Final = 8
MAX_TENSOR_BYTES: Final = 1 << 46

_METADATA: Final = "__metadata__"
_MEMBERS: Final = frozenset({"dtype", "shape", "data_offsets"})

# Two arrays belong to each tensor. Commas: one before it, two between its members, seven in its shape, one between its
# offsets. The rest is for metadata; real files have some dozens.
_ARRAYS_EACH: Final = 2
_COMMAS_EACH: Final = 11
_COMMAS_BESIDE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        name: its name, printable text.
        dtype: a key of ``DTYPE_BITS``.
        shape: sizes in elements; empty for a scalar.
        start: offset of its first byte from the beginning of the file.
        stop: offset behind its last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _refuse(code: str, found: str, expected: str) -> NoReturn:
    raise ModelRefused(
        code, found=found, expected=expected, hint="get the file again, or write it again with safetensors"
    )


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Give a tensor's size in bytes, or None when its bits do not fill whole bytes or it is absurdly large."""
    bits = DTYPE_BITS[dtype]
    for size in shape:
        # A zero counts as one: strides of a tensor without elements are products of its other sizes all the same.
        bits *= size or 1
        # Checked at each step, so that a hostile shape cannot make a number of a million digits.
        if bits > MAX_TENSOR_BYTES * 8:
            return None
    if 0 in shape:
        return 0
    return None if bits % 8 else bits // 8


def read_header(descriptor: int) -> tuple[TensorInfo, ...]:
    """Read the header of an open safetensors file.

    Args:
        descriptor: the file; its position is neither used nor moved.

    Returns:
        The tensors in the order of their data.

    Raises:
        ModelRefused: ``safetensors.*``; every way the header can be wrong has its own code (docs/spec/bundle.md).
    """
    size = os.fstat(descriptor).st_size
    prefix = os.pread(descriptor, 8, 0)
    if len(prefix) < 8:
        _refuse("safetensors.truncated", f"a file of {size} bytes", "at least 8 bytes")
    (length,) = struct.unpack("<Q", prefix)
    if not 2 <= length <= MAX_HEADER_BYTES:
        _refuse("safetensors.header.size", f"a header of {length} bytes", f"2 to {MAX_HEADER_BYTES} bytes")
    if 8 + length > size:
        _refuse("safetensors.truncated", f"a file of {size} bytes", f"a header of {length} bytes in it")
    text = _read_exactly(descriptor, length, 8)
    with resting():
        return parse_header(text, data_bytes=size - 8 - length)


def _read_exactly(descriptor: int, length: int, offset: int) -> bytes:
    parts: list[bytes] = []
    while length:
        part = os.pread(descriptor, length, offset)
        if not part:
            _refuse("safetensors.truncated", f"the end of the file at {offset}", f"{length} more bytes")
        parts.append(part)
        length -= len(part)
        offset += len(part)
    return b"".join(parts)


def parse_header(text: bytes, *, data_bytes: int) -> tuple[TensorInfo, ...]:
    """Read a header's JSON.

    Args:
        text: the header, without its length prefix.
        data_bytes: how many bytes follow it in the file.

    Raises:
        ModelRefused: ``safetensors.*``.
    """
    if not text.startswith(b"{"):
        _refuse("safetensors.json", f"a header that begins with {text[:1]!r}", "'{'")
    _check_counts(text)
    try:
        members = strictjson.loads(text, limit=MAX_HEADER_BYTES)
    except FormatError as error:
        code = "safetensors.duplicate" if error.code == "json.duplicate" else "safetensors.json"
        raise ModelRefused(code, found=error.found, expected=error.expected, hint="write the file again") from None
    _check_metadata(members.pop(_METADATA, {}))
    if len(members) > MAX_TENSORS:
        _refuse("safetensors.count", f"{len(members)} tensors", f"at most {MAX_TENSORS}")
    base = 8 + len(text)
    tensors = [_tensor(name, value, base=base) for name, value in members.items()]
    # By end second, so that tensors without bytes come before the one that begins at the same place.
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    _check_cover(tensors, base=base, end=base + data_bytes)
    return tuple(tensors)


def _check_counts(text: bytes) -> None:
    """Refuse what a parser would make a gigabyte of; the header itself and its metadata are two objects more."""
    shape = measure(text)
    if shape.objects > MAX_TENSORS + 2:
        _refuse("safetensors.count", f"{shape.objects} objects", f"at most {MAX_TENSORS} tensors")
    arrays, commas = shape.objects * _ARRAYS_EACH, shape.objects * _COMMAS_EACH + _COMMAS_BESIDE
    if shape.arrays > arrays or shape.commas > commas:
        found = f"{shape.arrays} arrays and {shape.commas} commas with {shape.objects} objects"
        _refuse("safetensors.json", found, f"at most {arrays} and {commas}")


def _check_metadata(value: Any) -> None:
    # Never used, but a reader that is strict about it gives no place to hide things in.
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        _refuse("safetensors.metadata", f"{_METADATA} of another form", "an object of texts")


def _tensor(name: str, value: Any, *, base: int) -> TensorInfo:
    # Runs half a million times for the largest models, so texts for refusals are made only when there is one.
    if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        _refuse("safetensors.name", f"the name {_shown(name)}", f"1 to {MAX_NAME_CHARACTERS} printable characters")
    if not isinstance(value, dict) or value.keys() != _MEMBERS:
        _refuse("safetensors.member", f"other members at {_shown(name)}", "dtype, shape and data_offsets")
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse("safetensors.dtype", f"dtype {str(dtype)[:40]!r} of {_shown(name)}", f"one of {', '.join(DTYPE_BITS)}")
    shape = whole_numbers(value["shape"])
    if shape is None or len(shape) > MAX_RANK:
        _refuse("safetensors.shape", f"the shape of {_shown(name)}", f"at most {MAX_RANK} whole numbers")
    offsets = whole_numbers(value["data_offsets"])
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse("safetensors.offsets", f"the data_offsets of {_shown(name)}", "a begin and an end not before it")
    start, stop = offsets
    expected = tensor_bytes(dtype, shape)
    if expected is None or stop - start != expected:
        wanted = "whole bytes, not too many" if expected is None else f"{expected} bytes"
        _refuse("safetensors.size", f"{stop - start} bytes for {_shown(name)}, {dtype} {list(shape)}", wanted)
    return TensorInfo(name, dtype, shape, base + start, base + stop)


def _shown(name: str) -> str:
    return json.dumps(name[:80])


def whole_numbers(value: Any) -> tuple[int, ...] | None:
    """Give the items of a list of whole numbers of zero or more; None for everything else, also for true."""
    if not isinstance(value, list):
        return None
    for item in value:
        if type(item) is not int or item < 0:
            return None
    return tuple(value)


def _check_cover(tensors: list[TensorInfo], *, base: int, end: int) -> None:
    position = base
    for tensor in tensors:
        if tensor.start != position or tensor.stop > end:
            _refuse_place(tensor, position=position, end=end)
        position = tensor.stop
    if position != end:
        _refuse("safetensors.trailing", f"{end - position} bytes after the last tensor", "none")


def _refuse_place(tensor: TensorInfo, *, position: int, end: int) -> NoReturn:
    shown = _shown(tensor.name)
    if tensor.stop > end:
        _refuse("safetensors.range", f"{shown} up to byte {tensor.stop}", f"at most {end}, the file's end")
    if tensor.start < position:
        _refuse("safetensors.overlap", f"{shown} from byte {tensor.start}", f"{position} or later")
    _refuse("safetensors.hole", f"{tensor.start - position} bytes of no tensor before {shown}", "no holes")
