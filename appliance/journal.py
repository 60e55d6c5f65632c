"""The node's own record: what was asked, granted, loaded, refused and wiped, each on the disk before it takes effect.

No journal, no service: when a record cannot be written, what it would have recorded does not happen. The wipe alone
never waits for the disk (appliance/drill.py). Records hold public values and numbers; no prompts, answers or keys.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final

from appliance.errors import JournalError
from attestation.clock import SystemClock
from provisioning.chainfile import ChainFile, Record, Words, read_chain
from provisioning.files import make_private_directory

WORDS: Final = Words(
    name="journal",
    error=JournalError,
    busy="another agent runs with this configuration; stop it first",
    broken="keep the file as evidence, tell the owner, and begin a new state directory",
    unwritten="free space or mend permissions; the appliance does nothing that it cannot record",
)

# Records after which nothing of a run is left in memory.
_ENDS: Final = (
    "agent.failed",
    "journal.begun",
    "journal.recovered",
    "zeroize.done",
    "zeroize.incomplete",
    "zeroize.unrecorded",
)


class Journal:
    """The journal of one node.

    Args:
        path: the file, in the state directory.
        node: the node's name.
        clock: gives times; the last record's time becomes a floor under it, so a clock set back is noticed.
    """

    def __init__(self, path: Path, *, node: str, clock: SystemClock) -> None:
        self._path = path
        self._node = node
        self._clock = clock
        self._file: ChainFile | None = None
        # The drill records from a worker thread, so that a hung disk cannot hold up the wipe.
        self._lock = threading.Lock()

    def open(self) -> Record | None:
        """Open or begin the journal, and give its last record from before.

        When that is no end of a run, the run was lost without a wipe, and ``agent.recovered`` is recorded: its session
        is gone, and so is every grant for it.

        Raises:
            JournalError: it cannot be written, or is not whole.
        """
        make_private_directory(self._path.parent)
        if self._path.exists() and (before := read_chain(self._path, WORDS)):
            # A machine that was off with a dead clock battery comes back in the past: its floor is the last record.
            self._clock.raise_floor(before[-1].at)
        else:
            before = ()
        self._file = ChainFile(self._path, WORDS, owner=self._node, at=self._clock.now())
        last = before[-1] if before else None
        if last is not None and last.event not in _ENDS:
            self.record("agent.recovered", outcome="failed", last=last.event, last_seq=last.seq)
        return last

    def record(self, event: str, *, outcome: str = "ok", **detail: Any) -> None:
        """Write one record; it is on the disk when this returns.

        Args:
            event: dotted name, such as ``grant.imported``.
            outcome: ``ok``, ``refused`` or ``failed``.
            detail: public values: text, whole numbers, lists of them.

        Raises:
            JournalError: it could not be written.
        """
        with self._lock:
            if self._file is None:
                raise JournalError(
                    "journal.closed", found="a closed journal", expected="an open one", hint="start the agent again"
                )
            self._file.append(event, at=self._clock.now(), detail={"outcome": outcome} | detail)

    def close(self) -> None:
        """Give up the lock on the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
