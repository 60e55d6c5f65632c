"""Keep a rank on the cores, and so with the memory, that are next to its device.

Staging memory on the far side of a machine with two sockets costs a crossing for each copy. The kernel says in sysfs
which node a PCI device hangs on. A process that is bound before it allocates gets memory of that node, and stays bound:
its threads feed the same device for the rest of its life.
"""

from __future__ import annotations

import os
from pathlib import Path


def bind_near(address: str, *, sysfs: Path = Path("/sys")) -> frozenset[int]:
    """Bind the calling thread, and all that it starts later, to the cores next to a device.

    Args:
        address: of the device on the PCI bus, as ``0000:3b:00.0``.
        sysfs: where the kernel's view of devices is.

    Returns:
        The cores; none when the machine has one node, does not say, or leaves this process no core there: then nothing
        was changed.
    """
    usable = near(address, sysfs=sysfs) & os.sched_getaffinity(0)
    if usable:
        os.sched_setaffinity(0, usable)
    return frozenset(usable)


def near(address: str, *, sysfs: Path = Path("/sys")) -> frozenset[int]:
    """Give the cores of the node that a device hangs on; none where the kernel does not say."""
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text(encoding="ascii"))
        if node < 0:  # the firmware names none
            return frozenset()
        listed = (sysfs / f"devices/system/node/node{node}/cpulist").read_text(encoding="ascii")
        return frozenset(parse_cores(listed))
    except (OSError, ValueError):
        return frozenset()


def parse_cores(listed: str) -> set[int]:
    """Read a list of cores such as ``0-3,8,10-11``.

    Raises:
        ValueError: it is none.
    """
    cores: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
