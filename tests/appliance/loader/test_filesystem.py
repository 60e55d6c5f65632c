"""Which files may be opened from a mapping: those whose pages are this machine's alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.filesystem import may_map


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def tree(tmp_path: Path, descriptor: int, *, kind: str, options: str = "rw", dax: str | None = "0") -> Path:
    """Make a root whose mountinfo says that the file lies on a file system of that kind."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    root = tmp_path / "root"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(
        "22 1 0:5 / /dev rw shared:2 - devtmpfs udev rw\n"
        f"30 1 {number} / / rw,relatime shared:1 - {kind} /dev/x {options}\n"
        "torn line\n"
    )
    if dax is not None:
        (root / "sys/dev/block" / number / "queue").mkdir(parents=True)
        (root / "sys/dev/block" / number / "queue/dax").write_text(dax + "\n")
    return root


@pytest.mark.parametrize("kind", ["ext4", "xfs", "vfat", "iso9660"])
def test_a_local_file_system_on_a_plain_disk_may_be_mapped(tmp_path: Path, descriptor: int, kind: str) -> None:
    assert may_map(descriptor, root=tree(tmp_path, descriptor, kind=kind))


def test_tmpfs_may_be_mapped_and_has_no_disk(tmp_path: Path, descriptor: int) -> None:
    assert may_map(descriptor, root=tree(tmp_path, descriptor, kind="tmpfs", dax=None))


@pytest.mark.parametrize("kind", ["virtiofs", "nfs4", "cifs", "9p", "fuse.sshfs", "overlay", "ceph", "lustre"])
def test_a_file_system_that_others_feed_is_never_mapped(tmp_path: Path, descriptor: int, kind: str) -> None:
    assert not may_map(descriptor, root=tree(tmp_path, descriptor, kind=kind))


@pytest.mark.parametrize("options", ["rw,dax", "rw,dax=always", "rw,dax=inode,noatime"])
def test_a_dax_mount_is_never_mapped(tmp_path: Path, descriptor: int, options: str) -> None:
    assert not may_map(descriptor, root=tree(tmp_path, descriptor, kind="ext4", options=options))


@pytest.mark.parametrize("dax", ["1", "", None])
def test_a_disk_that_can_do_dax_or_does_not_say_is_never_mapped(
    tmp_path: Path, descriptor: int, dax: str | None
) -> None:
    assert not may_map(descriptor, root=tree(tmp_path, descriptor, kind="ext4", dax=dax))


def test_a_partition_has_the_queue_of_its_disk(tmp_path: Path, descriptor: int) -> None:
    root = tree(tmp_path, descriptor, kind="ext4", dax=None)
    device = os.fstat(descriptor).st_dev
    disk = root / "sys/devices/disk"
    (disk / "part").mkdir(parents=True)
    (disk / "queue").mkdir()
    (disk / "queue/dax").write_text("0\n")
    (root / "sys/dev/block").mkdir(parents=True)
    (root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}").symlink_to(disk / "part")
    assert may_map(descriptor, root=root)


def test_a_device_that_no_mount_names_is_never_mapped(tmp_path: Path, descriptor: int) -> None:
    root = tree(tmp_path, descriptor, kind="ext4")
    (root / "proc/self/mountinfo").write_text("22 1 0:5 / /dev rw shared:2 - devtmpfs udev rw\n")
    assert not may_map(descriptor, root=root)


def test_a_machine_without_mountinfo_maps_nothing(tmp_path: Path, descriptor: int) -> None:
    assert not may_map(descriptor, root=tmp_path)
