from __future__ import annotations

import dataclasses
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attestation.binding import Binding, device_evidence_digest, frame
from attestation.errors import FormatError
from attestation.evidence import Evidence

BINDING = Binding(
    nonce=bytes(32),
    session_key_digest=bytes(48),
    tls_key_digest=bytes(48),
    policy_digest=bytes(48),
    manifest_digest=bytes(48),
    config_digest=bytes(48),
    boot_id=bytes(16),
)
FIELDS = [field.name for field in dataclasses.fields(Binding)]

_ITEMS = st.lists(st.tuples(st.binary(max_size=8), st.binary(max_size=8)), max_size=4)


@given(_ITEMS, _ITEMS)
def test_framing_has_one_reading(first: list[tuple[bytes, bytes]], second: list[tuple[bytes, bytes]]) -> None:
    assert (frame(first) == frame(second)) == (first == second)


@pytest.mark.parametrize("name", FIELDS)
def test_report_data_depends_on_every_field(name: str) -> None:
    changed = dataclasses.replace(BINDING, **{name: b"\x01" + getattr(BINDING, name)[1:]})
    assert changed.report_data(bytes(48)) != BINDING.report_data(bytes(48))


def test_report_data_depends_on_which_field_holds_a_value() -> None:
    one = dataclasses.replace(BINDING, policy_digest=b"x" * 48)
    other = dataclasses.replace(BINDING, manifest_digest=b"x" * 48)
    assert one.report_data(bytes(48)) != other.report_data(bytes(48))


def test_report_data_depends_on_the_device_evidence() -> None:
    assert BINDING.report_data(bytes(48)) != BINDING.report_data(b"\x01" + bytes(47))


def test_report_data_is_sixty_four_bytes() -> None:
    assert len(BINDING.report_data(bytes(48))) == 64


@pytest.mark.parametrize("name", FIELDS)
def test_nothing_is_padded_or_cut(name: str) -> None:
    for value in (getattr(BINDING, name)[1:], getattr(BINDING, name) + b"\0", b""):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(BINDING, **{name: value})


def test_refuses_a_device_digest_of_another_length() -> None:
    with pytest.raises(ValueError, match="48 bytes"):
        BINDING.report_data(bytes(47))


def test_every_place_has_its_own_nonce_in_every_challenge() -> None:
    other = dataclasses.replace(BINDING, nonce=b"\x01" * 32)
    nonces = {binding.device_nonce(ordinal) for binding in (BINDING, other) for ordinal in range(32)}
    assert len(nonces) == 64
    assert {len(nonce) for nonce in nonces} == {32}


@pytest.mark.parametrize("ordinal", [-1, 32])
def test_refuses_a_place_that_no_device_has(ordinal: int) -> None:
    with pytest.raises(ValueError, match="ordinal"):
        BINDING.device_nonce(ordinal)


def test_device_digest_tells_missing_added_moved_and_relabelled_devices() -> None:
    a, b = Evidence("simulated", b"a"), Evidence("simulated", b"b")
    sets = [(), (a,), (b,), (a, b), (b, a), (a, a), (Evidence("nvidia", b"a"),), (Evidence("simulated", b"ab"),)]
    digests = {device_evidence_digest(devices) for devices in sets}
    assert len(digests) == len(sets)
    assert {len(digest) for digest in digests} == {hashlib.sha384().digest_size}


def test_a_binding_reads_back() -> None:
    assert Binding.from_payload(BINDING.as_payload()) == BINDING


@pytest.mark.parametrize(
    ("change", "code"),
    [({"nonce": "QQ=="}, "json.base64"), ({"boot_id": 1}, "json.type"), ({"more": ""}, "json.unknown")],
)
def test_refuses_malformed_bindings(change: dict[str, object], code: str) -> None:
    with pytest.raises(FormatError) as caught:
        Binding.from_payload(BINDING.as_payload() | change)
    assert caught.value.code == code
