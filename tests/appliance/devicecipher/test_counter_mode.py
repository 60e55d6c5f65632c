"""Both forms of counter mode give the bytes of the standards and of the cryptography library."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests.appliance.devicecipher.conftest import reference

Crypt = Callable[..., bytes]

_GRAIN = 128


def test_vector_of_the_standard_for_counter_mode(crypt: Crypt) -> None:
    """NIST SP 800-38A, F.5.5."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    block = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    plaintext = bytes.fromhex(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    ciphertext = bytes.fromhex(
        "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
        "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    )
    start = int.from_bytes(block[12:], "big")
    padded = plaintext + bytes(_GRAIN - len(plaintext))
    given = crypt(key, block[:12], padded, first=0, segment_bytes=_GRAIN, start=start)
    assert given[: len(plaintext)] == ciphertext


@pytest.mark.parametrize(
    ("key", "nonce", "plaintext", "ciphertext"),
    [
        ("00" * 32, "00" * 12, "00" * 16, "cea7403d4d606b6e074ec5d3baf39d18"),
        (
            "feffe9928665731c6d6a8f9467308308" * 2,
            "cafebabefacedbaddecaf888",
            "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
            "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255",
            "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
            "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662898015ad",
        ),
    ],
    ids=["case 14", "case 15"],
)
def test_vector_of_galois_counter_mode(key: str, nonce: str, plaintext: str, ciphertext: str, crypt: Crypt) -> None:
    """McGrew and Viega, "The Galois/Counter Mode of Operation", appendix B: data begins at counter 2."""
    expected = bytes.fromhex(ciphertext)
    padded = expected + bytes(_GRAIN - len(expected))
    given = crypt(bytes.fromhex(key), bytes.fromhex(nonce), padded, first=0, segment_bytes=_GRAIN, start=2)
    assert given[: len(expected)] == bytes.fromhex(plaintext)


@pytest.mark.parametrize(
    ("first", "segments", "segment_bytes", "start"),
    [(0, 3, 4096, 2), (255, 2, 128, 2), (0xFFFFFFF0, 1, 4096, 2), (5, 1, 160 * 128, 2), (1, 2, 2048, 0xFFFFFFC1)],
    ids=["segments", "carry of the number", "large number", "more than one program", "wrapping counter"],
)
def test_random_data_agree_with_the_library(
    first: int, segments: int, segment_bytes: int, start: int, crypt: Crypt
) -> None:
    key, nonce, data = os.urandom(32), os.urandom(12), os.urandom(segments * segment_bytes)
    place = {"first": first, "segment_bytes": segment_bytes, "start": start}
    assert crypt(key, nonce, data, **place) == reference(key, nonce, data, **place)


def test_ciphertext_of_the_sealing_cipher_becomes_plaintext(crypt: Crypt) -> None:
    key, nonce, plaintext = os.urandom(32), os.urandom(12), os.urandom(4096)
    number = 0x01020304
    own = (int.from_bytes(nonce, "big") ^ number).to_bytes(12, "big")
    ciphertext = AESGCM(key).encrypt(own, plaintext, b"anything")[:-16]
    assert crypt(key, nonce, ciphertext, first=number, segment_bytes=4096, start=2) == plaintext


@pytest.mark.parametrize(("nbytes", "segment_bytes"), [(4096, 64), (4096, 8192), (4000, 128)])
def test_data_that_are_not_whole_segments_are_not_taken(nbytes: int, segment_bytes: int, crypt: Crypt) -> None:
    with pytest.raises(ValueError, match="in segments of"):
        crypt(bytes(32), bytes(12), bytes(nbytes), first=0, segment_bytes=segment_bytes, start=2)
