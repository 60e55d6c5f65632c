"""Judge simulated evidence: the numbered checks of docs/spec/appraisal.md, section 5.

Signature first, meaning after: a certificate or report is parsed only when the signature over its exact bytes leads to
the root that the policy pins. A check that could not be made, because one before it refused, is refused too.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeVar

from attestation import dsse
from attestation.binding import Binding
from attestation.clock import format_time
from attestation.errors import EvidenceNotGenuine, FormatError, SignatureRefused
from attestation.evidence import Evidence
from attestation.policy import PlatformRules
from attestation.result import Check
from attestation.rule import judge
from attestation.signature import PublicKeys
from attestation.simulated import abi
from attestation.simulated.rules import PLATFORM, RULES

NOT_PROVEN: Final = (
    "that there is a confidential machine: whoever holds the laboratory's files can sign any of these statements",
    "that the measured files are the code that runs: the simulated machine measures itself",
    "that the devices exist or that their memory is closed to the host",
)

_AGAIN: Final = "collect the evidence again with lethe request"
_NOT_JUDGED: Final = "not judged"
_SEE_FIRST: Final = "not judged, because a check before it refused; see that one first"

# Number of each check of a processor (docs/spec/appraisal.md, section 5).
_CPU_NUMBERS: Final[Mapping[str, str]] = {
    "cpu.form": "1.1",
    "cpu.root": "1.2",
    "cpu.certificate": "1.3",
    "cpu.signature": "1.4",
    "cpu.identity": "1.5",
    "cpu.report_data": "1.6",
    "cpu.validity": "2.1",
    "chip_id": "3.3",
    "measurement": "3.4",
    "tcb": "3.5",
    "debug": "3.6",
}
# Number of each check of one device; the ordinal follows in brackets.
_DEVICE_NUMBERS: Final[Mapping[str, str]] = {
    "device.form": "1.7",
    "device.root": "1.8",
    "device.certificate": "1.9",
    "device.signature": "1.10",
    "device.identity": "1.11",
    "device.nonce": "1.12",
    "device.validity": "2.2",
    "device_model": "3.8",
    "device_measurement": "3.9",
    "cc_mode": "3.10",
}
_DISTINCT_NUMBER: Final = "1.13"
_COUNT_NUMBER: Final = "3.7"

_HINTS: Final = {spec.name: spec.hint for spec in RULES}

_Report = TypeVar("_Report")


@dataclass(frozen=True, slots=True)
class _Place:
    """The processor or one device, and the checks made of it so far."""

    role: abi.Role
    numbers: Mapping[str, str]
    suffix: str
    made: dict[str, Check]

    def number(self, name: str) -> str:
        return self.numbers[name] + self.suffix

    def passed(self, name: str, seen: str, expected: str) -> None:
        self.made[name] = Check(self.number(name), f"{PLATFORM}.{name}", "pass", seen, expected, "")

    def refused(self, name: str, seen: str, expected: str, hint: str) -> None:
        self.made[name] = Check(self.number(name), f"{PLATFORM}.{name}", "refused", seen, expected, hint)

    def compared(self, name: str, seen: bytes, expected: bytes, hint: str) -> None:
        # Constant time costs nothing here and leaves no question to answer.
        if hmac.compare_digest(seen, expected):
            self.passed(name, seen.hex(), expected.hex())
        else:
            self.refused(name, seen.hex(), expected.hex(), hint)

    def ruled(self, rules: PlatformRules, name: str, seen: str | int | bool) -> None:
        number, full_name = self.number(name), f"{PLATFORM}.{name}"
        self.made[name] = judge(rules[name], seen, number=number, name=full_name, hint=_HINTS[name])

    def all_checks(self) -> list[Check]:
        """Give every check of this place; one that was never made is refused."""
        for name in self.numbers:
            if name not in self.made:
                self.refused(name, _NOT_JUDGED, "genuine evidence", _SEE_FIRST)
        return [self.made[name] for name in self.numbers]


def examine_cpu(evidence: Evidence, *, report_data: bytes, rules: PlatformRules, at: datetime) -> list[Check]:
    """Judge the processor's evidence.

    Args:
        evidence: unchecked.
        report_data: what the report must carry, 64 bytes.
        rules: the policy's rules for this platform.
        at: the time to judge for, UTC.

    Returns:
        Every check of the processor; the caller decides what follows from a refused one.
    """
    place = _Place("cpu", _CPU_NUMBERS, "", {})
    proven = _prove(place, evidence, rules, abi.read_cpu_report)
    if proven is not None:
        certificate, report = proven
        place.compared("cpu.identity", report.chip_id, certificate.identity, _AGAIN)
        hint = "this evidence was made for another challenge, session or device set; " + _AGAIN
        place.compared("cpu.report_data", report.report_data, report_data, hint)
        _judge_validity(place, certificate, at)
        place.ruled(rules, "chip_id", report.chip_id.hex())
        place.ruled(rules, "measurement", report.measurement.hex())
        place.ruled(rules, "tcb", report.tcb)
        place.ruled(rules, "debug", report.debug)
    return place.all_checks()


def examine_devices(
    devices: Mapping[int, Evidence], *, binding: Binding, rules: PlatformRules, at: datetime
) -> list[Check]:
    """Judge the evidence of all devices of this platform.

    Args:
        devices: unchecked evidence by ordinal.
        binding: gives each device's nonce.
        rules: the policy's rules for this platform.
        at: the time to judge for, UTC.

    Returns:
        Every check of every device, and those of the set.
    """
    count = judge(
        rules["devices"], len(devices), number=_COUNT_NUMBER, name=f"{PLATFORM}.devices", hint=_HINTS["devices"]
    )
    checks = [count]
    identities: list[bytes] = []
    for ordinal, evidence in devices.items():
        place = _Place("device", _DEVICE_NUMBERS, f"[{ordinal}]", {})
        proven = _prove(place, evidence, rules, abi.read_device_report)
        if proven is not None:
            certificate, report = proven
            # Both names count: the certified one, and the one the device gives itself.
            identities += {certificate.identity, report.device_id}
            place.compared("device.identity", report.device_id, certificate.identity, _AGAIN)
            hint = "this report answers another challenge or another place; " + _AGAIN
            place.compared("device.nonce", report.nonce, binding.device_nonce(ordinal), hint)
            _judge_validity(place, certificate, at)
            place.ruled(rules, "device_model", report.model)
            place.ruled(rules, "device_measurement", report.measurement.hex())
            place.ruled(rules, "cc_mode", report.cc_mode)
        checks += place.all_checks()
    return [*checks, _judge_distinct(identities)]


def _judge_distinct(identities: list[bytes]) -> Check:
    name, expected = f"{PLATFORM}.devices.distinct", "each device once"
    repeated = sorted({identity.hex() for identity in identities if identities.count(identity) > 1})
    if repeated:
        hint = "one device answers for two; check that every device is present, then request again"
        return Check(_DISTINCT_NUMBER, name, "refused", f"device {', '.join(repeated)} more than once", expected, hint)
    return Check(_DISTINCT_NUMBER, name, "pass", f"{len(set(identities))} identities", expected, "")


def _prove(
    place: _Place, evidence: Evidence, rules: PlatformRules, read_report: Callable[[bytes], _Report]
) -> tuple[abi.Certificate, _Report] | None:
    """Walk from the pinned root to the report; the first step that fails ends the walk with None."""
    role = place.role
    step = f"{role}.form"
    try:
        body = abi.read_body(evidence.body, role)
        root = abi.read_root(body.root)
        place.passed(step, f"{len(evidence.body)} bytes", f"{abi.MAGIC.decode('ascii')} version {abi.VERSION}")

        # The root in the evidence is only the preimage of the pinned digest; names in it count for nothing.
        step = f"{role}.root"
        digest = hashlib.sha384(body.root).hexdigest()
        pinned = judge(rules["root"], digest, number=place.number(step), name=f"{PLATFORM}.{step}", hint=_HINTS["root"])
        place.made[step] = pinned
        if pinned.outcome != "pass":
            return None

        step = f"{role}.certificate"
        certificate = abi.read_certificate(_opened(body.certificate, abi.CERTIFICATE_KIND, root))
        if certificate.role != role:
            abi.refuse(f"a certificate for the role {certificate.role}", role)
        place.passed(step, f"{role} {certificate.identity.hex()}", "signed by the pinned root")

        step = f"{role}.signature"
        report = read_report(_opened(body.report, abi.REPORT_KINDS[role], certificate.keys))
        place.passed(step, f"key {certificate.keys.key_id}", "signed by the certified key")
    except EvidenceNotGenuine as error:
        place.refused(step, error.found, error.expected, error.hint)
        return None
    return certificate, report


def _opened(envelope: bytes, kind: str, keys: PublicKeys) -> bytes:
    """Check an envelope and give its payload; only EvidenceNotGenuine comes out."""
    try:
        return dsse.verify(envelope, kind, [keys], limit=abi.MAX_PAYLOAD_BYTES)
    except (FormatError, SignatureRefused) as error:
        raise EvidenceNotGenuine("simulated.form", found=error.found, expected=error.expected, hint=_AGAIN) from None


def _judge_validity(place: _Place, certificate: abi.Certificate, at: datetime) -> None:
    name = f"{place.role}.validity"
    expected = f"{format_time(certificate.not_before)} to {format_time(certificate.not_after)}"
    seen = format_time(at)
    if at < certificate.not_before:
        place.refused(name, seen, expected, "the certificate is not valid yet; check the clock of this machine")
    elif at > certificate.not_after:
        place.refused(name, seen, expected, "the certificate has ended; make a new laboratory and pin its root")
    else:
        place.passed(name, seen, expected)
