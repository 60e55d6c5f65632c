"""The floor stands alone: a client or an auditor installs it without torch, HTTP or a command-line library."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import attestation

FORBIDDEN = [
    "appliance",
    "provisioning",
    "torch",
    "safetensors",
    "numpy",
    "click",
    "psutil",
    "socket",
    "subprocess",
    "tempfile",
    "pickle",
    "starlette",
    "uvicorn",
]

PROGRAM = """
import importlib, json, sys
before = set(sys.modules)
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""


def modules() -> list[str]:
    return [found.name for found in pkgutil.walk_packages(attestation.__path__, "attestation.")]


def test_every_module_imports_without_the_floors_above_and_their_libraries() -> None:
    names = modules()
    assert "attestation.appraise" in names
    assert "attestation.simulated.verify" in names
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            f"import sys; sys.path.insert(0, {str(Path(attestation.__path__[0]).parent)!r})" + PROGRAM,
            json.dumps(names),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = set(json.loads(done.stdout))
    assert "cryptography" in loaded
    assert loaded & set(FORBIDDEN) == set()
