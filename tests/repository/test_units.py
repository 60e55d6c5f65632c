"""The systemd units: known directives, a reason for each, and as little exposure as this release allows.

``systemd-analyze verify`` exits 0 on unknown directives and bad values, so any line on standard error is a failure.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

# One decimal, as `systemd-analyze security` shows it. What keeps it above 0 is listed in systemd/README.md.
_EXPOSURE = "1.2"
_PREFIX = "/opt/lethe"

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed; .ci/run installs it"
)


def _directives(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        (name, value) for name, equals, value in (line.partition("=") for line in lines) if equals and line_ok(name)
    ]


def line_ok(name: str) -> bool:
    return re.fullmatch(r"[A-Z]\w*", name) is not None


@pytest.fixture
def installed(root: Path, tmp_path: Path) -> Path:
    """The units in a directory of their own, with a program at their ExecStart that exists."""
    program = tmp_path / "bin" / "lethe"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    for path in [*(root / "systemd").glob("*.service"), *(root / "systemd").glob("*.target")]:
        text = path.read_text(encoding="utf-8")
        (tmp_path / path.name).write_text(text.replace(_PREFIX, str(tmp_path)), encoding="utf-8")
    return tmp_path


def _verify(*units: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, units)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@needs_systemd
def test_units_verify_without_a_word(installed: Path) -> None:
    done = _verify(*sorted(installed.glob("lethe*")))
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_verify_sees_a_misspelt_directive(installed: Path) -> None:
    unit = installed / "lethe-agent.service"
    unit.write_text(unit.read_text(encoding="utf-8").replace("ProtectHome=", "ProtectHomes="), encoding="utf-8")
    assert "ProtectHomes" in _verify(unit).stderr


@needs_systemd
def test_gpu_drop_in_verifies_without_a_word(installed: Path, root: Path) -> None:
    directory = installed / "lethe-agent.service.d"
    directory.mkdir()
    shutil.copy(root / "systemd" / "gpu.conf", directory)
    done = _verify(installed / "lethe-agent.service")
    assert (done.returncode, done.stderr) == (0, "")


def _exposure(unit: Path, bound: str) -> subprocess.CompletedProcess[str]:
    threshold = bound.replace(".", "")
    return subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", f"--threshold={threshold}", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@needs_systemd
def test_exposure_is_within_the_stated_bound(installed: Path, root: Path) -> None:
    done = _exposure(installed / "lethe-agent.service", _EXPOSURE)
    assert done.returncode == 0, done.stdout
    assert f"{_EXPOSURE} or less" in (root / "systemd" / "README.md").read_text(encoding="utf-8")


@needs_systemd
def test_exposure_gate_sees_a_weaker_unit(installed: Path) -> None:
    unit = installed / "lethe-agent.service"
    unit.write_text(unit.read_text(encoding="utf-8").replace("NoNewPrivileges=yes\n", ""), encoding="utf-8")
    assert _exposure(unit, _EXPOSURE).returncode == 1


@pytest.mark.parametrize("name", ["lethe-agent.service", "lethe.target", "gpu.conf"])
def test_every_directive_has_its_reason(name: str, root: Path) -> None:
    reasons = (root / "systemd" / "README.md").read_text(encoding="utf-8")
    explained = {
        word for row in re.findall(r"^\| (.*?) \|", reasons, flags=re.MULTILINE) for word in re.findall(r"`(\w+)=", row)
    }
    directives = [directive for directive, _ in _directives(root / "systemd" / name)]
    assert directives
    assert set(directives) - explained == set()


def test_users_and_groups_of_the_unit_and_the_configuration_are_made(root: Path) -> None:
    made = (root / "systemd/sysusers.d/lethe.conf").read_text(encoding="utf-8")
    unit = dict(_directives(root / "systemd/lethe-agent.service"))
    assert re.search(rf"^u {unit['User']} ", made, flags=re.MULTILINE)
    configuration = (root / "docs/configuration.md").read_text(encoding="utf-8")
    for group in re.findall(r"`control\.\w+_group` \| `([\w-]+)`", configuration):
        assert re.search(rf"^g {group} ", made, flags=re.MULTILINE)


@needs_systemd
@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
def test_users_and_directories_are_made_in_an_empty_root(root: Path, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    for program, name in (("systemd-sysusers", "sysusers.d"), ("systemd-tmpfiles", "tmpfiles.d")):
        words = [program, f"--root={tmp_path}", *(["--create"] if name == "tmpfiles.d" else [])]
        done = subprocess.run(
            [*words, str(root / "systemd" / name / "lethe.conf")], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr.replace("Creating user", "").count("rror")) == (0, 0), done.stderr
    assert "lethe-operator" in (tmp_path / "etc/group").read_text(encoding="utf-8")
    assert (tmp_path / "var/lib/lethe").is_dir()


def test_stopping_gives_the_wipe_its_time_and_never_dumps(root: Path) -> None:
    unit = dict(_directives(root / "systemd/lethe-agent.service"))
    # "mixed" would kill the ranks at once when the agent dies, before they can wipe themselves
    assert unit["KillMode"] == "control-group"
    assert int(unit["TimeoutStopSec"]) >= 60
    assert unit["WatchdogSignal"] == "SIGKILL"
    assert unit["LimitCORE"] == "0"
    assert unit["Restart"] == "no"
