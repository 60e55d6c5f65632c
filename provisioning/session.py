"""A session: one run of the agent, with keys that exist in its memory and nowhere else.

A reboot, a crash or a wipe ends the session, and with it every grant that was made for it: no file can bring the
private keys back. The session also remembers what it asked for and what it has opened, so a grant opens nothing twice.

The private keys are objects of the library, not SecretBytes; docs/limitations.md says what that means.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke, serialization
from cryptography.hazmat.primitives.asymmetric import ec, mlkem

from attestation import dsse
from attestation.binding import Binding
from attestation.clock import Clock
from attestation.result import AttestationResult
from attestation.signature import PrivateKeys
from provisioning._seal import MINT
from provisioning.errors import ExchangeRefused
from provisioning.fingerprint import fingerprint
from provisioning.grant import Grant, GrantStatement, SignedGrant, expired, require_key
from provisioning.manifest import SignedManifest
from provisioning.ownerkey import Purpose
from provisioning.secret import SecretBytes
from provisioning.segment import BUNDLE_KEY_BYTES
from provisioning.sessionkeys import SUITE, SessionKeys

MAX_OPEN_REQUESTS: Final = 64


@dataclass(slots=True)
class _Asked:
    """A request of this session: what its evidence was bound to, when it was made, how often its grant was opened."""

    binding: Binding
    monotonic: float
    opened: int = 0


def _refuse(code: str, found: str, expected: str, hint: str) -> NoReturn:
    raise ExchangeRefused(code, found=found, expected=expected, hint=hint)


class Session:
    """Fresh keys, made on construction.

    Attributes:
        keys: the public half.
    """

    def __init__(self) -> None:
        mlkem_key = mlkem.MLKEM1024PrivateKey.generate()
        p384_key = ec.generate_private_key(ec.SECP384R1())
        record = PrivateKeys.generate()
        self.keys: Final = SessionKeys(
            mlkem_key.public_key().public_bytes_raw(),
            p384_key.public_key().public_bytes(
                serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
            ),
            record.public,
        )
        self.digest: Final = self.keys.digest
        self._opening: hpke.MLKEM1024P384PrivateKey | None = hpke.MLKEM1024P384PrivateKey(mlkem_key, p384_key)
        self._record: PrivateKeys | None = record
        self._asked: dict[bytes, _Asked] = {}
        self._epoch_floor = 0

    def public_payload(self) -> dict[str, Any]:
        """Give the public half as JSON members."""
        return self.keys.as_payload()

    def sign(self, kind: str, payload: bytes) -> bytes:
        """Sign with the session's record keys.

        Raises:
            ExchangeRefused: ``session.wiped``.
        """
        if self._record is None:
            self._wiped()
        return dsse.sign(kind, payload, [self._record])

    def remember(self, request_digest: bytes, binding: Binding, clock: Clock) -> None:
        """Note a request that was made: only its grant can be opened, and its time runs from now."""
        while len(self._asked) >= MAX_OPEN_REQUESTS:
            del self._asked[next(iter(self._asked))]
        self._asked[request_digest] = _Asked(binding, clock.monotonic())

    def open(self, sealed: SignedGrant, *, manifest: SignedManifest, result: AttestationResult, clock: Clock) -> Grant:
        """Open a grant.

        Args:
            sealed: signed by the owner; checked against this session, its request and the manifest here.
            manifest: the bundle that will be loaded.
            result: this machine's own appraisal, made just now, for the same binding as the request but its nonce.
            clock: monotonic time decides whether the grant is still good.

        Raises:
            ExchangeRefused: ``session.wiped``; ``grant.session``, ``grant.request``, ``grant.manifest``,
                ``grant.owner``, ``grant.epoch``, ``grant.assurance``, ``grant.result``, ``grant.expired``,
                ``grant.spent`` or ``grant.sealed``.
            KeyRefused: ``bundle.key`` when the key inside is of another bundle.
        """
        if self._opening is None:
            self._wiped()
        statement = sealed.statement
        asked = self._match_request(statement)
        self._match_manifest(sealed, manifest)
        _match_result(statement, asked.binding, result, purpose=manifest.purpose)
        deadline = asked.monotonic + statement.terms.seconds
        if clock.monotonic() > deadline:
            raise expired(statement.terms.seconds)
        if asked.opened >= statement.terms.loads:
            _refuse(
                "grant.spent",
                f"grant {fingerprint(sealed.digest)} opened {asked.opened} times before",
                f"at most {statement.terms.loads} loads",
                "make a new request and ask the owner for a new grant",
            )
        # Counted before the key is out: a failure on the way uses up a load, it never gives one back.
        asked.opened += 1
        self._epoch_floor = max(self._epoch_floor, statement.epoch_floor)
        key = _decrypt(sealed, self._opening)
        require_key(key, manifest)
        return Grant(MINT, key=key, bundle_id=manifest.bundle_id, terms=statement.terms, deadline=deadline, clock=clock)

    def _match_request(self, statement: GrantStatement) -> _Asked:
        if statement.session_digest != self.digest:
            _refuse(
                "grant.session",
                f"a grant for session {fingerprint(statement.session_digest)}",
                f"one for {fingerprint(self.digest)}, this run of the agent",
                "the agent was restarted since that request, or it is another machine's; make a new request",
            )
        asked = self._asked.get(statement.request_digest)
        if asked is None:
            _refuse(
                "grant.request",
                f"a grant for request {fingerprint(statement.request_digest)}",
                "a request of this session",
                "make a new request",
            )
        return asked

    def _match_manifest(self, sealed: SignedGrant, manifest: SignedManifest) -> None:
        statement = sealed.statement
        if (statement.manifest_digest, statement.bundle_id) != (manifest.digest, manifest.bundle_id):
            _refuse(
                "grant.manifest",
                f"a grant for manifest {fingerprint(statement.manifest_digest)}",
                f"one for {fingerprint(manifest.digest)}, the bundle on this machine",
                "install the bundle that the grant is for, or make a new request",
            )
        if sealed.owner.key_id != manifest.manifest.owner:
            _refuse(
                "grant.owner",
                f"a grant by owner {sealed.owner.key_id[:16]}",
                f"one by {manifest.manifest.owner[:16]}, who packed the bundle",
                "send the request to the owner of the bundle",
            )
        floor = max(self._epoch_floor, statement.epoch_floor)
        if manifest.epoch < floor:
            _refuse(
                "grant.epoch",
                f"a bundle of epoch {manifest.epoch}",
                f"epoch {floor} or later",
                "install the newer bundle; the owner has withdrawn this one",
            )

    def drop_opening_key(self) -> None:
        """Drop the key that opens grants: the first step of a wipe. A record of the wipe can still be signed."""
        self._opening = None
        self._asked.clear()

    def wipe(self) -> None:
        """Drop all private keys. The session does nothing more."""
        self.drop_opening_key()
        self._record = None

    def _wiped(self) -> NoReturn:
        _refuse(
            "session.wiped",
            "a session that was wiped",
            "a live session",
            "start the agent again, then make a new request",
        )


def _match_result(statement: GrantStatement, bound: Binding, result: AttestationResult, *, purpose: Purpose) -> None:
    """Check that the machine was appraised again as the same machine, boot, keys and configuration."""
    names = [field.name for field in fields(Binding) if field.name != "nonce"]
    differing = [name for name in names if getattr(result.binding, name) != getattr(bound, name)]
    if differing:
        _refuse(
            "grant.result",
            f"an appraisal with another {', '.join(differing)}",
            "the binding of the request",
            "make a new request; something changed since the last one",
        )
    # The second half repeats what the manifest's reader refused before: a production bundle and simulated evidence
    # never meet, whatever was missed elsewhere.
    if statement.assurance != result.assurance or (purpose == "production" and result.assurance != "production"):
        _refuse(
            "grant.assurance",
            f"a {statement.assurance} grant of a {purpose} bundle on a machine appraised as {result.assurance}",
            "one assurance, and production for a production bundle",
            "make a new request on this machine",
        )


def _decrypt(sealed: SignedGrant, private: hpke.MLKEM1024P384PrivateKey) -> SecretBytes:
    key = SecretBytes(BUNDLE_KEY_BYTES)
    try:
        with key.expose() as view:
            # The library returns bytes, so for a moment there is one copy outside protected memory.
            view[:] = SUITE.decrypt(sealed.sealed, private, sealed.statement.hpke_info())
    except InvalidTag:
        key.close()
        _refuse(
            "grant.sealed",
            "a sealed key that does not open",
            "a key sealed to this session under these terms",
            "ask the owner for the grant again; if it repeats, make a new request",
        )
    return key
