"""The process itself: how it ends, what it tells its agent, and that it shows and keeps no prompt."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.api.quiet import ContentFree
from appliance.hardening import clean_environment
from appliance.protocol import Admit, Exit, Tokens
from appliance.residue import Searcher, forms_of
from tests.sim import chat_model
from tests.sim.api_process import MODEL, REPOSITORY, ApiProcess, running
from tests.sim.chat_model import end_id, ids
from tests.sim.engine_peer import PATIENCE, begins, rejects, says

Start = Callable[..., ApiProcess]
PROMPT = "zqxjkvbwzqxjkvbwpfgyzq"
COMPLETION = "wmqpzzvkjxhwqqpwmzzvkq"
HELLO: Any = [{"role": "user", "content": f"say {PROMPT} please"}]


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **fields})


def test_leaves_at_once_when_the_agent_goes(start: Start) -> None:
    api = start()
    api.serve()
    api.engine.script = begins(ids("hello"))
    with api.client() as client:
        next(ask(client, stream=True))
        api.control_socket.shutdown(socket.SHUT_RDWR)
        assert api.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_do_not_end_it_because_the_agent_decides(start: Start, number: int) -> None:
    api = start()
    api.process.send_signal(number)
    assert api.get("/health").status_code == 503


def test_loads_neither_torch_nor_anything_that_knows_keys() -> None:
    loads = "import sys, appliance.api.__main__; print(*sys.modules)"
    command = [sys.executable, "-c", loads]
    modules = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    assert "appliance.api.tls" in modules
    forbidden = {"torch", "numpy", "provisioning", "appliance.engine", "appliance.custody"}
    assert forbidden.isdisjoint(modules)


def test_loss_of_the_engine_is_logged_once_and_only_while_serving(start: Start) -> None:
    api = start()
    api.serve()
    api.engine.close()
    api.wait_for_state("engine_lost")
    assert api.log() == "lethe-api: error: lethe.api: api.engine.lost\n"


def test_hardens_itself_before_it_listens(api: ApiProcess) -> None:
    limits = Path(f"/proc/{api.process.pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max core file size")]
    assert line.split()[4:6] == ["0", "0"]


def test_message_that_no_agent_sends_ends_it(start: Start) -> None:
    api = start()
    api.tell(Exit())
    assert api.process.wait(PATIENCE) == 1
    assert "protocol.direction" in api.log()


def test_first_message_must_be_the_settings(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"protocol\.direction"), running(tmp_path, first=Exit()):
        pass


def test_message_that_no_engine_sends_ends_it(start: Start) -> None:
    api = start()
    api.engine.send(Exit())
    assert api.process.wait(PATIENCE) == 1
    assert "protocol.direction" in api.log()


@pytest.mark.parametrize(
    ("change", "code"),
    [({"tokenizer": b"{}"}, "model.tokenizer"), ({"chat_template": b"{% if %}"}, "model.template")],
)
def test_model_that_cannot_be_served_ends_it_with_the_exit_status(start: Start, change: Any, code: str) -> None:
    api = start()
    api.engine.send(replace(chat_model.ready(), **change))
    assert api.process.wait(PATIENCE) == 8
    assert code in api.log()


def test_refuses_to_start_in_plain_http_for_others(tmp_path: Path, start: Start) -> None:
    with pytest.raises(AssertionError, match=r"api\.tls\.required"):
        start(tls=False, host="0.0.0.0")


def test_address_in_use_ends_it_with_a_code(start: Start, api: ApiProcess) -> None:
    with pytest.raises(AssertionError, match=r"api\.system: OSError"):
        start(port=api.listening.port)


def test_log_and_files_hold_no_prompt_and_no_completion(start: Start, tmp_path: Path) -> None:
    api = start(request_seconds=1)
    api.serve()
    with api.client() as client:
        for script in (says(ids(COMPLETION), end=end_id()), begins(ids(COMPLETION)), rejects("x", COMPLETION)):
            api.engine.script = script
            for fields in ({}, {"stream": True}, {"stop": PROMPT, "temperature": PROMPT}, {PROMPT: 1}):
                with suppress(openai.APIError):
                    list(ask(client, extra_body=fields))
    with api.http() as http:
        http.get(f"{api.url}/{PROMPT}?q={PROMPT}")
        http.post(f"{api.url}/v1/completions", content=PROMPT, headers={"authorization": f"Bearer {api.key}"})
    with api.connect() as connection:
        connection.sendall(PROMPT.encode() + b"\r\n\r\n")
        connection.recv(4096)
    api.tell(Admit(open=False))
    api.wait_for_state("draining")
    search = Searcher(forms_of("prompt", PROMPT.encode()) + forms_of("completion", COMPLETION.encode()))
    assert search.search_tree(tmp_path).hits == []
    assert api.log() == ""


def test_fault_of_the_program_is_logged_by_type_and_place_only(start: Start) -> None:
    api = start()
    api.serve()
    no_token = 2**40
    api.engine.script = lambda submit: (Tokens(submit.request, [no_token], "length"),)
    with api.client() as client, pytest.raises(openai.InternalServerError) as caught:
        ask(client)
    assert caught.value.code == "internal_error"
    api.get("/health")
    assert "library.message: OverflowError at tokenizer.py:" in api.log()
    assert len(api.log().splitlines()) == 1


def test_fault_in_a_stream_breaks_it_off(start: Start) -> None:
    api = start()
    api.serve()
    api.engine.script = lambda submit: (Tokens(submit.request, ids("a"), ""), Tokens(submit.request, [2**40], "length"))
    with api.client() as client, pytest.raises(openai.APIConnectionError):
        list(ask(client, stream=True))
    api.get("/health")
    assert "OverflowError" in api.log()


def test_formatter_drops_messages_and_arguments_of_libraries() -> None:
    with pytest.raises(ValueError, match=PROMPT) as caught:
        int(PROMPT)
    record = logging.LogRecord("asyncio", logging.ERROR, "x", 1, "task %s", (PROMPT,), caught._excinfo)
    line = ContentFree().format(record)
    assert PROMPT not in line
    assert line.startswith("lethe-api: error: asyncio: library.message: ValueError at test_api_process.py:")


HOOKS = """
import sys, threading
from appliance.api import quiet
quiet.install()
class Breaks:
    def __del__(self):
        raise RuntimeError(sys.argv[1])
