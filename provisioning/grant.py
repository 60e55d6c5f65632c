"""Grants: a bundle key sealed to one session (SignedGrant), and the same opened, for one use (Grant).

The key is the plaintext of HPKE and of nothing else; all terms stand in the signed part. What the key is bound to goes
into HPKE's ``info`` too, so that a sealed key cannot be moved into another signed grant, even by who signs grants.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final, final

from attestation import dsse, strictjson
from attestation.binding import DIGEST_BYTES, frame
from attestation.clock import Clock, SystemClock, format_time
from attestation.errors import FormatError
from attestation.policy import GrantTerms
from attestation.proof import Proof
from attestation.result import Assurance
from attestation.strictjson import Fields, b64
from provisioning._seal import MINT
from provisioning.errors import ExchangeRefused
from provisioning.manifest import SignedManifest
from provisioning.ownerkey import OwnerKey
from provisioning.secret import SecretBytes
from provisioning.segment import BUNDLE_ID_BYTES, BUNDLE_KEY_BYTES, check_commitment
from provisioning.sessionkeys import SEALED_KEY_BYTES, SUITE_NAME

KIND: Final = "grant"
LIMIT: Final = 1 << 14
INFO_LABEL: Final = b"lethe/grant/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantStatement:
    """All that a grant says in the open.

    Attributes:
        epoch: the manifest's epoch.
        issued_at: the owner's time; a floor under "now" on the appliance.
        bundle_id: 16 bytes.
        manifest_digest, challenge_digest, request_digest, session_digest: what it answers, 48 bytes each.
        result_digest: the owner's attestation result, 48 bytes.
        assurance: ``lab`` when the evidence was simulated.
        epoch_floor: manifests below it are refused by a session that has opened this grant.
        terms: loads, seconds, and how a reboot gets its key.
    """

    epoch: int
    issued_at: datetime
    bundle_id: bytes
    manifest_digest: bytes
    challenge_digest: bytes
    request_digest: bytes
    session_digest: bytes
    result_digest: bytes
    assurance: Assurance
    epoch_floor: int
    terms: GrantTerms

    def hpke_info(self) -> bytes:
        """Give the ``info`` that the key is sealed with (docs/spec/exchange.md, section 6.2)."""
        return frame(
            [
                (b"protocol", INFO_LABEL),
                (b"suite", SUITE_NAME.encode("ascii")),
                (b"bundle-id", self.bundle_id),
                (b"manifest", self.manifest_digest),
                (b"challenge", self.challenge_digest),
                (b"request", self.request_digest),
                (b"session", self.session_digest),
                (b"result", self.result_digest),
                (b"assurance", self.assurance.encode("ascii")),
                (b"issued-at", format_time(self.issued_at).encode("ascii")),
                (b"epoch-floor", struct.pack(">Q", self.epoch_floor)),
                (b"loads", struct.pack(">Q", self.terms.loads)),
                (b"seconds", struct.pack(">Q", self.terms.seconds)),
                (b"reboot", self.terms.reboot.encode("ascii")),
            ]
        )

    def as_payload(self, sealed: bytes) -> dict[str, Any]:
        """Give the grant as JSON members, with the sealed key."""
        return {
            **strictjson.header(KIND, epoch=self.epoch, issued_at=format_time(self.issued_at)),
            "bundle_id": b64(self.bundle_id),
            "manifest_digest": b64(self.manifest_digest),
            "challenge_digest": b64(self.challenge_digest),
            "request_digest": b64(self.request_digest),
            "session_digest": b64(self.session_digest),
            "result_digest": b64(self.result_digest),
            "assurance": self.assurance,
            "epoch_floor": self.epoch_floor,
            "terms": asdict(self.terms),
            "suite": SUITE_NAME,
            "sealed": b64(sealed),
        }


def _read_assurance(fields: Fields) -> Assurance:
    found = fields.text("assurance", limit=16)
    if found == "lab":
        return "lab"
    if found == "production":
        return "production"
    raise FormatError("grant.assurance", found=found, expected="lab or production", hint="ask the owner again")


def _read_terms(fields: Fields) -> GrantTerms:
    terms = GrantTerms(
        loads=fields.integer("loads", low=1),
        seconds=fields.integer("seconds", low=1),
        reboot=fields.text("reboot", limit=16),
    )
    fields.end()
    if terms.reboot != "courier":
        raise FormatError(
            "grant.reboot",
            found=terms.reboot,
            expected="courier",
            hint="this version knows one way to get a key after a reboot: a new grant",
        )
    return terms


def _read_statement(fields: Fields) -> GrantStatement:
    epoch, issued_at = strictjson.read_header(fields, KIND)
    return GrantStatement(
        epoch=epoch,
        issued_at=issued_at,
        bundle_id=fields.blob("bundle_id", size=BUNDLE_ID_BYTES),
        manifest_digest=fields.blob("manifest_digest", size=DIGEST_BYTES),
        challenge_digest=fields.blob("challenge_digest", size=DIGEST_BYTES),
        request_digest=fields.blob("request_digest", size=DIGEST_BYTES),
        session_digest=fields.blob("session_digest", size=DIGEST_BYTES),
        result_digest=fields.blob("result_digest", size=DIGEST_BYTES),
        assurance=_read_assurance(fields),
        epoch_floor=fields.integer("epoch_floor"),
        terms=_read_terms(fields.fields("terms")),
    )


@final
class SignedGrant(Proof):
    """A grant whose owner signature was checked; its key is still sealed.

    Attributes:
        statement: what it says.
        sealed: the HPKE message: encapsulation, ciphertext, tag.
        owner: who signed it.
        digest: SHA-384 of the payload, 48 bytes.
    """

    __slots__ = ("digest", "owner", "sealed", "statement")

    def __init__(
        self, mint: object, *, statement: GrantStatement, sealed: bytes, owner: OwnerKey, digest: bytes
    ) -> None:
        self._demand(mint, MINT)
        self.statement = statement
        self.sealed = sealed
        self.owner = owner
        self.digest = digest

    @classmethod
    def read(cls, envelope: bytes, owner: OwnerKey) -> SignedGrant:
        """Read a grant and check that ``owner`` signed it.

        Raises:
            FormatError, SignatureRefused: it is damaged, of another kind, or by another key.
        """
        payload = dsse.verify(envelope, KIND, [owner.keys], limit=LIMIT)
        fields = Fields(strictjson.loads(payload, limit=LIMIT), KIND)
        statement = _read_statement(fields)
        suite = fields.text("suite", limit=64)
        if suite != SUITE_NAME:
            raise FormatError(
                "grant.suite", found=suite, expected=SUITE_NAME, hint="both sides must run one version of Lethe"
            )
        sealed = fields.blob("sealed", size=SEALED_KEY_BYTES)
        fields.end()
        return cls(MINT, statement=statement, sealed=sealed, owner=owner, digest=hashlib.sha384(payload).digest())

    @property
    def issued_at(self) -> datetime:
        """The owner's time."""
        return self.statement.issued_at


