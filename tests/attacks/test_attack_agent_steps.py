"""Attacks 21 to 23: a wipe that begins between two steps of a grant, at the very moment that is worst."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from appliance import agent as agent_module
from appliance import config
from appliance.agent import Agent
from appliance.control import Caller
from appliance.custody import Custody
from appliance.errors import StateRefused
from appliance.lifecycle import State
from provisioning.grant import Grant
from tests.e2e.conftest import CONFIG

OPERATOR = Caller(0, 1, "operator")


class Step:
    """A custody whose appraisal, or request, waits until the test has done what it wants to do meanwhile."""

    request_digest = bytes(48)

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.leave = threading.Event()
        self.opened = 0

    def _wait(self) -> Any:
        self.entered.set()
        assert self.leave.wait(10)
        return self

    def read_grant(self, _envelope: bytes) -> Any:
        return self

    def appraise_here(self) -> Any:
        return self._wait()

    def answer(self, _envelope: bytes) -> bytes:
        self._wait()
        return b"request"

    def refuse_weak_machine(self, _facts: object) -> None:
        pass

    def open(self, _grant: object, _result: object) -> Any:
        self.opened += 1
        return self

    digest = bytes(48)
    assurance = "lab"

    def close(self) -> None:
        pass


def with_agent(tmp_path: Path, test: Callable[[Agent], Coroutine[Any, Any, None]]) -> None:
    (tmp_path / "lethe.toml").write_text(CONFIG)

    async def run() -> None:
        agent = Agent(config.load(tmp_path / "lethe.toml"))
        agent.journal.open()
        await asyncio.wait_for(test(agent), 20)
        agent.journal.close()

    asyncio.run(run())


def test_21_no_grant_is_opened_when_a_wipe_began_during_the_appraisal(tmp_path: Path) -> None:
    async def attack(agent: Agent) -> None:
        step = Step()
        agent.custody, agent.state = cast(Custody, step), State.REQUESTED
        opening = asyncio.ensure_future(agent._open_grant(b"", OPERATOR))
        await asyncio.to_thread(step.entered.wait, 10)
        agent.state, agent._ending = State.ZEROIZING, asyncio.ensure_future(asyncio.sleep(0, 0))
        step.leave.set()
        with pytest.raises(StateRefused):
            await opening
        assert step.opened == 0

    with_agent(tmp_path, attack)


def test_22_a_request_waits_for_a_grant_under_way(tmp_path: Path) -> None:
    async def attack(agent: Agent) -> None:
        step = Step()
        agent.custody, agent.state = cast(Custody, step), State.REQUESTED
        request = asyncio.ensure_future(anext(agent._request({"envelope": ""}, OPERATOR)))
        await asyncio.to_thread(step.entered.wait, 10)
        grant = asyncio.ensure_future(anext(agent._grant({"envelope": ""}, OPERATOR)))
        await asyncio.sleep(0)
        assert agent.state is State.REQUESTED
        grant.cancel()
        step.leave.set()
        await request
        assert agent.state is State.REQUESTED
        assert agent._ending is None

    with_agent(tmp_path, attack)


def test_23_a_rank_that_was_started_too_late_gets_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    handed: list[object] = []
    dismissed: list[object] = []

    class Late:
        async def dismiss(self) -> bool:
            dismissed.append(self)
            return True

    class Key:
        def hand_over(self, pipes: object) -> None:
            handed.append(pipes)

    async def attack(agent: Agent) -> None:
        async def start_rank(_index: int, engine: socket.socket) -> tuple[Any, int]:
            engine.close()
            agent.state = State.ZEROIZING
            return Late(), write

        monkeypatch.setattr(agent_module.children, "start_rank", start_rank)
        agent._engine_socket, peer = socket.socketpair()
        agent.custody, agent.state = cast(Custody, Step()), State.GRANTED
        with pytest.raises(StateRefused):
            await agent._start_ranks(cast(Grant, Key()))
        peer.close()
        assert (handed, len(dismissed), agent.ranks) == ([], 1, [])

    with_agent(tmp_path, attack)
    assert os.read(read, 1) == b""
    os.close(read)
