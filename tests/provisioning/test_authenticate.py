"""Authenticating ciphertext without decrypting it says the same as opening it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from provisioning import authenticate
from provisioning.authenticate import SectionAuthenticator
from provisioning.errors import BundleDamaged
from provisioning.geometry import Section
from provisioning.segment import TAG_BYTES, SectionOpener, SectionSealer, associated_data

_SIZE = 1 << 18
_KEY = bytes(range(32))
_BUNDLE = bytes(range(16))
_DESCRIPTOR = bytes(range(48))


def _section(segments: int, number: int = 3) -> Section:
    return Section(number=number, stream=2, first=0, segments=segments, base=40)


def _cipher(kind: type, segments: int = 600, number: int = 3, descriptor: bytes = _DESCRIPTOR):  # noqa: ANN202  # one of three types
    return kind(
        memoryview(_KEY),
        bundle_id=_BUNDLE,
        section=_section(segments, number),
        segment_size=_SIZE,
        descriptor=descriptor,
    )


def _sealed(number: int, plaintext: bytes) -> tuple[memoryview, bytes]:
    """Seal one segment without those before it."""
    with _cipher(SectionSealer) as sealer:
        aead, nonce, associated = sealer._prepare(number)
        sealed = aead.encrypt(nonce, plaintext, associated)
    return memoryview(bytearray(sealed[:-TAG_BYTES])), sealed[-TAG_BYTES:]


@pytest.fixture(scope="module")
def authenticator() -> Iterator[SectionAuthenticator]:
    with _cipher(SectionAuthenticator) as opened:
        yield opened


@pytest.mark.parametrize("number", [0, 1, 2, 3, 85, 170, 255, 256, 257, 511, 512, 599])
def test_segment_of_every_digit_is_authentic(number: int, authenticator: SectionAuthenticator) -> None:
    ciphertext, tag = _sealed(number, os.urandom(_SIZE))
    before = bytes(ciphertext)
    authenticator.authenticate(number, ciphertext, tag)
    assert bytes(ciphertext) == before


@pytest.mark.parametrize("segments", [1, 2, 256, 257, 65537])
def test_last_segment_of_sections_of_all_lengths_is_authentic(segments: int) -> None:
    with _cipher(SectionSealer, segments) as sealer:
        aead, nonce, associated = sealer._prepare(segments - 1)
        sealed = aead.encrypt(nonce, bytes(_SIZE), associated)
    with _cipher(SectionAuthenticator, segments) as opened:
        opened.authenticate(segments - 1, memoryview(sealed)[:-TAG_BYTES], sealed[-TAG_BYTES:])


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 100, 104, 111, 112, 113, 256])
def test_terms_make_tags_for_associated_data_of_any_length(length: int) -> None:
    aead, nonce, spare, size = AESGCM(_KEY), bytes(12), bytes([1] * 12), 4096

    def associated(number: int) -> bytes:
        return (number.to_bytes(4, "little") + bytes(range(252)))[:length]

    terms = bytearray(2 * 256 * TAG_BYTES)
    authenticate._write_terms(memoryview(terms), 10, aead, spare, associated, size)
    for number in (0, 1, 255, 256, 0x2A5, 1023):
        plaintext = os.urandom(size)
        sealed = aead.encrypt(nonce, plaintext, associated(number))
        tag = bytearray(TAG_BYTES)
        aead.encrypt_into(nonce, b"", memoryview(sealed)[:size], tag)
        for at in (number % 256, 256 + number // 256):
            authenticate._add(tag, memoryview(terms)[at * TAG_BYTES : (at + 1) * TAG_BYTES])
        assert tag == sealed[size:]


@pytest.mark.parametrize("at", [0, 15, 16, _SIZE // 2, _SIZE - 1])
def test_changed_ciphertext_is_refused(at: int, authenticator: SectionAuthenticator) -> None:
    ciphertext, tag = _sealed(7, bytes(_SIZE))
    ciphertext[at] ^= 0x80
    with pytest.raises(BundleDamaged) as caught:
        authenticator.authenticate(7, ciphertext, tag)
    assert caught.value.code == "segment.tag"


@pytest.mark.parametrize("bit", [0, 7, 64, 127])
def test_changed_tag_is_refused(bit: int, authenticator: SectionAuthenticator) -> None:
    ciphertext, tag = _sealed(7, bytes(_SIZE))
    wrong = bytearray(tag)
    wrong[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BundleDamaged) as caught:
        authenticator.authenticate(7, ciphertext, bytes(wrong))
    assert caught.value.code == "segment.tag"


@pytest.mark.parametrize("claimed", [0, 6, 8, 7 + 256, 7 + 512])
def test_segment_at_another_place_is_refused(claimed: int, authenticator: SectionAuthenticator) -> None:
    ciphertext, tag = _sealed(7, bytes(_SIZE))
    with pytest.raises(BundleDamaged) as caught:
        authenticator.authenticate(claimed, ciphertext, tag)
    assert caught.value.code == "segment.tag"


@pytest.mark.parametrize(
    "other", [{"number": 4}, {"segments": 601}, {"descriptor": bytes(48)}], ids=["section", "count", "descriptor"]
)
def test_segment_with_other_associated_data_is_refused(other: dict[str, object]) -> None:
    ciphertext, tag = _sealed(7, bytes(_SIZE))
    with _cipher(SectionAuthenticator, **other) as opened, pytest.raises(BundleDamaged) as caught:
        opened.authenticate(7, ciphertext, tag)
    assert caught.value.code == "segment.tag"


def test_number_outside_the_section_is_not_taken(authenticator: SectionAuthenticator) -> None:
    with pytest.raises(ValueError, match="segment 600 of 600"):
        authenticator.authenticate(600, memoryview(bytes(_SIZE)), bytes(16))


def test_wrong_sizes_are_not_taken(authenticator: SectionAuthenticator) -> None:
    with pytest.raises(ValueError, match="bytes with a tag of"):
        authenticator.authenticate(0, memoryview(bytes(_SIZE - 16)), bytes(16))


def test_exposed_key_and_nonce_are_those_of_the_opener(authenticator: SectionAuthenticator) -> None:
    ciphertext, tag = _sealed(9, b"x" * _SIZE)
    with authenticator.expose() as (key, base):
        nonce = (int.from_bytes(base, "big") ^ 9).to_bytes(12, "big")
        aad = associated_data(_BUNDLE, _section(600), _SIZE, _DESCRIPTOR)(9)
        assert AESGCM(key).decrypt(nonce, bytes(ciphertext) + tag, aad) == b"x" * _SIZE


def test_closed_section_authenticates_and_exposes_nothing() -> None:
    ciphertext, tag = _sealed(0, bytes(_SIZE))
    opened = _cipher(SectionAuthenticator)
    terms = opened._terms
    opened.close()
    opened.close()
    with pytest.raises(ValueError, match="closed"):
        opened.authenticate(0, ciphertext, tag)
    with pytest.raises(ValueError, match="closed"), opened.expose():
        pass
    assert terms._array is None


def test_opener_agrees_on_a_segment_that_was_authenticated(authenticator: SectionAuthenticator) -> None:
    ciphertext, tag = _sealed(5, b"plain " * (_SIZE // 6) + b"text")
    authenticator.authenticate(5, ciphertext, tag)
    with _cipher(SectionOpener) as opener:
        plain = bytearray(_SIZE)
        opener.open_to(5, memoryview(bytearray(ciphertext) + tag), memoryview(plain))
        assert plain.startswith(b"plain ")
