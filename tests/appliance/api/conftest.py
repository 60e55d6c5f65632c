"""One API process for all tests that do not need their own; each test finds its engine with a clean record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from tests.sim.api_process import ApiProcess, running


@pytest.fixture(scope="session")
def shared_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    with running(tmp_path_factory.mktemp("api")) as process:
        process.serve()
        yield process


@pytest.fixture
def api(shared_api: ApiProcess) -> ApiProcess:
    shared_api.engine.reset()
    return shared_api


@pytest.fixture
def client(api: ApiProcess) -> Iterator[openai.OpenAI]:
    with api.client() as client:
        yield client


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ApiProcess]]:
    """Start API processes with other settings."""
    with ExitStack() as stack:
        yield lambda **changes: stack.enter_context(running(tmp_path, **changes))
