from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attestation import dsse, strictjson
from attestation.errors import FormatError, LetheError, SignatureRefused
from provisioning import challenge
from provisioning.errors import KeyRefused, LedgerError
from provisioning.ownerkey import OwnerSigner


def test_a_challenge_reads_back_as_issued(exchange: Any) -> None:
    read = challenge.read(exchange.challenge(), exchange.signer.owner)
    assert read.manifest_digest == exchange.manifest.digest
    assert (read.epoch, read.issued_at, len(read.nonce)) == (3, exchange.clock.now(), 32)


def test_every_challenge_has_its_own_nonce(exchange: Any) -> None:
    one, two = (challenge.read(exchange.challenge(), exchange.signer.owner) for _ in range(2))
    assert one.nonce != two.nonce
    assert one.digest != two.digest


def test_a_challenge_is_in_the_ledger_before_it_is_out(exchange: Any) -> None:
    read = challenge.read(exchange.challenge(), exchange.signer.owner)
    with exchange.ledger() as ledger:
        known = ledger.challenge(read.digest)
    assert known is not None
    assert (known.nonce, known.manifest_digest, known.answered) == (read.nonce, exchange.manifest.digest, False)


def test_no_challenge_without_a_ledger(exchange: Any) -> None:
    with exchange.ledger() as ledger:
        ledger.close()
        with pytest.raises(LedgerError) as caught:
            challenge.issue(signer=exchange.signer, manifest=exchange.manifest, ledger=ledger, at=exchange.clock.now())
    assert caught.value.code == "ledger.write"


def test_refuses_a_challenge_by_another_owner(exchange: Any) -> None:
    with pytest.raises(SignatureRefused) as caught:
        challenge.read(exchange.challenge(), exchange.stranger.owner)
    assert (caught.value.code, caught.value.exit_status) == ("signature.unknown", 6)


def test_refuses_a_challenge_with_any_flipped_bit(exchange: Any, flip: Callable[[bytes, int], bytes]) -> None:
    envelope = exchange.challenge()
    for position in range(0, len(envelope), 97):
        with pytest.raises(LetheError) as caught:
            challenge.read(flip(envelope, position), exchange.signer.owner)
        assert caught.value.exit_status == 6


def test_refuses_another_kind_of_object_by_the_same_owner(exchange: Any) -> None:
    with pytest.raises(FormatError) as caught:
        challenge.read(exchange.manifest_envelope, exchange.signer.owner)
    assert caught.value.code == "envelope.type"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"nonce": strictjson.b64(bytes(31))}, "json.base64"),
        ({"manifest_digest": strictjson.b64(bytes(49))}, "json.base64"),
        ({"type": "grant"}, "object.type"),
        ({"extra": ""}, "json.unknown"),
        ({"issued_at": "2026-11-30 12:00:00"}, "time.form"),
    ],
)
def test_refuses_malformed_challenges(exchange: Any, change: dict[str, object], code: str) -> None:
    members = {
        **strictjson.header("challenge", epoch=3, issued_at="2026-11-30T12:00:00Z"),
        "nonce": strictjson.b64(bytes(32)),
        "manifest_digest": strictjson.b64(bytes(48)),
    }
    envelope = dsse.sign("challenge", strictjson.dumps(members | change), [exchange.signer._keys])
    with pytest.raises(FormatError) as caught:
        challenge.read(envelope, exchange.signer.owner)
    assert caught.value.code == code


def test_a_key_of_another_purpose_issues_no_challenge(exchange: Any) -> None:
    production = OwnerSigner.generate("acme", "production")
    with exchange.ledger() as ledger, pytest.raises(KeyRefused) as caught:
        challenge.issue(signer=production, manifest=exchange.manifest, ledger=ledger, at=exchange.clock.now())
    assert caught.value.code == "owner.purpose"


def test_only_the_reader_makes_a_signed_challenge(exchange: Any) -> None:
    with pytest.raises(TypeError, match="only its checker"):
        challenge.SignedChallenge(
            object(), nonce=bytes(32), manifest_digest=bytes(48), epoch=0, issued_at=exchange.clock.now(), digest=b""
        )
