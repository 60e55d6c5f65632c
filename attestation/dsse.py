"""DSSE envelopes (secure-systems-lab/dsse, protocol.md v1.0) with hybrid signatures.

The signature covers the exact payload bytes and their type. Nothing of the payload is parsed before it is verified;
before that only sizes and the envelope's own frame are looked at. Each hybrid key gives two entries, whose ``keyid``
is ``<key id>#ml-dsa-87`` and ``<key id>#ecdsa-p384`` (or ``#ed25519``); an envelope may carry several keys' signatures.
"""

from __future__ import annotations

from collections.abc import Sequence

from attestation import strictjson
from attestation.errors import FormatError, SignatureRefused
from attestation.signature import (
    CLASSICAL_SIGNATURE_LIMIT,
    MLDSA87_SIGNATURE_BYTES,
    HybridSignature,
    PrivateKeys,
    PublicKeys,
)
from attestation.strictjson import Fields, b64

PAYLOAD_TYPE_PREFIX = "application/vnd.lethe."
MAX_SIGNATURES = 32


def payload_type(kind: str) -> str:
    """Give the DSSE payload type of one kind of object, such as ``manifest``."""
    return f"{PAYLOAD_TYPE_PREFIX}{kind}+json"


def pre_authentication_encoding(kind: str, payload: bytes) -> bytes:
    """Give PAE(type, body) of the DSSE protocol: what is really signed."""
    name = payload_type(kind).encode("utf-8")
    return b"DSSEv1 %d %s %d %s" % (len(name), name, len(payload), payload)


def sign(kind: str, payload: bytes, signers: Sequence[PrivateKeys]) -> bytes:
    """Wrap ``payload`` in an envelope signed by every one of ``signers``."""
    message = pre_authentication_encoding(kind, payload)
    entries: list[dict[str, str]] = []
    for signer in signers:
        made = signer.sign(message)
        key_id = signer.public.key_id
        entries.append({"keyid": f"{key_id}#ml-dsa-87", "sig": b64(made.post_quantum)})
        entries.append({"keyid": f"{key_id}#{signer.public.algorithm}", "sig": b64(made.classical)})
    return strictjson.dumps({"payloadType": payload_type(kind), "payload": b64(payload), "signatures": entries})


def envelope_limit(limit: int) -> int:
    """Give the largest size in bytes of an envelope around a payload of at most ``limit`` bytes."""
    return limit * 2 + MAX_SIGNATURES * 8192


def _open(envelope: bytes, kind: str, limit: int) -> tuple[bytes, dict[str, bytes]]:
    """Read an envelope's frame: (payload bytes still unverified, signatures by keyid)."""
    fields = Fields(strictjson.loads(envelope, limit=envelope_limit(limit)), "envelope")
    found = fields.text("payloadType", limit=128)
    if found != payload_type(kind):
        raise FormatError(
            "envelope.type", found=found, expected=payload_type(kind), hint="this is another kind of file"
        )
    payload = fields.blob("payload", limit=limit)
    signatures: dict[str, bytes] = {}
    for item in fields.items("signatures", limit=MAX_SIGNATURES):
        if not isinstance(item, dict):
            raise FormatError(
                "envelope.signature", found="no object", expected="keyid and sig", hint="get the file again"
            )
        entry = Fields(item, "envelope.signature")
        key_id = entry.text("keyid", limit=128)
        if key_id in signatures:
            raise FormatError(
                "envelope.signature",
                found=f"{key_id[:16]}... twice",
                expected="each key once",
                hint="get the file again",
            )
        signatures[key_id] = entry.blob("sig", limit=max(MLDSA87_SIGNATURE_BYTES, CLASSICAL_SIGNATURE_LIMIT))
        entry.end()
    fields.end()
    return payload, signatures


def unverified_payload(envelope: bytes, kind: str, *, limit: int) -> bytes:
    """Give the payload of an envelope whose signature nobody has checked: to find a key in it, or to show it as such.

    Raises:
        FormatError: the envelope is malformed or of another kind.
    """
    return _open(envelope, kind, limit)[0]


def signed_by(envelope: bytes, kind: str, keys: Sequence[PublicKeys], *, limit: int) -> tuple[bytes, tuple[str, ...]]:
    """Verify an envelope against trusted keys.

    Args:
        envelope: the whole file.
        kind: which object it must be, such as ``grant``; another kind is refused even if well signed.
        keys: the trusted keys; signatures by others are ignored.
        limit: largest payload in bytes.

    Returns:
        The exact payload bytes, and the ids of the trusted keys whose both halves verified (at least one).

    Raises:
        FormatError: the envelope is malformed or of another kind.
        SignatureRefused: ``signature.unknown`` when no trusted key signed; ``signature.half`` when one half of a
            trusted key's signature is missing; ``signature.wrong`` when a trusted key's signature does not verify.
    """
    payload, signatures = _open(envelope, kind, limit)
    message = pre_authentication_encoding(kind, payload)
    verified: list[str] = []
    # One key counts once, however often a caller lists it: a quorum must not be met by a repeated key.
    for key in dict.fromkeys(keys):
        halves = (signatures.get(f"{key.key_id}#ml-dsa-87"), signatures.get(f"{key.key_id}#{key.algorithm}"))
        if halves == (None, None):
            continue
        post_quantum, classical = halves
        # Both halves are demanded: dropping the post-quantum half must not downgrade the check.
        if post_quantum is None or classical is None:
            raise SignatureRefused(
                "signature.half",
                found=f"one half of the signature by {key.key_id[:16]}",
                expected="ML-DSA-87 and the classical half",
                hint="get the file again from the owner",
            )
        key.verify(message, HybridSignature(post_quantum, classical), what=kind)
        verified.append(key.key_id)
    if not verified:
        seen = sorted({name.split("#")[0][:16] for name in signatures})
        raise SignatureRefused(
            "signature.unknown",
            found=f"a {kind} signed by {', '.join(seen) or 'nobody'}",
            expected=f"a signature by {', '.join(key.key_id[:16] for key in keys) or 'a configured key'}",
            hint="check that the right owner's key is configured",
        )
    return payload, tuple(verified)


def verify(envelope: bytes, kind: str, keys: Sequence[PublicKeys], *, limit: int) -> bytes:
    """Verify an envelope by any one of ``keys`` and give its payload; see :func:`signed_by`."""
    return signed_by(envelope, kind, keys, limit=limit)[0]
