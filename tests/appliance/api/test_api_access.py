"""Client keys: issued once, kept as salted hashes, checked on every request."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.api.access import MAX_KEYS, AccessList, issue_key, list_keys, revoke_key
from appliance.api.errors import ApiRefused
from appliance.errors import ConfigError
from tests.sim.api_process import ApiProcess
from tests.sim.times import NOW


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def check(access: AccessList, key: str) -> None:
    access.check([(b"authorization", f"Bearer {key}".encode())])


def access_to(path: Path, now: datetime = NOW) -> AccessList:
    return AccessList(path, now=lambda: now)


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        act()
    return caught.value.code


def test_issued_key_is_admitted(path: Path) -> None:
    check(access_to(path), issue_key(path, "alice", at=NOW))


def test_file_holds_no_key_and_its_reader_is_the_group(path: Path) -> None:
    key = issue_key(path, "alice", at=NOW)
    assert key.removeprefix("lethe-") not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o640
    assert len(key) == len("lethe-") + 43


def test_keys_and_salts_differ(path: Path) -> None:
    keys = {issue_key(path, label, at=NOW) for label in ("alice", "bob")}
    assert len(keys) == len({entry.salt for entry in list_keys(path)}) == 2


def test_lists_labels_and_dates_but_no_hash(path: Path) -> None:
    issue_key(path, "alice", at=NOW, expires=NOW + timedelta(days=1))
    issue_key(path, "bob", at=NOW)
    first, second = list_keys(path)
    assert first.as_payload() == {
        "label": "alice",
        "created": "2026-11-30T12:00:00Z",
        "expires": "2026-12-01T12:00:00Z",
    }
    assert second.describe() == "bob  created 2026-11-30T12:00:00Z  expires never"


def test_time_without_a_zone_is_utc(path: Path) -> None:
    issue_key(path, "alice", at=NOW, expires=datetime(2027, 1, 1))  # noqa: DTZ001  # what click gives
    assert list_keys(path)[0].expires == "2027-01-01T00:00:00Z"


def test_key_made_without_a_time_gets_the_machines(path: Path) -> None:
    issue_key(path, "alice")
    made = datetime.strptime(list_keys(path)[0].created, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert abs(datetime.now(UTC) - made) < timedelta(minutes=5)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", b"Bearer " + b"x" * 10_000)],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"authorization", b"Basic KEY")],
        [(b"authorization", b"KEY")],
        [(b"authorization", b"Bearer KEY"), (b"authorization", b"Bearer KEY")],
        [(b"x-api-key", b"KEY")],
    ],
    ids=["none", "empty", "scheme", "no key", "wrong", "long", "not ascii", "basic", "bare", "twice", "other header"],
)
def test_refuses_anything_but_one_bearer_key(path: Path, headers: list[tuple[bytes, bytes]]) -> None:
    key = issue_key(path, "alice", at=NOW).encode()
    with pytest.raises(ApiRefused, match="invalid_api_key") as caught:
        access_to(path).check([(name, value.replace(b"KEY", key)) for name, value in headers])
    assert caught.value.status == 401


def test_scheme_is_read_in_any_case(path: Path) -> None:
    key = issue_key(path, "alice", at=NOW)
    access_to(path).check([(b"authorization", f"bEARER {key}".encode())])


def test_refuses_an_expired_key(path: Path) -> None:
    key = issue_key(path, "alice", at=NOW, expires=NOW + timedelta(seconds=1))
    check(access_to(path), key)
    with pytest.raises(ApiRefused, match="expired"):
        check(access_to(path, NOW + timedelta(seconds=1)), key)


def test_change_of_the_file_takes_effect_at_the_next_request(path: Path) -> None:
    alice = issue_key(path, "alice", at=NOW)
    access = access_to(path)
    check(access, alice)
    bob = issue_key(path, "bob", at=NOW)
    check(access, bob)
    revoke_key(path, "alice")
    check(access, bob)
    with pytest.raises(ApiRefused, match="invalid_api_key"):
        check(access, alice)


@pytest.mark.parametrize("damage", ["missing", "garbage", "unreadable"])
def test_file_that_cannot_be_read_admits_nobody(path: Path, damage: str) -> None:
    key = issue_key(path, "alice", at=NOW)
    access = access_to(path)
    check(access, key)
    path.unlink()
    if damage == "garbage":
        path.write_text("garbage")
    elif damage == "unreadable":
        path.mkdir()
    for _ in range(2):
        with pytest.raises(ApiRefused, match="invalid_api_key"):
            check(access, key)


@pytest.mark.parametrize("label", ["", " ", "a b", "a/b", "-a", "x" * 65, "é"])
def test_refuses_a_malformed_label(path: Path, label: str) -> None:
    assert refusal(lambda: issue_key(path, label, at=NOW)) == "api.keys.label"
    assert not path.exists()


def test_refuses_a_label_that_is_taken(path: Path) -> None:
    issue_key(path, "alice", at=NOW)
    before = path.read_bytes()
    assert refusal(lambda: issue_key(path, "alice", at=NOW)) == "api.keys.label"
    assert path.read_bytes() == before


def test_refuses_to_revoke_an_unknown_label(path: Path) -> None:
    issue_key(path, "alice", at=NOW)
    assert refusal(lambda: revoke_key(path, "bob")) == "api.keys.unknown"


def test_refuses_more_keys_than_fit(path: Path) -> None:
    issue_key(path, "alice", at=NOW)
    (entry,) = json.loads(path.read_text())["keys"]
    entries = [entry | {"label": f"client{number}"} for number in range(MAX_KEYS)]
    path.write_text(json.dumps({"version": 1, "keys": entries}))
    assert refusal(lambda: issue_key(path, "bob", at=NOW)) == "api.keys.count"
    path.write_text(json.dumps({"version": 1, "keys": [*entries, entry]}))
    assert refusal(lambda: list_keys(path)) == "api.keys.format"


def test_refuses_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert refusal(lambda: issue_key(tmp_path / "none" / "keys.json", "alice", at=NOW)) == "api.keys.write"


def test_refuses_to_list_a_file_that_is_not_there(path: Path) -> None:
    assert refusal(lambda: list_keys(path)) == "api.keys.read"


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document | {"version": 2},
        lambda document: document | {"more": 1},
        lambda document: document["keys"],
        lambda document: 5,
        lambda document: document | {"keys": {"a": 1}},
        lambda document: document | {"keys": document["keys"] * 2},
        lambda document: document | {"keys": [document["keys"][0] | {"more": 1}]},
        lambda document: document | {"keys": [document["keys"][0] | {"label": 5}]},
        lambda document: document | {"keys": [document["keys"][0] | {"label": "a b"}]},
        lambda document: document | {"keys": [document["keys"][0] | {"salt": ""}]},
        lambda document: document | {"keys": [document["keys"][0] | {"digest": "x" * 64}]},
        lambda document: document | {"keys": [document["keys"][0] | {"expires": "tomorrow"}]},
        lambda document: document | {"padding": "x" * (1 << 20)},
    ],
    ids=[
        "version",
        "member",
        "list",
        "number",
        "object",
        "twice",
        "field",
        "type",
        "label",
        "salt",
        "digest",
        "time",
        "size",
    ],
)
def test_refuses_a_file_that_is_not_a_keys_file(path: Path, change: Callable[[Any], Any]) -> None:
    issue_key(path, "alice", at=NOW)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    assert refusal(lambda: list_keys(path)) == "api.keys.format"


def test_disk_error_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    issue_key(path, "alice", at=NOW)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert refusal(lambda: issue_key(path, "bob", at=NOW)) == "api.keys.write"
    assert path.read_bytes() == before


def test_library_sees_its_own_error_class(api: ApiProcess) -> None:
    with api.client("lethe-wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"
    assert "wrong" not in str(caught.value)


def test_running_api_notices_a_revoked_key(start: Callable[..., ApiProcess], tmp_path: Path) -> None:
    api = start()
    api.serve()
    with api.client() as client:
        client.models.list()
        revoke_key(tmp_path / "keys.json", "test")
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
