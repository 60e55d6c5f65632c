from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from attestation import dsse, strictjson
from attestation.errors import FormatError, LetheError, SignatureRefused
from attestation.policy import GrantTerms
from provisioning import request
from provisioning.errors import ExchangeRefused, InputFailed, KeyRefused
from provisioning.grant import Grant, SignedGrant
from provisioning.secret import SecretBytes
from provisioning.session import Session
from provisioning.sessionkeys import SEALED_KEY_BYTES


@pytest.fixture
def envelope(exchange: Any, session: Session) -> bytes:
    granted: bytes = exchange.grant(exchange.request(session))
    return granted


def _payload(envelope: bytes) -> dict[str, Any]:
    members: dict[str, Any] = json.loads(strictjson.decode_b64(json.loads(envelope)["payload"], "", limit=1 << 24))
    return members


# --- signed ------------------------------------------------------------------------------------------------------


def test_a_grant_states_what_it_answers(exchange: Any, session: Session) -> None:
    asked = exchange.request(session)
    read = SignedGrant.read(exchange.grant(asked), exchange.signer.owner)
    statement = read.statement
    assert statement.request_digest == request.read(asked).digest
    assert statement.challenge_digest == request.read(asked).challenge_digest
    assert statement.session_digest == session.digest
    assert (statement.manifest_digest, statement.bundle_id) == (exchange.manifest.digest, exchange.manifest.bundle_id)
    assert (statement.assurance, statement.epoch_floor) == ("lab", exchange.manifest.epoch)
    assert statement.terms == GrantTerms(loads=1, seconds=600, reboot="courier")
    assert read.issued_at == exchange.clock.now()
    assert len(read.sealed) == SEALED_KEY_BYTES


def test_refuses_a_grant_by_another_owner(exchange: Any, envelope: bytes) -> None:
    with pytest.raises(SignatureRefused) as caught:
        SignedGrant.read(envelope, exchange.stranger.owner)
    assert (caught.value.code, caught.value.exit_status) == ("signature.unknown", 6)


def test_refuses_a_grant_with_any_flipped_bit(
    exchange: Any, envelope: bytes, flip: Callable[[bytes, int], bytes]
) -> None:
    for position in range(0, len(envelope), 101):
        with pytest.raises(LetheError) as caught:
            SignedGrant.read(flip(envelope, position), exchange.signer.owner)
        assert caught.value.exit_status == 6


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"assurance": "high"}, "grant.assurance"),
        ({"suite": "X25519/HKDF_SHA256/AES_128_GCM"}, "grant.suite"),
        ({"terms": {"loads": 1, "seconds": 1, "reboot": "counted"}}, "grant.reboot"),
        ({"terms": {"loads": 0, "seconds": 1, "reboot": "courier"}}, "json.range"),
        ({"terms": {"loads": 1, "seconds": 1, "reboot": "courier", "more": 1}}, "json.unknown"),
        ({"sealed": strictjson.b64(bytes(SEALED_KEY_BYTES - 1))}, "json.base64"),
        ({"epoch_floor": -1}, "json.range"),
        ({"type": "challenge"}, "object.type"),
        ({"extra": 1}, "json.unknown"),
    ],
)
def test_refuses_malformed_grants(exchange: Any, envelope: bytes, change: dict[str, object], code: str) -> None:
    payload = strictjson.dumps(_payload(envelope) | change)
    with pytest.raises(FormatError) as caught:
        SignedGrant.read(dsse.sign("grant", payload, [exchange.signer._keys]), exchange.signer.owner)
    assert caught.value.code == code


def test_no_term_can_be_changed_even_by_who_signs_grants(exchange: Any, session: Session, envelope: bytes) -> None:
    # The key is sealed under the terms; a signer without the bundle key cannot lend an old sealed key new terms.
    longer = _payload(envelope)
    longer["terms"]["seconds"] = 10**9
    forged = dsse.sign("grant", strictjson.dumps(longer), [exchange.signer._keys])
    with pytest.raises(ExchangeRefused) as caught:
        exchange.open(session, forged)
    assert caught.value.code == "grant.sealed"


def test_every_member_of_the_statement_is_in_the_info(exchange: Any, envelope: bytes) -> None:
    statement = SignedGrant.read(envelope, exchange.signer.owner).statement
    infos = {statement.hpke_info()}
    changed: dict[str, Any] = {
        "issued_at": statement.issued_at.replace(year=2027),
        "bundle_id": bytes(16),
        "manifest_digest": bytes(48),
        "challenge_digest": bytes(48),
        "request_digest": bytes(48),
        "session_digest": bytes(48),
        "result_digest": bytes(48),
        "assurance": "production",
        "epoch_floor": 99,
        "terms": GrantTerms(loads=2, seconds=600, reboot="courier"),
    }
    for name, value in changed.items():
        infos.add(dataclasses.replace(statement, **{name: value}).hpke_info())
    assert len(infos) == len(changed) + 1


