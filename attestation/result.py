"""What an appraisal says: every check with what was seen, then either a proof or one refusal.

Checks are numbered as in docs/spec/appraisal.md: ``family.check`` with ``[ordinal]`` for a device. The families are
1 (is the evidence genuine), 2 (are the endorsements good now), 3 (does the policy accept it). Nothing here decides.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, final

from attestation import strictjson
from attestation._seal import MINT
from attestation.binding import Binding
from attestation.clock import format_time
from attestation.errors import EndorsementRefused, EvidenceNotGenuine, LetheError
from attestation.proof import Proof

Outcome = Literal["pass", "refused", "unchecked"]
Assurance = Literal["production", "lab"]

SIMULATED_PLATFORM = "simulated"
SIMULATED_BANNER = "SIMULATED: laboratory evidence, signed by keys in files; it says nothing about any hardware"

_NUMBER = re.compile(r"([123])\.([1-9][0-9]?)(?:\[([0-9]{1,2})\])?")


@dataclass(frozen=True, slots=True)
class Check:
    """One numbered check and how it ended.

    Attributes:
        number: place in the specification, such as ``3.5`` or ``1.12[0]`` (device 0).
        name: stable dotted name, such as ``simulated.tcb``; the code of the refusal when this check refuses first.
        outcome: ``pass``, ``refused``, or ``unchecked`` (the owner left the rule open, with a reason).
        seen: what the evidence says.
        expected: what is accepted.
        reason: for ``unchecked`` the owner's words; for ``refused`` what to do next; empty for ``pass``.
    """

    number: str
    name: str
    outcome: Outcome
    seen: str
    expected: str
    reason: str

    def __post_init__(self) -> None:
        _order_of(self.number)

    @property
    def order(self) -> tuple[int, int, int]:
        """Family, check and device ordinal (-1 for none): sorting by it gives the order of the specification."""
        return _order_of(self.number)

    def as_payload(self) -> dict[str, str]:
        """Give the check as JSON members."""
        return {
            "number": self.number,
            "name": self.name,
            "outcome": self.outcome,
            "seen": self.seen,
            "expected": self.expected,
            "reason": self.reason,
        }


def _order_of(number: str) -> tuple[int, int, int]:
    found = _NUMBER.fullmatch(number)
    if found is None:
        raise ValueError(f"{number!r} is no check number")
    family, check, ordinal = found.groups()
    return int(family), int(check), -1 if ordinal is None else int(ordinal)


@final
class AttestationResult(Proof):
    """Proof that evidence was genuine, bound to one session, and accepted by one policy at one time.

    Only :func:`attestation.appraise.appraise` makes one.

    Attributes:
        platform: the CPU's platform word.
        platforms: all platform words in the evidence, sorted.
        assurance: ``lab`` when any part of the evidence is simulated, else ``production``.
        checks: every check, in the order of the specification; none is refused.
        binding: what the evidence was bound to; who uses the result compares it with its own session.
        policy_name, policy_digest: the policy that accepted (digest: 48 bytes).
        evidence_digest: names the evidence, 48 bytes.
        at: the time that the appraisal was made for.
        not_proven: what this result does not say, for people.
    """

    __slots__ = (
        "assurance",
        "at",
        "binding",
        "checks",
        "evidence_digest",
        "not_proven",
        "platform",
        "platforms",
        "policy_digest",
        "policy_name",
    )

    def __init__(
        self,
        mint: object,
        *,
        platform: str,
        platforms: tuple[str, ...],
        checks: tuple[Check, ...],
        binding: Binding,
        policy_name: str,
        policy_digest: bytes,
        evidence_digest: bytes,
        at: datetime,
        not_proven: tuple[str, ...],
    ) -> None:
        self._demand(mint, MINT)
        self.platform = platform
        self.platforms = platforms
        # Derived here and given by no caller: simulated evidence has no road to another word.
        self.assurance: Assurance = "lab" if SIMULATED_PLATFORM in platforms else "production"
        self.checks = checks
        self.binding = binding
        self.policy_name = policy_name
        self.policy_digest = policy_digest
        self.evidence_digest = evidence_digest
        self.at = at
        self.not_proven = not_proven

    @property
    def simulated(self) -> bool:
        """Say whether any part of the evidence is simulated; every surface then says SIMULATED."""
        return SIMULATED_PLATFORM in self.platforms

    @property
    def digest(self) -> bytes:
        """SHA-384 over the result's JSON form, 48 bytes."""
        return hashlib.sha384(strictjson.dumps(self.as_payload())).digest()

    def as_payload(self) -> dict[str, Any]:
        """Give the result as JSON members, for grants, journals and ``--json``."""
        return {
            **strictjson.header("attestation-result", epoch=0, issued_at=format_time(self.at)),
            "outcome": "accepted",
            "platform": self.platform,
            "platforms": list(self.platforms),
            "assurance": self.assurance,
            "simulated": self.simulated,
            "policy": self.policy_name,
            "policy_digest": self.policy_digest.hex(),
            "evidence_digest": self.evidence_digest.hex(),
            "binding": self.binding.as_payload(),
            "checks": [check.as_payload() for check in self.checks],
            "not_proven": list(self.not_proven),
        }


