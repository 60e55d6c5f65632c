from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attestation.errors import FormatError
from attestation.evidence import MAX_DEVICES, MAX_EVIDENCE_BYTES, Evidence, EvidenceSet

_EVIDENCE = st.builds(Evidence, st.from_regex(r"[a-z][a-z0-9-]{0,31}", fullmatch=True), st.binary(min_size=1))
_SETS = st.builds(EvidenceSet, _EVIDENCE, st.lists(_EVIDENCE, max_size=4).map(tuple))


@given(_SETS)
def test_a_set_reads_back(evidence: EvidenceSet) -> None:
    assert EvidenceSet.from_payload(evidence.as_payload()) == evidence


@pytest.mark.parametrize("word", ["", "Simulated", "1x", "x y", "x" * 33, "simulated\n", "s\u0131m"])
def test_refuses_odd_platform_words(word: str) -> None:
    with pytest.raises(FormatError) as caught:
        Evidence(word, b"x")
    assert caught.value.code == "evidence.platform"


@pytest.mark.parametrize("size", [0, MAX_EVIDENCE_BYTES + 1])
def test_refuses_empty_and_oversize_evidence(size: int) -> None:
    with pytest.raises(FormatError) as caught:
        Evidence("simulated", bytes(size))
    assert caught.value.code == "evidence.size"


def test_refuses_more_devices_than_a_machine_has() -> None:
    one = Evidence("simulated", b"x")
    EvidenceSet(one, (one,) * MAX_DEVICES)
    with pytest.raises(FormatError) as caught:
        EvidenceSet(one, (one,) * (MAX_DEVICES + 1))
    assert caught.value.code == "evidence.devices"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"cpu": []}, "json.type"),
        ({"devices": [1]}, "json.type"),
        ({"devices": [{}] * 33}, "json.range"),
        ({"extra": 1}, "json.unknown"),
        ({"cpu": {"platform": "simulated", "body": ""}}, "evidence.size"),
        ({"cpu": {"platform": "simulated", "body": "QQ==", "x": 1}}, "json.unknown"),
    ],
)
def test_refuses_malformed_sets(change: dict[str, Any], code: str) -> None:
    one = Evidence("simulated", b"x")
    with pytest.raises(FormatError) as caught:
        EvidenceSet.from_payload(EvidenceSet(one, (one,)).as_payload() | change)
    assert caught.value.code == code


def test_digest_depends_on_every_part_and_on_the_order() -> None:
    a, b = Evidence("simulated", b"a"), Evidence("simulated", b"b")
    sets = [
        EvidenceSet(a, ()),
        EvidenceSet(b, ()),
        EvidenceSet(a, (b,)),
        EvidenceSet(a, (a, b)),
        EvidenceSet(a, (b, a)),
    ]
    assert len({item.digest for item in sets}) == len(sets)


def test_names_its_platforms_once() -> None:
    a, b = Evidence("tdx", b"a"), Evidence("nvidia", b"b")
    assert EvidenceSet(a, (b, b)).platforms == ("nvidia", "tdx")