@final
class Grant(Proof):
    """A bundle key, open for one load. A context manager: the key is wiped at its end, whatever happened.

    Only :meth:`provisioning.session.Session.open` makes one from a SignedGrant, and :meth:`inherit` in a rank process.

    Attributes:
        bundle_id: 16 bytes.
        terms: the owner's.
        deadline: monotonic time after which the key is refused; infinite in a rank, where the agent watches the time.
    """

    __slots__ = ("_clock", "_key", "bundle_id", "deadline", "terms")

    def __init__(
        self,
        mint: object,
        *,
        key: SecretBytes,
        bundle_id: bytes,
        terms: GrantTerms,
        deadline: float,
        clock: Clock,
    ) -> None:
        self._demand(mint, MINT)
        self._key: SecretBytes | None = key
        self._clock = clock
        self.bundle_id = bundle_id
        self.terms = terms
        self.deadline = deadline

    @classmethod
    def inherit(cls, descriptor: int, manifest: SignedManifest) -> Grant:
        """Take the key from the pipe that the agent wrote it to, in a rank process.

        Args:
            descriptor: the reading end; it is closed here.
            manifest: checked again by this process; its key commitment must fit.

        Raises:
            KeyRefused: ``bundle.key`` when it is the key of another bundle.
            InputFailed: ``secret.short`` when the agent stopped before it wrote the key.
        """
        try:
            key = SecretBytes.read(descriptor, BUNDLE_KEY_BYTES)
        finally:
            os.close(descriptor)
        require_key(key, manifest)
        return cls(
            MINT,
            key=key,
            bundle_id=manifest.bundle_id,
            terms=manifest.policy.grant,
            deadline=math.inf,
            clock=SystemClock(),
        )

    def _live_key(self) -> SecretBytes:
        if self._key is None:
            raise ExchangeRefused(
                "grant.spent",
                found="a grant that was used",
                expected="one load per opening",
                hint="zeroize, then ask the owner for a new grant",
            )
        if self._clock.monotonic() > self.deadline:
            self.close()
            raise expired(self.terms.seconds)
        return self._key

    @contextlib.contextmanager
    def bundle_key(self) -> Iterator[memoryview]:
        """Give a view of the 32 key bytes for the length of a ``with`` block.

        Raises:
            ExchangeRefused: ``grant.spent`` or ``grant.expired``.
        """
        with self._live_key().expose() as view:
            yield view

    def hand_over(self, descriptors: Sequence[int]) -> None:
        """Write the key to the pipes of the rank processes, then wipe it here: this grant is spent.

        The bytes go from protected pages into the kernel's pipe buffers with no copy in this process between.

        Args:
            descriptors: writing ends; the caller closes them.

        Raises:
            ExchangeRefused: ``grant.spent``, ``grant.expired``, or ``grant.handover`` when a rank has gone.
        """
        try:
            with self._live_key().expose() as view:
                for descriptor in descriptors:
                    # A pipe takes up to PIPE_BUF (4096) bytes whole or not at all (pipe(7)).
                    if os.writev(descriptor, [view]) != len(view):
                        raise BrokenPipeError
        except OSError:
            raise ExchangeRefused(
                "grant.handover",
                found="a rank process that takes no key",
                expected="one reader per pipe",
                hint="look at the rank's messages; zeroize, then ask for a new grant",
            ) from None
        finally:
            self.close()

    def close(self) -> None:
        """Wipe the key. May be called again."""
        key, self._key = self._key, None
        if key is not None:
            key.close()

    def __enter__(self) -> Grant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Grant for bundle {self.bundle_id.hex()}, {'spent' if self._key is None else 'open'}>"


def require_key(key: SecretBytes, manifest: SignedManifest) -> None:
    """Check a key against the manifest's commitment, and wipe it if it does not fit.

    Raises:
        KeyRefused: ``bundle.key``.
    """
    try:
        with key.expose() as view:
            check_commitment(view, manifest.bundle_id, manifest.key_commitment)
    except BaseException:
        key.close()
        raise


def expired(seconds: int) -> ExchangeRefused:
    """Give the refusal of a grant whose time is over."""
    return ExchangeRefused(
        "grant.expired",
        found=f"more than {seconds} seconds since the request",
        expected=f"loading within {seconds} seconds",
        hint="make a new request and ask the owner for a new grant",
    )
