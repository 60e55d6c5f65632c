"""Sudden ends: a process is killed at a bad moment, and nothing readable may be left anywhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.control import ask
from tests.e2e.conftest import House, alive, wait_until

CANARY = "lethe-prompt-canary-77ab02"


def search_everything(house: House) -> None:
    searcher = house.searcher(CANARY)
    findings = searcher.search_tree(house.root)
    findings.add(searcher.search_tree(Path("/dev/shm")))
    assert findings.hits == []
    assert findings.searched_bytes > 100_000
    assert searcher.search_tree(house.model).hits


@pytest.mark.parametrize("opened", [0.0, 0.02, 0.5])
def test_the_agent_killed_during_load_leaves_nothing(larger: House, opened: float) -> None:
    with larger.agent() as agent:
        grant = larger.grant()
        command = [sys.executable, "-m", "appliance.cli", "--config", str(larger.config), "grant", str(grant)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as loading:
            wait_until(lambda: _part_opened(larger) >= opened)
            processes = _status(larger)["processes"]
            agent.kill()
            assert loading.wait(60) == 69
        wait_until(lambda: not any(alive(pid) for pid in processes.values()), 15)
    search_everything(larger)
    with larger.agent():
        assert larger.status()["state"] == "HARDENED"
        assert "agent.recovered" in larger.journal()


def test_a_rank_killed_during_load_stops_the_load_and_is_named(larger: House) -> None:
    with larger.agent() as agent:
        grant = larger.grant()
        command = [sys.executable, "-m", "appliance.cli", "--config", str(larger.config), "grant", str(grant)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as loading:
            wait_until(lambda: _part_opened(larger) >= 0)
            os.kill(_status(larger)["processes"]["rank 0"], signal.SIGKILL)
            _, told = loading.communicate(timeout=60)
            assert loading.returncode != 0
        assert agent.wait(60) == 9
    assert b"the process of cpu is gone" in told
    assert "load.done" not in larger.journal()
    assert larger.journal()[-1] == "zeroize.incomplete"
    search_everything(larger)


def _status(house: House) -> dict[str, Any]:
    """Ask without starting a program, which would take longer than the load."""
    (answer,) = ask(house.root / "run" / "control.sock", "status")
    return dict(answer["status"])


def _part_opened(house: House) -> float:
    devices = _status(house)["devices"]
    if not devices:
        return -1.0
    return float(devices[0]["opened_bytes"]) / max(int(devices[0]["total_bytes"]), 1)


def test_the_agent_killed_while_serving_leaves_nothing_and_asks_again(house: House) -> None:
    with house.agent() as agent:
        status = house.serve()
        with house.client(status) as client:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": CANARY}], max_tokens=4)
        agent.kill()
        agent.wait(60)
        wait_until(lambda: not any(alive(pid) for pid in status["processes"].values()), 15)
    search_everything(house)
    with house.agent():
        assert house.status()["state"] == "HARDENED"
        assert house.journal()[-2:] == ["agent.recovered", "agent.started"]


def test_a_killed_rank_ends_the_service_as_not_shown_to_be_wiped(house: House) -> None:
    with house.agent() as agent:
        status = house.serve()
        os.kill(status["processes"]["rank 0"], signal.SIGKILL)
        assert agent.wait(60) == 9
    assert house.journal()[-1] == "zeroize.incomplete"
    search_everything(house)


def test_a_killed_api_ends_the_service_with_a_wipe(house: House) -> None:
    with house.agent() as agent:
        status = house.serve()
        os.kill(status["processes"]["api"], signal.SIGKILL)
        assert agent.wait(60) == 8
    assert house.journal()[-1] == "zeroize.done"


def test_zeroize_during_a_load_stops_it(larger: House) -> None:
    with larger.agent() as agent:
        grant = larger.grant()
        command = [sys.executable, "-m", "appliance.cli", "--config", str(larger.config), "grant", str(grant)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as loading:
            wait_until(lambda: _part_opened(larger) >= 0)
            assert larger.zeroize().status == 0
            assert loading.wait(60) != 0
        assert agent.wait(60) == 0
    assert "load.done" not in larger.journal()
    assert larger.journal()[-1] == "zeroize.done"
