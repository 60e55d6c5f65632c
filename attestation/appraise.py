"""Evidence, binding, policy and a time in; an Attestation Result or one refusal with every reason out.

Pure: no clock, no file and no device is read here. The owner's broker and the machine itself call the same function
with the same policy. Which checks a platform makes is in its ``verify`` module; what joins them is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, Protocol

from attestation._seal import MINT
from attestation.binding import Binding, device_evidence_digest
from attestation.evidence import Evidence, EvidenceSet
from attestation.policy import AppraisalPolicy, PlatformRules
from attestation.result import (
    AppraisalRefused,
    AttestationResult,
    Check,
    EndorsementsRefused,
    EvidenceRefused,
    PolicyRefused,
    render,
)
from attestation.simulated import rules as simulated_rules
from attestation.simulated import verify as simulated_verify

__all__ = ["AppraisalRefused", "EndorsementsRefused", "EvidenceRefused", "PolicyRefused", "appraise", "render"]


class _CpuExaminer(Protocol):
    def __call__(
        self, evidence: Evidence, *, report_data: bytes, rules: PlatformRules, at: datetime
    ) -> list[Check]: ...


class _DevicesExaminer(Protocol):
    def __call__(
        self, devices: Mapping[int, Evidence], *, binding: Binding, rules: PlatformRules, at: datetime
    ) -> list[Check]: ...


_CPU: Final[Mapping[str, _CpuExaminer]] = {simulated_rules.PLATFORM: simulated_verify.examine_cpu}
_DEVICES: Final[Mapping[str, _DevicesExaminer]] = {simulated_rules.PLATFORM: simulated_verify.examine_devices}
_NOT_PROVEN: Final[Mapping[str, tuple[str, ...]]] = {simulated_rules.PLATFORM: simulated_verify.NOT_PROVEN}

# True on every platform, so every result says it.
_NEVER_PROVEN: Final = (
    "that nobody probes memory, buses and links inside the machine: keep it in a guarded room",
    "that the machine still is what it was: a result is about the time it names",
)


def appraise(evidence: EvidenceSet, *, binding: Binding, policy: AppraisalPolicy, at: datetime) -> AttestationResult:
    """Judge a machine's evidence.

    Every check is made that can be made, then the outcome is decided once.

    Args:
        evidence: unchecked evidence of one machine.
        binding: what the evidence must be bound to, taken from the caller's own knowledge of challenge and session.
        policy: what the owner accepts.
        at: the time to judge for, UTC; see attestation/clock.py for why it is not trusted to go back.

    Raises:
        EvidenceRefused: exit status 3, a check of family 1 refused.
        EndorsementsRefused: exit status 5, none of family 1 but one of family 2 refused.
        PolicyRefused: exit status 4, only checks of family 3 refused.
    """
    checks = [_check_policy_is_bound(binding, policy)]
    checks += _check_platforms(evidence, policy)
    if evidence.cpu.platform in policy.accept and evidence.cpu.platform in _CPU:
        expected = binding.report_data(device_evidence_digest(evidence.devices))
        rules = policy.rules(evidence.cpu.platform)
        checks += _CPU[rules.platform](evidence.cpu, report_data=expected, rules=rules, at=at)
    for platform in policy.accept:
        # A platform is asked also when it has no device here: a missing device is refused by its count. Only one that
        # brings its own processor, and is not the processor here, has nothing to answer for.
        if platform in _DEVICES and (platform in evidence.platforms or platform not in _CPU):
            own = {place: device for place, device in enumerate(evidence.devices) if device.platform == platform}
            checks += _DEVICES[platform](own, binding=binding, rules=policy.rules(platform), at=at)
    ordered = tuple(sorted(checks, key=lambda check: check.order))
    _refuse_if_any(ordered, evidence, policy)
    limits = tuple(text for word in evidence.platforms for text in _NOT_PROVEN[word])
    return AttestationResult(
        MINT,
        platform=evidence.cpu.platform,
        platforms=evidence.platforms,
        checks=ordered,
        binding=binding,
        policy_name=policy.name,
        policy_digest=policy.digest,
        evidence_digest=evidence.digest,
        at=at,
        not_proven=limits + _NEVER_PROVEN,
    )


def _check_platforms(evidence: EvidenceSet, policy: AppraisalPolicy) -> list[Check]:
    """Check 3.1: a platform that the policy does not name is not judged at all."""
    checks = [_check_platform("3.1", evidence.cpu.platform, [word for word in policy.accept if word in _CPU])]
    for_devices = [word for word in policy.accept if word in _DEVICES]
    for place, device in enumerate(evidence.devices):
        checks.append(_check_platform(f"3.1[{place}]", device.platform, for_devices))
    return checks


def _check_platform(number: str, word: str, accepted: Sequence[str]) -> Check:
    expected = f"one of {', '.join(accepted)}"
    if word in accepted:
        return Check(number, "appraise.platform", "pass", word, expected, "")
    hint = "run on a platform that the policy accepts, or ask the owner for a policy that accepts this one"
    return Check(number, "appraise.platform", "refused", word, expected, hint)


def _check_policy_is_bound(binding: Binding, policy: AppraisalPolicy) -> Check:
    """Check 3.2: the machine works under this policy and no other, so its caps and terms hold there too."""
    seen, expected = binding.policy_digest.hex(), policy.digest.hex()
    if seen == expected:
        return Check("3.2", "appraise.policy", "pass", seen, expected, "")
    hint = "the machine holds another policy; install the bundle whose manifest carries this one"
    return Check("3.2", "appraise.policy", "refused", seen, expected, hint)


def _refuse_if_any(checks: tuple[Check, ...], evidence: EvidenceSet, policy: AppraisalPolicy) -> None:
    families = {check.order[0] for check in checks if check.outcome == "refused"}
    if not families:
        return
    refusal = {1: EvidenceRefused, 2: EndorsementsRefused, 3: PolicyRefused}[min(families)]
    raise refusal(checks, platforms=evidence.platforms, policy_name=policy.name)
