from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from attestation import dsse, strictjson
from attestation.signature import PublicKeys
from provisioning.errors import ExchangeRefused, KeyRefused
from provisioning.grant import SignedGrant
from provisioning.manifest import SignedManifest
from provisioning.secret import SecretBytes
from provisioning.session import MAX_OPEN_REQUESTS, Session, _match_result
from provisioning.sessionkeys import SessionKeys


def _refusal(exchange: Any, session: Session, envelope: bytes, **changes: object) -> ExchangeRefused:
    with pytest.raises(ExchangeRefused) as caught:
        exchange.open(session, envelope, **changes)
    assert caught.value.exit_status == 6
    return caught.value


def test_a_grant_opens_in_the_session_that_asked(exchange: Any, session: Session) -> None:
    granted = exchange.grant(exchange.request(session))
    with (
        exchange.open(session, granted) as grant,
        grant.bundle_key() as opened,
        exchange.bundle_key.expose() as packed,
    ):
        assert bytes(opened) == bytes(packed)
        assert grant.bundle_id == exchange.manifest.bundle_id
        assert grant.terms == exchange.manifest.policy.grant


def test_refuses_a_grant_for_another_session(exchange: Any, session: Session) -> None:
    granted = exchange.grant(exchange.request(Session()))
    assert _refusal(exchange, session, granted).code == "grant.session"


def test_refuses_a_grant_after_the_agent_was_restarted(exchange: Any, session: Session) -> None:
    granted = exchange.grant(exchange.request(session))
    session.wipe()
    refusal = _refusal(exchange, Session(), granted)
    assert refusal.code == "grant.session"
    assert "restarted" in refusal.hint


def test_refuses_a_grant_that_was_opened_before(exchange: Any, session: Session) -> None:
    granted = exchange.grant(exchange.request(session))
    exchange.open(session, granted).close()
    assert _refusal(exchange, session, granted).code == "grant.spent"


def test_opens_a_grant_as_often_as_its_terms_say(make_exchange: Callable[..., Any], session: Session) -> None:
    exchange = make_exchange(loads=2)
    granted = exchange.grant(exchange.request(session))
    for _ in range(2):
        exchange.open(session, granted).close()
    assert _refusal(exchange, session, granted).code == "grant.spent"


def test_refuses_a_grant_for_a_request_that_this_session_did_not_make(exchange: Any, session: Session) -> None:
    asked = exchange.request(session)
    session._asked.clear()
    assert _refusal(exchange, session, exchange.grant(asked)).code == "grant.request"


def test_forgets_the_oldest_of_too_many_requests(exchange: Any, session: Session) -> None:
    first = exchange.request(session)
    for number in range(MAX_OPEN_REQUESTS):
        session.remember(bytes([number]), exchange.binding(session, bytes(32)), exchange.clock)
    assert len(session._asked) == MAX_OPEN_REQUESTS
    assert _refusal(exchange, session, exchange.grant(first)).code == "grant.request"


def test_opens_within_the_grants_seconds_and_refuses_after(exchange: Any, session: Session) -> None:
    granted = exchange.grant(exchange.request(session))
    exchange.clock.pass_seconds(600)
    exchange.open(session, granted).close()


def test_refuses_a_grant_past_its_seconds(exchange: Any, session: Session) -> None:
    granted = exchange.grant(exchange.request(session))
    exchange.clock.pass_seconds(601)
    assert _refusal(exchange, session, granted).code == "grant.expired"


def test_turning_the_wall_clock_back_gains_nothing(exchange: Any, session: Session) -> None:
    granted = exchange.grant(exchange.request(session))
    before = exchange.clock.now()
    exchange.clock.pass_seconds(601)
    exchange.clock.wall = before
    assert _refusal(exchange, session, granted).code == "grant.expired"


def test_refuses_a_grant_for_another_bundle(
    exchange: Any, session: Session, make_manifest: Callable[..., bytes]
) -> None:
    granted = exchange.grant(exchange.request(session))
    other = SignedManifest.read(make_manifest(exchange.signer, SecretBytes.random(32)), [exchange.signer.owner])
    assert _refusal(exchange, session, granted, manifest=other).code == "grant.manifest"


def test_refuses_a_grant_by_another_owner_than_the_packer(exchange: Any, session: Session) -> None:
    # Two owners may be configured on one machine; each may grant its own bundles only.
    asked = exchange.request(session)
    forged = exchange.stranger.sign("grant", _grant_payload(exchange, asked), policy=exchange.manifest.policy)
    sealed = SignedGrant.read(forged, exchange.stranger.owner)
    with pytest.raises(ExchangeRefused) as caught:
        session.open(sealed, manifest=exchange.manifest, result=exchange.appraised(session), clock=exchange.clock)
    assert caught.value.code == "grant.owner"


def _grant_payload(exchange: Any, asked: bytes) -> bytes:
    return dsse.verify(exchange.grant(asked), "grant", [exchange.signer.owner.keys], limit=1 << 14)


