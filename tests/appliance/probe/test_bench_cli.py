"""``lethe bench load``: exit statuses, one JSON object, and nothing left when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from appliance.cli import bench
from appliance.errors import ProtocolError
from appliance.probe import __main__ as probe
from appliance.probe.findings import Findings

LETHE = [sys.executable, "-m", "appliance.cli"]


def _lethe(*words: object) -> subprocess.CompletedProcess[str]:
    command = [*LETHE, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def _without_configuration(tmp_path: Path) -> list[object]:
    return ["--config", tmp_path / "absent.toml", "bench", "load"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One whole measurement."""
    directory = tmp_path_factory.mktemp("medium")
    words = [*_without_configuration(directory), "--dir", directory, "--gb", 0.01, "--json"]
    return directory, _lethe(*words)


def test_measurement_gives_one_json_object(measured: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    directory, done = measured
    assert done.returncode == 0, done.stderr
    members: dict[str, Any] = json.loads(done.stdout)
    assert members["directory"] == str(directory.resolve())
    assert members["warm"]["nbytes"] >= 10_000_000 * 0.6
    assert members["verdict"]["stage"] in {"medium", "cipher", "loader"}
    assert {entry["threads"] for entry in members["ciphers"]} >= {1, 2}


@pytest.mark.parametrize("size", ["nan", "inf", "-1", "0"])
def test_refuses_a_size_that_is_none(tmp_path: Path, size: str) -> None:
    done = _lethe(*_without_configuration(tmp_path), "--dir", tmp_path, "--gb", size)
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_measurement_leaves_nothing(measured: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    assert list(measured[0].iterdir()) == []


def test_measurement_says_what_it_does(measured: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    said = measured[1].stderr.splitlines()
    assert [line for line in said if line.startswith("reading the medium: 4 MiB")]
    assert "loading, warm" in said


def test_findings_are_shown_to_people(measured: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    members = json.loads(measured[1].stdout)
    lines = bench.describe(Findings.from_payload(members))
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [
        "medium",
        "cipher",
        "copy",
        "cold",
        "warm",
    ]


def test_interrupted_measurement_leaves_nothing(tmp_path: Path) -> None:
    command = [*LETHE, *map(str, _without_configuration(tmp_path)), "--dir", str(tmp_path), "--gb", "0.5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("writing and packing")
        while not list(tmp_path.glob(".lethe-bench-*/model/*.safetensors")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.stderr.read()
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_probe_whose_command_line_was_killed_leaves_nothing(tmp_path: Path) -> None:
    """The kernel tells it; it is this test's grandchild, so its directory is what can be watched."""
    command = [*LETHE, *map(str, _without_configuration(tmp_path)), "--dir", str(tmp_path), "--gb", "0.5"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not list(tmp_path.glob(".lethe-bench-*/model/*.safetensors")):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    deadline = time.monotonic() + 60
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_absent_device_is_a_device_fault(tmp_path: Path) -> None:
    done = _lethe(*_without_configuration(tmp_path), "--dir", tmp_path, "--device", "cuda:31", "--json")
    assert done.returncode == 8
    assert json.loads(done.stdout)["error"]["code"] == "slot.absent"


def test_missing_configuration_is_named_when_no_directory_is(tmp_path: Path) -> None:
    done = _lethe(*_without_configuration(tmp_path))
    assert done.returncode == 78
    assert "config.file" in done.stderr


def test_absent_directory_is_a_usage_error(tmp_path: Path) -> None:
    assert _lethe(*_without_configuration(tmp_path), "--dir", tmp_path / "absent").returncode == 2


def test_more_weights_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(probe.ConfigError) as caught:
        probe._require_memory(1 << 60)
    assert caught.value.code == "bench.memory"


def test_probe_that_dies_is_a_fault_with_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen

    def dying(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        code = "import os; os.kill(os.getpid(), 9)"
        return real([command[0], "-c", code], **options)

    monkeypatch.setattr(bench.subprocess, "Popen", dying)
    with pytest.raises(ProtocolError) as caught:
        bench._measure({"directory": "/"})
    assert caught.value.code == "bench.ended"
    assert "SIGKILL" in caught.value.found


def test_probe_that_says_nothing_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen
    monkeypatch.setattr(bench.subprocess, "Popen", lambda command, **options: real(["true"], **options))
    with pytest.raises(ProtocolError) as caught:
        bench._measure({"directory": "/"})
    assert caught.value.code == "bench.ended"


def test_malformed_request_is_refused_by_the_probe() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "appliance.probe"],
        input=b"{}\n",
        capture_output=True,
        env=os.environ,
        timeout=120,
        check=False,
    )
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["error"]["code"].startswith("json.")
