"""The key request: what a session sends to the owner, evidence and all, signed by the session itself."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NoReturn

from attestation import dsse, strictjson
from attestation.binding import DIGEST_BYTES, Binding
from attestation.clock import Clock, format_time
from attestation.errors import FormatError
from attestation.evidence import EvidenceSet
from attestation.strictjson import Fields, b64
from provisioning.challenge import SignedChallenge
from provisioning.errors import ExchangeRefused
from provisioning.selfsigned import open_self_signed
from provisioning.session import Session
from provisioning.sessionkeys import SessionKeys, record_keys

KIND: Final = "request"
# Evidence of a CPU, eight devices and four switches with their chains is well under 1 MiB.
LIMIT: Final = 16 << 20
ENVELOPE_LIMIT: Final = dsse.envelope_limit(LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRequest:
    """A request that agrees with itself; whether its evidence is genuine is for the broker to appraise.

    Attributes:
        node: the machine's name as its operator gave it; for people only.
        epoch: the manifest's epoch as the machine read it.
        issued_at: by the machine's own clock, which nothing vouches for.
        challenge_digest: which challenge it answers, 48 bytes.
        session: public keys of the session; the evidence binds their digest.
        binding: what the evidence is bound to.
        evidence: unchecked.
        digest: SHA-384 of the payload, 48 bytes.
    """

    node: str
    epoch: int
    issued_at: datetime
    challenge_digest: bytes
    session: SessionKeys
    binding: Binding
    evidence: EvidenceSet
    digest: bytes


def make(
    *,
    node: str,
    challenge: SignedChallenge,
    session: Session,
    binding: Binding,
    evidence: EvidenceSet,
    clock: Clock,
) -> bytes:
    """Make a request; the session remembers it, so that its grant can be opened later.

    Args:
        node: the machine's name.
        challenge: the owner's; its nonce must be the binding's.
        session: signs, and its digest must be the binding's.
        binding: what the evidence was made over.
        evidence: collected for that binding.
        clock: issue time, and the monotonic time that the grant's seconds run from.

    Returns:
        The signed envelope.

    Raises:
        ExchangeRefused: ``request.nonce``, ``request.session`` or ``challenge.manifest`` when the binding is not of
            this challenge and session; ``session.wiped``.
    """
    if binding.manifest_digest != challenge.manifest_digest:
        _refuse(
            "challenge.manifest",
            "a challenge for another bundle",
            "one for the bundle on this machine",
            "ask the owner for a challenge made from this bundle",
        )
    _check_binding(binding, session.keys, nonce=challenge.nonce)
    payload = strictjson.dumps(
        {
            **strictjson.header(KIND, epoch=challenge.epoch, issued_at=format_time(clock.now())),
            "node": node,
            "challenge_digest": b64(challenge.digest),
            "session": session.public_payload(),
            "binding": binding.as_payload(),
            "evidence": evidence.as_payload(),
        }
    )
    envelope = session.sign(KIND, payload)
    session.remember(hashlib.sha384(payload).digest(), binding, clock)
    return envelope


def read(envelope: bytes) -> KeyRequest:
    """Read a request and check that it agrees with itself.

    Raises:
        FormatError, SignatureRefused: it is damaged, or not signed by the session keys inside it.
        ExchangeRefused: ``request.session`` when its binding is of other session keys.
    """
    payload = open_self_signed(envelope, KIND, keys_of=record_keys, limit=LIMIT)
    fields = Fields(strictjson.loads(payload, limit=LIMIT), KIND)
    epoch, issued_at = strictjson.read_header(fields, KIND)
    node = fields.text("node", limit=64)
    if not node.strip():
        raise FormatError("request.node", found="an empty name", expected="a name", hint="set node.name and ask again")
    request = KeyRequest(
        node=node,
        epoch=epoch,
        issued_at=issued_at,
        challenge_digest=fields.blob("challenge_digest", size=DIGEST_BYTES),
        session=SessionKeys.read(fields, KIND),
        binding=Binding.from_payload(fields.mapping("binding"), f"{KIND}.binding"),
        evidence=EvidenceSet.from_payload(fields.mapping("evidence"), f"{KIND}.evidence"),
        digest=hashlib.sha384(payload).digest(),
    )
    fields.end()
    _check_binding(request.binding, request.session)
    return request


def _check_binding(binding: Binding, session: SessionKeys, *, nonce: bytes | None = None) -> None:
    if binding.session_key_digest != session.digest:
        # Else a request could carry another machine's evidence beside keys of its own.
        _refuse(
            "request.session",
            "evidence bound to other session keys",
            "the keys in the request",
            "make a new request on the appliance",
        )
    if nonce is not None and binding.nonce != nonce:
        _refuse(
            "request.nonce",
            "evidence bound to another nonce",
            "the nonce of the challenge",
            "make a new request on the appliance",
        )


def _refuse(code: str, found: str, expected: str, hint: str) -> NoReturn:
    raise ExchangeRefused(code, found=found, expected=expected, hint=hint)