def test_refuses_a_bundle_below_the_epoch_floor_that_a_session_has_seen(exchange: Any, session: Session) -> None:
    granted = exchange.grant(exchange.request(session))
    session._epoch_floor = exchange.manifest.epoch + 1
    assert _refusal(exchange, session, granted).code == "grant.epoch"


def test_a_session_keeps_the_highest_epoch_floor(exchange: Any, session: Session) -> None:
    exchange.open(session, exchange.grant(exchange.request(session))).close()
    assert session._epoch_floor == exchange.manifest.epoch


@pytest.mark.parametrize("field", ["tls_key_digest", "config_digest", "boot_id"])
def test_refuses_an_appraisal_of_a_machine_that_changed(exchange: Any, session: Session, field: str) -> None:
    granted = exchange.grant(exchange.request(session))
    size = len(getattr(exchange.binding(session, bytes(32)), field))
    refusal = _refusal(exchange, session, granted, result=exchange.appraised(session, **{field: b"x" * size}))
    assert refusal.code == "grant.result"
    assert field in refusal.found


def test_refuses_a_wiped_session(exchange: Any, session: Session) -> None:
    granted = exchange.grant(exchange.request(session))
    result = exchange.appraised(session)
    session.wipe()
    assert _refusal(exchange, session, granted, result=result).code == "session.wiped"


def test_a_wiped_session_signs_nothing(session: Session) -> None:
    session.wipe()
    with pytest.raises(ExchangeRefused) as caught:
        session.sign("wipe-record", b"{}")
    assert caught.value.code == "session.wiped"


def test_after_the_opening_key_is_dropped_only_records_can_be_signed(exchange: Any, session: Session) -> None:
    granted = exchange.grant(exchange.request(session))
    session.drop_opening_key()
    assert _refusal(exchange, session, granted).code == "session.wiped"
    assert session.sign("wipe-record", b"{}")


def test_a_failed_opening_uses_up_the_load(exchange: Any, session: Session) -> None:
    granted = exchange.grant(exchange.request(session))
    right, session._opening = session._opening, Session()._opening
    assert _refusal(exchange, session, granted).code == "grant.sealed"
    session._opening = right
    assert _refusal(exchange, session, granted).code == "grant.spent"


def test_refuses_the_key_of_another_bundle_inside_a_genuine_grant(
    exchange: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provisioning.broker.check_commitment", lambda *_: None)
    granted = exchange.grant(exchange.request(session), bundle_key=SecretBytes.random(32))
    with pytest.raises(KeyRefused) as caught:
        exchange.open(session, granted)
    assert caught.value.code == "bundle.key"


def test_two_sessions_share_no_key() -> None:
    one, two = Session(), Session()
    assert one.digest != two.digest
    assert one.keys.mlkem1024 != two.keys.mlkem1024
    assert one.keys.p384 != two.keys.p384
    assert one.keys.record.key_id != two.keys.record.key_id


def test_public_keys_read_back_as_written(session: Session) -> None:
    assert SessionKeys.from_payload(session.public_payload(), "session") == session.keys
    assert session.keys.digest == session.digest


@pytest.mark.parametrize("half", ["mlkem1024", "p384"])
def test_seals_nothing_to_public_keys_that_are_no_keys(half: str, session: Session) -> None:
    values = {"mlkem1024": session.keys.mlkem1024, "p384": session.keys.p384}
    values[half] = b"\xff" * len(values[half])
    record: PublicKeys = session.keys.record
    with pytest.raises(ExchangeRefused) as caught:
        SessionKeys(values["mlkem1024"], values["p384"], record).seal(memoryview(secrets.token_bytes(32)), b"")
    assert caught.value.code == "session.keys"


def test_refuses_a_grant_of_another_assurance_than_the_machines(exchange: Any, session: Session) -> None:
    payload = json.loads(_grant_payload(exchange, exchange.request(session))) | {"assurance": "production"}
    forged = dsse.sign("grant", strictjson.dumps(payload), [exchange.signer._keys])
    assert _refusal(exchange, session, forged).code == "grant.assurance"


def test_simulated_evidence_opens_no_production_bundle_whatever_was_missed_before(
    exchange: Any, session: Session
) -> None:
    sealed = SignedGrant.read(exchange.grant(exchange.request(session)), exchange.signer.owner)
    with pytest.raises(ExchangeRefused) as caught:
        _match_result(
            sealed.statement,
            exchange.binding(session, bytes(32)),
            exchange.appraised(session),
            purpose="production",
        )
    assert caught.value.code == "grant.assurance"


def test_a_wiped_session_signs_no_record(session: Session) -> None:
    session.wipe()
    with pytest.raises(ExchangeRefused) as caught:
        session.sign("wipe-record", b"{}")
    assert caught.value.code == "session.wiped"
