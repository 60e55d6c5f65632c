"""Evidence as it travels: a platform's word and bytes that nobody has checked yet.

Nothing here says whether the bytes are genuine. They are bounded in size and number before anything looks inside, and
only :func:`attestation.appraise.appraise` turns an :class:`EvidenceSet` into a fact.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from attestation import strictjson
from attestation.errors import FormatError
from attestation.strictjson import Fields, b64

MAX_EVIDENCE_BYTES = 1 << 20
MAX_DEVICES = 32

_PLATFORM_WORD = re.compile(r"[a-z][a-z0-9-]{0,31}")


@dataclass(frozen=True, slots=True)
class Evidence:
    """One signed statement, unchecked.

    Attributes:
        platform: which technology made it, a word such as ``simulated``; it picks the verifier and proves nothing.
        body: the statement's exact bytes with its certificates, 1 byte to 1 MiB.

    Raises:
        FormatError: ``evidence.platform`` or ``evidence.size``.
    """

    platform: str
    body: bytes

    def __post_init__(self) -> None:
        if _PLATFORM_WORD.fullmatch(self.platform) is None:
            raise FormatError(
                "evidence.platform",
                found=ascii(self.platform[:32]),
                expected="a word of a-z, 0-9 and -, at most 32 characters",
                hint="make the key request again",
            )
        if not 0 < len(self.body) <= MAX_EVIDENCE_BYTES:
            raise FormatError(
                "evidence.size",
                found=f"{len(self.body)} bytes",
                expected=f"1 to {MAX_EVIDENCE_BYTES} bytes",
                hint="make the key request again",
            )

    def as_payload(self) -> dict[str, Any]:
        """Give the evidence as JSON members."""
        return {"platform": self.platform, "body": b64(self.body)}

    @classmethod
    def from_payload(cls, members: dict[str, Any], where: str = "evidence") -> Evidence:
        """Read the evidence back.

        Raises:
            FormatError: ``json.*``, ``evidence.platform`` or ``evidence.size``.
        """
        fields = Fields(members, where)
        evidence = cls(fields.text("platform", limit=32), fields.blob("body", limit=MAX_EVIDENCE_BYTES))
        fields.end()
        return evidence


@dataclass(frozen=True, slots=True)
class EvidenceSet:
    """All evidence of one machine, unchecked.

    Attributes:
        cpu: the statement of the confidential machine.
        devices: one per device; the position is the device's ordinal and decides its nonce. At most 32.

    Raises:
        FormatError: ``evidence.devices`` for too many.
    """

    cpu: Evidence
    devices: tuple[Evidence, ...]

    def __post_init__(self) -> None:
        if len(self.devices) > MAX_DEVICES:
            raise FormatError(
                "evidence.devices",
                found=f"{len(self.devices)} devices",
                expected=f"at most {MAX_DEVICES}",
                hint="make the key request again",
            )

    @property
    def platforms(self) -> tuple[str, ...]:
        """The distinct platform words, sorted."""
        return tuple(sorted({self.cpu.platform, *(device.platform for device in self.devices)}))

    @property
    def digest(self) -> bytes:
        """SHA-384 over the set's JSON form, 48 bytes: names exactly this evidence in results and journals."""
        return hashlib.sha384(strictjson.dumps(self.as_payload())).digest()

    def as_payload(self) -> dict[str, Any]:
        """Give the set as JSON members."""
        return {"cpu": self.cpu.as_payload(), "devices": [device.as_payload() for device in self.devices]}

    @classmethod
    def from_payload(cls, members: dict[str, Any], where: str = "evidence") -> EvidenceSet:
        """Read the set back.

        Raises:
            FormatError: ``json.*`` or ``evidence.*``.
        """
        fields = Fields(members, where)
        cpu = Evidence.from_payload(fields.mapping("cpu"), f"{where}.cpu")
        devices = tuple(
            Evidence.from_payload(item, f"{where}.devices[{ordinal}]")
            for ordinal, item in enumerate(fields.mappings("devices", limit=MAX_DEVICES))
        )
        fields.end()
        return cls(cpu, devices)
