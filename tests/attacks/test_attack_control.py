"""Attacks 7 and 8: callers of the control socket who say nothing, or say it to keep others out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from appliance import control
from appliance.control import Answers, Caller, ControlServer
from attestation import strictjson


async def handler(command: str, members: Mapping[str, Any], caller: Caller) -> Answers:
    if command == "fault":
        raise ValueError("a fault of the program")
    yield {"event": "done", "role": caller.role}


def serve(path: Path, talk: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        server = ControlServer(path, operator_group="none-such", viewer_group="none-such", handler=handler)
        await server.start()
        try:
            await asyncio.wait_for(talk(), 30)
        finally:
            await server.stop()

    asyncio.run(run())


async def answer(reader: asyncio.StreamReader) -> dict[str, Any]:
    return strictjson.loads(await reader.readline(), limit=control.MAX_LINE)


def test_7_a_caller_who_says_nothing_is_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_COMMAND_SECONDS", 0.01)

    async def talk() -> None:
        reader, writer = await asyncio.open_unix_connection(tmp_path / "sock")
        assert (await answer(reader))["code"] == "control.line"
        assert await reader.read() == b""
        writer.close()

    serve(tmp_path / "sock", talk)


def test_8_viewers_who_say_nothing_do_not_keep_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = iter(["viewer"] * 3 + ["operator"])
    monkeypatch.setattr(control, "_MAX_VIEWERS", 2)
    monkeypatch.setattr(control, "role_of", lambda *_, **__: next(roles))

    async def talk() -> None:
        silent = [await asyncio.open_unix_connection(tmp_path / "sock") for _ in range(2)]
        third, of_third = await asyncio.open_unix_connection(tmp_path / "sock")
        assert (await answer(third))["code"] == "control.busy"
        operator, of_operator = await asyncio.open_unix_connection(tmp_path / "sock")
        of_operator.write(b'{"command":"who"}\n')
        assert await answer(operator) == {"event": "done", "role": "operator"}
        for writer in (of_third, of_operator, *(writer for _, writer in silent)):
            writer.close()

    serve(tmp_path / "sock", talk)
