"""A whole exchange in small: an owner with keys and a ledger, a laboratory machine, a manifest, a told clock."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from attestation.appraise import appraise
from attestation.binding import Binding
from attestation.policy import AppraisalPolicy
from attestation.result import AttestationResult
from attestation.simulated import collect, lab
from provisioning import broker, challenge, request
from provisioning.geometry import Geometry
from provisioning.grant import Grant, SignedGrant
from provisioning.keystore import PassphraseCost
from provisioning.ledger import Ledger
from provisioning.manifest import FILE_NAME, Manifest, SignedManifest
from provisioning.ownerkey import OwnerSigner
from provisioning.request import KeyRequest
from provisioning.secret import SecretBytes
from provisioning.segment import commitment
from provisioning.session import Session

NOON = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
CHEAP = PassphraseCost(memory_kib=8, iterations=1, lanes=1)

POLICY = """
version = 1
name = "laboratory"
epoch = 3
accept = ["simulated"]
challenge_seconds = 3600

[simulated]
root        = {{ equals = "{root}" }}
chip_id     = {{ unchecked = "any laboratory machine" }}
measurement = {{ unchecked = "the code changes daily" }}
tcb         = {{ at_least = {tcb} }}
debug       = {{ equals = false }}
devices     = {{ equals = 1 }}
device_model = {{ one_of = ["simulated-cpu-slot"] }}
device_measurement = {{ unchecked = "no device firmware here" }}
cc_mode     = {{ equals = "on" }}

[serving]
max_context = 2048
max_output_tokens = 512
max_concurrent = 16

[grant]
loads = {loads}
seconds = 600
reboot = "courier"
"""


@dataclass
class ToldClock:
    """A clock that stands still until it is moved."""

    wall: datetime = NOON
    elapsed: float = 1000.0

    def now(self) -> datetime:
        return self.wall

    def monotonic(self) -> float:
        return self.elapsed

    def pass_seconds(self, seconds: int) -> None:
        self.wall += timedelta(seconds=seconds)
        self.elapsed += seconds


@dataclass
class Exchange:
    """Both rooms; every step is the product's own function with the arguments that fit, or those that a test gives."""

    directory: Path
    laboratory: Path
    signer: OwnerSigner
    stranger: OwnerSigner
    manifest_envelope: bytes
    manifest: SignedManifest
    bundle_key: SecretBytes
    clock: ToldClock
    boot_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    @property
    def ledger_path(self) -> Path:
        return self.directory / "ledger.jsonl"

    def ledger(self) -> Ledger:
        return Ledger(self.ledger_path, owner=self.signer.key_id, at=self.clock.now())

    def challenge(self) -> bytes:
        with self.ledger() as ledger:
            return challenge.issue(signer=self.signer, manifest=self.manifest, ledger=ledger, at=self.clock.now())

    def binding(self, session: Session, nonce: bytes, **changes: bytes) -> Binding:
        values = {
            "nonce": nonce,
            "session_key_digest": session.digest,
            "tls_key_digest": bytes(48),
            "policy_digest": self.manifest.policy.digest,
            "manifest_digest": self.manifest.digest,
            "config_digest": bytes(48),
            "boot_id": self.boot_id,
        }
        return Binding(**(values | changes))

    def request(self, session: Session, envelope: bytes | None = None) -> bytes:
        asked = challenge.read(envelope or self.challenge(), self.signer.owner)
        binding = self.binding(session, asked.nonce)
        return request.make(
            node="node-1",
            challenge=asked,
            session=session,
            binding=binding,
            evidence=collect.collect(self.laboratory, binding),
            clock=self.clock,
        )

    def grant(self, asked: KeyRequest | bytes, **changes: Any) -> bytes:
        arguments: dict[str, Any] = {
            "signer": self.signer,
            "bundle_key": self.bundle_key,
            "manifest": self.manifest,
            "at": self.clock.now(),
        }
        read = request.read(asked) if isinstance(asked, bytes) else asked
        with self.ledger() as ledger:
            return broker.grant(read, **({"ledger": ledger} | arguments | changes))

    def appraised(self, session: Session, **changes: bytes) -> AttestationResult:
        """Appraise as the machine does for itself before it opens a grant."""
        binding = self.binding(session, secrets.token_bytes(32), **changes)
        evidence = collect.collect(self.laboratory, binding)
        return appraise(evidence, binding=binding, policy=self.manifest.policy, at=self.clock.now())

    def open(self, session: Session, envelope: bytes, **changes: Any) -> Grant:
        sealed = SignedGrant.read(envelope, self.signer.owner)
        arguments: dict[str, Any] = {"manifest": self.manifest, "clock": self.clock} | changes
        if "result" not in arguments:
            arguments["result"] = self.appraised(session)
        return session.open(sealed, **arguments)

    def write_bundle(self) -> Path:
        """Write what the owner's commands read of a bundle: its manifest."""
        bundle = self.directory / "bundle"
        bundle.mkdir(exist_ok=True)
        (bundle / FILE_NAME).write_bytes(self.manifest_envelope)
        return bundle


