"""What the machine is, without its name."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import cryptography
import torch

from provisioning.medium import file_system_at


def describe(directory: Path) -> dict[str, Any]:
    """Describe processor, memory, kernel, the file system of a directory, and the libraries that all share."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {name.strip(): value.strip() for name, value in facts.items()}
    flags = named.get("flags", "").split()
    return {
        "cpu": named.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "avx512_aes": all(flag in flags for flag in ("avx512f", "vaes", "vpclmulqdq")),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release().split("-")[0],
        "file_system": file_system_at(directory),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cryptography": cryptography.__version__,
    }
