"""Counts of JSON that is not parsed: as a parser finds them, and quickly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attestation.jsonshape import JsonShape, is_deeper, measure

_VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=8), st.text('"\\[]{},:', max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text('"\\[,a', max_size=3), inner)),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Give (objects, arrays, commas), the slow way."""
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inside = [counted(item) for item in (value.values() if isinstance(value, dict) else value)]
    objects, arrays, commas = (sum(counts) for counts in zip(*inside, strict=True)) if inside else (0, 0, 0)
    return objects + isinstance(value, dict), arrays + isinstance(value, list), commas + max(0, len(value) - 1)


def depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


@settings(deadline=None, max_examples=300)
@given(_VALUES, st.sampled_from([None, 1]), st.booleans())
def test_counts_are_those_of_the_parsed_value(value: Any, indent: int | None, escaped: bool) -> None:
    data = json.dumps(value, indent=indent, ensure_ascii=escaped).encode()
    assert measure(data) == JsonShape(*counted(value))
    assert not is_deeper(data, depth(value))
    assert depth(value) == 0 or is_deeper(data, depth(value) - 1)


def test_texts_longer_than_a_block_are_left_out() -> None:
    data = json.dumps(["[,{" * 400_000, "x", {"]": ["\\", '"[']}]).encode()
    assert measure(data) == JsonShape(1, 2, 3)


@pytest.mark.parametrize("open_text", [b"[" * 40, b'{"a":' * 40, b"[" + b'"",[' * 40, b'[{"a":["\\\\",[' * 10])
def test_text_that_never_closes_is_deep(open_text: bytes) -> None:
    assert is_deeper(open_text, 16)


def test_brackets_that_close_first_are_not_deep() -> None:
    assert not is_deeper(b"]" * 100 + b"[" * 16, 16)
