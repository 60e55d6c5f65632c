"""The owner's side of the exchange: a key request in, a grant or a refusal out.

Cheap checks come first. The ledger's entry is on disk before the grant exists outside this function: a crash after it
costs the operator a new challenge; no crash gives a second grant for one challenge.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import NoReturn

from attestation import strictjson
from attestation.appraise import AppraisalRefused, appraise
from attestation.clock import format_time
from attestation.result import AttestationResult
from provisioning.challenge import require_same_purpose
from provisioning.errors import ExchangeRefused
from provisioning.fingerprint import fingerprint
from provisioning.grant import KIND, GrantStatement
from provisioning.ledger import Ledger
from provisioning.manifest import SignedManifest
from provisioning.ownerkey import OwnerSigner
from provisioning.request import KeyRequest
from provisioning.secret import SecretBytes
from provisioning.segment import check_commitment


def _refuse(code: str, found: str, expected: str, hint: str) -> NoReturn:
    raise ExchangeRefused(code, found=found, expected=expected, hint=hint)


def appraise_request(request: KeyRequest, *, manifest: SignedManifest, at: datetime) -> AttestationResult:
    """Judge the evidence of a request under the manifest's policy, without the ledger and without any key.

    Raises:
        ExchangeRefused: ``request.manifest`` or ``request.policy``.
        AppraisalRefused: with every check that was made.
    """
    if request.binding.manifest_digest != manifest.digest:
        _refuse(
            "request.manifest",
            f"a request for manifest {fingerprint(request.binding.manifest_digest)}",
            f"one for {fingerprint(manifest.digest)}, the bundle given here",
            "give the bundle that the appliance asks for",
        )
    if request.binding.policy_digest != manifest.policy.digest:
        _refuse(
            "request.policy",
            "evidence bound to another policy",
            f"policy {manifest.policy.name} of the manifest",
            "both sides must run one version of Lethe; make a new request",
        )
    return appraise(request.evidence, binding=request.binding, policy=manifest.policy, at=at)


def check_challenge(request: KeyRequest, *, manifest: SignedManifest, ledger: Ledger, at: datetime) -> None:
    """Check that a request answers an open, fresh challenge of this owner for this bundle.

    Raises:
        ExchangeRefused: ``challenge.unknown``, ``challenge.used``, ``challenge.manifest``, ``challenge.nonce``
            or ``challenge.stale``.
        LedgerError: ``ledger.clock``.
    """
    ledger.require_time(at)
    issued = ledger.challenge(request.challenge_digest)
    name = fingerprint(request.challenge_digest)
    if issued is None:
        _refuse(
            "challenge.unknown",
            f"challenge {name}",
            "a challenge of this ledger",
            "give the key directory that the challenge was made with, or send a new challenge",
        )
    if issued.answered:
        _refuse(
            "challenge.used",
            f"challenge {name} already answered by a grant",
            "an open challenge",
            "send a new challenge; each answers one grant",
        )
    if issued.manifest_digest != manifest.digest:
        _refuse(
            "challenge.manifest",
            f"challenge {name} for manifest {fingerprint(issued.manifest_digest)}",
            f"one for {fingerprint(manifest.digest)}",
            "give the bundle that the challenge was made for, or send a new challenge",
        )
    if issued.nonce != request.binding.nonce:
        _refuse(
            "challenge.nonce",
            "evidence bound to another nonce",
            f"the nonce of challenge {name}",
            "make a new request on the appliance",
        )
    age = int((at - issued.issued_at).total_seconds())
    if age > manifest.policy.challenge_seconds:
        _refuse(
            "challenge.stale",
            f"challenge {name} of {format_time(issued.issued_at)}, {age} seconds old",
            f"at most {manifest.policy.challenge_seconds} seconds",
            "send a new challenge",
        )


def grant(
    request: KeyRequest,
    *,
    signer: OwnerSigner,
    bundle_key: SecretBytes,
    manifest: SignedManifest,
    ledger: Ledger,
    at: datetime,
    epoch_floor: int | None = None,
) -> bytes:
    """Judge a request and, if all is well, give the key to its session and to nobody else.

    Args:
        request: read by :func:`provisioning.request.read`.
        signer: the owner.
        bundle_key: 32 bytes; stays the caller's to wipe.
        manifest: of the bundle that the key opens; its policy decides.
        ledger: open, so no other program can grant at the same time.
        at: the owner's time.
        epoch_floor: bundles below this epoch are withdrawn; the manifest's own epoch when not given.

    Returns:
        The signed grant, after its ledger entry is on disk.

    Raises:
        ExchangeRefused: as for :func:`check_challenge` and :func:`appraise_request`, and ``grant.epoch``.
        AppraisalRefused: the evidence is not acceptable; the refusal is in the ledger.
        KeyRefused: ``owner.purpose``, or ``bundle.key`` when the key is not of this bundle.
        LedgerError: the ledger cannot be written, so nothing is granted.
    """
    require_same_purpose(signer, manifest)
    signer.require_purpose(manifest.policy)
    floor = manifest.epoch if epoch_floor is None else epoch_floor
    if manifest.epoch < floor:
        _refuse(
            "grant.epoch",
            f"a bundle of epoch {manifest.epoch}",
            f"epoch {floor} or later",
            "grant for the newer bundle; this one is withdrawn",
        )
    check_challenge(request, manifest=manifest, ledger=ledger, at=at)
    try:
        result = appraise_request(request, manifest=manifest, at=at)
    except AppraisalRefused as refusal:
        ledger.append(
            "request.refused",
            at=at,
            detail={
                "challenge": request.challenge_digest.hex(),
                "request": request.digest.hex(),
                "node": request.node,
                "code": refusal.code,
            },
        )
        raise
    statement = _state(request, manifest=manifest, result=result, at=at, epoch_floor=floor)
    with bundle_key.expose() as view:
        check_commitment(view, manifest.bundle_id, manifest.key_commitment)
        sealed = request.session.seal(view, statement.hpke_info())
    payload = strictjson.dumps(statement.as_payload(sealed))
    envelope = signer.sign(KIND, payload, policy=manifest.policy)
    ledger.append(
        "grant.given",
        at=at,
        detail={
            "challenge": request.challenge_digest.hex(),
            "request": request.digest.hex(),
            "grant": hashlib.sha384(payload).hexdigest(),
            "manifest": manifest.digest.hex(),
            "session": request.session.digest.hex(),
            "result": result.digest.hex(),
            "assurance": result.assurance,
            "node": request.node,
        },
    )
    return envelope


def _state(
    request: KeyRequest, *, manifest: SignedManifest, result: AttestationResult, at: datetime, epoch_floor: int
) -> GrantStatement:
    return GrantStatement(
        epoch=manifest.epoch,
        issued_at=at,
        bundle_id=manifest.bundle_id,
        manifest_digest=manifest.digest,
        challenge_digest=request.challenge_digest,
        request_digest=request.digest,
        session_digest=request.session.digest,
        result_digest=result.digest,
        assurance=result.assurance,
        epoch_floor=epoch_floor,
        terms=manifest.policy.grant,
    )
