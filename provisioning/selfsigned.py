"""Envelopes that carry the key that signed them: owner key files, key requests, wipe records.

Such a signature proves only that the maker held the private half and that nothing changed since; whether that key is
to be trusted is decided elsewhere (an owner key by its configured id, a session key by evidence that binds it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attestation import dsse, strictjson
from attestation.signature import PublicKeys


def open_self_signed(
    envelope: bytes, kind: str, *, keys_of: Callable[[dict[str, Any]], PublicKeys], limit: int
) -> bytes:
    """Verify an envelope by the keys that its own payload names.

    Only ``keys_of`` looks at the payload before it is verified, and what it gives is used for the check alone.

    Args:
        envelope: the whole file.
        kind: which object it must be.
        keys_of: finds the public keys in the parsed, unverified payload.
        limit: largest payload in bytes.

    Raises:
        FormatError: the envelope or its payload is malformed.
        SignatureRefused: the signature is not by those keys.
    """
    unverified = strictjson.loads(dsse.unverified_payload(envelope, kind, limit=limit), limit=limit)
    return dsse.verify(envelope, kind, [keys_of(unverified)], limit=limit)
