"""Segments open at their own place and nowhere else; a failed open leaves zeros; nonces never repeat."""

from __future__ import annotations

import copy
import hashlib
import hmac
import itertools
import pickle
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioning.errors import BundleDamaged, KeyRefused
from provisioning.geometry import Section
from provisioning.secret import SecretBytes
from provisioning.segment import SectionOpener, SectionSealer, check_commitment, commitment

SIZE = 256 << 10
BUNDLE = bytes(range(16))
SECTION = Section(number=5, stream=2, first=0, segments=3, base=40)
DESCRIPTOR = hashlib.sha384(b"descriptor").digest()
KEY = bytes(range(32))
PLAIN = [hashlib.shake_256(bytes([number])).digest(SIZE) for number in range(3)]


def hkdf_sha384(key: bytes, info: bytes, length: int) -> bytes:
    """HKDF of RFC 5869 in a few lines, so that the product's call is compared with something."""
    extracted = hmac.digest(bytes(48), key, "sha384")
    block, made = b"", b""
    while len(made) < length:
        block = hmac.digest(extracted, block + info + bytes([len(made) // 48 + 1]), "sha384")
        made += block
    return made[:length]


@pytest.fixture
def key() -> Iterator[memoryview]:
    with SecretBytes.take(bytearray(KEY)) as secret, secret.expose() as view:
        yield view


def opener(key: memoryview, **changes: object) -> SectionOpener:
    arguments = {"bundle_id": BUNDLE, "section": SECTION, "segment_size": SIZE, "descriptor": DESCRIPTOR, **changes}
    return SectionOpener(key, **arguments)  # type: ignore[arg-type]  # a test's arguments


def open_in_place(opening: SectionOpener, number: int, buffer: memoryview) -> memoryview:
    plaintext = buffer[:SIZE]
    opening.open_to(number, buffer, plaintext)
    return plaintext


@pytest.fixture
def sealed(key: memoryview) -> list[bytes]:
    made: list[bytes] = []
    with SectionSealer(key, bundle_id=BUNDLE, section=SECTION, segment_size=SIZE, descriptor=DESCRIPTOR) as sealer:
        for plain in PLAIN:
            buffer = memoryview(bytearray(plain + bytes(16)))
            sealer.seal_into(buffer)
            made.append(bytes(buffer))
    return made


def test_opens_in_place_what_was_sealed(key: memoryview, sealed: list[bytes]) -> None:
    with opener(key) as opening:
        for number in (2, 0, 1):
            buffer = memoryview(bytearray(sealed[number]))
            view = open_in_place(opening, number, buffer)
            assert bytes(view) == PLAIN[number]
            assert bytes(buffer[:SIZE]) == PLAIN[number]


def test_key_nonce_and_associated_data_are_those_of_the_specification(sealed: list[bytes]) -> None:
    suite = b"AES-256-GCM/HKDF-SHA384"
    info = b"lethe/bundle/v1/section\0" + BUNDLE + struct.pack("<IIH", 5, SIZE, len(suite)) + suite
    derived = hkdf_sha384(KEY, info, 44)
    for number, stored in enumerate(sealed):
        nonce = (int.from_bytes(derived[32:], "big") ^ number).to_bytes(12, "big")
        associated = b"lethe/bundle/v1/segment\0" + BUNDLE + struct.pack("<IIII", 5, number, 3, SIZE) + DESCRIPTOR
        assert AESGCM(derived[:32]).encrypt(nonce, PLAIN[number], associated) == stored


WRONG: dict[str, dict[str, object]] = {
    "another bundle": {"bundle_id": bytes(16)},
    "another section": {"section": replace(SECTION, number=6)},
    "another count of segments": {"section": replace(SECTION, segments=4)},
    "another plan": {"descriptor": bytes(48)},
}


@pytest.mark.parametrize("change", WRONG)
def test_refuses_a_segment_at_another_place(key: memoryview, sealed: list[bytes], change: str) -> None:
    buffer = memoryview(bytearray(sealed[0]))
    with opener(key, **WRONG[change]) as opening, pytest.raises(BundleDamaged) as refused:
        open_in_place(opening, 0, buffer)
    assert refused.value.code == "segment.tag"
    assert refused.value.exit_status == 7


def test_refuses_a_segment_under_another_number(key: memoryview, sealed: list[bytes]) -> None:
    with opener(key) as opening, pytest.raises(BundleDamaged) as refused:
        open_in_place(opening, 1, memoryview(bytearray(sealed[0])))
    assert refused.value.code == "segment.tag"
    assert "segment 1 of section 5" in refused.value.found


def test_refuses_every_segment_under_another_key(sealed: list[bytes]) -> None:
    with (
        SecretBytes.random(32) as other,
        other.expose() as view,
        opener(view) as opening,
        pytest.raises(BundleDamaged),
    ):
        open_in_place(opening, 0, memoryview(bytearray(sealed[0])))


@settings(deadline=None, max_examples=40)
@given(place=st.integers(0, SIZE + 15), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_refused_and_leaves_only_zeros(place: int, bit: int) -> None:
    with SecretBytes.take(bytearray(KEY)) as secret, secret.expose() as key:
        with SectionSealer(key, bundle_id=BUNDLE, section=SECTION, segment_size=SIZE, descriptor=DESCRIPTOR) as sealer:
            buffer = memoryview(bytearray(PLAIN[0] + bytes(16)))
            sealer.seal_into(buffer)
        buffer[place] ^= 1 << bit
        with opener(key) as opening, pytest.raises(BundleDamaged):
            open_in_place(opening, 0, buffer)
    assert not any(bytes(buffer[:SIZE]).strip(b"\0"))


def test_several_threads_open_at_once(key: memoryview, sealed: list[bytes]) -> None:
    with opener(key) as opening, ThreadPoolExecutor(4) as pool:

        def job(turn: int) -> bool:
            number = turn % 3
            return bytes(open_in_place(opening, number, memoryview(bytearray(sealed[number])))) == PLAIN[number]

        assert all(pool.map(job, range(60)))


def nonces_of(key: memoryview, section: Section) -> set[bytes]:
    with opener(key, section=section) as opening:
        return {opening._prepare(number)[1] for number in range(section.segments)}


def test_no_two_segments_of_a_section_have_one_nonce(key: memoryview) -> None:
    assert len(nonces_of(key, replace(SECTION, segments=70_000))) == 70_000


def test_sections_have_keys_of_their_own(key: memoryview) -> None:
    seen: set[bytes] = set()
    for number in range(50):
        with opener(key, section=replace(SECTION, number=number)) as opening:
            assert opening._secret is not None
            with opening._secret.expose() as derived:
                seen.add(bytes(derived[:32]))
    assert len(seen) == 50


def test_a_sealer_seals_no_more_than_its_section(key: memoryview) -> None:
    section = replace(SECTION, segments=1)
    with SectionSealer(key, bundle_id=BUNDLE, section=section, segment_size=SIZE, descriptor=DESCRIPTOR) as sealer:
        buffer = memoryview(bytearray(SIZE + 16))
        sealer.seal_into(buffer)
        assert sealer.sealed == 1
        with pytest.raises(ValueError, match="segment 1 of 1"):
            sealer.seal_into(buffer)


def test_sealing_takes_no_number_and_no_nonce() -> None:
    with pytest.raises(TypeError):
        SectionSealer.seal_into(object(), memoryview(b""), 0)  # type: ignore[call-arg, arg-type]  # what is tested


@pytest.mark.parametrize("length", [0, SIZE, SIZE + 15, SIZE + 17])
def test_refuses_buffers_of_another_length(key: memoryview, length: int) -> None:
    buffer = memoryview(bytearray(length))
    with opener(key) as opening, pytest.raises(ValueError, match="buffer"):
        open_in_place(opening, 0, buffer)
    with (
        SectionSealer(key, bundle_id=BUNDLE, section=SECTION, segment_size=SIZE, descriptor=DESCRIPTOR) as sealer,
        pytest.raises(ValueError, match="buffer"),
    ):
        sealer.seal_into(buffer)


@pytest.mark.parametrize("number", [-1, 3])
def test_refuses_numbers_out_of_the_section(key: memoryview, number: int) -> None:
    with opener(key) as opening, pytest.raises(ValueError, match="of 3"):
        open_in_place(opening, number, memoryview(bytearray(SIZE + 16)))


def test_a_closed_section_opens_nothing_and_its_key_is_gone(key: memoryview, sealed: list[bytes]) -> None:
    opening = opener(key)
    secret = opening._secret
    assert secret is not None
    opening.close()
    opening.close()
    with pytest.raises(ValueError, match="closed"):
        open_in_place(opening, 0, memoryview(bytearray(sealed[0])))
    with pytest.raises(KeyRefused), secret.expose():
        pass


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_section_is_not_copied_or_pickled(key: memoryview, act: Callable[[object], object]) -> None:
    with opener(key) as opening, pytest.raises(TypeError):
        act(opening)


@pytest.mark.parametrize("change", [{"bundle_id": bytes(15)}, {"descriptor": bytes(32)}])
def test_refuses_ids_and_digests_of_another_length(key: memoryview, change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="of"):
        opener(key, **change)


def test_commitment_is_that_of_the_specification(key: memoryview) -> None:
    assert commitment(key, BUNDLE) == hkdf_sha384(KEY, b"lethe/bundle/v1/commitment\0" + BUNDLE, 48)


def test_commitment_accepts_the_key_and_refuses_every_other(key: memoryview) -> None:
    value = commitment(key, BUNDLE)
    check_commitment(key, BUNDLE, value)
    with SecretBytes.random(32) as other, other.expose() as view, pytest.raises(KeyRefused) as refused:
        check_commitment(view, BUNDLE, value)
    assert refused.value.code == "bundle.key"
    with pytest.raises(KeyRefused):
        check_commitment(key, bytes(16), value)


def test_commitment_refuses_keys_of_another_length() -> None:
    with pytest.raises(ValueError, match="bundle key"):
        commitment(memoryview(bytes(16)), BUNDLE)


def test_opens_to_another_place_and_leaves_the_ciphertext(key: memoryview, sealed: list[bytes]) -> None:
    with opener(key) as opening:
        source, place = memoryview(bytearray(sealed[1])), memoryview(bytearray(b"\xee" * (SIZE + 2)))
        opening.open_to(1, source, place[1:-1])
        assert place == b"\xee" + PLAIN[1] + b"\xee"
        assert source == sealed[1]


@given(cuts=st.lists(st.integers(0, SIZE), max_size=5))
@settings(max_examples=20, deadline=None)
def test_opens_to_several_places_whatever_their_lengths(cuts: list[int]) -> None:
    key = memoryview(bytearray(KEY))
    with SectionSealer(key, bundle_id=BUNDLE, section=SECTION, segment_size=SIZE, descriptor=DESCRIPTOR) as sealer:
        buffer = memoryview(bytearray(PLAIN[0] + bytes(16)))
        sealer.seal_into(buffer)
    edges = [0, *sorted(cuts), SIZE]
    parts = [memoryview(bytearray(b - a)) for a, b in itertools.pairwise(edges)]
    with opener(key) as opening:
        opening.open_parts(0, buffer[:SIZE].toreadonly(), bytes(buffer[SIZE:]), parts)
    assert b"".join(parts) == PLAIN[0]


def test_opens_parts_of_it_in_place(key: memoryview, sealed: list[bytes]) -> None:
    buffer, apart = memoryview(bytearray(sealed[2])), memoryview(bytearray(1000))
    with opener(key) as opening:
        opening.open_parts(2, buffer[:SIZE], sealed[2][SIZE:], [buffer[:5000], apart, buffer[6000:SIZE]])
    assert bytes(buffer[:5000]) + bytes(apart) + bytes(buffer[6000:SIZE]) == PLAIN[2]


@pytest.mark.parametrize("flipped", [0, SIZE - 1, SIZE, SIZE + 15])
def test_a_wrong_segment_leaves_zeros_in_every_place(key: memoryview, sealed: list[bytes], flipped: int) -> None:
    wrong = memoryview(bytearray(sealed[0]))
    wrong[flipped] ^= 1
    place = memoryview(bytearray(b"\xee" * SIZE))
    parts = [memoryview(bytearray(b"\xee" * (SIZE // 2))) for _ in range(2)]
    with opener(key) as opening:
        for work in (
            lambda: opening.open_to(0, wrong, place),
            lambda: opening.open_parts(0, wrong[:SIZE], bytes(wrong[SIZE:]), parts),
        ):
            with pytest.raises(BundleDamaged) as refused:
                work()
            assert refused.value.code == "segment.tag"
    assert not any(place)
    assert not any(any(part) for part in parts)


def test_takes_places_of_a_segments_length_only(key: memoryview, sealed: list[bytes]) -> None:
    with opener(key) as opening:
        with pytest.raises(ValueError, match="buffers of"):
            opening.open_to(0, memoryview(sealed[0]), memoryview(bytearray(SIZE - 1)))
        with pytest.raises(ValueError, match="parts that are not"):
            opening.open_parts(0, memoryview(sealed[0])[:SIZE], bytes(16), [memoryview(bytearray(SIZE - 1))])


def test_a_closed_opener_opens_nothing_and_keeps_no_view_of_its_key(key: memoryview, sealed: list[bytes]) -> None:
    with opener(key) as opening:
        parts = [memoryview(bytearray(SIZE))]
        opening.open_parts(0, memoryview(sealed[0])[:SIZE], sealed[0][SIZE:], parts)
        secret = opening._secret
        assert secret is not None
    assert opening._aes is None
    assert secret._array is None
    with pytest.raises(ValueError, match="closed"):
        opening.open_parts(0, memoryview(sealed[0])[:SIZE], sealed[0][SIZE:], parts)
