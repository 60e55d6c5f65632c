"""What file system a directory is on."""

from __future__ import annotations

import os
from pathlib import Path


def file_system(directory: Path) -> str:
    """Give the type of the file system that a directory is on, from the mount table (proc(5), mountinfo)."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == wanted:
            return rest.split()[0]
    return "unknown"
