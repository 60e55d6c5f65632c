"""A short form of a digest that two people can compare over the telephone."""

from __future__ import annotations

import hashlib

from attestation import strictjson
from attestation.strictjson import Fields


def fingerprint(digest: bytes) -> str:
    """Give the first 64 bits as four groups of four hex digits, such as ``1f0a-77c3-09be-d2e4``.

    It tells one file of a courier's stick from another. It is not a check: programs compare whole digests.
    """
    text = digest[:8].hex()
    return "-".join(text[start : start + 4] for start in range(0, 16, 4))


def envelope_fingerprint(envelope: bytes) -> str:
    """Give the fingerprint of a signed file: that of the SHA-384 of its payload, whoever signed it.

    Raises:
        FormatError: it is no envelope.
    """
    frame = Fields(strictjson.loads(envelope, limit=len(envelope)), "envelope")
    return fingerprint(hashlib.sha384(frame.blob("payload", limit=len(envelope))).digest())