class AppraisalRefused(LetheError):
    """An appraisal refused; raised once, with every check that was made.

    ``code``, ``found``, ``expected`` and ``hint`` are those of the first refused check; the subclass, and with it the
    exit status, is that of the lowest family with a refusal.

    Attributes:
        checks: every check in the order of the specification, at least one of them refused.
        platforms: all platform words in the evidence, sorted.
        policy_name: the policy that was applied.
    """

    exit_status = 4

    def __init__(self, checks: tuple[Check, ...], *, platforms: tuple[str, ...], policy_name: str) -> None:
        first = next(check for check in checks if check.outcome == "refused")
        super().__init__(first.name, found=first.seen, expected=first.expected, hint=first.reason)
        self.checks = checks
        self.platforms = platforms
        self.policy_name = policy_name

    @property
    def refused(self) -> tuple[Check, ...]:
        """The checks that refused, in order."""
        return tuple(check for check in self.checks if check.outcome == "refused")

    @property
    def simulated(self) -> bool:
        """Say whether any part of the evidence is simulated."""
        return SIMULATED_PLATFORM in self.platforms

    def trail_payload(self) -> dict[str, Any]:
        """Give the refusal with its whole trail as JSON members, for ``--json`` and journals."""
        return {
            **self.as_payload(),
            "outcome": "refused",
            "platforms": list(self.platforms),
            "simulated": self.simulated,
            "policy": self.policy_name,
            "checks": [check.as_payload() for check in self.checks],
        }


class EvidenceRefused(AppraisalRefused, EvidenceNotGenuine):
    """The evidence is not genuine, or not of this session."""

    exit_status = 3


class EndorsementsRefused(AppraisalRefused, EndorsementRefused):
    """The evidence is genuine; an endorsement of it is not good at this time."""

    exit_status = 5


class PolicyRefused(AppraisalRefused):
    """The evidence is genuine and endorsed; the owner's policy does not accept it."""

    exit_status = 4


def render(outcome: AttestationResult | AppraisalRefused) -> list[str]:
    """Give an appraisal's trail as lines of text for people, SIMULATED first where it applies."""
    lines = [SIMULATED_BANNER] if outcome.simulated else []
    platforms = ", ".join(outcome.platforms)
    if isinstance(outcome, AttestationResult):
        lines.append(f"accepted by policy {outcome.policy_name}: platform {platforms}, assurance {outcome.assurance}")
    else:
        count = len(outcome.refused)
        lines.append(f"REFUSED by policy {outcome.policy_name}: platform {platforms}, {count} of the checks below")
    lines += _check_lines(outcome.checks)
    if isinstance(outcome, AttestationResult):
        lines += [f"not proven: {text}" for text in outcome.not_proven]
    return lines


def _check_lines(checks: Iterable[Check]) -> Iterable[str]:
    for check in checks:
        start = f"  {check.number:<8}{check.outcome.upper() if check.outcome == 'refused' else check.outcome:<11}"
        line = f"{start}{check.name}: {check.seen}"
        if check.outcome == "unchecked":
            line += f" (left open: {check.reason})"
        elif check.outcome == "refused":
            line += f"; expected {check.expected}; hint: {check.reason}"
        yield line
