"""May ciphertext be opened from a mapping of its file?

A mapping is read while it is authenticated and again while it is decrypted. On a file system whose pages somebody
outside of this machine can write (DAX, virtiofs with a window into the host, network file systems with shared caches)
the two could see different bytes. So only files on local file systems with pages of this machine's own memory are
mapped; everything else is read into private memory first. What cannot be found out counts as "no".
"""

from __future__ import annotations

import os
from pathlib import Path

# File systems whose page cache only this kernel fills, from a block device or from nothing.
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs", "vfat", "exfat", "iso9660", "udf", "squashfs"})
_MEMORY = frozenset({"tmpfs"})


def may_map(descriptor: int, *, root: Path = Path("/")) -> bool:
    """Say whether the pages of an open file are this machine's alone.

    Args:
        descriptor: of a regular file.
        root: where ``proc`` and ``sys`` are.
    """
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        text = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    found = [mount for line in text.splitlines() if (mount := _parse(line)) is not None and mount[0] == number]
    if not found:
        return False
    return all(
        kind in _MEMORY or (kind in _LOCAL and not _dax(options) and _plain_block(number, root))
        for _, kind, options in found
    )


def _parse(line: str) -> tuple[str, str, str] | None:
    """Give (device, type, options) of a line of mountinfo (proc(5))."""
    before, separator, after = line.partition(" - ")
    mount, rest = before.split(), after.split()
    if not separator or len(mount) < 6 or len(rest) < 3:
        return None
    return mount[2], rest[0], f"{mount[5]},{rest[2]}"


def _dax(options: str) -> bool:
    return any(option == "dax" or option.startswith("dax=") for option in options.split(","))


def _plain_block(number: str, root: Path) -> bool:
    """Say whether a block device cannot do DAX at all: single files can have it without a mount option."""
    device = root / "sys/dev/block" / number
    for place in (device / "queue/dax", device / "../queue/dax"):  # a partition has its disk's queue
        try:
            return place.read_text(encoding="ascii", errors="replace").strip() == "0"
        except OSError:
            continue
    return False
