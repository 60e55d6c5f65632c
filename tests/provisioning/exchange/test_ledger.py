from __future__ import annotations

import hashlib
import itertools
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from attestation import strictjson
from provisioning.errors import ExchangeRefused, LedgerError
from provisioning.ledger import Ledger, challenge_detail, head_of, read_ledger

OWNER = "a" * 96
NOON = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
CHALLENGE = bytes(48)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def _open(path: Path, at: datetime = NOON) -> Ledger:
    return Ledger(path, owner=OWNER, at=at)


def _fill(path: Path) -> None:
    with _open(path) as ledger:
        ledger.append("challenge.issued", at=NOON, detail=challenge_detail(CHALLENGE, bytes(32), bytes(48)))
        ledger.append("grant.given", at=NOON, detail={"challenge": CHALLENGE.hex(), "node": "n"})


def test_begins_with_its_owner(path: Path) -> None:
    with _open(path) as ledger:
        (entry,) = ledger.entries
    assert (entry.seq, entry.event, entry.detail["owner"]) == (0, "ledger.begun", OWNER)


def test_entries_are_there_after_reopening(path: Path) -> None:
    _fill(path)
    with _open(path) as ledger:
        assert [entry.event for entry in ledger.entries] == ["ledger.begun", "challenge.issued", "grant.given"]
        known = ledger.challenge(CHALLENGE)
    assert known is not None
    assert known.answered
    assert known.issued_at == NOON


def test_an_unknown_challenge_is_not_found(path: Path) -> None:
    with _open(path) as ledger:
        assert ledger.challenge(bytes([1] * 48)) is None


def test_each_line_carries_the_digest_of_the_line_before(path: Path) -> None:
    _fill(path)
    lines = path.read_bytes().splitlines()
    assert json.loads(lines[0])["prev"] == "0" * 96
    for before, line in itertools.pairwise(lines):
        assert json.loads(line)["prev"] == hashlib.sha384(before).hexdigest()
    assert head_of(read_ledger(path)) == hashlib.sha384(lines[-1]).digest()


def test_an_entry_is_synced_before_append_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        real(descriptor)

    with _open(path) as ledger:
        monkeypatch.setattr(os, "fsync", fsync)
        ledger.append("request.refused", at=NOON, detail={"code": "x"})
        assert synced == [path.stat().st_size]


@pytest.mark.parametrize("line", [0, 1, 2])
@pytest.mark.parametrize("what", ["edited", "removed", "repeated"])
def test_refuses_a_changed_file(path: Path, line: int, what: str) -> None:
    _fill(path)
    lines = path.read_bytes().splitlines(keepends=True)
    if what == "edited":
        # The last line has no line after it that would notice, so it is made unreadable as a ledger line.
        lines[line] = lines[line].replace(b'"event"', b'"Event"')
    elif what == "removed":
        del lines[line]
        if line == 2:
            lines.append(strictjson.dumps({"seq": 9}) + b"\n")
    else:
        lines.insert(line, lines[line])
    path.write_bytes(b"".join(lines))
    for read in (lambda: _open(path), lambda: read_ledger(path)):
        with pytest.raises(LedgerError) as caught:
            read()
        assert (caught.value.code, caught.value.exit_status) == ("ledger.chain", 74)


def test_refuses_an_edit_that_leaves_the_line_well_formed(path: Path) -> None:
    _fill(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"2026-11-30T12:00:00Z", b"2026-11-30T13:00:00Z")
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerError) as caught:
        read_ledger(path)
    assert caught.value.code == "ledger.chain"


