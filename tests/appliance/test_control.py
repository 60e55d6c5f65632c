from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from appliance.control import Answers, Caller, ControlServer, RemoteError, ask, role_of
from appliance.errors import AgentUnreachable, NotPermitted


async def handler(command: str, members: Mapping[str, Any], caller: Caller) -> Answers:
    if command == "refuse":
        raise NotPermitted("test.refused", found="this", expected="that", hint="do the other")
    if command == "long":
        for number in range(3):
            yield {"event": "progress", "number": number}
    if command != "silent":
        yield {"event": "done", "uid": caller.uid, "members": dict(members)}


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "control.sock"
    started = threading.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        server = ControlServer(path, operator_group="none-such", viewer_group="none-such", handler=handler)
        await server.start()
        started.set()
        await stopping.wait()
        await server.stop()

    stopping = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait(10)
    yield path
    loop.call_soon_threadsafe(stopping.set)
    thread.join(10)
    loop.close()


def test_answers_arrive_in_order_and_end_with_done(path: Path) -> None:
    events = [answer["event"] for answer in ask(path, "long")]
    assert events == ["progress", "progress", "progress", "done"]


def test_the_kernel_says_who_is_calling(path: Path) -> None:
    (answer,) = ask(path, "who", {"uid": 12345})
    assert answer["uid"] == os.geteuid()


def test_a_refusal_reaches_the_caller_with_its_code_and_exit_status(path: Path) -> None:
    with pytest.raises(RemoteError) as refusal:
        list(ask(path, "refuse"))
    assert (refusal.value.code, refusal.value.exit_status, refusal.value.hint) == ("test.refused", 77, "do the other")


@pytest.mark.parametrize("line", [b"\n", b"[]\n", b'{"command": 1}\n', b"\xff\n", b'{"command":"a","command":"b"}\n'])
def test_malformed_lines_are_refused_and_the_server_lives_on(path: Path, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.sendall(line)
        assert b'"event":"error"' in sock.makefile("rb").readline()
    assert list(ask(path, "who"))[-1]["event"] == "done"


def test_no_agent_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachable) as refusal:
        list(ask(tmp_path / "none.sock", "status"))
    assert refusal.value.exit_status == 69


def test_an_agent_that_leaves_before_it_is_done_is_no_success(path: Path) -> None:
    with pytest.raises(AgentUnreachable, match="before it was done"):
        list(ask(path, "silent"))


def test_a_stranger_is_refused_and_root_is_not() -> None:
    assert role_of(0, 0, operator_group="none-such", viewer_group="none-such") == "operator"
    with pytest.raises(NotPermitted, match=r"control\.group"):
        role_of(54321, 54321, operator_group="none-such", viewer_group="none-such")


def test_groups_decide_the_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.control._group_names", lambda uid, gid: {"watchers"})
    assert role_of(54321, 1, operator_group="operators", viewer_group="watchers") == "viewer"
    assert role_of(54321, 1, operator_group="watchers", viewer_group="watchers") == "operator"
