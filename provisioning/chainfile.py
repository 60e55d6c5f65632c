"""An append-only file of records, each with the SHA-384 of the line before it: the owner's ledger, the node's journal.

One JSON object per line. A line is on disk before what it records takes effect. Who can write the file can also rewrite
the whole chain; compare its head with an earlier one kept elsewhere to notice (docs/limitations.md).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

from attestation import strictjson
from attestation.clock import format_time
from attestation.errors import FormatError, LetheError, reason_of
from attestation.strictjson import Fields
from provisioning.files import sync_directory

FIRST_PREVIOUS: Final = "0" * 96
_LINE_LIMIT: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Record:
    """One line.

    Attributes:
        seq: 0, 1, 2, ...
        at: when; never before the record above.
        event: dotted name of what happened.
        detail: its members: public values only.
        previous: SHA-384 of the line before, hex.
    """

    seq: int
    at: datetime
    event: str
    detail: Mapping[str, Any]
    previous: str

    def as_payload(self) -> dict[str, Any]:
        """Give the record as JSON members."""
        return {
            "seq": self.seq,
            "at": format_time(self.at),
            "event": self.event,
            "detail": dict(self.detail),
            "prev": self.previous,
        }

    def as_line(self) -> bytes:
        """Give the line without its end."""
        return strictjson.dumps(self.as_payload())


@dataclass(frozen=True, slots=True)
class Words:
    """How one kind of chain names itself in errors.

    Attributes:
        name: ``ledger`` or ``journal``; error codes begin with it.
        error: the class to raise.
        busy, broken, unwritten: hints for a locked, a changed, and an unwritable file.
    """

    name: str
    error: type[LetheError]
    busy: str
    broken: str
    unwritten: str

    def refuse(self, code: str, *, found: str, expected: str, hint: str) -> NoReturn:
        """Raise this kind's error."""
        raise self.error(f"{self.name}.{code}", found=found, expected=expected, hint=hint) from None

    def refuse_broken(self, path: Path, seq: int, why: str) -> NoReturn:
        """Raise for a line that is not as it was written."""
        self.refuse(
            "chain",
            found=f"{path} line {seq + 1}: {why}",
            expected="the file as it was written",
            hint=self.broken,
        )

    def refuse_unwritten(self, path: Path, error: OSError) -> NoReturn:
        """Raise for a file that cannot be written."""
        self.refuse(
            "write",
            found=f"{path}: {reason_of(error)}",
            expected="room and permission to write",
            hint=self.unwritten,
        )


def _read_record(line: bytes) -> Record | None:
    """Read one line, or give None when it is not exactly a line as this program writes it."""
    try:
        fields = Fields(strictjson.loads(line, limit=_LINE_LIMIT), "record")
        record = Record(
            fields.integer("seq"),
            fields.time("at"),
            fields.text("event", limit=64),
            fields.mapping("detail"),
            fields.text("prev", limit=96),
        )
        fields.end()
    except FormatError:
        return None
    return record if record.as_line() == line else None


class _Chain:
    """Follows a file line by line."""

    def __init__(self, path: Path, words: Words, note: Callable[[Record], None]) -> None:
        self.path = path
        self.words = words
        self.records: list[Record] = []
        self.head = FIRST_PREVIOUS
        self._note = note

    def fits(self, record: Record) -> bool:
        return record.seq == len(self.records) and record.previous == self.head

    def follow(self, record: Record) -> None:
        seq = len(self.records)
        if not self.fits(record):
            self.words.refuse_broken(self.path, seq, "does not follow the line before")
        if self.records and record.at < self.records[-1].at:
            self.words.refuse_broken(self.path, seq, "is earlier than the line before")
        try:
            self._note(record)
        except FormatError as error:
            self.words.refuse_broken(self.path, seq, f"{error.code} in its detail")
        self.records.append(record)
        self.head = hashlib.sha384(record.as_line()).hexdigest()

    def follow_all(self, data: bytes) -> bytes:
        """Check a whole file; gives what stands after the last whole line."""
        lines = data.split(b"\n")
        for seq, line in enumerate(lines[:-1]):
            record = _read_record(line)
            if record is None:
                self.words.refuse_broken(self.path, seq, f"is not a line of a {self.words.name}")
            self.follow(record)
        return lines[-1]


def _write_whole(descriptor: int, line: bytes) -> None:
    if os.write(descriptor, line) != len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _nothing(_: Record) -> None:
    """Note nothing."""


