"""The engine's loop with an engine that does as it is told."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from appliance import serving
from appliance.errors import ProtocolError, RequestRefused
from appliance.mailbox import Mailbox
from appliance.protocol import Cancel, Message, RankStats, Rejected, Submit, Tokens, Zeroize
from appliance.serving import EngineLoop
from tests.sim.channel import Channel
from tests.sim.ranks import submit


class StopError(Exception):
    """Ends the loop."""


class ScriptedEngine:
    """Gives one token per request and step, without end."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.cancelled: list[str] = []
        self.steps = 0

    @property
    def idle(self) -> bool:
        return not self.requests

    def submit(self, message: Submit) -> None:
        if message.request == "bad":
            raise RequestRefused("request.context", found="too long", expected="shorter", hint="shorten it")
        self.requests.append(message.request)

    def cancel(self, request: str) -> None:
        self.cancelled.append(request)
        if request in self.requests:
            self.requests.remove(request)

    def step(self) -> list[Tokens | Rejected]:
        self.steps += 1
        return [Tokens(request, [self.steps], "") for request in self.requests]

    def stats(self) -> RankStats:
        return RankStats(len(self.requests), 0, 0, 0, 0, 0)


class Loop:
    """A loop that runs until a condition holds, looked at between its steps."""

    def __init__(self) -> None:
        control, agent = socket.socketpair()
        api, client = socket.socketpair()
        agent.settimeout(10)
        client.settimeout(10)
        self.agent, self.client_socket, self.client = Channel(agent), client, Channel(client)
        self.engine = ScriptedEngine()
        self.until: Callable[[], bool] = lambda: True
        self._sockets = (control, agent, api, client)
        self.control, self.api = Mailbox(control, max_frame=1 << 20), Mailbox(api, max_frame=1 << 20)

    def run(self, until: Callable[[], bool]) -> None:
        def obey() -> None:
            if until():
                raise StopError

        with pytest.raises(StopError):
            EngineLoop(self.engine, control=self.control, api=self.api, obey=obey).run()

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr(serving, "_STATS_SECONDS", 0.01)
    made = Loop()
    yield made
    made.close()


def test_gives_tokens_as_they_come(loop: Loop) -> None:
    loop.client.send(submit("a"))
    loop.run(lambda: loop.engine.steps >= 3)
    assert [loop.client.receive() for _ in range(3)] == [Tokens("a", [n], "") for n in (1, 2, 3)]


def test_takes_new_requests_between_steps(loop: Loop) -> None:
    loop.client.send(submit("a"))

    def until() -> bool:
        if loop.engine.steps == 2 and "b" not in loop.engine.requests:
            loop.client.send(submit("b"))
        return loop.engine.steps >= 4

    loop.run(until)
    assert loop.engine.requests == ["a", "b"]


def test_does_not_step_an_idle_engine(loop: Loop) -> None:
    def until() -> bool:
        loop.client.send(Cancel("nobody"))
        return len(loop.engine.cancelled) > 3

    loop.run(until)
    assert loop.engine.steps == 0


def test_says_why_a_request_is_refused(loop: Loop) -> None:
    loop.client.send(submit("bad"))
    loop.client.send(submit("good"))
    loop.run(lambda: loop.engine.steps >= 1)
    assert loop.client.receive() == Rejected("bad", "request.context", "too long; expected shorter")
    assert loop.client.receive() == Tokens("good", [1], "")


def test_cancels_what_a_dead_api_has_asked_for_and_goes_on(loop: Loop) -> None:
    loop.client.send(submit("a"))
    loop.client.send(submit("b"))

    def until() -> bool:
        if loop.engine.steps == 2:
            loop.client_socket.close()
        return bool(loop.engine.cancelled)

    loop.run(until)
    assert loop.engine.cancelled == ["a", "b"]


def test_sends_counters_at_once_and_not_at_every_step(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_STATS_SECONDS", 3600.0)
    loop.client.send(submit("a"))
    loop.run(lambda: loop.engine.steps >= 50)
    assert isinstance(loop.agent.receive(), RankStats)
    loop.control.send(Zeroize())
    assert isinstance(loop.agent.receive(), Zeroize)


@pytest.mark.parametrize("message", [Zeroize(), RankStats(0, 0, 0, 0, 0, 0)])
def test_refuses_what_only_others_may_send(loop: Loop, message: Message) -> None:
    loop.client.send(message)
    with pytest.raises(ProtocolError) as refused:
        EngineLoop(loop.engine, control=loop.control, api=loop.api, obey=lambda: None).run()
    assert refused.value.code == "protocol.direction"


def test_a_client_that_does_not_read_gets_everything_later(loop: Loop) -> None:
    loop.client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    loop.client.send(submit("a"))
    loop.run(lambda: loop.engine.steps >= 5000)
    assert loop.api.pending_bytes > 0
    seen: list[Message] = []
    client = Mailbox(loop.client_socket, max_frame=1 << 20)

    def until() -> bool:
        seen.extend(client.receive())
        return len(seen) >= 5000

    loop.engine.requests.clear()
    loop.run(until)
    assert seen == [Tokens("a", [n], "") for n in range(1, 5001)]
