"""The public half of a session, and sealing to it with HPKE.

HPKE (RFC 9180) base mode, single shot, with the hybrid KEM MLKEM1024-P384 (draft-ietf-hpke-pq), HKDF-SHA384 and
AES-256-GCM. The library gives no associated data in this mode, so all that a sealed key is bound to goes into ``info``
(provisioning/grant.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric import ec, mlkem

from attestation import strictjson
from attestation.errors import FormatError
from attestation.signature import PublicKeys
from attestation.strictjson import Fields, b64
from provisioning.errors import ExchangeRefused

SUITE_NAME: Final = "MLKEM1024_P384/HKDF_SHA384/AES_256_GCM"
SUITE: Final = hpke.Suite(hpke.KEM.MLKEM1024_P384, hpke.KDF.HKDF_SHA384, hpke.AEAD.AES_256_GCM)

MLKEM1024_PUBLIC_BYTES: Final = 1568
P384_PUBLIC_BYTES: Final = 97
# Encapsulation: ML-KEM-1024 ciphertext (1568) and an uncompressed P-384 point (97); then the key and its tag.
SEALED_KEY_BYTES: Final = 1568 + P384_PUBLIC_BYTES + 32 + 16

_DIGEST_LABEL: Final = b"lethe/session/v1\0"


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """What a session shows of itself.

    Attributes:
        mlkem1024: encapsulation key, 1568 bytes (FIPS 203).
        p384: uncompressed point, 97 bytes (SEC 1, section 2.3.3).
        record: verifies what the session signs: key requests and wipe records.
    """

    mlkem1024: bytes
    p384: bytes
    record: PublicKeys

    @property
    def digest(self) -> bytes:
        """SHA-384 that evidence binds, 48 bytes."""
        return hashlib.sha384(_DIGEST_LABEL + strictjson.dumps(self.as_payload())).digest()

    def as_payload(self) -> dict[str, Any]:
        """Give the keys as JSON members."""
        return {
            "suite": SUITE_NAME,
            "mlkem1024": b64(self.mlkem1024),
            "p384": b64(self.p384),
            "record": self.record.as_payload(),
        }

    @classmethod
    def from_payload(cls, members: dict[str, Any], where: str) -> SessionKeys:
        """Read the keys back.

        Raises:
            FormatError: ``session.suite``, ``key.algorithm`` or ``json.*``.
        """
        fields = Fields(members, where)
        suite = fields.text("suite", limit=64)
        if suite != SUITE_NAME:
            raise FormatError(
                "session.suite", found=suite, expected=SUITE_NAME, hint="both sides must run one version of Lethe"
            )
        keys = cls(
            fields.blob("mlkem1024", size=MLKEM1024_PUBLIC_BYTES),
            fields.blob("p384", size=P384_PUBLIC_BYTES),
            PublicKeys.from_payload(fields.mapping("record"), f"{where}.record"),
        )
        fields.end()
        return keys

    @classmethod
    def read(cls, fields: Fields, where: str) -> SessionKeys:
        """Read the member ``session`` of an object that a session made."""
        return cls.from_payload(fields.mapping("session"), f"{where}.session")

    def seal(self, key: memoryview, info: bytes) -> bytes:
        """Encrypt a key so that only the session's private half and the same ``info`` open it.

        Args:
            key: 32 bytes, exposed by the caller.
            info: what the key is bound to.

        Raises:
            ExchangeRefused: ``session.keys`` when the public keys are no valid keys.
        """
        try:
            public = hpke.MLKEM1024P384PublicKey(
                mlkem.MLKEM1024PublicKey.from_public_bytes(self.mlkem1024),
                ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), self.p384),
            )
        except ValueError:
            public = None
        if public is None:
            raise ExchangeRefused(
                "session.keys",
                found="session keys that are no valid keys",
                expected="an ML-KEM-1024 key and a point of P-384",
                hint="make a new request on the appliance",
            )
        return SUITE.encrypt(key, public, info)


def record_keys(members: dict[str, Any]) -> PublicKeys:
    """Find the keys that signed an object of a session, for :func:`provisioning.selfsigned.open_self_signed`."""
    return SessionKeys.read(Fields(members, "payload"), "payload").record
