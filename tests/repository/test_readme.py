"""README.md is true: its targets exist, its commands run in the order shown, its transcript has the demo's steps."""

from __future__ import annotations

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest

import appliance.cli
import provisioning.cli

_WAIT_FOR_AGENT = """
agent=$!
{ for _ in $(seq 600); do [ -S run/control.sock ] && break; kill -0 $agent || exit 1; sleep 0.1; done; } 2> /dev/null
"""
_GROUPS: dict[str, click.Group] = {"lethe": appliance.cli.group, "lethe-owner": provisioning.cli.group}


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    """The text of README.md."""
    return (root / "README.md").read_text(encoding="utf-8")


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def _commands(text: str) -> list[str]:
    """Every command of the console blocks, in order."""
    lines = [line for block in _blocks(text, "console") for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines), "console blocks hold commands only"
    return [line.removeprefix("$ ") for line in lines]


def _files(text: str) -> dict[str, str]:
    """Each TOML block by the file name that is named last before it."""
    found: dict[str, str] = {}
    for match in re.finditer(r"^```toml\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        names = re.findall(r"`([\w-]+\.toml)`", text[: match.start()])
        found[names[-1]] = match[1]
    return found


def _programs() -> list[str]:
    """The programs' words in README's commands, such as ``lethe-owner keygen --out``."""
    text = Path(__file__).resolve().parents[2].joinpath("README.md").read_text(encoding="utf-8")
    return [match[0] for command in _commands(text) for match in re.finditer(r"\blethe(?:-owner)? .*", command)]


@pytest.mark.parametrize("words", _programs())
def test_command_and_options_exist(words: str) -> None:
    program, *rest = words.replace("lethe --config lethe.toml", "lethe").split()
    name = next(word for word in rest if not word.startswith("-"))
    group = _GROUPS[program]
    command = group.commands[name]
    if isinstance(command, click.Group):
        command = command.commands[rest[rest.index(name) + 1]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert set(re.findall(r"(?<= )--[a-z-]+", words.split(name, 1)[1])) <= known


def test_every_command_of_both_programs_has_help() -> None:
    for program, group in _GROUPS.items():
        for name in group.commands:
            assert group.commands[name].get_short_help_str(), f"{program} {name} has no help"


def test_make_targets_exist(readme: str, root: Path) -> None:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    texts = [readme, *((root / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "systemd/README.md"))]
    targets = {target for text in texts for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, flags=re.MULTILINE)}
    assert {"demo", "venv", "test", "install-owner"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:.*## ", makefile, flags=re.MULTILINE), target
        assert subprocess.run(["make", "-n", target], cwd=root, capture_output=True, check=False).returncode == 0, (
            target
        )


def _titles_in_demo(root: Path) -> list[str]:
    """A pattern for each numbered heading that the demo prints, in order."""
    tree = ast.parse((root / "demo/run.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "step"]
    numbered: dict[int, str] = {}
    for call in calls:
        title = call.args[1]
        parts = title.values if isinstance(title, ast.JoinedStr) else [title]
        fixed = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+" for part in parts]
        numbered[ast.literal_eval(call.args[0])] = "".join(fixed)
    return [rf"{number:2}\. {numbered[number]}" for number in sorted(numbered)]


def test_transcript_has_the_steps_of_the_demo(readme: str, root: Path) -> None:
    marked = re.search(r"<!-- transcript: begin -->\n```text\n(.*?)```\n<!-- transcript: end -->", readme, re.DOTALL)
    assert marked is not None
    titles = [line for line in marked[1].splitlines() if re.match(r"[ \d]\d\. ", line)]
    patterns = _titles_in_demo(root)
    assert len(titles) == len(patterns)
    for title, pattern in zip(titles, patterns, strict=True):
        assert re.fullmatch(pattern, title), title
    assert "SIMULATED" in marked[1]


@pytest.fixture
def room(root: Path, tmp_path: Path, readme: str) -> Path:
    """A directory with README's files and the model."""
    for name, text in _files(readme).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "build").symlink_to(root / "build")
    return tmp_path


@pytest.mark.model
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed; .ci/run installs it")
def test_commands_run_in_the_order_shown(readme: str, room: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    configuration = room / "lethe.toml"
    configuration.write_text(configuration.read_text(encoding="utf-8").replace("8443", port), encoding="utf-8")
    # The agent is this shell's only job; a step that fails must not leave it behind.
    lines = ["set -eux", "trap 'kill %1; wait' EXIT"]
    for command in _commands(readme):
        lines.append(command.replace("8443", port))
        if command.endswith("&"):
            lines.append(_WAIT_FOR_AGENT)
    lines += ["trap - EXIT", "wait $agent"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=room,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"role":"assistant"' in done.stdout.replace(" ", "")
    assert "SIMULATED" in done.stdout + done.stderr
