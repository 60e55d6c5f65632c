"""From connections to requests: uvicorn's h11 protocol on plain asyncio, narrowed and with time limits.

Only the protocol class of uvicorn is used: not its process and signal handling, because the agent decides when this
process ends, and not its logging, because its messages can hold requests. docs/adr/0006-http-stack.md has the reasons.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from typing import Any

import h11
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from appliance.api.app import response_marks
from appliance.api.errors import ApiRefused

MAX_CONNECTIONS = 512
MAX_HEADER_BYTES = 32 << 10
_HANDSHAKE_SECONDS = 10
_KEEP_ALIVE_SECONDS = 30


class BoundedProtocol(H11Protocol):
    """One connection: a whole request must arrive in time, and its answer must be read in time.

    Without these limits a client that sends a byte a minute, or never reads, would hold a connection for ever.
    """

    reading_seconds = 30.0
    writing_seconds = 30.0
    banner = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limit: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        # When it began to wait for a request; None while one is answered.
        self.idle_since: float | None = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """Take a new connection; when there are too many, drop the one that has been idle for longest."""
        super().connection_made(transport)
        self._limit_reading()
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the time limit runs from the first byte of a request to its last."""
        super().data_received(data)
        self._note_idle()
        self._limit_reading()
        self._forget_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timers()
        super().connection_lost(exc)
        self._forget_unread()

    def on_response_complete(self) -> None:
        """Go on to the next request of the connection."""
        super().on_response_complete()
        self._note_idle()
        self._forget_unread()

    def pause_writing(self) -> None:
        """Note that the client reads too slowly for the buffers."""
        super().pause_writing()
        self._stuck = self.loop.call_later(self.writing_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP request, in the shape of every other error."""
        del msg
        refused = ApiRefused(400, "invalid_http", found="bytes that are no HTTP/1.1 request", expected="one")
        body = json.dumps(refused.as_body()).encode()
        headers = response_marks(self.banner) | {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            start = h11.Response(status_code=400, headers=list(headers.items()), reason=b"Bad Request")
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _note_idle(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        busy = cycle is not None and not cycle.response_complete
        self.idle_since = None if busy else self.idle_since or self.loop.time()

    def _make_room(self) -> None:
        # Not the newest: else whoever holds many connections and says nothing would keep out everyone else.
        idle = [one for one in self.connections if isinstance(one, BoundedProtocol) and one.idle_since is not None]
        longest = min(idle, key=lambda one: one.idle_since or 0.0, default=self)
        longest.transport.abort()

    def _limit_reading(self) -> None:
        receiving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if receiving and self._limit is None:
            self._limit = self.loop.call_later(self.reading_seconds, self.transport.abort)
        elif not receiving and self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _forget_unread(self) -> None:
        """Drop a body that nobody will read, since the request was answered before it had arrived: it is a prompt."""
        cycle: RequestResponseCycle | None = self.cycle  # uvicorn starts with none, whatever its annotation says
        if cycle is not None and (cycle.response_complete or cycle.disconnected):
            cycle.body = bytearray()

    def _stop_timers(self) -> None:
        for timer in (self._limit, self._stuck):
            if timer is not None:
                timer.cancel()
        self._limit = self._stuck = None


async def listen(app: ASGIApp, *, host: str, port: int, context: ssl.SSLContext | None, banner: str) -> asyncio.Server:
    """Serve an application on a TCP address.

    Args:
        app: the ASGI application.
        host: name or address.
        port: 0 takes a free one.
        context: for TLS; None for plain HTTP.
        banner: of the platform, for answers given before the application is reached.

    Raises:
        OSError: the address cannot be used.
    """
    config = Config(
        app,
        http=BoundedProtocol,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
    config.load()
    state = ServerState()
    BoundedProtocol.banner = banner
    return await asyncio.get_running_loop().create_server(
        lambda: BoundedProtocol(config, state, {}),
        host,
        port,
        family=socket.AF_UNSPEC,
        ssl=context,
        ssl_handshake_timeout=_HANDSHAKE_SECONDS if context else None,
        backlog=128,
    )
