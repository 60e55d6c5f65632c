"""The one shape of every refusal in Lethe.

Each error carries a stable dotted ``code``, what was ``found``, what was ``expected`` and a ``hint`` that tells the
operator what to do next. One class exists per decision a caller can take, so each class owns one process exit status
(docs/exit-codes.md). Messages hold public values only: never a key, a prompt or a weight.
"""

from __future__ import annotations

from typing import ClassVar


class LetheError(Exception):
    """Base of every refusal; never raised itself.

    Attributes:
        code: stable dotted identifier, such as ``snp.tcb.old``; it is the same on the console and in the journal.
        found: what was seen.
        expected: what would have been accepted.
        hint: what the operator can do next.
    """

    exit_status: ClassVar[int] = 1

    def __init__(self, code: str, *, found: str, expected: str, hint: str) -> None:
        super().__init__(code)
        self.code = code
        self.found = found
        self.expected = expected
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.code}: found {self.found}, expected {self.expected}"

    def as_payload(self) -> dict[str, str]:
        """Give the error as JSON-ready text fields, for ``--json``, the journal and the control socket."""
        return {"code": self.code, "found": self.found, "expected": self.expected, "hint": self.hint}


def reason_of(error: OSError) -> str:
    """Give why the system refused, as a message says it: lower case, and nothing of the file's content."""
    return (error.strerror or type(error).__name__).lower()


class FormatError(LetheError):
    """Bytes from outside are not the object they claim to be (grant, challenge, manifest, envelope)."""

    exit_status = 6


class SignatureRefused(LetheError):
    """A signature is absent, by another key, or wrong."""

    exit_status = 6


class EvidenceNotGenuine(LetheError):
    """Evidence is malformed, or its signature or chain does not lead to the root it must lead to."""

    exit_status = 3


class EndorsementRefused(LetheError):
    """Vendor material needed to judge the evidence is missing, stale or revoked."""

    exit_status = 5


class PolicyInvalid(LetheError):
    """A policy file cannot be used: a rule is missing, unknown, malformed, or left open without a reason."""

    exit_status = 78
