"""Layout of simulated evidence: bytes to fields and back, pure (docs/spec/appraisal.md, section 4).

Reading a field here proves nothing; attestation/simulated/verify.py reads a certificate or report only after the
signature over its exact bytes was checked. Every parser raises :class:`EvidenceNotGenuine` and nothing else, and what
it accepts has one form: writing it again gives the same bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, NoReturn, Protocol, TypeVar

from attestation import strictjson
from attestation.binding import DEVICE_NONCE_BYTES, REPORT_DATA_BYTES
from attestation.clock import format_time
from attestation.errors import EvidenceNotGenuine, FormatError
from attestation.rule import MAX_INTEGER
from attestation.signature import PublicKeys
from attestation.simulated.rules import CC_MODES, DIGEST_BYTES, IDENTITY_BYTES
from attestation.strictjson import Fields, b64

Role = Literal["cpu", "device"]

MAGIC: Final = b"LETHE-SIMULATED-EVIDENCE"
VERSION: Final = 1
_ROLE_NUMBERS: Final[dict[Role, int]] = {"cpu": 1, "device": 2}
# Magic, version, role, then the lengths of the three parts; big-endian.
_HEAD: Final = struct.Struct(">24sHHIII")
MAX_PART_BYTES: Final = 64 << 10
# DSSE payload limit of certificates and reports.
MAX_PAYLOAD_BYTES: Final = 16 << 10

CERTIFICATE_KIND: Final = "simulated-certificate"
REPORT_KINDS: Final[dict[Role, str]] = {"cpu": "simulated-cpu-report", "device": "simulated-device-report"}

_HINT: Final = "collect the evidence again with lethe request"


class _Written(Protocol):
    def as_payload(self) -> Mapping[str, Any]: ...


_Read = TypeVar("_Read", bound=_Written)


def refuse(found: str, expected: str) -> NoReturn:
    """Raise the one error of this module."""
    raise EvidenceNotGenuine("simulated.form", found=found, expected=expected, hint=_HINT)


@dataclass(frozen=True, slots=True)
class Body:
    """The three parts of one piece of evidence, unchecked.

    Attributes:
        root: the laboratory root's public keys as JSON; compared with the policy's pinned digest, never trusted.
        certificate: DSSE envelope, signed by the root.
        report: DSSE envelope, signed by the key in the certificate.
    """

    root: bytes
    certificate: bytes
    report: bytes


def write_body(body: Body, role: Role) -> bytes:
    """Join the parts behind the head."""
    parts = (body.root, body.certificate, body.report)
    head = _HEAD.pack(MAGIC, VERSION, _ROLE_NUMBERS[role], *(len(part) for part in parts))
    return head + b"".join(parts)


def read_body(data: bytes, role: Role) -> Body:
    """Cut evidence into its parts; nothing may be missing and nothing may follow.

    Raises:
        EvidenceNotGenuine: another magic, version or role, a part that is empty or too long, another total length.
    """
    if len(data) < _HEAD.size:
        refuse(f"{len(data)} bytes", f"at least {_HEAD.size} bytes")
    magic, version, number, *lengths = _HEAD.unpack_from(data)
    if magic != MAGIC:
        refuse("another magic", MAGIC.decode("ascii"))
    if version != VERSION:
        refuse(f"version {version}", f"version {VERSION}")
    if number != _ROLE_NUMBERS[role]:
        refuse(f"role {number}", f"role {_ROLE_NUMBERS[role]} ({role})")
    if not all(0 < length <= MAX_PART_BYTES for length in lengths):
        refuse(f"parts of {', '.join(map(str, lengths))} bytes", f"1 to {MAX_PART_BYTES} bytes each")
    total = _HEAD.size + sum(lengths)
    if len(data) != total:
        refuse(f"{len(data)} bytes", f"{total} bytes by its own head")
    first = _HEAD.size + lengths[0]
    second = first + lengths[1]
    return Body(data[_HEAD.size : first], data[first:second], data[second:])


def _in_one_form(read: Callable[[], _Read], data: bytes, what: str) -> _Read:
    try:
        value = read()
    except FormatError as error:
        refuse(f"a {what} with {error.found}", error.expected)
    # One form, so that a digest over the bytes is a digest of the meaning.
    if strictjson.dumps(value.as_payload()) != data:
        refuse(f"a {what} in another form", "sorted members without spaces")
    return value


def write_root(keys: PublicKeys) -> bytes:
    """Give the root's public keys in the form whose SHA-384 a policy pins."""
    return strictjson.dumps(keys.as_payload())


