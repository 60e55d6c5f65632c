"""Invariant: only a payload whose exact bytes and kind a trusted key signed, with both halves, comes out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attestation import dsse, strictjson
from attestation.errors import FormatError, SignatureRefused
from attestation.signature import PrivateKeys

PAYLOAD = b'{"a":1}'
LIMIT = 1 << 16


@pytest.fixture(scope="module")
def envelope(keys: PrivateKeys) -> bytes:
    return dsse.sign("grant", PAYLOAD, [keys])


def refused(data: bytes, keys: PrivateKeys, kind: str = "grant", limit: int = LIMIT) -> str:
    with pytest.raises((FormatError, SignatureRefused)) as caught:
        dsse.verify(data, kind, [keys.public], limit=limit)
    return caught.value.code


def edited(envelope: bytes, **changes: Any) -> bytes:
    return strictjson.dumps(json.loads(envelope) | changes)


def signatures(envelope: bytes) -> list[dict[str, str]]:
    return list(json.loads(envelope)["signatures"])


def test_gives_the_exact_payload(envelope: bytes, keys: PrivateKeys) -> None:
    assert dsse.verify(envelope, "grant", [keys.public], limit=LIMIT) == PAYLOAD


def test_pre_authentication_encoding_is_that_of_the_protocol() -> None:
    # The protocol document's own example differs only in the payload type.
    assert dsse.pre_authentication_encoding("x", b"hello world") == (
        b"DSSEv1 28 application/vnd.lethe.x+json 11 hello world"
    )


def test_refuses_another_kind_even_if_well_signed(envelope: bytes, keys: PrivateKeys) -> None:
    assert refused(envelope, keys, kind="manifest") == "envelope.type"


def test_relabelling_the_kind_breaks_the_signature(envelope: bytes, keys: PrivateKeys) -> None:
    relabelled = edited(envelope, payloadType=dsse.payload_type("manifest"))
    assert refused(relabelled, keys, kind="manifest") == "signature.wrong"


def test_refuses_a_changed_payload(envelope: bytes, keys: PrivateKeys) -> None:
    assert refused(edited(envelope, payload=strictjson.b64(b'{"a":2}')), keys) == "signature.wrong"


def test_refuses_another_key(envelope: bytes, other_keys: PrivateKeys) -> None:
    assert refused(envelope, other_keys) == "signature.unknown"


def test_refuses_an_envelope_without_signatures(envelope: bytes, keys: PrivateKeys) -> None:
    with pytest.raises(SignatureRefused) as caught:
        dsse.verify(edited(envelope, signatures=[]), "grant", [keys.public], limit=LIMIT)
    assert caught.value.code == "signature.unknown"
    assert "nobody" in caught.value.found


def test_trusting_nobody_verifies_nothing(envelope: bytes) -> None:
    with pytest.raises(SignatureRefused) as caught:
        dsse.verify(envelope, "grant", [], limit=LIMIT)
    assert caught.value.code == "signature.unknown"


@pytest.mark.parametrize("dropped", [0, 1], ids=["post-quantum half", "classical half"])
def test_refuses_when_one_half_is_dropped(envelope: bytes, keys: PrivateKeys, dropped: int) -> None:
    left = signatures(envelope)
    del left[dropped]
    assert refused(edited(envelope, signatures=left), keys) == "signature.half"


def test_refuses_when_the_halves_are_swapped(envelope: bytes, keys: PrivateKeys) -> None:
    first, second = signatures(envelope)
    first["sig"], second["sig"] = second["sig"], first["sig"]
    assert refused(edited(envelope, signatures=[first, second]), keys) == "signature.wrong"


@pytest.mark.parametrize("half", [0, 1])
def test_refuses_a_half_from_another_envelope(envelope: bytes, keys: PrivateKeys, half: int) -> None:
    entries = signatures(envelope)
    entries[half] = signatures(dsse.sign("grant", b'{"a":2}', [keys]))[half]
    assert refused(edited(envelope, signatures=entries), keys) == "signature.wrong"


def test_refuses_one_key_twice(envelope: bytes, keys: PrivateKeys) -> None:
    entries = signatures(envelope)
    assert refused(edited(envelope, signatures=[*entries, entries[0]]), keys) == "envelope.signature"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"signatures": ["x"]}, "envelope.signature"),
        ({"signatures": [{"keyid": "x"}]}, "json.missing"),
        ({"signatures": [{"keyid": "x", "sig": "", "alg": "none"}]}, "json.unknown"),
        ({"signatures": [{"keyid": "x", "sig": "A" * 8000}]}, "json.base64"),
        ({"signatures": [{}] * 33}, "json.range"),
        ({"payload": "e30"}, "json.base64"),
        ({"extra": 1}, "json.unknown"),
    ],
)
def test_refuses_a_malformed_envelope(envelope: bytes, keys: PrivateKeys, change: dict[str, Any], code: str) -> None:
    assert refused(edited(envelope, **change), keys) == code


def test_refuses_a_payload_over_the_limit(keys: PrivateKeys) -> None:
    assert refused(dsse.sign("grant", PAYLOAD, [keys]), keys, limit=len(PAYLOAD) - 1) == "json.base64"


def test_refuses_an_envelope_over_the_limit_before_parsing(keys: PrivateKeys) -> None:
    assert refused(b"{" * (dsse.MAX_SIGNATURES * 8192 + 100), keys, limit=10) == "json.size"


def test_names_every_trusted_key_that_signed(keys: PrivateKeys, other_keys: PrivateKeys) -> None:
    both = dsse.sign("grant", PAYLOAD, [keys, other_keys])
    _, signers = dsse.signed_by(both, "grant", [other_keys.public, keys.public], limit=LIMIT)
    assert set(signers) == {keys.public.key_id, other_keys.public.key_id}


def test_one_key_listed_twice_counts_once(envelope: bytes, keys: PrivateKeys) -> None:
    _, signers = dsse.signed_by(envelope, "grant", [keys.public, keys.public], limit=LIMIT)
    assert signers == (keys.public.key_id,)


def test_a_wrong_signature_of_one_trusted_key_refuses_the_whole(keys: PrivateKeys, other_keys: PrivateKeys) -> None:
    entries = signatures(dsse.sign("grant", PAYLOAD, [keys]))
    entries += signatures(dsse.sign("grant", b'{"a":2}', [other_keys]))
    mixed = edited(dsse.sign("grant", PAYLOAD, [keys]), signatures=entries)
    with pytest.raises(SignatureRefused):
        dsse.signed_by(mixed, "grant", [keys.public, other_keys.public], limit=LIMIT)


@given(place=st.integers(0, 1 << 20), bit=st.integers(0, 7))
@settings(deadline=None, max_examples=150)
def test_no_flipped_bit_is_accepted(envelope: bytes, keys: PrivateKeys, place: int, bit: int) -> None:
    spoiled = bytearray(envelope)
    spoiled[place % len(spoiled)] ^= 1 << bit
    assert refused(bytes(spoiled), keys)


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=100)
def test_any_bytes_are_refused_with_our_own_errors(keys: PrivateKeys, data: bytes) -> None:
    assert refused(data, keys)


def test_refuses_every_truncation(envelope: bytes, keys: PrivateKeys) -> None:
    for length in range(0, len(envelope), 97):
        assert refused(envelope[:length], keys)
