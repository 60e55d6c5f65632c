"""The engine's loop: requests in, tokens out, and an ear for the agent between two steps.

Nothing in it waits for another process. The API may be slow, silent or hostile: its requests queue up, its half-sent
frames stay half-sent, and the agent is heard all the same.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import Protocol

from appliance.errors import RequestRefused
from appliance.mailbox import Mailbox
from appliance.protocol import Cancel, Message, RankStats, Rejected, Submit, Tokens, misdirected

_STATS_SECONDS = 1.0


class Stepper(Protocol):
    """What of the engine (appliance/engine/engine.py) the loop needs."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute and nothing to tell."""
        ...

    def submit(self, submit: Submit) -> None:
        """Take a request or raise RequestRefused."""
        ...

    def cancel(self, request: str) -> None:
        """Forget a request."""
        ...

    def step(self) -> list[Tokens | Rejected]:
        """Compute one step."""
        ...

    def stats(self) -> RankStats:
        """Give the counters."""
        ...


class EngineLoop:
    """Runs an engine until the agent ends it.

    Args:
        engine: the engine.
        control: to the agent.
        api: to the API process.
        obey: called between steps; it reads ``control``, and raises to end the loop.
    """

    def __init__(self, engine: Stepper, *, control: Mailbox, api: Mailbox, obey: Callable[[], None]) -> None:
        self._engine = engine
        self._control = control
        self._api = api
        self._obey = obey
        self._running: set[str] = set()
        self._next_stats = 0.0

    def run(self) -> None:
        """Loop; ends only by what ``obey`` or the engine raises.

        Raises:
            ProtocolError: the API sent something that it must not send.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._api, selectors.EVENT_READ)
            while True:
                self._watch_for_room(selector)
                selector.select(self._patience())
                self._obey()
                self._take_requests(selector)
                if not self._engine.idle:
                    self._step()
                self._report()

    def _watch_for_room(self, selector: selectors.BaseSelector) -> None:
        for mailbox in (self._control, self._api):
            if mailbox.is_open():
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if mailbox.pending_bytes else 0)
                selector.modify(mailbox, wanted)

    def _patience(self) -> float:
        """Give how long to wait for a message: not at all while there is something to compute."""
        return 0.0 if not self._engine.idle else max(0.0, self._next_stats - time.monotonic())

    def _take_requests(self, selector: selectors.BaseSelector) -> None:
        if not self._api.is_open():
            return
        self._api.flush()
        for message in self._api.receive():
            self._take(message)
        if not self._api.is_open():
            # Nobody is left to answer; the agent decides what becomes of this process.
            selector.unregister(self._api)
            for request in sorted(self._running):
                self._engine.cancel(request)

    def _take(self, message: Message) -> None:
        match message:
            case Submit():
                try:
                    self._engine.submit(message)
                except RequestRefused as error:
                    self._api.send(Rejected(message.request, error.code, f"{error.found}; expected {error.expected}"))
                else:
                    self._running.add(message.request)
            case Cancel():
                self._engine.cancel(message.request)
            case _:
                raise misdirected(message, expected="Submit or Cancel from the API")

    def _step(self) -> None:
        for message in self._engine.step():
            if isinstance(message, Rejected) or message.finish:
                self._running.discard(message.request)
            self._api.send(message)

    def _report(self) -> None:
        now = time.monotonic()
        if now >= self._next_stats:
            self._next_stats = now + _STATS_SECONDS
            self._control.send(self._engine.stats())
        self._control.flush()
