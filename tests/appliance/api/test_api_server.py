"""Connections that send or read too slowly, and an engine that is silent for long; with short times."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from appliance.api import inference, server
from appliance.api.dialects import Asked, Chat
from appliance.api.engineclient import EngineClient, Generation
from appliance.api.inference import Reply
from appliance.api.schema import Options
from appliance.api.servedmodel import prepare
from appliance.api.server import BoundedProtocol, listen
from appliance.channel import AsyncChannel
from appliance.protocol import Tokens
from tests.sim import chat_model
from tests.sim.engine_peer import PATIENCE
from tests.sim.times import NOW

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


HALF_BODY = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab"


async def ok(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while (await asyncio.wait_for(_one_more(receive, send), PATIENCE)) != "http.disconnect":
        pass


async def _one_more(receive: Receive, send: Send) -> str:
    await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
    waiting = asyncio.ensure_future(receive())
    done, _ = await asyncio.wait((waiting,), timeout=0)
    waiting.cancel()
    return str(waiting.result()["type"]) if done else ""


def serve(app: Any, talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
    async def run() -> None:
        async with await listen(app, host="127.0.0.1", port=0, context=None, banner="") as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
            try:
                await asyncio.wait_for(talk(reader, writer), PATIENCE)
            finally:
                writer.transport.abort()

    asyncio.run(run())


async def read_to_the_end(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionResetError):
        while await reader.read(65536):
            pass


@pytest.mark.parametrize(
    "sent",
    [b"", REQUEST[:10], b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab"],
    ids=["nothing", "half", "body"],
)
def test_connection_without_a_whole_request_is_cut(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(BoundedProtocol, "reading_seconds", 0.01)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await read_to_the_end(reader)

    serve(ok, talk)


def test_time_for_reading_does_not_run_while_the_answer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "reading_seconds", 0.01)

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.05)
        await ok(scope, receive, send)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REQUEST)
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    serve(slow, talk)


def test_client_that_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "writing_seconds", 0.01)
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await endless(scope, receive, send)
        ended.set()

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # every transport of a socket has it
        writer.write(REQUEST)
        await ended.wait()

    serve(app, talk)


def test_connections_beyond_the_cap_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 0)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_to_the_end(reader)

    serve(ok, talk)


def test_silent_engine_shows_as_comment_lines_in_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "_PATIENCE", 0.01)
    model = prepare(chat_model.ready(), name="m", max_output_tokens=8, now=lambda: NOW)
    options = Options(
        model="m",
        max_tokens=None,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=None,
        stop=(),
        n=1,
        stream=True,
        include_usage=False,
    )
    sent: list[bytes] = []

    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            channel = await AsyncChannel.over(ours)
            generation = Generation(EngineClient(channel), seconds=60)
            reply = Reply(Chat(), Asked(options, lambda _: []), model, generation, answers=1, prompt_tokens=1)

            async def send(message: Any) -> None:
                sent.append(message.get("body", b""))
                if sent[-1].startswith(b":"):
                    generation.put((0, Tokens("", chat_model.ids("a"), "length")))

            await reply.stream(send)
            channel.close()

    asyncio.run(run())
    assert [frame[:5] for frame in sent[1:4]] == [b"data:", b": wai", b"data:"]
    assert sent[-2] == b"data: [DONE]\n\n"
