"""Which package may import which: the contracts hold, and each reports a breach that is planted."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

# contract -> (module that breaks it, line that is planted there)
_BREACHES = {
    "floors": ("provisioning/secret.py", "import appliance.errors"),
    "lower-floors": ("attestation/evidence.py", "import socket"),
    "command-line": ("provisioning/manifest.py", "import provisioning.cli"),
    "engine": ("appliance/engine/model.py", "import provisioning.secret"),
    "api": ("appliance/api/schema.py", "import torch"),
    "agent": ("appliance/status.py", "import torch"),
    "mint-attestation": ("attestation/evidence.py", "from attestation._seal import MINT"),
    "mint-provisioning": ("provisioning/ledger.py", "from provisioning._seal import MINT"),
    "mint-appliance": ("appliance/agent.py", "from appliance._seal import MINT"),
    "cycles": ("provisioning/secret.py", "import provisioning.segment"),
}


def _contracts(root: Path) -> set[str]:
    with (root / "pyproject.toml").open("rb") as file:
        return {contract["id"] for contract in tomllib.load(file)["tool"]["importlinter"]["contracts"]}


def _check(where: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    options = [word for contract in contracts for word in ("--contract", contract)]
    return subprocess.run(
        [str(program), "--no-cache", *options], cwd=where, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A copy of the product and its settings, free to be broken."""
    shutil.copy(root / "pyproject.toml", tmp_path)
    for package in ("appliance", "attestation", "provisioning"):
        shutil.copytree(root / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_contracts_hold(root: Path) -> None:
    done = _check(root)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_contract_has_a_planted_breach(root: Path) -> None:
    assert _contracts(root) == _BREACHES.keys()


@pytest.mark.parametrize("contract", _BREACHES)
def test_breach_is_reported(contract: str, copy: Path) -> None:
    module, line = _BREACHES[contract]
    path = copy / module
    path.write_text(path.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    done = _check(copy, contract)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout


def test_import_inside_a_function_is_a_breach_too(copy: Path) -> None:
    path = copy / "attestation/evidence.py"
    path.write_text(path.read_text(encoding="utf-8") + "\n\ndef late() -> None:\n    import torch\n", encoding="utf-8")
    assert _check(copy, "lower-floors").returncode == 1
