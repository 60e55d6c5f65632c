"""What one session's evidence must be bound to: report data and device nonces (docs/spec/appraisal.md, section 2).

A report proves something about *this* session only because its 64 bytes of report data are this digest. Every input
has a label and a length in front, so no two different bindings have the same bytes under the hash, and a report made
for another protocol or another version of this one has another first item.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from attestation.evidence import MAX_DEVICES, Evidence
from attestation.strictjson import Fields, b64

REPORT_DATA_LABEL = b"lethe/report-data/v1"
DEVICE_NONCE_LABEL = b"lethe/device-nonce/v1"
DEVICE_EVIDENCE_LABEL = b"lethe/device-evidence/v1"

# Of the owner's challenge, and of SHA-384, which names every object here.
NONCE_BYTES = 32
DIGEST_BYTES = 48
BOOT_ID_BYTES = 16
REPORT_DATA_BYTES = 64
DEVICE_NONCE_BYTES = 32

_FIELD_BYTES = {
    "nonce": NONCE_BYTES,
    "session_key_digest": DIGEST_BYTES,
    "tls_key_digest": DIGEST_BYTES,
    "policy_digest": DIGEST_BYTES,
    "manifest_digest": DIGEST_BYTES,
    "config_digest": DIGEST_BYTES,
    "boot_id": BOOT_ID_BYTES,
}


def frame(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Join labelled values so that the result has one reading.

    Each item is: label length (2 bytes), label, value length (4 bytes), value; lengths are big-endian.
    """
    parts: list[bytes] = []
    for label, value in items:
        parts += (struct.pack(">H", len(label)), label, struct.pack(">I", len(value)), value)
    return b"".join(parts)


def device_evidence_digest(devices: Sequence[Evidence]) -> bytes:
    """Give SHA-384 over all device evidence in ordinal order, 48 bytes.

    Inside the report data it lets the CPU's report vouch for the set: a device that is missing, added, exchanged or
    moved to another place gives another digest.
    """
    items = [(b"protocol", DEVICE_EVIDENCE_LABEL), (b"count", struct.pack(">I", len(devices)))]
    for device in devices:
        items += [(b"platform", device.platform.encode("ascii")), (b"evidence", device.body)]
    return hashlib.sha384(frame(items)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The values that evidence of one session is made over.

    Attributes:
        nonce: the owner's challenge, 32 bytes.
        session_key_digest: SHA-384 of the session's public keys, 48 bytes.
        tls_key_digest: SHA-384 of the API's TLS public key, 48 bytes.
        policy_digest: SHA-384 of the appraisal policy, 48 bytes.
        manifest_digest: SHA-384 of the manifest payload, 48 bytes.
        config_digest: SHA-384 of the appliance's configuration, 48 bytes.
        boot_id: the kernel's random identifier of this boot, 16 bytes.

    Raises:
        ValueError: a field of another length; nothing is padded or cut.
    """

    nonce: bytes
    session_key_digest: bytes
    tls_key_digest: bytes
    policy_digest: bytes
    manifest_digest: bytes
    config_digest: bytes
    boot_id: bytes

    def __post_init__(self) -> None:
        for name, size in _FIELD_BYTES.items():
            if len(getattr(self, name)) != size:
                raise ValueError(f"binding.{name} must be {size} bytes")

    def device_nonce(self, ordinal: int) -> bytes:
        """Give the nonce that the device at ``ordinal`` must answer, 32 bytes: no report can serve two places.

        Raises:
            ValueError: an ordinal that no device can have.
        """
        if not 0 <= ordinal < MAX_DEVICES:
            raise ValueError(f"device ordinal {ordinal} is not in 0 to {MAX_DEVICES - 1}")
        items = [
            (b"protocol", DEVICE_NONCE_LABEL),
            (b"nonce", self.nonce),
            (b"ordinal", struct.pack(">I", ordinal)),
        ]
        return hashlib.sha256(frame(items)).digest()

    def report_data(self, device_digest: bytes) -> bytes:
        """Give the 64 bytes that the CPU's report must carry.

        Args:
            device_digest: :func:`device_evidence_digest` of the set beside the report, 48 bytes.

        Raises:
            ValueError: a device digest of another length.
        """
        if len(device_digest) != DIGEST_BYTES:
            raise ValueError(f"device evidence digest must be {DIGEST_BYTES} bytes")
        items = [
            (b"protocol", REPORT_DATA_LABEL),
            (b"nonce", self.nonce),
            (b"session-key", self.session_key_digest),
            (b"tls-key", self.tls_key_digest),
            (b"device-evidence", device_digest),
            (b"policy", self.policy_digest),
            (b"manifest", self.manifest_digest),
            (b"config", self.config_digest),
            (b"boot-id", self.boot_id),
        ]
        return hashlib.sha512(frame(items)).digest()

    def as_payload(self) -> dict[str, str]:
        """Give the binding as JSON members."""
        return {field.name: b64(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_payload(cls, members: dict[str, Any], where: str = "binding") -> Binding:
        """Read the binding back.

        Raises:
            FormatError: ``json.*``.
        """
        read = Fields(members, where)
        values = {name: read.blob(name, size=size) for name, size in _FIELD_BYTES.items()}
        read.end()
        return cls(**values)