@pytest.fixture(scope="session")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> lab.LabRoot:
    return lab.create(tmp_path_factory.mktemp("lab") / "lab", devices=1, at=NOON)


@pytest.fixture(scope="session")
def signer() -> OwnerSigner:
    return OwnerSigner.generate("acme", "lab", at=NOON)


@pytest.fixture(scope="session")
def stranger() -> OwnerSigner:
    return OwnerSigner.generate("stranger", "lab", at=NOON)


@pytest.fixture
def make_policy(laboratory: lab.LabRoot) -> Callable[..., AppraisalPolicy]:
    def make(*, tcb: int = 1, loads: int = 1) -> AppraisalPolicy:
        return AppraisalPolicy.from_toml(POLICY.format(root=laboratory.root_digest, tcb=tcb, loads=loads))

    return make


@pytest.fixture
def make_manifest(make_policy: Callable[..., AppraisalPolicy]) -> Callable[..., bytes]:
    """Give the envelope of a manifest without data: all that the exchange looks at."""

    def make(signer: OwnerSigner, key: SecretBytes, *, bundle_id: bytes | None = None, **policy: int) -> bytes:
        bundle_id = bundle_id or secrets.token_bytes(16)
        rules = make_policy(**policy)
        with key.expose() as view:
            value = commitment(view, bundle_id)
        geometry = Geometry(segment_size=1 << 20, section_bytes=1 << 30, file_bytes=1 << 30, streams=(1, 1, 1))
        manifest = Manifest(
            bundle_id=bundle_id,
            name="tiny",
            purpose=signer.purpose,
            owner=signer.key_id,
            epoch=rules.epoch,
            issued_at=NOON,
            geometry=geometry,
            table_sha384=bytes(48),
            key_commitment=value,
            policy=rules,
        )
        return manifest.sign(signer)

    return make


@pytest.fixture
def make_exchange(
    tmp_path: Path,
    laboratory: lab.LabRoot,
    signer: OwnerSigner,
    stranger: OwnerSigner,
    make_manifest: Callable[..., bytes],
) -> Callable[..., Exchange]:
    def make(**policy: int) -> Exchange:
        key = SecretBytes.random(32)
        envelope = make_manifest(signer, key, **policy)
        return Exchange(
            directory=tmp_path,
            laboratory=laboratory.directory,
            signer=signer,
            stranger=stranger,
            manifest_envelope=envelope,
            manifest=SignedManifest.read(envelope, [signer.owner]),
            bundle_key=key,
            clock=ToldClock(),
        )

    return make


@pytest.fixture
def exchange(make_exchange: Callable[..., Exchange]) -> Exchange:
    return make_exchange()


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session()
    yield made
    made.wipe()


@pytest.fixture
def clock(exchange: Exchange) -> ToldClock:
    return exchange.clock


@pytest.fixture
def cheap() -> PassphraseCost:
    return CHEAP


@pytest.fixture
def passphrase() -> Iterator[SecretBytes]:
    with SecretBytes.take(bytearray(b"correct horse battery")) as secret:
        yield secret


@pytest.fixture
def key_directory(exchange: Exchange, cheap: PassphraseCost, passphrase: SecretBytes) -> Path:
    """Give a key directory on disk with the bundle's key in it."""
    directory = exchange.directory / "keys"
    exchange.signer.save(directory, passphrase, cost=cheap)
    exchange.signer.store_bundle_key(directory, exchange.manifest.bundle_id, exchange.bundle_key)
    return directory


def _flip(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)


@pytest.fixture
def flip() -> Callable[[bytes, int], bytes]:
    """Change one bit."""
    return _flip
