"""Attacks 9 to 11: bytes and connections of strangers, against the HTTP server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from appliance.api import server
from appliance.api.access import AccessList, issue_key
from appliance.api.app import FrontDoor
from appliance.api.engineclient import EngineClient
from appliance.api.inference import Service
from appliance.api.server import listen
from appliance.protocol import ApiSettings
from tests.sim.times import NOW

PATIENCE = 20


async def ok(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def exchange(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), PATIENCE)
    finally:
        writer.close()


def test_9_silent_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever held as many connections as there are, without a key, kept every client out.
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)

    async def run() -> None:
        async with await listen(ok, host="127.0.0.1", port=0, context=None, banner="") as listener:
            port = listener.sockets[0].getsockname()[1]
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
            answer = await exchange(port, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(silent[0][0].read(), PATIENCE) == b""  # the oldest had to go
            for _, writer in silent:
                writer.close()

    asyncio.run(run())


def test_10_a_request_under_way_is_not_dropped_for_silent_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)

    async def run() -> None:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            entered.set()
            await leave.wait()
            await ok(scope, receive, send)

        async with await listen(slow, host="127.0.0.1", port=0, context=None, banner="") as listener:
            port = listener.sockets[0].getsockname()[1]
            asked = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            working = asyncio.ensure_future(exchange(port, asked))
            await asyncio.wait_for(entered.wait(), PATIENCE)
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            leave.set()
            assert (await working).startswith(b"HTTP/1.1 200")
            for _, writer in silent:
                writer.close()

    asyncio.run(run())


def test_11_a_body_with_two_lengths_hides_no_second_request(tmp_path: Path) -> None:
    key = issue_key(tmp_path / "clients", "a", at=NOW)
    auth = f"authorization: Bearer {key}\r\n".encode()
    hidden = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    lengths = b"content-length: %d\r\ntransfer-encoding: chunked\r\n" % (5 + len(hidden))
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + auth + lengths + b"\r\n0\r\n\r\n" + hidden

    async def run() -> None:
        settings = ApiSettings(
            host="127.0.0.1",
            port=0,
            tls=False,
            keys_file=str(tmp_path / "clients"),
            model="m",
            platform_banner="",
            max_body_bytes=1000,
            max_output_tokens=1,
            max_queue=1,
            request_seconds=1,
        )
        engine = EngineClient(None)  # type: ignore[arg-type]  # no request reaches the engine
        door = FrontDoor(Service(settings, engine), AccessList(tmp_path / "clients", now=lambda: NOW))
        async with await listen(door, host="127.0.0.1", port=0, context=None, banner="") as listener:
            answer = await exchange(listener.sockets[0].getsockname()[1], request)
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in answer.lower()

    asyncio.run(run())
