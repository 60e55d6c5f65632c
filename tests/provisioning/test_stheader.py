"""The safetensors header reader: what it accepts, it reads as the safetensors package does; all else has a code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from provisioning.errors import ModelRefused
from provisioning.stheader import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    MAX_RANK,
    TensorInfo,
    parse_header,
    read_header,
    tensor_bytes,
)
from tests.sim.modelfiles import file_of, sound_file, tensors_of

PAIR = tensors_of({"a": ("F32", (2, 3)), "b": ("BF16", (4,))})


def read_bytes(directory: Path, data: bytes) -> tuple[TensorInfo, ...]:
    path = directory / "x.safetensors"
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_header(descriptor)
    finally:
        os.close(descriptor)


def theirs(directory: Path, data: bytes) -> dict[str, tuple[str, list[int]]]:
    path = directory / "y.safetensors"
    path.write_bytes(data)
    with safe_open(path, framework="np") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}


def entry(dtype: Any = "U8", shape: Any = (1,), offsets: Any = (0, 1), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def test_gives_tensors_in_the_order_of_their_data_with_offsets_from_the_start_of_the_file(tmp_path: Path) -> None:
    data = sound_file(PAIR)
    first, second = read_bytes(tmp_path, data)
    assert (first.name, first.dtype, first.shape) == ("a", "F32", (2, 3))
    assert data[first.start : first.stop] == PAIR["a"][2]
    assert data[second.start : second.stop] == PAIR["b"][2]
    assert second.stop == len(data)


def test_orders_by_data_when_the_header_does_not(tmp_path: Path) -> None:
    header = {"b": entry(offsets=(2, 3)), "a": entry(offsets=(0, 1)), "c": entry(offsets=(1, 2))}
    assert [info.name for info in read_bytes(tmp_path, file_of(header, b"abc"))] == ["a", "c", "b"]


def test_accepts_spaces_behind_the_header_and_metadata(tmp_path: Path) -> None:
    text = json.dumps({"__metadata__": {"format": "pt"}, "a": entry()}).encode() + b"   "
    assert len(read_bytes(tmp_path, file_of(text, b"x"))) == 1


def test_accepts_scalars_and_tensors_without_bytes(tmp_path: Path) -> None:
    header = {"s": entry("F32", [], (0, 4)), "e": entry("F32", [0, 7], (4, 4)), "t": entry("U8", [1], (4, 5))}
    assert [info.name for info in read_bytes(tmp_path, file_of(header, bytes(5)))] == ["s", "e", "t"]


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_knows_every_type_that_safetensors_knows_at_its_size(tmp_path: Path, dtype: str) -> None:
    size = DTYPE_BITS[dtype]
    data = file_of({"a": entry(dtype, [8], (0, size))}, bytes(size))
    assert [info.dtype for info in read_bytes(tmp_path, data)] == [dtype]
    assert theirs(tmp_path, data) == {"a": (dtype, [8])}


def test_counts_bits_of_types_below_a_byte() -> None:
    assert tensor_bytes("F4", (3, 2)) == 3
    assert tensor_bytes("F6_E2M3", (4,)) == 3
    assert tensor_bytes("F4", (3,)) is None


HUGE = [2**40, 2**40, 2**40]
ONE = b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
DOUBLE = b"{" + ONE + b", " + ONE + b"}"
INNER_DOUBLE = b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}'

FAULTS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "safetensors.truncated"),
    "seven bytes": (b"1234567", "safetensors.truncated"),
    "length behind the end": (file_of({"a": entry()}, b"", length=4000), "safetensors.truncated"),
    "length of zero": (file_of(b"", b"x" * 20), "safetensors.header.size"),
    "length beyond the bound": (file_of(b"{}", b"", length=MAX_HEADER_BYTES + 1), "safetensors.header.size"),
    "zero with a sign, which other readers refuse": (
        file_of(b'{"a": {"dtype": "U8", "shape": [-0], "data_offsets": [0, 0]}}', b""),
        "safetensors.json",
    ),
    "length of 2^64-1": (file_of(b"{}", b"", length=2**64 - 1), "safetensors.header.size"),
    "zip archive in disguise": (b"PK\x03\x04" + bytes(range(60)), "safetensors.header.size"),
    "space before the brace": (file_of(b' {"a": 1}', b""), "safetensors.json"),
    "no object": (file_of(b"[1, 2]", b""), "safetensors.json"),
    "cut JSON": (file_of(b'{"a": ', b""), "safetensors.json"),
    "bytes that are not UTF-8": (file_of(b'{"\xff": 1}', b""), "safetensors.json"),
    "deep nesting": (file_of(b'{"a": ' + b"[" * 400 + b"]" * 400 + b"}", b""), "safetensors.json"),
    "fraction": (file_of({"a": entry(shape=[1.0])}, b"x"), "safetensors.json"),
    "number of many digits": (file_of(b'{"a": ' + b"9" * 4000 + b"}", b""), "safetensors.json"),
    "name twice": (file_of(DOUBLE, b"x"), "safetensors.duplicate"),
    "member twice": (file_of(INNER_DOUBLE, b"x"), "safetensors.duplicate"),
    "metadata that is a number": (file_of({"__metadata__": 3, "a": entry()}, b"x"), "safetensors.metadata"),
    "metadata that nests": (file_of({"__metadata__": {"k": {}}, "a": entry()}, b"x"), "safetensors.metadata"),
    "empty name": (file_of({"": entry()}, b"x"), "safetensors.name"),
    "name with a line end": (file_of({"a\nb": entry()}, b"x"), "safetensors.name"),
    "name too long": (file_of({"a" * 513: entry()}, b"x"), "safetensors.name"),
    "entry that is a list": (file_of({"a": [1]}, b"x"), "safetensors.member"),
    "entry without shape": (file_of({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, b"x"), "safetensors.member"),
    "unknown member": (file_of({"a": entry(extra=1)}, b"x"), "safetensors.member"),
    "unknown type": (file_of({"a": entry("Q7")}, b"x"), "safetensors.dtype"),
    "type that is a number": (file_of({"a": entry(5)}, b"x"), "safetensors.dtype"),
    "type that is a list": (file_of({"a": entry(["U8"])}, b"x"), "safetensors.dtype"),
    "shape that is text": (file_of({"a": entry(shape="1")}, b"x"), "safetensors.shape"),
    "shape with a negative size": (file_of({"a": entry(shape=[-1])}, b"x"), "safetensors.shape"),
    "shape with true": (file_of({"a": entry(shape=[True])}, b"x"), "safetensors.shape"),
    "shape of too many sizes": (file_of({"a": entry(shape=[1] * (MAX_RANK + 1))}, b"x"), "safetensors.shape"),
    "one offset": (file_of({"a": entry(offsets=[0])}, b"x"), "safetensors.offsets"),
    "end before begin": (file_of({"a": entry(offsets=[1, 0])}, b"x"), "safetensors.offsets"),
    "negative offset": (file_of({"a": entry(offsets=[-1, 0])}, b"x"), "safetensors.offsets"),
    "fewer bytes than the shape": (file_of({"a": entry("F32", [2], (0, 4))}, bytes(4)), "safetensors.size"),
    "more bytes than the shape": (file_of({"a": entry("U8", [2], (0, 4))}, bytes(4)), "safetensors.size"),
    "half a byte": (file_of({"a": entry("F4", [3], (0, 2))}, bytes(2)), "safetensors.size"),
    "product beyond 64 bits": (file_of({"a": entry("U8", HUGE, (0, 1))}, b"x"), "safetensors.size"),
    "tensor behind the end": (file_of({"a": entry(shape=[9], offsets=(0, 9))}, b"x"), "safetensors.range"),
    "two tensors on one place": (file_of({"a": entry(), "b": entry()}, b"x"), "safetensors.overlap"),
    "tensors that share a byte": (
        file_of({"a": entry(shape=[2], offsets=(0, 2)), "b": entry(shape=[2], offsets=(1, 3))}, bytes(3)),
        "safetensors.overlap",
    ),
    "hole at the front": (file_of({"a": entry(offsets=(1, 2))}, bytes(2)), "safetensors.hole"),
    "hole in the middle": (
        file_of({"a": entry(), "b": entry(offsets=(2, 3))}, bytes(3)),
        "safetensors.hole",
    ),
    "bytes behind the last tensor": (file_of({"a": entry()}, b"xy"), "safetensors.trailing"),
    "data and no tensor": (file_of({}, b"xy"), "safetensors.trailing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refuses_a_faulty_file_with_its_own_code(tmp_path: Path, fault: str) -> None:
    data, code = FAULTS[fault]
    with pytest.raises(ModelRefused) as refused:
        read_bytes(tmp_path, data)
    assert refused.value.code == code
    assert refused.value.exit_status == 2


def test_refuses_too_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioning.stheader.MAX_TENSORS", 1)
    header = {"a": entry(), "b": entry(offsets=(1, 2))}
    with pytest.raises(ModelRefused) as refused:
        parse_header(json.dumps(header).encode(), data_bytes=2)
    assert refused.value.code == "safetensors.count"


def test_refuses_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: original(fd, count, offset) if offset == 0 else b"")
    with pytest.raises(ModelRefused) as refused:
        read_bytes(tmp_path, sound_file(PAIR))
    assert refused.value.code == "safetensors.truncated"


def test_every_cut_of_a_sound_file_is_refused(tmp_path: Path) -> None:
    data = sound_file(PAIR)
    for length in range(len(data)):
        with pytest.raises(ModelRefused):
            read_bytes(tmp_path, data[:length])


def test_every_extension_of_a_sound_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused) as refused:
        read_bytes(tmp_path, sound_file(PAIR) + b"\0")
    assert refused.value.code == "safetensors.trailing"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(st.data())
def test_a_changed_header_is_refused_or_read_as_safetensors_reads_it(tmp_path: Path, data: st.DataObject) -> None:
    # Invariant: what we accept, the other reader accepts with the same meaning; so no file has two readings.
    sound = bytearray(sound_file(PAIR))
    end = 8 + sound.index(b"}}") + 2 - 8
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, end - 1))
        sound[place] = data.draw(st.one_of(st.sampled_from(b' "0123456789{}[],:abFU'), st.integers(0, 255)))
    try:
        ours = read_bytes(tmp_path, bytes(sound))
    except ModelRefused:
        return
    try:
        other = theirs(tmp_path, bytes(sound))
    except SafetensorError as error:
        pytest.fail(f"accepted what safetensors refuses: {error}")
    assert {info.name: (info.dtype, list(info.shape)) for info in ours} == other