def read_root(data: bytes) -> PublicKeys:
    """Read the root's public keys.

    Raises:
        EvidenceNotGenuine: they are no hybrid public keys in the one form.
    """

    def read() -> PublicKeys:
        return PublicKeys.from_payload(strictjson.loads(data, limit=MAX_PART_BYTES), "root")

    return _in_one_form(read, data, "root")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The root's statement about one key.

    Attributes:
        role: whether the key signs for a processor or for a device.
        identity: chip id or device id, 32 bytes.
        keys: the certified public keys.
        not_before: start of validity, the payload's issue time.
        not_after: natural end.
    """

    role: Role
    identity: bytes
    keys: PublicKeys
    not_before: datetime
    not_after: datetime

    def as_payload(self) -> dict[str, Any]:
        """Give the certificate as JSON members."""
        return {
            **strictjson.header(CERTIFICATE_KIND, epoch=1, issued_at=format_time(self.not_before)),
            "role": self.role,
            "identity": self.identity.hex(),
            "keys": self.keys.as_payload(),
            "not_after": format_time(self.not_after),
        }


def read_certificate(data: bytes) -> Certificate:
    """Read a certificate whose signature was checked.

    Raises:
        EvidenceNotGenuine: it is malformed.
    """

    def read() -> Certificate:
        fields = Fields(strictjson.loads(data, limit=MAX_PAYLOAD_BYTES), "certificate")
        _, not_before = strictjson.read_header(fields, CERTIFICATE_KIND)
        certificate = Certificate(
            role=_role(fields.text("role", limit=8)),
            identity=read_hex(fields, "identity", IDENTITY_BYTES),
            keys=PublicKeys.from_payload(fields.mapping("keys"), "certificate.keys"),
            not_before=not_before,
            not_after=fields.time("not_after"),
        )
        fields.end()
        return certificate

    return _in_one_form(read, data, "certificate")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReport:
    """What the simulated processor says; as on hardware it carries no time, freshness is in ``report_data``.

    Attributes:
        chip_id: identity of the processor, 32 bytes.
        measurement: SHA-384 over the installed product, 48 bytes.
        tcb: version of the simulated firmware.
        debug: whether the host may read the machine's memory.
        report_data: see attestation/binding.py, 64 bytes.
    """

    chip_id: bytes
    measurement: bytes
    tcb: int
    debug: bool
    report_data: bytes

    def as_payload(self) -> dict[str, Any]:
        """Give the report as JSON members."""
        return {
            "type": REPORT_KINDS["cpu"],
            "version": VERSION,
            "chip_id": self.chip_id.hex(),
            "measurement": self.measurement.hex(),
            "tcb": self.tcb,
            "debug": self.debug,
            "report_data": b64(self.report_data),
        }


def read_cpu_report(data: bytes) -> CpuReport:
    """Read a processor's report whose signature was checked.

    Raises:
        EvidenceNotGenuine: it is malformed.
    """

    def read() -> CpuReport:
        fields = _report_fields(data, "cpu")
        report = CpuReport(
            chip_id=read_hex(fields, "chip_id", IDENTITY_BYTES),
            measurement=read_hex(fields, "measurement", DIGEST_BYTES),
            tcb=fields.integer("tcb", high=MAX_INTEGER),
            debug=fields.flag("debug"),
            report_data=fields.blob("report_data", size=REPORT_DATA_BYTES),
        )
        fields.end()
        return report

    return _in_one_form(read, data, "report")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """What one simulated device says.

    Attributes:
        model: name of its kind, at most 64 characters.
        device_id: identity of the device, 32 bytes.
        nonce: the nonce it was asked with, 32 bytes.
        cc_mode: confidential computing ``on``, ``off``, or ``devtools`` (on, with debugging open).
        measurement: SHA-384 over its firmware, 48 bytes.
    """

    model: str
    device_id: bytes
    nonce: bytes
    cc_mode: str
    measurement: bytes

    def as_payload(self) -> dict[str, Any]:
        """Give the report as JSON members."""
        return {
            "type": REPORT_KINDS["device"],
            "version": VERSION,
            "model": self.model,
            "device_id": self.device_id.hex(),
            "nonce": b64(self.nonce),
            "cc_mode": self.cc_mode,
            "measurement": self.measurement.hex(),
        }


def read_device_report(data: bytes) -> DeviceReport:
    """Read a device's report whose signature was checked.

    Raises:
        EvidenceNotGenuine: it is malformed.
    """

    def read() -> DeviceReport:
        fields = _report_fields(data, "device")
        report = DeviceReport(
            model=fields.text("model", limit=64),
            device_id=read_hex(fields, "device_id", IDENTITY_BYTES),
            nonce=fields.blob("nonce", size=DEVICE_NONCE_BYTES),
            cc_mode=read_cc_mode(fields),
            measurement=read_hex(fields, "measurement", DIGEST_BYTES),
        )
        fields.end()
        return report

    return _in_one_form(read, data, "report")


def _report_fields(data: bytes, role: Role) -> Fields:
    fields = Fields(strictjson.loads(data, limit=MAX_PAYLOAD_BYTES), "report")
    kind = fields.text("type", limit=64)
    version = fields.integer("version", high=1 << 16)
    if (kind, version) != (REPORT_KINDS[role], VERSION):
        refuse(f"{kind} version {version}", f"{REPORT_KINDS[role]} version {VERSION}")
    return fields


def _role(word: str) -> Role:
    if word == "cpu":
        return "cpu"
    if word == "device":
        return "device"
    refuse(f"a certificate for the role {word}", "cpu or device")


def read_cc_mode(fields: Fields) -> str:
    """Read a confidential-computing mode; an unknown word is refused."""
    word = fields.text("cc_mode", limit=16)
    if word not in CC_MODES:
        refuse(f"cc_mode {word}", f"one of {', '.join(CC_MODES)}")
    return word


def read_hex(fields: Fields, name: str, size: int) -> bytes:
    """Read ``size`` bytes in lower-case hex, the form of digests and identities that people compare."""
    text = fields.text(name, limit=size * 2)
    if re.fullmatch(f"[0-9a-f]{{{size * 2}}}", text) is None:
        refuse(f"{name} {text!a:.40}", f"{size * 2} lower-case hex digits")
    return bytes.fromhex(text)
