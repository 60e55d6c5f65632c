"""Attacks 12 to 15: ways in which code that looks honest would have a proof of something that nobody checked."""

from __future__ import annotations

import copy
import pickle

import pytest

from appliance.resident import ResidentModel
from attestation.proof import Proof
from attestation.result import AttestationResult
from provisioning.challenge import SignedChallenge
from provisioning.grant import Grant, SignedGrant
from provisioning.manifest import SignedManifest

PROOFS = [AttestationResult, Grant, ResidentModel, SignedChallenge, SignedGrant, SignedManifest]


class _Checked(Proof):
    __slots__ = ("_left", "fact")

    def __init__(self) -> None:
        self.fact = "checked"
        self._left = 1

    def use_up(self) -> None:
        self._left = 0

    @property
    def left(self) -> int:
        return self._left


@pytest.mark.parametrize("proof", PROOFS)
def test_12_no_proof_has_a_subclass_without_its_check(proof: type[Proof]) -> None:
    with pytest.raises(TypeError, match="no subclasses"):
        type("Forged", (proof,), {"__slots__": (), "__init__": lambda self: None})


def test_13_what_was_checked_cannot_be_exchanged() -> None:
    proof = _Checked()
    with pytest.raises(AttributeError, match="cannot be changed"):
        proof.fact = "another"
    with pytest.raises(AttributeError, match="cannot be taken away"):
        del proof.fact
    assert proof.fact == "checked"
    proof.use_up()
    assert proof.left == 0


@pytest.mark.parametrize("proof", PROOFS)
def test_14_a_proof_that_was_never_made_says_nothing(proof: type[Proof]) -> None:
    empty = object.__new__(proof)
    for name in (name for kind in proof.__mro__ for name in getattr(kind, "__slots__", ())):
        with pytest.raises(AttributeError):
            getattr(empty, name)


@pytest.mark.parametrize("proof", PROOFS)
def test_15_a_proof_is_neither_copied_nor_pickled(proof: type[Proof]) -> None:
    empty = object.__new__(proof)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="is a proof"):
            duplicate(empty)
