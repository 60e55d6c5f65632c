"""Who may come in, how large a body may be, and what happens when a client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from appliance.api.errors import body_too_large, encoding_refused, invalid, not_serving, queue_full
from appliance.protocol import ApiStats

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


class Admission:
    """The state of serving and the places for answers under way.

    Attributes:
        active: answers under way.
        served: requests answered in full.
        refused: requests answered with an error.
        changed: set when the state may have changed; who reports it clears it.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self.changed = asyncio.Event()
        self._admitted = False
        self._opened_once = False
        self._model_ready = False
        self._engine_lost = False
        self.active = 0
        self.served = 0
        self.refused = 0

    @property
    def state(self) -> str:
        """Give ``loading``, ``serving``, ``draining`` or ``engine_lost``."""
        if self._engine_lost:
            return "engine_lost"
        if self._model_ready and self._admitted:
            return "serving"
        return "draining" if self._opened_once and not self._admitted else "loading"

    def open(self) -> None:
        """Serve, as soon as the model is ready."""
        self._admitted = self._opened_once = True
        self.changed.set()

    def close(self) -> None:
        """Admit nobody until opened again."""
        self._admitted = False
        self.changed.set()

    def model_ready(self) -> None:
        """Note that the model is resident and its tokenizer prepared."""
        self._model_ready = True
        self.changed.set()

    def engine_lost(self) -> None:
        """Note that the engine has gone. It does not come back in this process."""
        self._engine_lost = True
        self.changed.set()

    def require_serving(self) -> None:
        """Raise 503 ``not_serving`` unless the state is ``serving``."""
        if self.state != "serving":
            raise not_serving(self.state)

    @contextmanager
    def enter(self) -> Iterator[Place]:
        """Give a place for one answer, until the end of the block.

        Raises:
            ApiRefused: 503 ``not_serving``, or 429 ``queue_full``.
        """
        self.require_serving()
        place = Place(self)
        place.widen(1)
        try:
            yield place
        finally:
            place.leave()

    def take(self, count: int) -> None:
        """Occupy places.

        Raises:
            ApiRefused: 429 ``queue_full``.
        """
        if self.active + count > self._places:
            raise queue_full(self._places)
        self.active += count

    def stats(self) -> ApiStats:
        """Give the counters, for the agent."""
        return ApiStats(serving=self.state == "serving", active=self.active, served=self.served, refused=self.refused)

    def fits(self, count: int) -> bool:
        """Say whether so many answers could ever be under way together."""
        return count <= self._places


class Place:
    """The places that one request occupies: one per answer that it asks for."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._held = 0

    def widen(self, count: int) -> None:
        """Hold ``count`` places in all.

        Raises:
            ApiRefused: 429 ``queue_full``; 400 when there are not so many places even in an idle server.
        """
        if not self._admission.fits(count):
            raise invalid("n", found=f"{count} answers in one request", expected="fewer")
        self._admission.take(count - self._held)
        self._held = count

    def leave(self) -> None:
        """Give the places back."""
        self._admission.active -= self._held
        self._held = 0


async def read_body(scope: Scope, receive: Receive, *, limit: int) -> bytes:
    """Read a request body of at most ``limit`` bytes.

    Raises:
        ApiRefused: 413 when it is larger, 415 when it is compressed.
        ClientGone: the client hung up first.
    """
    headers = Headers(scope=scope)
    if headers.get("content-encoding", "identity") != "identity":
        raise encoding_refused()
    # h11 has checked that the header, where there is one, is a plain number.
    if int(headers.get("content-length", "0")) > limit:
        raise body_too_large(limit)
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message["body"]
        more = message["more_body"]
        if len(body) > limit:
            raise body_too_large(limit)
    return bytes(body)


async def until_hang_up(receive: Receive, work: Awaitable[Result]) -> Result:
    """Do the work of a request whose body was read; stop it when the client hangs up.

    Raises:
        ClientGone: the client hung up first.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