def read_chain(path: Path, words: Words) -> tuple[Record, ...]:
    """Check a file and give its records, changing nothing; a line still being written is left out.

    Raises:
        LetheError: ``NAME.read`` or ``NAME.chain``.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        words.refuse(
            "read",
            found=f"{path}: {reason_of(error)}",
            expected=f"a readable {words.name}",
            hint="check the path and its permissions",
        )
    chain = _Chain(path, words, _nothing)
    chain.follow_all(data)
    return tuple(chain.records)


class ChainFile:
    """A chain, open for appending and locked against every other program until it is closed.

    Args:
        path: the file; begun when it is not there.
        words: what kind of chain it is.
        owner: who it belongs to; written in the first record and compared on opening.
        at: now.
        note: sees every record, old and new; it raises FormatError for one that makes no sense.

    Raises:
        LetheError: ``NAME.busy``, ``NAME.chain``, ``NAME.owner``, ``NAME.write`` or ``NAME.clock``.
    """

    def __init__(
        self, path: Path, words: Words, *, owner: str, at: datetime, note: Callable[[Record], None] = _nothing
    ) -> None:
        self._path = path
        self._words = words
        self._chain = _Chain(path, words, note)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            words.refuse_unwritten(path, error)
        try:
            data = self._lock_and_read()
            tail = self._chain.follow_all(data)
            if tail:
                self._recover(tail, len(data) - len(tail), at)
            self._require_owner(owner, at)
        except BaseException:
            self.close()
            raise

    def _lock_and_read(self) -> bytes:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with os.fdopen(os.dup(self._descriptor), "rb") as stream:
                stream.seek(0)
                data = stream.read()
        except BlockingIOError:
            self._words.refuse(
                "busy", found=f"{self._path} in use", expected="one program at a time", hint=self._words.busy
            )
        except OSError as error:
            self._words.refuse_unwritten(self._path, error)
        self._require_same_file()
        return data

    def _require_same_file(self) -> None:
        # A file that was unlinked or replaced would take records that nobody can ever read.
        try:
            here, there = os.fstat(self._descriptor), self._path.lstat()
        except OSError as error:
            self._words.refuse_unwritten(self._path, error)
        if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
            self._words.refuse_broken(self._path, len(self._chain.records), "the file was replaced")

    def _recover(self, tail: bytes, length: int, at: datetime) -> None:
        # A whole last line that lacks only its end is kept, so that cutting off one byte cannot undo a record.
        record = _read_record(tail)
        whole = record is not None and self._chain.fits(record)
        try:
            if record is not None and whole:
                os.write(self._descriptor, b"\n")
                self._chain.follow(record)
            else:
                os.ftruncate(self._descriptor, length)
            os.fsync(self._descriptor)
        except OSError as error:
            self._words.refuse_unwritten(self._path, error)
        if self._chain.records:
            self.append(f"{self._words.name}.recovered", at=at, detail={"bytes_cut": 0 if whole else len(tail)})

    def _require_owner(self, owner: str, at: datetime) -> None:
        begun = f"{self._words.name}.begun"
        if not self._chain.records:
            self.append(begun, at=at, detail={"version": 1, "owner": owner})
            sync_directory(self._path.parent)
        first = self._chain.records[0]
        if first.event != begun or first.detail.get("owner") != owner:
            self._words.refuse(
                "owner",
                found=f"{self._path} of another owner",
                expected=f"the {self._words.name} of {owner[:16]}",
                hint=f"keep one {self._words.name} for each",
            )

    @property
    def records(self) -> tuple[Record, ...]:
        """All records, oldest first."""
        return tuple(self._chain.records)

    def append(self, event: str, *, at: datetime, detail: Mapping[str, Any]) -> Record:
        """Add a record. It is on disk when this returns.

        Raises:
            LetheError: ``NAME.clock`` when the clock has gone back, ``NAME.write`` when it cannot be written,
                ``NAME.chain`` when the file was replaced.
        """
        self.require_time(at)
        self._require_same_file()
        record = Record(len(self._chain.records), at, event, detail, self._chain.head)
        line = record.as_line() + b"\n"
        try:
            _write_whole(self._descriptor, line)
            os.fsync(self._descriptor)
        except OSError as error:
            # What is on disk is not known now, so nothing more is written; the next opening cuts a torn line.
            self.close()
            self._words.refuse_unwritten(self._path, error)
        self._chain.follow(record)
        return record

    def require_time(self, at: datetime) -> None:
        """Refuse a time before the last record: a clock set back would make stale challenges fresh.

        Raises:
            LetheError: ``NAME.clock``.
        """
        last = self._chain.records[-1].at if self._chain.records else at
        if at < last:
            self._words.refuse(
                "clock",
                found=f"a clock at {format_time(at)}",
                expected=f"not before {format_time(last)}, the last record",
                hint="set this machine's clock right, then try again",
            )

    def close(self) -> None:
        """Give up the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
