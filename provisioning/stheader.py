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
MAX_TENSORS: Final = 1 << 20
MAX_NAME_CHARACTERS: Final = 512
MAX_RANK: Final = 8
MAX_TENSOR_BYTES: Final = 1 << 46

_METADATA = "__metadata__"


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
        bits *= size
        # Checked at each step, so that a hostile shape cannot make a number of a million digits.
        if bits > MAX_TENSOR_BYTES * 8:
            return None
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


def _check_metadata(value: Any) -> None:
    # Never used, but a reader that is strict about it gives no place to hide things in.
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        _refuse("safetensors.metadata", f"{_METADATA} of another form", "an object of texts")


def _tensor(name: str, value: Any, *, base: int) -> TensorInfo:
    shown = json.dumps(name[:80])
    if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        _refuse("safetensors.name", f"the name {shown}", f"1 to {MAX_NAME_CHARACTERS} printable characters")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        _refuse("safetensors.member", f"other members at {shown}", "dtype, shape and data_offsets")
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse("safetensors.dtype", f"dtype {str(dtype)[:40]!r} of {shown}", f"one of {', '.join(DTYPE_BITS)}")
    shape = _whole_numbers(value["shape"])
    if shape is None or len(shape) > MAX_RANK:
        _refuse("safetensors.shape", f"the shape of {shown}", f"at most {MAX_RANK} whole numbers")
    offsets = _whole_numbers(value["data_offsets"])
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse("safetensors.offsets", f"the data_offsets of {shown}", "a begin and an end that is not before it")
    start, stop = offsets
    expected = tensor_bytes(dtype, shape)
    if expected is None or stop - start != expected:
        wanted = "whole bytes, not too many" if expected is None else f"{expected} bytes"
        _refuse("safetensors.size", f"{stop - start} bytes for {shown}, {dtype} {list(shape)}", wanted)
    return TensorInfo(name, dtype, shape, base + start, base + stop)


def _whole_numbers(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    for item in value:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            return None
    return tuple(value)


def _check_cover(tensors: list[TensorInfo], *, base: int, end: int) -> None:
    position = base
    for tensor in tensors:
        shown = json.dumps(tensor.name[:80])
        if tensor.stop > end:
            _refuse("safetensors.range", f"{shown} up to byte {tensor.stop}", f"at most {end}, the file's end")
        if tensor.start < position:
            _refuse("safetensors.overlap", f"{shown} from byte {tensor.start}", f"{position} or later")
        if tensor.start > position:
            _refuse("safetensors.hole", f"{tensor.start - position} bytes of no tensor before {shown}", "no holes")
        position = tensor.stop
    if position != end:
        _refuse("safetensors.trailing", f"{end - position} bytes after the last tensor", "none")
