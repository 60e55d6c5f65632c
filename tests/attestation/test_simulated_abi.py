"""Invariant: any bytes give the fields, whose writing gives the same bytes, or EvidenceNotGenuine."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attestation import strictjson
from attestation.errors import EvidenceNotGenuine
from attestation.evidence import EvidenceSet
from attestation.signature import PrivateKeys
from attestation.simulated import abi

BODY = abi.Body(b"root", b"certificate", b"report")
CPU = abi.CpuReport(chip_id=bytes(32), measurement=bytes(48), tcb=3, debug=False, report_data=bytes(64))
DEVICE = abi.DeviceReport(model="m", device_id=bytes(32), nonce=bytes(32), cc_mode="on", measurement=bytes(48))


def refusal(read: Callable[[], object]) -> EvidenceNotGenuine:
    with pytest.raises(EvidenceNotGenuine) as caught:
        read()
    assert caught.value.exit_status == 3
    return caught.value


@given(st.binary(min_size=1), st.binary(min_size=1), st.binary(min_size=1), st.sampled_from(["cpu", "device"]))
def test_a_frame_reads_back(root: bytes, certificate: bytes, report: bytes, role: Any) -> None:
    body = abi.Body(root, certificate, report)
    written = abi.write_body(body, role)
    assert abi.read_body(written, role) == body
    assert abi.write_body(abi.read_body(written, role), role) == written


def test_refuses_every_truncation_and_a_byte_more() -> None:
    data = abi.write_body(BODY, "cpu")
    for length in range(len(data)):
        refusal(lambda length=length: abi.read_body(data[:length], "cpu"))
    refusal(lambda: abi.read_body(data + b"\0", "cpu"))


def test_refuses_every_flipped_bit_of_the_head() -> None:
    data = abi.write_body(BODY, "cpu")
    for place in range(40):
        for bit in range(8):
            spoiled = bytearray(data)
            spoiled[place] ^= 1 << bit
            refusal(lambda spoiled=spoiled: abi.read_body(bytes(spoiled), "cpu"))


def test_refuses_the_other_role() -> None:
    assert refusal(lambda: abi.read_body(abi.write_body(BODY, "device"), "cpu")).found == "role 2"


@pytest.mark.parametrize("lengths", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (65537, 1, 1), (1, 1, 0xFFFFFFFF)])
def test_refuses_parts_out_of_bounds(lengths: tuple[int, int, int]) -> None:
    head = struct.pack(">24sHHIII", abi.MAGIC, 1, 1, *lengths)
    refusal(lambda: abi.read_body(head + bytes(min(sum(lengths), 70_000)), "cpu"))


@given(st.binary(max_size=120))
@settings(deadline=None, max_examples=200)
def test_any_bytes_behind_a_good_magic_are_refused_or_read(data: bytes) -> None:
    for candidate in (data, abi.MAGIC + data):
        try:
            body = abi.read_body(candidate, "cpu")
        except EvidenceNotGenuine:
            continue
        assert abi.write_body(body, "cpu") == candidate


def certificate(keys: PrivateKeys) -> abi.Certificate:
    at = datetime(2026, 11, 30, tzinfo=UTC)
    return abi.Certificate(role="cpu", identity=bytes(32), keys=keys.public, not_before=at, not_after=at)


def test_payloads_read_back(keys: PrivateKeys) -> None:
    made = certificate(keys)
    assert abi.read_certificate(strictjson.dumps(made.as_payload())) == made
    device = dataclasses.replace(made, role="device")
    assert abi.read_certificate(strictjson.dumps(device.as_payload())) == device
    assert abi.read_cpu_report(strictjson.dumps(CPU.as_payload())) == CPU
    assert abi.read_device_report(strictjson.dumps(DEVICE.as_payload())) == DEVICE
    assert abi.read_root(abi.write_root(keys.public)) == keys.public


@pytest.mark.parametrize(
    "change",
    [
        {"type": "simulated-device-report"},
        {"version": 2},
        {"chip_id": "AB" * 32},
        {"chip_id": "ab" * 31},
        {"chip_id": 1},
        {"measurement": "ab" * 47},
        {"tcb": -1},
        {"tcb": 3.0},
        {"tcb": True},
        {"debug": 0},
        {"debug": "false"},
        {"report_data": ""},
        {"report_data": strictjson.b64(bytes(63))},
        {"vmpl": 0},
    ],
)
def test_refuses_a_malformed_cpu_report(change: dict[str, Any]) -> None:
    members = CPU.as_payload() | change
    if isinstance(members["tcb"], float):
        data = strictjson.dumps(CPU.as_payload()).replace(b'"tcb":3', b'"tcb":3.0')
    else:
        data = strictjson.dumps(members)
    refusal(lambda: abi.read_cpu_report(data))


@pytest.mark.parametrize(
    "change",
    [
        {"type": "simulated-cpu-report"},
        {"model": "a\nb"},
        {"model": "m" * 65},
        {"device_id": ""},
        {"nonce": strictjson.b64(bytes(31))},
        {"cc_mode": "On"},
        {"cc_mode": "unknown"},
        {"measurement": "zz" * 48},
        {"extra": 1},
    ],
)
def test_refuses_a_malformed_device_report(change: dict[str, Any]) -> None:
    refusal(lambda: abi.read_device_report(strictjson.dumps(DEVICE.as_payload() | change)))


@pytest.mark.parametrize(
    "change",
    [
        {"type": "grant"},
        {"version": 2},
        {"epoch": 2},
        {"role": "root"},
        {"identity": "00"},
        {"keys": {}},
        {"issued_at": "2026-11-30"},
        {"not_after": "never"},
        {"ca": True},
    ],
)
def test_refuses_a_malformed_certificate(keys: PrivateKeys, change: dict[str, Any]) -> None:
    refusal(lambda: abi.read_certificate(strictjson.dumps(certificate(keys).as_payload() | change)))


def test_every_payload_has_one_form(keys: PrivateKeys) -> None:
    readers: list[tuple[Callable[[bytes], object], bytes]] = [
        (abi.read_root, abi.write_root(keys.public)),
        (abi.read_certificate, strictjson.dumps(certificate(keys).as_payload())),
        (abi.read_cpu_report, strictjson.dumps(CPU.as_payload())),
        (abi.read_device_report, strictjson.dumps(DEVICE.as_payload())),
    ]
    for read, data in readers:
        assert read(data) is not None
        # The same meaning, spelt with one space more, would have another digest.
        assert "another form" in refusal(lambda read=read, data=data: read(data.replace(b":", b": ", 1))).found


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=100)
def test_any_payload_bytes_give_our_own_error(data: bytes) -> None:
    for read in (abi.read_root, abi.read_certificate, abi.read_cpu_report, abi.read_device_report):
        refusal(lambda read=read: read(data))


def test_evidence_is_small(genuine: EvidenceSet) -> None:
    sizes = [len(item.body) for item in (genuine.cpu, *genuine.devices)]
    assert max(sizes) < 32 << 10
