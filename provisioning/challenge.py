"""The owner's challenge: a nonce for one key request, bound to one bundle."""

from __future__ import annotations

import hashlib
import secrets
from datetime import datetime
from typing import Final, final

from attestation import dsse, strictjson
from attestation.binding import DIGEST_BYTES, NONCE_BYTES
from attestation.clock import format_time
from attestation.proof import Proof
from attestation.strictjson import Fields, b64
from provisioning._seal import MINT
from provisioning.errors import KeyRefused
from provisioning.ledger import Ledger, challenge_detail
from provisioning.manifest import SignedManifest
from provisioning.ownerkey import OwnerKey, OwnerSigner

KIND: Final = "challenge"
LIMIT: Final = 1 << 12


@final
class SignedChallenge(Proof):
    """A challenge whose owner signature was checked.

    Attributes:
        nonce: 32 bytes; evidence must answer exactly this.
        manifest_digest: the only bundle it is for, 48 bytes.
        epoch: the manifest's epoch.
        issued_at: the owner's time; a floor under "now" for who reads it.
        digest: SHA-384 of the payload, 48 bytes.
    """

    __slots__ = ("digest", "epoch", "issued_at", "manifest_digest", "nonce")

    def __init__(
        self, mint: object, *, nonce: bytes, manifest_digest: bytes, epoch: int, issued_at: datetime, digest: bytes
    ) -> None:
        self._demand(mint, MINT)
        self.nonce = nonce
        self.manifest_digest = manifest_digest
        self.epoch = epoch
        self.issued_at = issued_at
        self.digest = digest


def require_same_purpose(signer: OwnerSigner, manifest: SignedManifest) -> None:
    """Refuse to act with a lab key for a production bundle, or the other way round.

    Raises:
        KeyRefused: ``owner.purpose``.
    """
    if signer.purpose != manifest.purpose:
        raise KeyRefused(
            "owner.purpose",
            found=f"a {signer.purpose} key for a {manifest.purpose} bundle",
            expected=f"the {manifest.purpose} key that packed it",
            hint="give the key directory that the bundle was packed with",
        )


def issue(*, signer: OwnerSigner, manifest: SignedManifest, ledger: Ledger, at: datetime) -> bytes:
    """Make a challenge and record it; the record is on disk before the challenge is returned.

    Args:
        signer: the owner.
        manifest: which bundle it is for.
        ledger: where a later grant looks it up.
        at: issue time; its age counts from here.

    Returns:
        The signed envelope.

    Raises:
        KeyRefused: ``owner.purpose``.
        LedgerError: the ledger cannot be written.
    """
    require_same_purpose(signer, manifest)
    nonce = secrets.token_bytes(NONCE_BYTES)
    payload = strictjson.dumps(
        {
            **strictjson.header(KIND, epoch=manifest.epoch, issued_at=format_time(at)),
            "nonce": b64(nonce),
            "manifest_digest": b64(manifest.digest),
        }
    )
    envelope = signer.sign(KIND, payload, policy=manifest.policy)
    digest = hashlib.sha384(payload).digest()
    ledger.append("challenge.issued", at=at, detail=challenge_detail(digest, nonce, manifest.digest))
    return envelope


def read(envelope: bytes, owner: OwnerKey) -> SignedChallenge:
    """Read a challenge and check that ``owner`` signed it.

    Raises:
        FormatError, SignatureRefused: it is damaged, of another kind, or by another key.
    """
    payload = dsse.verify(envelope, KIND, [owner.keys], limit=LIMIT)
    fields = Fields(strictjson.loads(payload, limit=LIMIT), KIND)
    epoch, issued_at = strictjson.read_header(fields, KIND)
    signed = SignedChallenge(
        MINT,
        nonce=fields.blob("nonce", size=NONCE_BYTES),
        manifest_digest=fields.blob("manifest_digest", size=DIGEST_BYTES),
        epoch=epoch,
        issued_at=issued_at,
        digest=hashlib.sha384(payload).digest(),
    )
    fields.end()
    return signed
