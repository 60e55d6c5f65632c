"""A laboratory bench: one simulated machine, its policy and its session, and every way to spoil them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from attestation import dsse, strictjson
from attestation.appraise import AppraisalRefused, appraise
from attestation.binding import Binding, device_evidence_digest
from attestation.evidence import Evidence, EvidenceSet
from attestation.policy import AppraisalPolicy
from attestation.result import AttestationResult
from attestation.signature import PrivateKeys
from attestation.simulated import abi, collect, lab
from attestation.simulated.rules import PLATFORM

AT = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
DEVICES = 2


def policy_members(root_digest: str, devices: int = DEVICES) -> dict[str, Any]:
    """Give a policy that the untouched bench satisfies, as the members of its file."""
    return {
        "version": 1,
        "name": "laboratory",
        "epoch": 1,
        "accept": ["simulated"],
        "challenge_seconds": 86400,
        "simulated": {
            "root": {"equals": root_digest},
            "chip_id": {"unchecked": "any laboratory machine"},
            "measurement": {"unchecked": "the code changes daily"},
            "tcb": {"at_least": 3},
            "debug": {"equals": False},
            "devices": {"equals": devices},
            "device_model": {"one_of": ["simulated-cpu-slot"]},
            "device_measurement": {"equals": lab.DEVICE_FIRMWARE.hex()},
            "cc_mode": {"equals": "on"},
        },
        "serving": {"max_context": 2048, "max_output_tokens": 512, "max_concurrent": 16},
        "grant": {"loads": 1, "seconds": 86400, "reboot": "courier"},
    }


def read_keys(path: Path) -> PrivateKeys:
    members = json.loads(path.read_text())
    return PrivateKeys.from_private_parts(
        strictjson.decode_b64(members["seed"], "seed"), strictjson.decode_b64(members["classical"], "classical")
    )


@dataclass
class Bench:
    """One laboratory, and its parts taken apart so that a test can put them together wrongly."""

    directory: Path
    root_digest: str

    def policy(self, **rules: Any) -> AppraisalPolicy:
        members = policy_members(self.root_digest)
        members["simulated"] |= rules
        return AppraisalPolicy.from_payload(members)

    def binding(self, policy: AppraisalPolicy | None = None, **changes: bytes) -> Binding:
        values = {
            "nonce": bytes(range(32)),
            "session_key_digest": b"s" * 48,
            "tls_key_digest": b"t" * 48,
            "policy_digest": (policy or self.policy()).digest,
            "manifest_digest": b"m" * 48,
            "config_digest": b"c" * 48,
            "boot_id": b"b" * 16,
        }
        return Binding(**(values | changes))

    @property
    def laboratory(self) -> lab.Laboratory:
        return lab.load(self.directory)

    @property
    def root_keys(self) -> PrivateKeys:
        return read_keys(self.directory / lab.ROOT_KEY_FILE)

    def edit_machine(self, **changes: Any) -> None:
        """Change the machine as a drill does: in machine.json."""
        path = self.directory / lab.MACHINE_FILE
        path.write_bytes(lab.write_machine(dataclasses.replace(lab.read_machine(path.read_bytes()), **changes)))

    def edit_device(self, ordinal: int, **changes: Any) -> None:
        devices = list(self.laboratory.machine.devices)
        devices[ordinal] = dataclasses.replace(devices[ordinal], **changes)
        self.edit_machine(devices=tuple(devices))

    def collect(self, policy: AppraisalPolicy | None = None) -> EvidenceSet:
        return collect.collect(self.directory, self.binding(policy))

    def appraise(self, evidence: EvidenceSet | None = None, policy: AppraisalPolicy | None = None) -> AttestationResult:
        policy = policy or self.policy()
        evidence = evidence or self.collect(policy)
        return appraise(evidence, binding=self.binding(policy), policy=policy, at=AT)

    def refusal(
        self, evidence: EvidenceSet | None = None, policy: AppraisalPolicy | None = None, at: datetime = AT
    ) -> AppraisalRefused:
        """Appraise what must be refused."""
        policy = policy or self.policy()
        evidence = evidence or self.collect(policy)
        with pytest.raises(AppraisalRefused) as caught:
            appraise(evidence, binding=self.binding(policy), policy=policy, at=at)
        return caught.value

    def certificate(
        self, role: abi.Role, identity: bytes, keys: PrivateKeys, root: PrivateKeys, **changes: Any
    ) -> bytes:
        """Certify any key with any root."""
        made = abi.Certificate(
            role=role,
            identity=identity,
            keys=keys.public,
            not_before=AT - timedelta(days=1),
            not_after=AT + timedelta(days=1),
        )
        payload = strictjson.dumps(dataclasses.replace(made, **changes).as_payload())
        return dsse.sign(abi.CERTIFICATE_KIND, payload, [root])

    def cpu_report(self, devices: tuple[Evidence, ...], **changes: Any) -> abi.CpuReport:
        machine = self.laboratory.machine
        report = abi.CpuReport(
            chip_id=machine.chip_id,
            measurement=bytes(48),
            tcb=machine.tcb,
            debug=machine.debug,
            report_data=self.binding().report_data(device_evidence_digest(devices)),
        )
        return dataclasses.replace(report, **changes)

    def device_report(self, ordinal: int, **changes: Any) -> abi.DeviceReport:
        device = self.laboratory.machine.devices[ordinal]
        report = abi.DeviceReport(
            model=device.model,
            device_id=device.device_id,
            nonce=self.binding().device_nonce(ordinal),
            cc_mode=device.cc_mode,
            measurement=device.measurement,
        )
        return dataclasses.replace(report, **changes)

    def sign(
        self,
        role: abi.Role,
        report: abi.CpuReport | abi.DeviceReport,
        signer: lab.Signer,
        *,
        root: bytes | None = None,
        certificate: bytes | None = None,
    ) -> Evidence:
        """Put evidence together from parts that need not fit."""
        envelope = dsse.sign(abi.REPORT_KINDS[role], strictjson.dumps(report.as_payload()), [signer.keys])
        body = abi.Body(root or self.laboratory.root, certificate or signer.certificate, envelope)
        return Evidence(PLATFORM, abi.write_body(body, role))

    def with_devices(self, devices: tuple[Evidence, ...]) -> EvidenceSet:
        """Give a set whose processor vouches for these devices, so that only the devices can refuse."""
        return EvidenceSet(self.sign("cpu", self.cpu_report(devices), self.laboratory.cpu), devices)


@pytest.fixture(scope="session")
def made_laboratory(tmp_path_factory: pytest.TempPathFactory) -> lab.LabRoot:
    return lab.create(tmp_path_factory.mktemp("labs") / "lab", devices=DEVICES, at=AT)


@pytest.fixture(scope="session")
def bench(made_laboratory: lab.LabRoot) -> Bench:
    """The bench, not to be changed; its files are shared by all tests."""
    return Bench(made_laboratory.directory, made_laboratory.root_digest)


@pytest.fixture
def own_bench(made_laboratory: lab.LabRoot, tmp_path: Path) -> Bench:
    """A copy of the bench that a test may change."""
    shutil.copytree(made_laboratory.directory, tmp_path / "lab")
    return Bench(tmp_path / "lab", made_laboratory.root_digest)


@pytest.fixture(scope="session")
def genuine(bench: Bench) -> EvidenceSet:
    """Evidence that the bench's policy accepts, collected once."""
    return bench.collect()


@pytest.fixture(scope="session")
def other_keys() -> PrivateKeys:
    return PrivateKeys.generate()


@pytest.fixture(scope="session")
def keys() -> PrivateKeys:
    return PrivateKeys.generate()
