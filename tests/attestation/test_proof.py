from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from attestation._seal import MINT, Mint
from attestation.result import AttestationResult


@pytest.fixture
def result(bench: Any) -> AttestationResult:
    made: AttestationResult = bench.appraise()
    return made


def members(result: AttestationResult) -> dict[str, Any]:
    names = set(AttestationResult.__slots__) - {"assurance"}
    return {name: getattr(result, name) for name in names}


def test_only_the_mint_makes_a_result(result: AttestationResult) -> None:
    for forged in (None, True, Mint(), "MINT"):
        with pytest.raises(TypeError, match="only its checker"):
            AttestationResult(forged, **members(result))


def test_the_mint_makes_a_result(result: AttestationResult) -> None:
    assert AttestationResult(MINT, **members(result)).digest == result.digest


def test_a_proof_is_not_copied_or_pickled(result: AttestationResult) -> None:
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="is a proof"):
            attempt(result)


def test_a_result_made_past_its_constructor_holds_nothing() -> None:
    hollow = object.__new__(AttestationResult)
    with pytest.raises(AttributeError):
        hollow.as_payload()
