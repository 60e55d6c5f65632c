"""The owner's ledger: every challenge issued and every grant given, in one chain file.

An entry is on disk before what it records takes effect, so no crash can lead to a second grant for one challenge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from attestation.binding import DIGEST_BYTES, NONCE_BYTES
from attestation.errors import FormatError
from attestation.strictjson import Fields, b64
from provisioning.chainfile import ChainFile, Record, Words, read_chain
from provisioning.errors import ExchangeRefused, LedgerError

FILE_NAME: Final = "ledger.jsonl"

_WORDS: Final = Words(
    name="ledger",
    error=LedgerError,
    busy="wait for the other lethe-owner command, then try again",
    broken="restore the ledger from its backup; without it, make new keys and pack again",
    unwritten="check the disk and the key directory; nothing was granted",
)


@dataclass(frozen=True, slots=True)
class IssuedChallenge:
    """What the ledger knows of one challenge.

    Attributes:
        nonce: 32 bytes.
        manifest_digest: which bundle it is for, 48 bytes.
        issued_at: when.
        answered: a grant was given for it.
    """

    nonce: bytes
    manifest_digest: bytes
    issued_at: datetime
    answered: bool


def read_ledger(path: Path) -> tuple[Record, ...]:
    """Check a ledger and give its entries, changing nothing.

    Raises:
        LedgerError: ``ledger.read`` or ``ledger.chain``.
    """
    return read_chain(path, _WORDS)


def head_of(entries: Sequence[Record]) -> bytes:
    """Give SHA-384 of the last line, 48 bytes, zeros for an empty ledger: a note of it shows later changes."""
    return hashlib.sha384(entries[-1].as_line()).digest() if entries else bytes(DIGEST_BYTES)


class Ledger:
    """The ledger, open for appending and locked against every other program until it is closed.

    Events: ``ledger.begun``, ``ledger.recovered``, ``challenge.issued``, ``request.refused``, ``grant.given``.

    Args:
        path: the file; begun when it is not there.
        owner: key id of its owner.
        at: now.

    Raises:
        LedgerError: ``ledger.busy``, ``ledger.chain``, ``ledger.owner``, ``ledger.write`` or ``ledger.clock``.
    """

    def __init__(self, path: Path, *, owner: str, at: datetime) -> None:
        self._challenges: dict[str, IssuedChallenge] = {}
        self._file = ChainFile(path, _WORDS, owner=owner, at=at, note=self._note)

    def _note(self, entry: Record) -> None:
        """Follow challenges; raises FormatError for an entry that no broker writes."""
        detail = Fields(entry.detail, f"ledger.{entry.event}")
        if entry.event == "challenge.issued":
            name = detail.text("challenge", limit=96)
            if name in self._challenges:
                raise FormatError("ledger.challenge", found=f"{name[:16]} twice", expected="once", hint="restore it")
            self._challenges[name] = IssuedChallenge(
                detail.blob("nonce", size=NONCE_BYTES),
                detail.blob("manifest", size=DIGEST_BYTES),
                entry.at,
                answered=False,
            )
        elif entry.event == "grant.given":
            name = detail.text("challenge", limit=96)
            known = self._challenges.get(name)
            if known is None or known.answered:
                raise FormatError("ledger.grant", found=name[:16], expected="an open challenge", hint="restore it")
            self._challenges[name] = replace(known, answered=True)

    @property
    def entries(self) -> tuple[Record, ...]:
        """All entries, oldest first."""
        return self._file.records

    def challenge(self, digest: bytes) -> IssuedChallenge | None:
        """Give what is known of a challenge, or None when this owner never issued it."""
        return self._challenges.get(digest.hex())

    def append(self, event: str, *, at: datetime, detail: Mapping[str, Any]) -> Record:
        """Add an entry. It is on disk when this returns.

        Raises:
            ExchangeRefused: ``challenge.used`` for a second grant, whatever the caller looked at before.
            LedgerError: ``ledger.clock`` when the clock has gone back, ``ledger.write`` when it cannot be written.
        """
        if event == "grant.given":
            known = self._challenges.get(str(detail.get("challenge")))
            if known is None or known.answered:
                raise ExchangeRefused(
                    "challenge.used",
                    found="a challenge that is not open",
                    expected="an open challenge",
                    hint="send a new challenge; each answers one grant",
                )
        return self._file.append(event, at=at, detail=detail)

    def require_time(self, at: datetime) -> None:
        """Refuse a time before the last entry: a clock set back would make stale challenges fresh.

        Raises:
            LedgerError: ``ledger.clock``.
        """
        self._file.require_time(at)

    def close(self) -> None:
        """Give up the lock."""
        self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def challenge_detail(digest: bytes, nonce: bytes, manifest_digest: bytes) -> dict[str, str]:
    """Give the members of a ``challenge.issued`` entry."""
    return {"challenge": digest.hex(), "nonce": b64(nonce), "manifest": b64(manifest_digest)}
