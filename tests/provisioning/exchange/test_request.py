from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from attestation import dsse, strictjson
from attestation.errors import FormatError, LetheError, SignatureRefused
from attestation.signature import PrivateKeys
from attestation.simulated import collect
from provisioning import challenge, request
from provisioning.errors import ExchangeRefused
from provisioning.session import Session


def _payload(envelope: bytes) -> dict[str, Any]:
    members: dict[str, Any] = json.loads(strictjson.decode_b64(json.loads(envelope)["payload"], "", limit=1 << 24))
    return members


def test_a_request_reads_back_as_made(exchange: Any, session: Session) -> None:
    challenged = exchange.challenge()
    read = request.read(exchange.request(session, challenged))
    assert read.node == "node-1"
    assert read.session == session.keys
    assert read.challenge_digest == challenge.read(challenged, exchange.signer.owner).digest
    assert read.binding.session_key_digest == session.digest
    assert len(read.evidence.devices) == 1


def test_refuses_a_request_with_any_flipped_bit(
    exchange: Any, session: Session, flip: Callable[[bytes, int], bytes]
) -> None:
    envelope = exchange.request(session)
    for position in range(0, len(envelope), len(envelope) // 40):
        with pytest.raises(LetheError) as caught:
            request.read(flip(envelope, position))
        assert caught.value.exit_status == 6


def test_refuses_a_request_signed_by_other_keys_than_its_own(exchange: Any, session: Session) -> None:
    payload = strictjson.dumps(_payload(exchange.request(session)))
    with pytest.raises(SignatureRefused) as caught:
        request.read(dsse.sign("request", payload, [PrivateKeys.generate()]))
    assert caught.value.code == "signature.unknown"


def test_refuses_evidence_of_another_machine_beside_own_keys(exchange: Any, session: Session) -> None:
    thief = Session()
    stolen = _payload(exchange.request(session)) | {"session": thief.public_payload()}
    with pytest.raises(ExchangeRefused) as caught:
        request.read(thief.sign("request", strictjson.dumps(stolen)))
    assert (caught.value.code, caught.value.exit_status) == ("request.session", 6)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"node": " "}, "request.node"),
        ({"node": "\x1b[2J"}, "json.text"),
        ({"challenge_digest": ""}, "json.base64"),
        ({"session": {}}, "json.missing"),
        ({"evidence": []}, "json.type"),
        ({"extra": 1}, "json.unknown"),
        ({"version": 2}, "object.version"),
    ],
)
def test_refuses_malformed_requests(exchange: Any, session: Session, change: dict[str, object], code: str) -> None:
    payload = strictjson.dumps(_payload(exchange.request(session)) | change)
    with pytest.raises(FormatError) as caught:
        request.read(session.sign("request", payload))
    assert caught.value.code == code


def test_refuses_another_suite(exchange: Any, session: Session) -> None:
    members = _payload(exchange.request(session))
    members["session"]["suite"] = "X25519/HKDF_SHA256/AES_128_GCM"
    with pytest.raises(FormatError) as caught:
        request.read(session.sign("request", strictjson.dumps(members)))
    assert caught.value.code == "session.suite"


@pytest.mark.parametrize(
    ("field", "code"),
    [
        ("nonce", "request.nonce"),
        ("session_key_digest", "request.session"),
        ("manifest_digest", "challenge.manifest"),
    ],
)
def test_makes_no_request_from_parts_that_do_not_fit(exchange: Any, session: Session, field: str, code: str) -> None:
    asked = challenge.read(exchange.challenge(), exchange.signer.owner)
    fields = ("nonce", "session_key_digest", "manifest_digest")
    values = dict(zip(fields, (asked.nonce, session.digest, exchange.manifest.digest), strict=True))
    values[field] = bytes(len(values[field]))
    binding = exchange.binding(session, **values)
    evidence = collect.collect(exchange.laboratory, binding)
    with pytest.raises(ExchangeRefused) as caught:
        request.make(
            node="n", challenge=asked, session=session, binding=binding, evidence=evidence, clock=exchange.clock
        )
    assert caught.value.code == code