def test_only_the_reader_makes_a_signed_grant(exchange: Any, envelope: bytes) -> None:
    statement = SignedGrant.read(envelope, exchange.signer.owner).statement
    with pytest.raises(TypeError, match="only its checker"):
        SignedGrant(object(), statement=statement, sealed=b"", owner=exchange.signer.owner, digest=b"")


# --- opened ------------------------------------------------------------------------------------------------------


@pytest.fixture
def grant(exchange: Any, session: Session, envelope: bytes) -> Grant:
    opened: Grant = exchange.open(session, envelope)
    return opened


def _refusal(use: Callable[[], object]) -> str:
    with pytest.raises(ExchangeRefused) as caught:
        use()
    assert caught.value.exit_status == 6
    return caught.value.code


def _expose(grant: Grant) -> bytes:
    with grant.bundle_key() as view:
        return bytes(view)


def test_the_key_is_wiped_at_the_end_of_the_block(grant: Grant) -> None:
    with grant, grant.bundle_key() as view:
        kept = view[:]
        assert bytes(kept) != bytes(32)
    assert bytes(kept) == bytes(32)
    assert _refusal(lambda: _expose(grant)) == "grant.spent"


def test_the_key_is_wiped_when_the_block_fails(grant: Grant) -> None:
    with pytest.raises(ZeroDivisionError), grant:
        raise ZeroDivisionError
    assert _refusal(lambda: _expose(grant)) == "grant.spent"


def test_an_open_grant_past_its_seconds_wipes_its_key(exchange: Any, grant: Grant) -> None:
    exchange.clock.pass_seconds(601)
    assert _refusal(lambda: _expose(grant)) == "grant.expired"
    assert _refusal(lambda: _expose(grant)) == "grant.spent"


def test_hand_over_gives_each_rank_the_key_and_spends_the_grant(exchange: Any, grant: Grant) -> None:
    pipes = [os.pipe() for _ in range(3)]
    grant.hand_over([writer for _, writer in pipes])
    with exchange.bundle_key.expose() as key:
        for reader, writer in pipes:
            os.close(writer)
            with Grant.inherit(reader, exchange.manifest) as inherited, inherited.bundle_key() as view:
                assert bytes(view) == bytes(key)
    assert _refusal(lambda: grant.hand_over([])) == "grant.spent"


def test_hand_over_to_a_rank_that_has_gone_is_refused_and_wipes(grant: Grant) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert _refusal(lambda: grant.hand_over([writer])) == "grant.handover"
    assert _refusal(lambda: _expose(grant)) == "grant.spent"
    os.close(writer)


def test_half_a_key_in_a_pipe_is_refused(grant: Grant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "writev", lambda descriptor, views: 16)
    assert _refusal(lambda: grant.hand_over([0])) == "grant.handover"


def test_hand_over_past_the_seconds_writes_nothing(exchange: Any, grant: Grant) -> None:
    reader, writer = os.pipe()
    exchange.clock.pass_seconds(601)
    assert _refusal(lambda: grant.hand_over([writer])) == "grant.expired"
    os.close(writer)
    assert os.read(reader, 32) == b""
    os.close(reader)


def test_a_rank_refuses_the_key_of_another_bundle(exchange: Any) -> None:
    reader, writer = os.pipe()
    os.write(writer, bytes(32))
    os.close(writer)
    with pytest.raises(KeyRefused) as caught:
        Grant.inherit(reader, exchange.manifest)
    assert caught.value.code == "bundle.key"


def test_a_rank_refuses_half_a_key(exchange: Any) -> None:
    reader, writer = os.pipe()
    os.write(writer, bytes(16))
    os.close(writer)
    with pytest.raises(InputFailed) as caught:
        Grant.inherit(reader, exchange.manifest)
    assert caught.value.code == "secret.short"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)


def test_a_grant_shows_nothing_of_its_key(exchange: Any, grant: Grant) -> None:
    with exchange.bundle_key.expose() as key:
        assert bytes(key).hex() not in repr(grant)
    assert "open" in repr(grant)
    grant.close()
    assert "spent" in repr(grant)


def test_nobody_else_makes_a_grant(exchange: Any) -> None:
    with pytest.raises(TypeError, match="only its checker"):
        Grant(
            object(),
            key=SecretBytes(32),
            bundle_id=bytes(16),
            terms=exchange.manifest.policy.grant,
            deadline=0.0,
            clock=exchange.clock,
        )
