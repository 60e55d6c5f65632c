"""A rank stays on the cores next to its device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.numa import bind_near, near, parse_cores

ADDRESS = "0000:3b:00.0"


@pytest.fixture(autouse=True)
def affinity() -> Iterator[set[int]]:
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def tree(directory: Path, node: str, cores: dict[int, str]) -> Path:
    device = directory / "bus/pci/devices" / ADDRESS
    device.mkdir(parents=True)
    (device / "numa_node").write_text(node + "\n")
    for number, listed in cores.items():
        place = directory / f"devices/system/node/node{number}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(listed + "\n")
    return directory


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", {0}), ("0-3", {0, 1, 2, 3}), ("0-1,8,10-11\n", {0, 1, 8, 10, 11}), ("", set()), ("5,5", {5})],
)
def test_reads_a_list_of_cores(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


def test_binds_to_the_cores_of_the_devices_node(tmp_path: Path, affinity: set[int]) -> None:
    mine = min(affinity)
    root = tree(tmp_path, "1", {0: "1000-1003", 1: f"{mine},2000-2003"})
    assert bind_near(ADDRESS, sysfs=root) == {mine}
    assert os.sched_getaffinity(0) == {mine}


@pytest.mark.parametrize("node", ["-1", "7", "nonsense"])
def test_changes_nothing_where_the_node_is_not_known(tmp_path: Path, affinity: set[int], node: str) -> None:
    assert bind_near(ADDRESS, sysfs=tree(tmp_path, node, {0: "0"})) == frozenset()
    assert os.sched_getaffinity(0) == affinity


def test_changes_nothing_where_no_usable_core_is_near(tmp_path: Path, affinity: set[int]) -> None:
    assert bind_near(ADDRESS, sysfs=tree(tmp_path, "0", {0: "5000-5003"})) == frozenset()
    assert os.sched_getaffinity(0) == affinity


def test_a_device_that_sysfs_does_not_know_is_near_nothing(tmp_path: Path) -> None:
    assert near("ffff:ff:1f.7", sysfs=tmp_path) == frozenset()