def fail():
    raise KeyError(sys.argv[1])
Breaks()
thread = threading.Thread(target=fail)
thread.start()
thread.join()
import warnings
warnings.warn(sys.argv[1])
raise ValueError(sys.argv[1])
"""


def test_no_hook_of_python_prints_an_exceptions_text() -> None:
    result = subprocess.run(
        [sys.executable, "-c", HOOKS, PROMPT],
        env=clean_environment(os.environ) | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert PROMPT not in result.stdout + result.stderr
    for kind in ("RuntimeError", "KeyError", "ValueError"):
        assert kind in result.stderr
    assert "py.warnings" in result.stderr


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
def test_memory_holds_a_prompt_only_while_it_is_answered(start: Start, tls: bool) -> None:
    """In the environment that the agent gives the process; each search that finds something is the positive control.

    A prompt is gone as soon as it is encoded, an answer as soon as it is sent.
    """
    api = start(tls=tls, environment=clean_environment(os.environ, wipe_all_frees=True))
    api.serve()
    api.engine.script = begins(ids(COMPLETION))
    needles = Searcher(forms_of("prompt", PROMPT.encode()) + forms_of("completion", COMPLETION.encode()))

    def found() -> set[str]:
        return {hit.label for hit in needles.search_process(api.process.pid).hits}

    body = json.dumps({"model": MODEL, "messages": HELLO}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {api.key}\r\n"
    with api.connect() as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:-1])
        while "prompt" not in found():
            pass
        connection.sendall(body[-1:])
        name = api.engine.next_submit().request
        while "completion" not in (under_way := found()):
            pass
        assert under_way == {"completion"}
        api.engine.send(Tokens(name, [end_id()], "stop"))
        received = b""
        while COMPLETION.encode() not in received:
            received += connection.recv(65536)
    api.get("/health")
    assert found() == set()


def test_memory_holds_no_prompt_that_was_refused_before_it_was_read(start: Start) -> None:
    """A connection that stays open must not keep the body of a request that was answered with 503."""
    api = start(environment=clean_environment(os.environ, wipe_all_frees=True))
    needles = Searcher(forms_of("prompt", PROMPT.encode()))
    body = json.dumps({"model": MODEL, "messages": HELLO}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {api.key}\r\n"
    with api.connect() as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert b" 503 " in connection.recv(4096)
        assert needles.search_process(api.process.pid).hits == []
