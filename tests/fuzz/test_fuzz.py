"""The parsers under hypothesis: damaged seeds, made-up objects and noise; the invariants are those of invariants.py.

The coverage-guided driver over the same invariants is run.py; it needs atheris and is run by ``make fuzz``.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioning.errors import BundleDamaged, ModelRefused
from tests.fuzz import invariants
from tests.fuzz.invariants import TARGETS, Breach
from tests.fuzz.seeds import CORPUS, seeds

EXAMPLES = settings(deadline=None, max_examples=150)

_NUMBERS = st.one_of(st.integers(0, 9), st.sampled_from([-1, 127, 128, 255, 2**31, 2**32, 2**53, 2**62, 2**63 - 1]))
_NAMES = st.sampled_from(
    ["", "a", "b", "a/b", "../a", "a\0b", "w1", "é", "\ud800", "\u202e", "x" * 513, "__metadata__"]
)
_DTYPES = st.sampled_from(["F4", "F6_E2M3", "U8", "BF16", "F32", "C64", "F128", "", "u8"])
_ANY = st.one_of(_NUMBERS, _NAMES, st.none(), st.booleans(), st.just([]), st.just({}))


def damaged(target: str) -> st.SearchStrategy[bytes]:
    """Give inputs made of a seed by a few changes."""
    sound = list(seeds()[target].values())
    words = st.one_of(st.sampled_from(TARGETS[target].words or (b"",)), st.binary(max_size=4))

    @st.composite
    def change(draw: st.DrawFn) -> bytes:
        data = bytearray(draw(st.sampled_from(sound)))
        for _ in range(draw(st.integers(0, 3))):
            start = draw(st.integers(0, len(data)))
            stop = min(len(data), start + draw(st.integers(0, 3)))
            data[start:stop] = draw(words)
        return bytes(data)

    return st.one_of(change(), change(), st.binary(max_size=64))


@pytest.mark.parametrize("target", TARGETS)
def test_any_damage_of_a_sound_input_is_refused_or_encodes_back(target: str) -> None:
    seen: set[bool] = set()

    @EXAMPLES
    @given(damaged(target))
    def feed(data: bytes) -> None:
        seen.add(TARGETS[target].check(data))

    feed()
    assert seen == {True, False}


@st.composite
def _shapes_and_offsets(draw: st.DrawFn) -> dict[str, Any]:
    """Give the members of one tensor, most of them sound."""
    shape = draw(st.lists(_NUMBERS, max_size=4))
    begin, size = draw(st.integers(0, 16)), draw(st.integers(0, 16))
    members = {"dtype": draw(_DTYPES), "shape": shape, "data_offsets": [begin, begin + size]}
    if draw(st.integers(0, 9)) == 0:
        members[draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))] = draw(_ANY)
    return members


@EXAMPLES
@given(st.dictionaries(_NAMES, st.one_of(_shapes_and_offsets(), _ANY), max_size=4))
def test_any_tensors_of_a_safetensors_header_are_refused_or_read_as_the_package_does(members: dict[str, Any]) -> None:
    invariants.check_header(json.dumps(members).encode())


@st.composite
def _entries(draw: st.DrawFn) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": draw(_NAMES),
        "dtype": draw(_DTYPES),
        "shape": draw(st.lists(_NUMBERS, max_size=3)),
    }
    for name in draw(st.sets(st.sampled_from(["parallel", "block", "column", "more"]), max_size=2)):
        entry[name] = draw(st.one_of(_NUMBERS, _ANY))
    return entry


@EXAMPLES
@given(
    st.integers(0, len(invariants.CATALOG_GEOMETRIES) - 1),
    st.lists(_entries(), max_size=4),
    st.lists(st.fixed_dictionaries({"name": _NAMES, "size": _NUMBERS}), max_size=2),
    st.sampled_from([1, 2, 3]),
)
def test_any_entries_of_a_catalog_are_refused_or_encode_back(
    chosen: int, tensors: list[dict[str, Any]], files: list[dict[str, Any]], tiles: int
) -> None:
    header = {"type": "catalog", "version": 1, "tiles": tiles, "tensors": tensors, "files": files}
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )
    invariants.check_catalog(bytes([chosen]) + len(text).to_bytes(4, "little") + text)


def test_make_fuzzes_every_parser() -> None:
    (listed,) = re.findall(r"^FUZZ_TARGETS := (.*)$", (CORPUS.parents[2] / "Makefile").read_text(), re.MULTILINE)
    assert listed.split() == list(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_is_what_its_maker_writes(target: str) -> None:
    kept = {path.stem: path.read_bytes() for path in (CORPUS / target).iterdir()}
    assert kept == seeds()[target]


@pytest.mark.parametrize("target", TARGETS)
def test_every_parser_has_a_seed_that_it_accepts(target: str) -> None:
    assert any(TARGETS[target].check(data) for data in seeds()[target].values())


def test_a_reader_that_gives_another_model_is_a_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = seeds()["safetensors"]["sound"]
    monkeypatch.setattr(invariants, "deserialize", lambda data: [])
    with pytest.raises(Breach, match="another model"):
        invariants.check_safetensors(sound)


def test_an_encoder_that_gives_other_bytes_is_a_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "encode", lambda *_, **__: b"")
    with pytest.raises(Breach, match="other bytes"):
        invariants.check_table(seeds()["table"]["sound"])


@pytest.mark.parametrize(
    "error",
    [
        BundleDamaged("bundle.file.extra", found="a", expected="b", hint="c"),
        BundleDamaged("catalog.file", found="a\x1b[2J", expected="b", hint="c"),
    ],
    ids=["code of another parser", "message that a terminal obeys"],
)
def test_a_refusal_of_another_form_is_a_breach(monkeypatch: pytest.MonkeyPatch, error: BundleDamaged) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(invariants.Catalog, "decode", refuse)
    with pytest.raises(Breach):
        invariants.check_catalog(seeds()["catalog"]["cut"])


def test_an_error_that_is_not_ours_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RecursionError

    monkeypatch.setattr(invariants, "read_header", fail)
    with pytest.raises(RecursionError):
        invariants.check_safetensors(b"")


def test_what_the_reader_refuses_the_package_need_not_read() -> None:
    assert not invariants.check_safetensors(b"\xff" * 16)
    with pytest.raises(ModelRefused):
        invariants.parse_header(b"[]", data_bytes=0)
