from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from attestation import strictjson
from attestation.errors import FormatError, LetheError
from provisioning import request, wiperecord
from provisioning.errors import ExchangeRefused
from provisioning.session import Session
from provisioning.wiperecord import DeviceWipe, WipeRecord

WIPED = DeviceWipe("cpu", 1000, 1000, 0, 64, shown=True)


@pytest.fixture
def asked(exchange: Any, session: Session) -> request.KeyRequest:
    return request.read(exchange.request(session))


@pytest.fixture
def record(exchange: Any, session: Session) -> WipeRecord:
    return WipeRecord(
        node="node-1",
        boot_id=exchange.boot_id,
        reason="operator 1000",
        session_digest=session.digest,
        manifest_digest=exchange.manifest.digest,
        epoch=exchange.manifest.epoch,
        devices=(WIPED,),
        milliseconds=12,
        complete=True,
        at=exchange.clock.now(),
    )


def _code(envelope: bytes, asked: request.KeyRequest | None) -> str:
    with pytest.raises(ExchangeRefused) as caught:
        wiperecord.read_and_verify(envelope, request=asked)
    assert caught.value.exit_status == 6
    return caught.value.code


def test_a_record_reads_back_as_signed(session: Session, record: WipeRecord, asked: request.KeyRequest) -> None:
    envelope = record.sign(session)
    assert wiperecord.read_and_verify(envelope, request=asked) == record
    assert wiperecord.read_and_verify(envelope, request=None) == record


def test_can_be_signed_after_the_opening_key_is_gone(session: Session, record: WipeRecord) -> None:
    session.drop_opening_key()
    assert wiperecord.read_and_verify(record.sign(session), request=None) == record


def test_refuses_a_record_with_any_flipped_bit(
    session: Session, record: WipeRecord, flip: Callable[[bytes, int], bytes]
) -> None:
    envelope = record.sign(session)
    for position in range(0, len(envelope), 211):
        with pytest.raises(LetheError) as caught:
            wiperecord.read_and_verify(flip(envelope, position), request=None)
        assert caught.value.exit_status == 6


def test_refuses_a_record_of_another_session(exchange: Any, record: WipeRecord, asked: request.KeyRequest) -> None:
    other = Session()
    envelope = dataclasses.replace(record, session_digest=other.digest).sign(other)
    assert _code(envelope, asked) == "wipe.session"


def test_a_session_signs_no_record_of_another_session(session: Session, record: WipeRecord) -> None:
    with pytest.raises(ExchangeRefused) as caught:
        dataclasses.replace(record, session_digest=bytes(48)).sign(session)
    assert caught.value.code == "wipe.session"


def test_refuses_a_record_that_names_another_session_than_its_keys(session: Session, record: WipeRecord) -> None:
    payload = record.as_payload() | {
        "session": session.public_payload(),
        "session_digest": strictjson.b64(bytes(48)),
    }
    assert _code(session.sign("wipe-record", strictjson.dumps(payload)), None) == "wipe.session"


@pytest.mark.parametrize(
    ("change", "code"), [({"boot_id": bytes(16)}, "wipe.boot"), ({"manifest_digest": bytes(48)}, "wipe.manifest")]
)
def test_refuses_a_record_that_does_not_fit_the_request(
    session: Session, record: WipeRecord, asked: request.KeyRequest, change: dict[str, bytes], code: str
) -> None:
    assert _code(dataclasses.replace(record, **change).sign(session), asked) == code  # type: ignore[arg-type]  # bytes fields


@pytest.mark.parametrize(
    ("device", "complete"),
    [
        (dataclasses.replace(WIPED, nonzero_bytes=1), True),
        (dataclasses.replace(WIPED, read_back_bytes=999), True),
        (dataclasses.replace(WIPED, nonzero_bytes=1), False),
        (dataclasses.replace(WIPED, shown=False), True),
    ],
    ids=["nonzero", "not read back", "nonzero though incomplete", "complete though not shown"],
)
def test_refuses_a_record_that_claims_more_than_its_numbers(
    session: Session, record: WipeRecord, device: DeviceWipe, complete: bool
) -> None:
    envelope = dataclasses.replace(record, devices=(device,), complete=complete).sign(session)
    assert _code(envelope, None) == "wipe.contradiction"


def test_reads_an_honest_record_of_an_incomplete_wipe(session: Session, record: WipeRecord) -> None:
    failed = dataclasses.replace(WIPED, nonzero_bytes=5, shown=False)
    honest = dataclasses.replace(record, devices=(WIPED, failed), complete=False)
    assert wiperecord.read_and_verify(honest.sign(session), request=None) == honest


@pytest.mark.parametrize(
    ("change", "code"),
    [({"devices": [1]}, "json.type"), ({"complete": 1}, "json.type"), ({"extra": 1}, "json.unknown")],
)
def test_refuses_malformed_records(session: Session, record: WipeRecord, change: dict[str, object], code: str) -> None:
    payload = record.as_payload() | {"session": session.public_payload()} | change
    with pytest.raises(FormatError) as caught:
        wiperecord.read_and_verify(session.sign("wipe-record", strictjson.dumps(payload)), request=None)
    assert caught.value.code == code
