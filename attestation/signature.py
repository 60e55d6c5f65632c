"""Hybrid signatures: ML-DSA-87 together with ECDSA P-384 (or Ed25519), and both must verify.

ML-DSA-87 holds against a quantum computer (FIPS 204, CNSA 2.0); the classical half holds should ML-DSA fall. A key pair
is one object with one id; half a signature is no signature.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, mldsa

from attestation.errors import FormatError, SignatureRefused
from attestation.strictjson import Fields, b64

Classical = Literal["ecdsa-p384", "ed25519"]

MLDSA87_PUBLIC_BYTES = 2592
MLDSA87_SIGNATURE_BYTES = 4627
_CLASSICAL_PUBLIC_BYTES: dict[str, int] = {"ecdsa-p384": 97, "ed25519": 32}
CLASSICAL_SIGNATURE_LIMIT = 104

# Bound into ML-DSA's context string (FIPS 204, section 5.2), so a Lethe signature is none for another protocol.
CONTEXT = b"lethe/signature/v1"


@dataclass(frozen=True, slots=True)
class HybridSignature:
    """One signature of each half over the same message.

    Attributes:
        post_quantum: ML-DSA-87 signature, 4627 bytes.
        classical: ECDSA P-384 with SHA-384 in DER, or Ed25519 (64 bytes).
    """

    post_quantum: bytes
    classical: bytes


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """The public halves of a hybrid key pair.

    Attributes:
        post_quantum: ML-DSA-87 public key, 2592 bytes (FIPS 204).
        classical: uncompressed P-384 point (97 bytes, SEC 1 section 2.3.3) or Ed25519 key (32 bytes).
        algorithm: which classical half.
    """

    post_quantum: bytes
    classical: bytes
    algorithm: Classical

    @property
    def key_id(self) -> str:
        """SHA-384 over algorithm and both halves, 96 hex digits."""
        digest = hashlib.sha384(b"lethe/key-id/v1\0" + self.algorithm.encode() + b"\0")
        digest.update(self.post_quantum + self.classical)
        return digest.hexdigest()

    def verify(self, message: bytes, signature: HybridSignature, *, what: str) -> None:
        """Check both halves.

        Args:
            message: the exact bytes that were signed.
            signature: both halves.
            what: the object's kind, for the error text.

        Raises:
            SignatureRefused: ``signature.wrong`` when either half does not verify.
        """
        try:
            mldsa.MLDSA87PublicKey.from_public_bytes(self.post_quantum).verify(signature.post_quantum, message, CONTEXT)
            if self.algorithm == "ed25519":
                ed25519.Ed25519PublicKey.from_public_bytes(self.classical).verify(signature.classical, message)
            else:
                point = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), self.classical)
                point.verify(signature.classical, message, ec.ECDSA(hashes.SHA384()))
        except (InvalidSignature, ValueError):
            raise SignatureRefused(
                "signature.wrong",
                found=f"a {what} whose signature by {self.key_id[:16]} does not verify",
                expected="the bytes that were signed",
                hint="the file was changed after signing; get it again",
            ) from None

    def as_payload(self) -> dict[str, str]:
        """Give the keys as JSON members."""
        return {
            "algorithm": f"ml-dsa-87+{self.algorithm}",
            "ml_dsa_87": b64(self.post_quantum),
            "classical": b64(self.classical),
        }

    @classmethod
    def from_payload(cls, members: dict[str, Any], where: str) -> PublicKeys:
        """Read the keys back.

        Raises:
            FormatError: ``key.algorithm``, or ``json.*`` for a half of the wrong length.
        """
        fields = Fields(members, where)
        name = fields.text("algorithm", limit=32)
        classical: Classical
        if name == "ml-dsa-87+ecdsa-p384":
            classical = "ecdsa-p384"
        elif name == "ml-dsa-87+ed25519":
            classical = "ed25519"
        else:
            raise FormatError(
                "key.algorithm",
                found=name,
                expected="ml-dsa-87+ecdsa-p384 or ml-dsa-87+ed25519",
                hint="make the keys with lethe-owner keygen",
            )
        keys = cls(
            fields.blob("ml_dsa_87", size=MLDSA87_PUBLIC_BYTES),
            fields.blob("classical", size=_CLASSICAL_PUBLIC_BYTES[classical]),
            classical,
        )
        fields.end()
        return keys


class PrivateKeys:
    """The private halves. Library objects hold them; see docs/limitations.md on what wiping means there."""

    __slots__ = ("_classical", "_post_quantum", "public")

    def __init__(
        self,
        post_quantum: mldsa.MLDSA87PrivateKey,
        classical: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey,
    ) -> None:
        self._post_quantum = post_quantum
        self._classical = classical
        algorithm: Classical
        if isinstance(classical, ed25519.Ed25519PrivateKey):
            algorithm = "ed25519"
            encoded = classical.public_key().public_bytes_raw()
        else:
            algorithm = "ecdsa-p384"
            encoded = classical.public_key().public_bytes(
                serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
            )
        self.public = PublicKeys(post_quantum.public_key().public_bytes_raw(), encoded, algorithm)

    @classmethod
    def generate(cls, algorithm: Classical = "ecdsa-p384") -> PrivateKeys:
        """Make a fresh pair from the system's random source."""
        classical: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
        if algorithm == "ed25519":
            classical = ed25519.Ed25519PrivateKey.generate()
        else:
            classical = ec.generate_private_key(ec.SECP384R1())
        return cls(mldsa.MLDSA87PrivateKey.generate(), classical)

    def sign(self, message: bytes) -> HybridSignature:
        """Sign with both halves."""
        post_quantum = self._post_quantum.sign(message, CONTEXT)
        if isinstance(self._classical, ed25519.Ed25519PrivateKey):
            return HybridSignature(post_quantum, self._classical.sign(message))
        return HybridSignature(post_quantum, self._classical.sign(message, ec.ECDSA(hashes.SHA384())))

    def private_parts(self) -> tuple[bytes, bytes]:
        """Give (ML-DSA seed of 32 bytes, PKCS #8 DER of the classical half), only for files that protect them."""
        der = self._classical.private_bytes(
            serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return self._post_quantum.private_bytes_raw(), der

    @classmethod
    def from_private_parts(cls, seed: bytes | memoryview, der: bytes | memoryview) -> PrivateKeys:
        """Rebuild a pair from ``private_parts``.

        Raises:
            FormatError: ``key.private`` when the parts are not such keys.
        """
        try:
            classical = serialization.load_der_private_key(der, None)
            post_quantum = mldsa.MLDSA87PrivateKey.from_seed_bytes(seed)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            classical = None
        # The curve is checked too: a P-256 key is also an "elliptic curve key", and its points have another length.
        if isinstance(classical, ed25519.Ed25519PrivateKey) or (
            isinstance(classical, ec.EllipticCurvePrivateKey) and isinstance(classical.curve, ec.SECP384R1)
        ):
            return cls(post_quantum, classical)
        raise FormatError(
            "key.private",
            found="unreadable private key",
            expected="ML-DSA-87 and P-384 or Ed25519",
            hint="restore the key file from its backup",
        )
