"""``python -m appliance.api --control FD --engine FD``: the API process.

The agent sends the settings first; the process makes its TLS key, listens, tells the agent, and answers 503 until the
agent admits clients and the engine has a model. It ends when the agent closes the control channel, at once and in any
state: whoever holds that channel decides how long prompts may be in memory. Signals are ignored, so that a key press
at a terminal reaches the agent, which ends all processes in order.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from appliance.api import quiet
from appliance.api.access import AccessList
from appliance.api.app import FrontDoor
from appliance.api.engineclient import EngineClient
from appliance.api.inference import Service
from appliance.api.servedmodel import prepare
from appliance.api.server import listen
from appliance.api.tls import make_identity, require_loopback
from appliance.channel import AsyncChannel
from appliance.errors import ConfigError, ModelUnsupported, ProtocolError
from appliance.hardening import harden_process
from appliance.protocol import Admit, ApiListening, ApiSettings, Drain, ModelReady, misdirected

_STATS_SECONDS = 1.0
_NO_TLS_DIGEST = bytes(48)


class _AgentGone(Exception):
    """The agent has closed the control channel."""


def main() -> None:
    """Run until the agent closes the control channel; never returns."""
    harden_process()
    quiet.install()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="appliance.api")
    parser.add_argument("--control", type=int, required=True, metavar="FD")
    parser.add_argument("--engine", type=int, required=True, metavar="FD")
    arguments = parser.parse_args()
    asyncio.run(_run(socket.socket(fileno=arguments.control), socket.socket(fileno=arguments.engine)))


async def _run(control_socket: socket.socket, engine_socket: socket.socket) -> NoReturn:
    control = await AsyncChannel.over(control_socket)
    engine = EngineClient(await AsyncChannel.over(engine_socket))
    status = 0
    try:
        async with asyncio.TaskGroup() as tasks:
            settings = await _receive_settings(control)
            service = Service(settings, engine)
            await control.send(await _listen(service))
            tasks.create_task(_follow_engine(service))
            tasks.create_task(_report(control, service))
            tasks.create_task(_obey(control, service))
    except* _AgentGone:
        pass
    except* (ConfigError, ModelUnsupported, ProtocolError) as group:
        for error in group.exceptions:
            if isinstance(error, ConfigError | ModelUnsupported | ProtocolError):
                quiet.LOG.critical(error.code)
                status = error.exit_status
    except* OSError as group:
        quiet.LOG.critical("api.system", exc_info=group.exceptions[0])
        status = 1
    # Not by way of the interpreter's own end, which waits for threads that are encoding a prompt.
    sys.stderr.flush()
    os._exit(status)


async def _receive_settings(control: AsyncChannel) -> ApiSettings:
    message = await control.receive()
    if message is None:
        raise _AgentGone
    if not isinstance(message, ApiSettings):
        raise misdirected(message, expected="the settings of the API")
    return message


async def _listen(service: Service) -> ApiListening:
    settings = service.settings
    access = AccessList(Path(settings.keys_file), now=_now)
    if settings.tls:
        identity = make_identity(settings.host, at=_now())
        context, digest, certificate = identity.context, identity.key_sha384, identity.certificate
    else:
        require_loopback(settings.host)
        context, digest, certificate = None, _NO_TLS_DIGEST, b""
    server = await listen(
        FrontDoor(service, access),
        host=settings.host,
        port=settings.port,
        context=context,
        banner=settings.platform_banner,
    )
    port = server.sockets[0].getsockname()[1]
    return ApiListening(port=port, tls_key_sha384=digest, certificate=certificate)


async def _obey(control: AsyncChannel, service: Service) -> None:
    """Open and close admission as the agent says, until it has gone."""
    while (message := await control.receive()) is not None:
        match message:
            case Admit(open=True):
                service.admission.open()
            case Admit(open=False):
                service.admission.close()
                service.stop()
            case Drain():
                service.admission.close()
            case _:
                raise misdirected(message, expected="Admit or Drain")
    raise _AgentGone


async def _follow_engine(service: Service) -> None:
    """Carry the engine's messages; when it has gone, say so to everyone who waits."""

    async def on_ready(ready: ModelReady) -> None:
        settings = service.settings
        model = await asyncio.to_thread(
            prepare, ready, name=settings.model, max_output_tokens=settings.max_output_tokens, now=_now
        )
        service.begin(model)

    try:
        await service.engine.run(on_ready)
    finally:
        if service.admission.state == "serving":
            quiet.LOG.error("api.engine.lost")
        service.admission.engine_lost()
        service.stop()


async def _report(control: AsyncChannel, service: Service) -> None:
    """Send state and counters to the agent, about once a second, and at once when the state changes."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(_STATS_SECONDS):
                await service.admission.changed.wait()
        service.admission.changed.clear()
        try:
            await control.send(service.admission.stats())
        except OSError:
            raise _AgentGone from None


def _now() -> datetime:
    return datetime.now(UTC)


if __name__ == "__main__":
    main()
