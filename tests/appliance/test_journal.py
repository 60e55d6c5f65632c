from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from appliance.errors import JournalError
from appliance.journal import WORDS, Journal
from attestation.clock import SystemClock
from provisioning.chainfile import read_chain


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.jsonl"


def opened(path: Path, *, node: str = "node-1") -> Journal:
    journal = Journal(path, node=node, clock=SystemClock())
    journal.open()
    return journal


def test_records_are_on_disk_in_order_with_their_details(path: Path) -> None:
    journal = opened(path)
    journal.record("grant.imported", uid=1000)
    journal.record("grant.rejected", outcome="refused", error="grant.session")
    journal.close()
    records = read_chain(path, WORDS)
    assert [(record.event, record.detail) for record in records[1:]] == [
        ("grant.imported", {"outcome": "ok", "uid": 1000}),
        ("grant.rejected", {"outcome": "refused", "error": "grant.session"}),
    ]


def test_opening_again_continues_the_chain_and_shows_the_last_record(path: Path) -> None:
    journal = opened(path)
    journal.record("zeroize.done")
    journal.close()
    again = Journal(path, node="node-1", clock=SystemClock())
    last = again.open()
    assert last is not None
    assert last.event == "zeroize.done"
    again.record("agent.started")
    assert [record.seq for record in read_chain(path, WORDS)] == [0, 1, 2]
    again.close()


@pytest.mark.parametrize("change", ["edit", "drop", "swap"])
def test_refuses_a_journal_that_was_changed(path: Path, change: str) -> None:
    journal = opened(path)
    for number in range(4):
        journal.record("agent.started", number=number)
    journal.close()
    lines = path.read_bytes().splitlines(keepends=True)
    if change == "edit":
        lines[2] = lines[2].replace(b'"number":1', b'"number":7')
    elif change == "drop":
        del lines[2]
    else:
        lines[2], lines[3] = lines[3], lines[2]
    path.write_bytes(b"".join(lines))
    with pytest.raises(JournalError, match=r"journal\.chain.*line [34]") as refusal:
        opened(path)
    assert refusal.value.exit_status == 74


def test_cuts_a_torn_last_line_and_records_the_cut(path: Path) -> None:
    journal = opened(path)
    journal.record("zeroize.done")
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"at":"2026')
    opened(path).close()
    assert [record.event for record in read_chain(path, WORDS)] == [
        "journal.begun",
        "zeroize.done",
        "journal.recovered",
    ]


def test_refuses_to_share_the_journal_with_another_agent(path: Path) -> None:
    journal = opened(path)
    with pytest.raises(JournalError, match=r"journal\.busy"):
        opened(path)
    journal.close()


def test_refuses_the_journal_of_another_node(path: Path) -> None:
    opened(path).close()
    with pytest.raises(JournalError, match=r"journal\.owner"):
        opened(path, node="node-2")


@pytest.mark.parametrize("fate", ["unlinked", "replaced"])
def test_notices_on_the_next_record_that_the_file_is_gone(path: Path, fate: str) -> None:
    journal = opened(path)
    path.unlink()
    if fate == "replaced":
        path.write_bytes(b"")
    with pytest.raises(JournalError, match=r"journal\.(write|chain)"):
        journal.record("agent.started")
    journal.close()


def test_a_full_disk_refuses_the_record(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(path)
    monkeypatch.setattr(os, "write", lambda descriptor, data: len(data) - 1)
    with pytest.raises(JournalError, match=r"journal\.write") as refusal:
        journal.record("load.done")
    assert refusal.value.exit_status == 74


def test_the_last_record_is_a_floor_under_a_clock_that_was_set_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = datetime.now(UTC).replace(microsecond=0) + timedelta(days=2)
    clock = SystemClock()
    clock.raise_floor(ahead)
    journal = Journal(path, node="node-1", clock=clock)
    journal.open()
    journal.close()
    later = SystemClock()
    again = Journal(path, node="node-1", clock=later)
    again.open()
    assert later.now() >= ahead
    again.close()


def test_a_run_that_ended_without_a_wipe_is_recorded_as_lost(path: Path) -> None:
    journal = opened(path)
    journal.record("serve.started")
    journal.close()
    opened(path).close()
    last = read_chain(path, WORDS)[-1]
    assert (last.event, last.detail["last"]) == ("agent.recovered", "serve.started")
