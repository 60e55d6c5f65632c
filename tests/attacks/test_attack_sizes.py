"""Attack 24: inputs that a parser would make gigabytes of, or take hours over, end in a code in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attacks.hostile_inputs import CASES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    # In a fresh process, since one that has run tests has memory to spare already.
    place = tmp_path_factory.mktemp("hostile")
    command = [sys.executable, "-m", "tests.attacks.hostile_inputs", str(place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=280)
    said: dict[str, str] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize("name", CASES)
def test_24_a_hostile_input_ends_in_its_code_in_little_memory(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] == CASES[name].code


def test_24_its_harness_sees_a_parser_that_takes_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.attacks import hostile_inputs

    greedy = hostile_inputs.Case(lambda data: bytearray(len(data) * 16 + (256 << 20)), lambda: b"x", "none")
    assert hostile_inputs._run(greedy) == "MemoryError"
