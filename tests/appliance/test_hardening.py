from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance import hardening
from appliance.hardening import clean_environment, examine_machine

REPORT = """
import json, os, resource, ctypes
from appliance.hardening import harden_process
harden_process()
readable = os.access("/proc/self/environ", os.R_OK, effective_ids=True)
print(json.dumps({
    "dumpable": ctypes.CDLL(None).prctl(3, 0, 0, 0, 0),
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "umask": os.umask(0),
    "owner": os.stat("/proc/self/environ").st_uid,
}))
"""


def test_a_hardened_process_leaves_no_core_and_makes_private_files() -> None:
    done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    assert facts["dumpable"] == 0
    assert facts["core"] == [0, 0]
    assert facts["umask"] == 0o077
    assert facts["owner"] == 0


def test_variables_that_load_code_do_not_reach_the_processes() -> None:
    hostile = {
        "LD_PRELOAD": "/tmp/x.so",
        "PYTHONPATH": "/tmp",
        "CUDA_INJECTION64_PATH": "/tmp/x.so",
        "PYTHONMALLOC": "pymalloc",
        "NOTIFY_SOCKET": "/run/systemd/notify",
    }
    clean = clean_environment(hostile)
    assert clean["NOTIFY_SOCKET"] == "/run/systemd/notify"
    assert clean["PYTHONMALLOC"] == "debug"
    assert not {"LD_PRELOAD", "PYTHONPATH", "CUDA_INJECTION64_PATH"} & clean.keys()


def test_the_agent_starts_itself_again_with_the_clean_environment(tmp_path: Path) -> None:
    program = tmp_path / "again.py"
    program.write_text(
        "import os\nfrom appliance.hardening import restart_clean\nrestart_clean('again')\n"
        "import sys; print(sorted(os.environ), sys.argv[1:])\n"
    )
    environment = dict(os.environ) | {"LD_LIBRARY_PATH": str(tmp_path), "SECRET_HINT": "x"}
    done = subprocess.run(
        [sys.executable, program, "one", "two"], env=environment | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    # The second start cannot find a module that only PYTHONPATH names: that path is gone, as it must be.
    assert "No module named again" in done.stderr


def test_freed_memory_is_overwritten_where_prompts_are_text() -> None:
    program = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "block = libc.malloc(1000)\n"
        "ctypes.memset(block, 65, 1000)\n"
        "libc.free(ctypes.c_void_p(block))\n"
        "print(ctypes.string_at(block + 64, 900).count(b'A'))\n"
    )

    def left(environment: dict[str, str]) -> int:
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert left(clean_environment(os.environ, wipe_all_frees=True)) == 0
    assert left(clean_environment(os.environ)) > 0  # the control: without it bytes stay


def test_swap_is_a_weakness_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    swaps = "Filename Type Size Used Priority\n/swapfile file 1 0 -2\n"
    monkeypatch.setattr(hardening, "_read", lambda path: swaps if path == "/proc/swaps" else "")
    facts = {fact.name: fact for fact in examine_machine()}
    assert (facts["swap"].state, facts["swap"].seen) == ("weak", "/swapfile")
    assert facts["swap"].hint
    assert facts["hibernation"].state == "good"
