"""What a process does to itself before it may hold a secret, and what it finds out about its machine.

``harden_process`` comes first in every process of the appliance: ``PR_SET_DUMPABLE`` is reset by ``execve``, and a zero
core limit alone does not stop a piped core pattern. The environment is rebuilt from an allow-list, because variables
such as ``LD_PRELOAD``, ``PYTHONPATH`` or ``CUDA_INJECTION64_PATH`` run code that nobody measured.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_PR_SET_DUMPABLE = 4
_PR_GET_DUMPABLE = 3

# What a child may see of the outside. The systemd names are its notification protocol (sd_notify(3)).
_KEPT = (
    "CUDA_VISIBLE_DEVICES",
    "LANG",
    "LC_ALL",
    "NOTIFY_SOCKET",
    "PATH",
    "TERM",
    "TZ",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
)

# Set for every process that sees prompts, keys or weights.
_FIXED = {
    # Freed Python blocks are overwritten, so a finished prompt does not stay in the heap.
    "PYTHONMALLOC": "debug",
    # Lazy binding saves vector registers on the stack, and with them half of a key that AES has just used.
    "LD_BIND_NOW": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",
    # No library may look for a model or a kernel cache outside, or write one to disk.
    "CUDA_CACHE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # In a virtual machine a thread that spins at a barrier may spin away the time slice that its partner waits for:
    # decoding with two threads took 23 times as long as with one (benchmarks/results).
    "OMP_WAIT_POLICY": "PASSIVE",
    # MKL otherwise keeps the buffers in which it packs weights for large products.
    "MKL_DISABLE_FAST_MM": "1",
}

# Python's debug hooks over malloc, and a glibc that overwrites every freed block; its per-thread cache would skip that
# (mallopt(3) M_PERTURB, glibc tunables manual). It reaches the tokenizer's, the parser's and the TLS library's copies.
_WIPE_ALL_FREES = {
    "PYTHONMALLOC": "malloc_debug",
    "GLIBC_TUNABLES": "glibc.malloc.perturb=165:glibc.malloc.tcache_count=0",
}


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing found out about the machine.

    Attributes:
        name: stable id, such as ``swap``.
        state: ``good``; ``weak`` when a promise of docs/threat-model.md does not hold here.
        seen: what was found.
        hint: what to do about it; empty when good.
    """

    name: str
    state: Literal["good", "weak"]
    seen: str
    hint: str


def harden_process() -> None:
    """Forbid core dumps and reading of this process by its peers; files it makes are for its user only.

    Raises:
        OSError: the kernel refuses; the process must not go on.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o077)


def clean_environment(environment: Mapping[str, str], *, wipe_all_frees: bool = False) -> dict[str, str]:
    """Give the environment of a process of the appliance: the allowed names and the fixed values.

    Args:
        environment: that of this process.
        wipe_all_frees: also overwrite what C libraries free; for processes that see prompts as text.
    """
    kept = {name: environment[name] for name in _KEPT if name in environment}
    return kept | _FIXED | (_WIPE_ALL_FREES if wipe_all_frees else {})


def restart_clean(module: str) -> None:
    """Start ``python -m module`` in place of this process with the clean environment, unless it already runs with it.

    The allocator and the module path are chosen before the first line of Python runs, so they cannot be set later.
    """
    wanted = clean_environment(os.environ)
    if dict(os.environ) != wanted:
        os.execve(sys.executable, [sys.executable, "-s", "-P", "-m", module, *sys.argv[1:]], wanted)


def examine_machine() -> tuple[Fact, ...]:
    """Find out what of the machine weakens the promises: swap, dumps, locked memory, allocator."""
    return (_swap(), _dumps(), _locked_memory(), _allocator(), _hibernation())


def _fact(name: str, seen: str, hint: str, *, good: bool) -> Fact:
    return Fact(name, "good" if good else "weak", seen, "" if good else hint)


def _swap() -> Fact:
    lines = _read("/proc/swaps").splitlines()[1:]
    seen = ", ".join(line.split()[0] for line in lines) or "none"
    return _fact("swap", seen, "turn swap off: wiped memory may already have been copied there", good=not lines)


def _dumps() -> Fact:
    dumpable = ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
    limit = resource.getrlimit(resource.RLIMIT_CORE)
    good = dumpable == 0 and limit == (0, 0)
    return _fact("dumps", f"dumpable {dumpable}, core limit {limit[0]}", "start through lethe agent", good=good)


def _locked_memory() -> Fact:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    seen = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    good = soft == resource.RLIM_INFINITY or soft >= 1 << 20
    return _fact("memlock", seen, "raise LimitMEMLOCK so that keys and staging can be locked", good=good)


def _allocator() -> Fact:
    seen = os.environ.get("PYTHONMALLOC", "default")
    return _fact(
        "allocator",
        seen,
        "start through lethe agent, which sets PYTHONMALLOC=debug",
        good=seen in ("debug", "malloc_debug"),
    )


def _hibernation() -> Fact:
    seen = _read("/sys/power/state").split()
    return _fact(
        "hibernation",
        ", ".join(seen) or "not offered",
        "mask hibernate.target: a hibernation image holds all memory",
        good="disk" not in seen,
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