def test_cuts_a_torn_tail_and_records_the_cut(path: Path) -> None:
    _fill(path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"at":"2026-')
    with _open(path) as ledger:
        last = ledger.entries[-1]
    assert (last.event, last.detail["bytes_cut"]) == ("ledger.recovered", 12)
    assert path.read_bytes().startswith(whole)
    assert len(read_ledger(path)) == 4


def test_cutting_off_a_line_end_does_not_undo_a_grant(path: Path) -> None:
    _fill(path)
    path.write_bytes(path.read_bytes()[:-1])
    with _open(path) as ledger:
        known = ledger.challenge(CHALLENGE)
        assert known is not None
        assert known.answered
        assert ledger.entries[-1].event == "ledger.recovered"


def test_a_ledger_torn_in_its_first_line_begins_anew(path: Path) -> None:
    path.write_bytes(b'{"at":')
    with _open(path) as ledger:
        assert [entry.event for entry in ledger.entries] == ["ledger.begun"]


def test_reading_leaves_a_torn_tail_alone(path: Path) -> None:
    _fill(path)
    path.write_bytes(path.read_bytes() + b"torn")
    before = path.read_bytes()
    assert len(read_ledger(path)) == 3
    assert path.read_bytes() == before


def test_refuses_a_clock_that_went_back(path: Path) -> None:
    _fill(path)
    with _open(path) as ledger, pytest.raises(LedgerError) as caught:
        ledger.append("request.refused", at=NOON - timedelta(seconds=1), detail={})
    assert caught.value.code == "ledger.clock"


def test_refuses_a_second_program_at_the_same_time(path: Path) -> None:
    with _open(path), pytest.raises(LedgerError) as caught:
        _open(path)
    assert caught.value.code == "ledger.busy"


def test_the_lock_ends_with_the_ledger(path: Path) -> None:
    _open(path).close()
    _open(path).close()


def test_refuses_the_ledger_of_another_owner(path: Path) -> None:
    _fill(path)
    with pytest.raises(LedgerError) as caught:
        Ledger(path, owner="b" * 96, at=NOON)
    assert caught.value.code == "ledger.owner"


@pytest.mark.parametrize("challenge", [CHALLENGE, bytes([1] * 48)], ids=["answered", "unknown"])
def test_refuses_to_record_a_grant_for_a_challenge_that_is_not_open(path: Path, challenge: bytes) -> None:
    _fill(path)
    before = path.read_bytes()
    with _open(path) as ledger, pytest.raises(ExchangeRefused) as caught:
        ledger.append("grant.given", at=NOON, detail={"challenge": challenge.hex()})
    assert caught.value.code == "challenge.used"
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("event", "detail"),
    [
        ("grant.given", {"challenge": CHALLENGE.hex()}),
        ("challenge.issued", challenge_detail(CHALLENGE, bytes(32), bytes(48))),
        ("challenge.issued", {"challenge": CHALLENGE.hex()}),
    ],
    ids=["second grant", "challenge twice", "challenge without nonce"],
)
def test_refuses_a_well_chained_file_that_no_broker_writes(path: Path, event: str, detail: dict[str, str]) -> None:
    _fill(path)
    last = path.read_bytes().splitlines()[-1]
    line = strictjson.dumps(
        {
            "seq": 3,
            "at": "2026-11-30T12:00:00Z",
            "event": event,
            "detail": detail,
            "prev": hashlib.sha384(last).hexdigest(),
        }
    )
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(LedgerError) as caught:
        _open(path)
    assert caught.value.code == "ledger.chain"


def test_refuses_a_link_in_place_of_the_file(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LedgerError) as caught:
        _open(path)
    assert caught.value.code == "ledger.write"


def test_refuses_a_file_that_was_replaced_while_it_was_open(path: Path) -> None:
    with _open(path) as ledger:
        path.rename(path.with_suffix(".old"))
        path.write_bytes(b"")
        with pytest.raises(LedgerError) as caught:
            ledger.append("request.refused", at=NOON, detail={})
    assert caught.value.code == "ledger.chain"


def test_a_failed_write_ends_the_ledger(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with _open(path) as ledger:
        monkeypatch.setattr(os, "fsync", full)
        for _ in range(2):
            with pytest.raises(LedgerError) as caught:
                ledger.append("request.refused", at=NOON, detail={})
        assert caught.value.code == "ledger.write"


def test_refuses_an_unreadable_path(path: Path) -> None:
    with pytest.raises(LedgerError) as caught:
        read_ledger(path)
    assert caught.value.code == "ledger.read"
