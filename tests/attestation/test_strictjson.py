"""Invariant: any bytes give an object or a FormatError, and what was written reads back as it was."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attestation import strictjson
from attestation.errors import FormatError
from attestation.strictjson import Fields

LIMIT = 1 << 20

_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-strictjson.MAX_SAFE_INTEGER, strictjson.MAX_SAFE_INTEGER),
    _TEXT,
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_TEXT, inner, max_size=4)),
    max_leaves=12,
)
_OBJECTS = st.dictionaries(_TEXT, _VALUES, max_size=6)


def refusal(data: bytes, limit: int = LIMIT) -> str:
    with pytest.raises(FormatError) as caught:
        strictjson.loads(data, limit=limit)
    return caught.value.code


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "json.syntax"),
        (b"{", "json.syntax"),
        (b'{"a":1} x', "json.syntax"),
        (b'{"a":"unclosed', "json.syntax"),
        (b'{"a":"\x01"}', "json.syntax"),
        (b"\xef\xbb\xbf{}", "json.syntax"),
        (b"[]", "json.object"),
        (b'"text"', "json.object"),
        (b'{"a":1,"a":1}', "json.duplicate"),
        (b'{"o":{"a":1,"b":2,"a":3}}', "json.duplicate"),
        (b'{"a":1.0}', "json.float"),
        (b'{"a":1e3}', "json.float"),
        (b'{"a":NaN}', "json.float"),
        (b'{"a":-Infinity}', "json.float"),
        (b'{"a":9223372036854775808}', "json.integer"),
        (b'{"a":' + b"9" * 100_000 + b"}", "json.integer"),
        (b'{"a":-0}', "json.integer"),
        (b'{"a":[1,-0]}', "json.integer"),
        (b'{"a":"\xff"}', "json.utf8"),
        (b'{"a":"\\ud800"}', "json.utf8"),
        (b'{"\\udfff":1}', "json.utf8"),
        (b'{"a":' + b"[" * 16 + b"]" * 16 + b"}", "json.depth"),
        (b'{"a":' * 100_000, "json.depth"),
    ],
)
def test_refuses_each_fault_with_its_code(data: bytes, code: str) -> None:
    assert refusal(data) == code


def test_refuses_more_bytes_than_the_limit_before_it_parses() -> None:
    assert refusal(b'{"a":NaN}', limit=8) == "json.size"


def test_brackets_inside_text_are_no_depth() -> None:
    text = "[{" * 40 + '\\"' + "[" * 40
    assert strictjson.loads(strictjson.dumps({"a": text}), limit=LIMIT) == {"a": text}


def test_accepts_sixteen_levels() -> None:
    data = b'{"a":' + b"[" * 15 + b"]" * 15 + b"}"
    assert list(strictjson.loads(data, limit=LIMIT)) == ["a"]


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":"' + b'\\"' * 400_000,
        b'{"a":"' + b"x" * 1_000_000,
        b"{" + b",".join(b'"%d":1' % number for number in range(60_000)) + b',"0":1}',
    ],
    ids=["escaped quotes", "unclosed text", "many members, one twice"],
)
def test_hostile_input_costs_linear_time(data: bytes) -> None:
    start = time.process_time()
    refusal(data, limit=len(data))
    # A quadratic scan of these takes minutes; the bound leaves room for a slow machine.
    assert time.process_time() - start < 5


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=200)
def test_any_bytes_give_an_object_or_a_format_error(data: bytes) -> None:
    try:
        value = strictjson.loads(data, limit=LIMIT)
    except FormatError:
        return
    assert isinstance(value, dict)


@given(st.text('{}[]":,\\u0123456789dDa truefalsn.-eE', max_size=60))
@settings(deadline=None, max_examples=300)
def test_near_json_gives_an_object_or_a_format_error(text: str) -> None:
    try:
        value = strictjson.loads(text.encode(), limit=LIMIT)
    except FormatError:
        return
    assert strictjson.loads(strictjson.dumps(value), limit=LIMIT) == value


@given(_OBJECTS)
@settings(deadline=None, max_examples=150)
def test_what_is_written_reads_back_and_writes_the_same_bytes(value: dict[str, Any]) -> None:
    written = strictjson.dumps(value)
    read = strictjson.loads(written, limit=LIMIT)
    assert read == value
    assert strictjson.dumps(read) == written


@pytest.mark.parametrize("value", [1.5, [1, 2.0], {"b": 1e3}, 2**63, (0, -(2**63))])
def test_writer_refuses_what_the_reader_would_refuse(value: object) -> None:
    with pytest.raises(TypeError):
        strictjson.dumps({"a": value})


def code_of(read: Any) -> str:
    with pytest.raises(FormatError) as caught:
        read()
    return caught.value.code


def test_fields_refuse_missing_members() -> None:
    assert code_of(lambda: Fields({}, "x").text("a")) == "json.missing"


@pytest.mark.parametrize(
    ("value", "method"),
    [(True, "integer"), (1, "flag"), (1, "text"), ("x", "mapping"), ({}, "blob"), ("x", "integer"), (None, "text")],
)
def test_fields_do_not_convert_types(value: object, method: str) -> None:
    assert code_of(lambda: getattr(Fields({"a": value}, "x"), method)("a")) == "json.type"


def test_fields_refuse_unknown_members_without_printing_control_characters() -> None:
    with pytest.raises(FormatError) as caught:
        Fields({"\x1b[2J": 1}, "x").end()
    assert caught.value.code == "json.unknown"
    assert "\x1b" not in str(caught.value)


def test_fields_refuse_control_characters_and_long_text() -> None:
    assert code_of(lambda: Fields({"a": "x\ny"}, "x").text("a")) == "json.text"
    assert code_of(lambda: Fields({"a": "xy"}, "x").text("a", limit=1)) == "json.text"


def test_fields_bound_numbers_and_lists() -> None:
    assert code_of(lambda: Fields({"a": 5}, "x").integer("a", low=6, high=7)) == "json.range"
    assert code_of(lambda: Fields({"a": 8}, "x").integer("a", low=6, high=7)) == "json.range"
    assert code_of(lambda: Fields({"a": [1, 2]}, "x").items("a", limit=1)) == "json.range"
    assert code_of(lambda: Fields({"a": [{}, 1]}, "x").mappings("a", limit=2)) == "json.type"


def test_fields_give_each_member_once() -> None:
    fields = Fields({"a": "t", "n": 1, "f": True, "o": {"b": 2}, "l": [1], "m": [{}], "t": "2026-11-30T00:00:00Z"}, "x")
    assert fields.has("a")
    assert fields.text("a") == "t"
    assert not fields.has("a")
    assert fields.integer("n") == 1
    assert fields.flag("f") is True
    assert fields.fields("o").integer("b") == 2
    assert fields.items("l", limit=1) == [1]
    assert fields.mappings("m", limit=1) == [{}]
    assert fields.time("t").year == 2026
    fields.end()


@pytest.mark.parametrize("text", ["QQ", "QQ=", "QQ==\n", "QR==", "Q Q==", "QQ==QQ==", "Q-==", "\u0430Q=="])
def test_base64_has_one_form(text: str) -> None:
    assert code_of(lambda: strictjson.decode_b64(text, "x", limit=3)) == "json.base64"


def test_base64_demands_the_exact_size() -> None:
    assert code_of(lambda: strictjson.decode_b64("QUE=", "x", size=1)) == "json.base64"
    assert code_of(lambda: strictjson.decode_b64("QUE=", "x", size=3)) == "json.base64"
    assert code_of(lambda: strictjson.decode_b64("QUFBQQ==", "x", limit=3)) == "json.base64"


@given(st.binary(max_size=64))
def test_base64_reads_back(data: bytes) -> None:
    assert strictjson.decode_b64(strictjson.b64(data), "x", size=len(data)) == data


def test_header_reads_back() -> None:
    header = strictjson.header("grant", epoch=7, issued_at="2026-11-30T00:00:00Z")
    epoch, issued_at = strictjson.read_header(Fields(header, "x"), "grant")
    assert (epoch, issued_at.isoformat()) == (7, "2026-11-30T00:00:00+00:00")


def test_header_of_another_kind_or_version_is_refused() -> None:
    header = strictjson.header("grant", epoch=7, issued_at="2026-11-30T00:00:00Z", version=2)
    assert code_of(lambda: strictjson.read_header(Fields(header, "x"), "manifest")) == "object.type"
    assert code_of(lambda: strictjson.read_header(Fields(header, "x"), "grant")) == "object.version"


def test_a_refusal_of_nothing_and_of_bad_base64_says_so() -> None:
    with pytest.raises(FormatError, match=r"json\.syntax") as empty:
        strictjson.loads(b"", limit=8)
    assert empty.value.found == "an empty file"
    with pytest.raises(FormatError, match=r"json\.base64") as bad:
        strictjson.decode_b64("?", "x", size=1)
    assert bad.value.expected == "valid base64 of exactly 1 bytes"
