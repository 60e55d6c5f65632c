"""Half a hybrid signature is no signature."""

from __future__ import annotations

import dataclasses

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa, x25519
from hypothesis import given, settings
from hypothesis import strategies as st

from attestation.errors import FormatError, SignatureRefused
from attestation.signature import HybridSignature, PrivateKeys, PublicKeys

MESSAGE = b"a message"


def refusal(public: PublicKeys, message: bytes, signature: HybridSignature) -> str:
    with pytest.raises(SignatureRefused) as caught:
        public.verify(message, signature, what="grant")
    return caught.value.code


@pytest.fixture(scope="module", params=["ecdsa-p384", "ed25519"])
def pair(request: pytest.FixtureRequest) -> PrivateKeys:
    return PrivateKeys.generate(request.param)


def test_verifies_what_it_signed(pair: PrivateKeys) -> None:
    pair.public.verify(MESSAGE, pair.sign(MESSAGE), what="grant")


def test_refuses_another_message(pair: PrivateKeys) -> None:
    assert refusal(pair.public, MESSAGE + b"!", pair.sign(MESSAGE)) == "signature.wrong"


def test_refuses_another_key(pair: PrivateKeys, other_keys: PrivateKeys) -> None:
    assert refusal(other_keys.public, MESSAGE, pair.sign(MESSAGE)) == "signature.wrong"


@pytest.mark.parametrize("half", ["post_quantum", "classical"])
def test_refuses_when_one_half_is_wrong(pair: PrivateKeys, half: str) -> None:
    signature = pair.sign(MESSAGE)
    spoiled = bytearray(getattr(signature, half))
    spoiled[-1] ^= 1
    assert refusal(pair.public, MESSAGE, dataclasses.replace(signature, **{half: bytes(spoiled)})) == "signature.wrong"


@pytest.mark.parametrize("half", ["post_quantum", "classical"])
def test_refuses_when_one_half_is_empty(pair: PrivateKeys, half: str) -> None:
    assert refusal(pair.public, MESSAGE, dataclasses.replace(pair.sign(MESSAGE), **{half: b""})) == "signature.wrong"


@pytest.mark.parametrize("half", ["post_quantum", "classical"])
def test_refuses_one_half_by_another_key(keys: PrivateKeys, other_keys: PrivateKeys, half: str) -> None:
    foreign = getattr(other_keys.sign(MESSAGE), half)
    mixed = dataclasses.replace(keys.sign(MESSAGE), **{half: foreign})
    assert refusal(keys.public, MESSAGE, mixed) == "signature.wrong"


def test_refuses_a_public_key_that_is_no_point(keys: PrivateKeys) -> None:
    broken = dataclasses.replace(keys.public, classical=b"\x04" + bytes(96))
    assert refusal(broken, MESSAGE, keys.sign(MESSAGE)) == "signature.wrong"


def test_key_id_depends_on_both_halves_and_the_algorithm(keys: PrivateKeys, other_keys: PrivateKeys) -> None:
    ids = {
        keys.public.key_id,
        dataclasses.replace(keys.public, classical=other_keys.public.classical).key_id,
        dataclasses.replace(keys.public, post_quantum=other_keys.public.post_quantum).key_id,
        dataclasses.replace(keys.public, algorithm="ed25519").key_id,
    }
    assert len(ids) == 4


def test_public_keys_read_back(pair: PrivateKeys) -> None:
    assert PublicKeys.from_payload(pair.public.as_payload(), "keys") == pair.public


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"algorithm": "rsa"}, "key.algorithm"),
        ({"algorithm": "ml-dsa-87+ed25519"}, "json.base64"),
        ({"ml_dsa_87": "QUE="}, "json.base64"),
        ({"extra": 1}, "json.unknown"),
    ],
)
def test_refuses_malformed_public_keys(keys: PrivateKeys, change: dict[str, object], code: str) -> None:
    with pytest.raises(FormatError) as caught:
        PublicKeys.from_payload(keys.public.as_payload() | change, "keys")
    assert caught.value.code == code


def test_private_keys_read_back(pair: PrivateKeys) -> None:
    again = PrivateKeys.from_private_parts(*pair.private_parts())
    assert again.public == pair.public
    pair.public.verify(MESSAGE, again.sign(MESSAGE), what="grant")


def der(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | x25519.X25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.mark.parametrize(
    "parts",
    [
        (bytes(32), b""),
        (bytes(32), b"no key"),
        (bytes(31), der(ec.generate_private_key(ec.SECP384R1()))),
        (bytes(32), der(ec.generate_private_key(ec.SECP256R1()))),
        (bytes(32), der(x25519.X25519PrivateKey.generate())),
    ],
    ids=["empty", "garbage", "short seed", "another curve", "another kind"],
)
def test_refuses_private_parts_that_are_no_such_keys(parts: tuple[bytes, bytes]) -> None:
    with pytest.raises(FormatError) as caught:
        PrivateKeys.from_private_parts(*parts)
    assert caught.value.code == "key.private"


@given(st.binary(max_size=80))
@settings(deadline=None, max_examples=100)
def test_any_private_part_gives_keys_or_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        PrivateKeys.from_private_parts(bytes(32), data)
