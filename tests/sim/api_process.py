"""The real API process, with the test as its agent and a scripted engine behind it."""

from __future__ import annotations

import os
import queue
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai

from appliance.api.access import issue_key
from appliance.hardening import clean_environment
from appliance.protocol import Admit, ApiListening, ApiSettings, ApiStats, Message, ModelReady
from tests.sim import chat_model
from tests.sim.channel import Channel
from tests.sim.engine_peer import PATIENCE, EnginePeer

REPOSITORY = Path(__file__).parents[2]
MODEL = "tiny-chat"


def settings(keys_file: Path) -> ApiSettings:
    return ApiSettings(
        host="127.0.0.1",
        port=0,
        tls=True,
        keys_file=str(keys_file),
        model=MODEL,
        platform_banner="SIMULATED",
        max_body_bytes=64 << 10,
        max_output_tokens=64,
        max_queue=4,
        request_seconds=60,
    )


class ApiProcess:
    """A running API process.

    Attributes:
        engine: the scripted engine.
        listening: what the process told its agent.
        key: a client key that it accepts.
        errors: the file that receives its standard error.
    """

    def __init__(self, first: Message, *, tls: bool, key: str, errors: Path, environment: dict[str, str]) -> None:
        self.key = key
        self.errors = errors
        self.control, self._engine_socket, self.process = _start(errors, environment)
        self.engine = EnginePeer(self._engine_socket)
        self.stats: queue.Queue[ApiStats] = queue.Queue()
        self._tls = tls
        self.control.send(first)
        answer = self.control.receive()
        assert isinstance(answer, ApiListening), self._end()
        self.listening = answer
        self._reader = threading.Thread(target=self._read_control, daemon=True)
        self._reader.start()

    def tell(self, message: Message) -> None:
        self.control.send(message)

    def serve(self, model: ModelReady | None = None) -> None:
        """Make the engine ready, admit clients and wait until requests are served."""
        self.engine.ready(model or chat_model.ready())
        self.tell(Admit(open=True))
        self.wait_for_state("serving")

    def wait_for_state(self, state: str) -> None:
        for _ in range(2000):
            if self.get("/health").json()["state"] == state:
                return
        raise AssertionError(f"never {state}: {self.errors.read_text()}")

    def tls(self) -> ssl.SSLContext:
        """Trust exactly this process's certificate, by the strictest rules that Python knows."""
        context = ssl.create_default_context(cadata=self.listening.certificate.decode())
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    def http(self) -> openai.DefaultHttpxClient:
        return openai.DefaultHttpxClient(verify=self.tls() if self._tls else True, trust_env=False)

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.listening.port}"

    @contextmanager
    def client(self, key: str = "") -> Iterator[openai.OpenAI]:
        with (
            self.http() as http,
            openai.OpenAI(
                base_url=f"{self.url}/v1", api_key=key or self.key, http_client=http, max_retries=0
            ) as client,
        ):
            yield client

    def get(self, path: str, key: str = "") -> Any:
        with self.http() as http:
            return http.get(self.url + path, headers={"authorization": f"Bearer {key}"} if key else {})

    def connect(self) -> socket.socket:
        """Open a raw connection, for bytes that no client library would send."""
        raw = socket.create_connection(("127.0.0.1", self.listening.port), timeout=PATIENCE)
        return self.tls().wrap_socket(raw, server_hostname="127.0.0.1") if self._tls else raw

    def log(self) -> str:
        return self.errors.read_text()

    def _end(self) -> str:
        """Clean up after a process that did not start, and give what it said."""
        self.process.wait(PATIENCE)
        self.engine.close()
        self.control.close()
        return self.log()

    def close(self) -> None:
        """Leave as the agent does; the process must follow at once."""
        self.engine.close()
        with suppress(OSError):
            self.control_socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(PATIENCE)
        self.control.close()
        try:
            self.process.wait(PATIENCE)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    @property
    def control_socket(self) -> socket.socket:
        return self.control._sock

    def _read_control(self) -> None:
        try:
            while (message := self.control.receive()) is not None:
                if isinstance(message, ApiStats):
                    self.stats.put(message)
        except OSError:
            return


def _start(errors: Path, environment: dict[str, str]) -> tuple[Channel, socket.socket, subprocess.Popen[bytes]]:
    # Coverage tells a child process by variables that it is measured.
    measured = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
    control, control_child = socket.socketpair()
    engine, engine_child = socket.socketpair()
    with control_child, engine_child, errors.open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-s", "-P", "-m", "appliance.api"),
                *("--control", str(control_child.fileno()), "--engine", str(engine_child.fileno())),
            ],
            pass_fds=(control_child.fileno(), engine_child.fileno()),
            stdin=subprocess.DEVNULL,
            stderr=log,
            env=environment | {"PYTHONPATH": str(REPOSITORY)} | measured,
            start_new_session=True,
        )
    return Channel(control), engine, process


@contextmanager
def running(
    directory: Path, *, environment: dict[str, str] | None = None, first: Message | None = None, **changes: Any
) -> Iterator[ApiProcess]:
    """Run the API process with a fresh keys file; ``changes`` are settings that differ, ``first`` replaces them."""
    keys = directory / "keys.json"
    key = issue_key(keys, "test")
    given = replace(settings(keys), **changes)
    process = ApiProcess(
        first or given,
        tls=given.tls,
        key=key,
        errors=directory / "stderr",
        # The wiping allocators of the real environment triple the time to start; one test turns them on.
        environment=environment or clean_environment(os.environ) | {"PYTHONMALLOC": "default"},
    )
    try:
        yield process
    finally:
        process.close()
