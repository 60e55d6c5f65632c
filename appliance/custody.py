"""What the agent holds of the exchange: session, bundle and owner, and the steps from challenge to opened grant.

Each step takes the proof that the step before it gave, so they cannot be done in another order. Nothing here touches a
process, a socket or the lifecycle; the agent does.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from appliance.config import Config
from appliance.hardening import Fact
from appliance.preflight import require_ring
from attestation.appraise import appraise
from attestation.binding import DIGEST_BYTES, NONCE_BYTES, Binding
from attestation.clock import SystemClock
from attestation.result import AttestationResult
from attestation.simulated import collect
from provisioning import challenge, request
from provisioning.bundle import Bundle
from provisioning.errors import ExchangeRefused
from provisioning.files import read_bounded
from provisioning.grant import Grant, SignedGrant
from provisioning.ownerkey import MAX_PUBLIC_FILE, OwnerKey
from provisioning.session import Session

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> bytes:
    """Give the kernel's random id of this boot, 16 bytes."""
    return bytes.fromhex(_BOOT_ID.read_text(encoding="ascii").strip().replace("-", ""))


class Custody:
    """The exchange of one agent process.

    Args:
        config: the node's configuration.
        clock: gives times; issue times of signed objects raise its floor.

    Attributes:
        request_digest: of the last key request, or 48 zero bytes when none was made.

    Raises:
        LetheError: the owner key, the manifest or the table of the bundle is refused, or no ring of the configured
            size can hold a segment of it.
    """

    def __init__(self, config: Config, clock: SystemClock) -> None:
        self._config = config
        self._clock = clock
        self.boot_id = boot_id()
        self.owner_key = read_bounded(config.model.owner_key, limit=MAX_PUBLIC_FILE)
        self.owner = OwnerKey.read(self.owner_key)
        with Bundle.open(config.model.bundle, [self.owner]) as bundle:
            # Missing and cut files are found now, not after the grant is spent; a rank opens the bundle for itself.
            for number in range(len(bundle.manifest.files)):
                bundle.open_file(number)
            self.manifest = bundle.manifest
        require_ring(config, segment_bytes=self.manifest.segment_size)
        self.session = Session()
        self.tls_key_digest = bytes(DIGEST_BYTES)
        self.request_digest = bytes(DIGEST_BYTES)
        clock.raise_floor(self.manifest.issued_at)

    def refuse_weak_machine(self, facts: tuple[Fact, ...]) -> None:
        """Refuse to ask for a production key on a machine that breaks a promise of the threat model.

        Raises:
            ExchangeRefused: ``hardening.weak``.
        """
        weak = [fact for fact in facts if fact.state == "weak"]
        if weak and self.manifest.purpose == "production":
            raise ExchangeRefused(
                "hardening.weak",
                found="; ".join(f"{fact.name}: {fact.seen}" for fact in weak),
                expected="a machine without these weaknesses for a production bundle",
                hint="; ".join(fact.hint for fact in weak),
            )

    def answer(self, envelope: bytes) -> bytes:
        """Answer the owner's challenge with a key request.

        Args:
            envelope: the signed challenge.

        Returns:
            The key request: evidence bound to the challenge, this session, the TLS key, policy, manifest,
            configuration and boot, signed by the session.

        Raises:
            LetheError: the challenge is not the owner's, or is for another bundle.
        """
        signed = challenge.read(envelope, self.owner)
        self._clock.raise_floor(signed.issued_at)
        binding = self._binding(signed.nonce)
        made = request.make(
            node=self._config.node.name,
            challenge=signed,
            session=self.session,
            binding=binding,
            evidence=collect.collect(self._config.platform.lab_dir, binding),
            clock=self._clock,
        )
        self.request_digest = request.read(made).digest
        return made

    def read_grant(self, envelope: bytes) -> SignedGrant:
        """Check that a grant is the owner's.

        Raises:
            LetheError: it is not, or it is malformed.
        """
        return SignedGrant.read(envelope, self.owner)

    def appraise_here(self) -> AttestationResult:
        """Appraise this machine again, now, with a nonce of our own: time has passed since the request.

        Raises:
            LetheError: the machine no longer satisfies the policy of the manifest.
        """
        binding = self._binding(secrets.token_bytes(NONCE_BYTES))
        evidence = collect.collect(self._config.platform.lab_dir, binding)
        return appraise(evidence, binding=binding, policy=self.manifest.policy, at=self._clock.now())

    def open(self, grant: SignedGrant, result: AttestationResult) -> Grant:
        """Open the grant with the session's private key, once.

        Raises:
            LetheError: the grant is for another session, bundle or boot, is spent, or is out of date.
        """
        self._clock.raise_floor(grant.issued_at)
        return self.session.open(grant, manifest=self.manifest, result=result, clock=self._clock)

    def _binding(self, nonce: bytes) -> Binding:
        return Binding(
            nonce=nonce,
            session_key_digest=self.session.digest,
            tls_key_digest=self.tls_key_digest,
            policy_digest=self.manifest.policy.digest,
            manifest_digest=self.manifest.digest,
            config_digest=self._config.digest,
            boot_id=self.boot_id,
        )
