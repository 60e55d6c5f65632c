"""Copies on real file systems: ext4 on a loop device, FAT where the system has it, a small tmpfs; and full ones."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from provisioning.errors import OutputFailed
from provisioning.medium import Road, file_system
from provisioning.partial import Partial
from tests.provisioning.copying.conftest import BLOCK, Room

Mount = Callable[..., Path]


def kind_of(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return file_system(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("kind", "options"), [("ext4", ("-q", "-F")), ("vfat", ()), ("xfs", ("-q",)), ("btrfs", ("-q",)), ("exfat", ())]
)
def test_a_copy_on_a_medium_of_its_own_is_read_back_from_it(
    copies: Room, mounted: Mount, kind: str, options: tuple[str, ...]
) -> None:
    point = mounted(kind, *options, size=320 << 20)
    assert kind_of(point) == kind
    report = copies.run(point / "copy")
    assert report.road is Road.MEDIUM
    copies.check(point / "copy")


def test_a_tmpfs_has_no_medium_to_read_back_from_and_the_result_says_so(copies: Room, mounted: Mount) -> None:
    point = mounted("tmpfs", size=64 << 20)
    assert copies.run(point / "copy").road is Road.MEMORY


def test_a_read_only_medium_is_refused(copies: Room, mounted: Mount) -> None:
    point = mounted("ext4", "-q", "-F", size=32 << 20)
    subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)
    with pytest.raises(OutputFailed) as refused:
        copies.run(point / "copy")
    assert refused.value.code == "copy.output"
    assert "read-only file system" in refused.value.found


def test_the_mount_point_itself_is_refused_before_its_parent_fills_up(copies: Room, mounted: Mount) -> None:
    point = mounted("tmpfs", size=64 << 20)
    with pytest.raises(OutputFailed) as refused:
        copies.run(point)
    assert refused.value.code == "copy.exists"
    assert not point.with_name(point.name + ".partial").exists()


def test_a_disk_that_fills_up_meanwhile_stops_the_copy_and_room_lets_it_go_on(
    copies: Room, mounted: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = mounted("tmpfs", size=2 << 20)
    with pytest.raises(OutputFailed) as early:
        copies.run(point / "copy")
    assert early.value.code == "copy.full"
    assert list(point.iterdir()) == []
    # Someone else takes the room after it was looked at.
    with monkeypatch.context() as patch:
        patch.setattr(Partial, "require_room", lambda _: None)
        with pytest.raises(OutputFailed) as late:
            copies.run(point / "copy")
    assert (late.value.code, late.value.exit_status) == ("copy.full", 74)
    assert not (point / "copy").exists()
    subprocess.run(["mount", "-o", "remount,size=64m", str(point)], check=True)
    report = copies.run(point / "copy")
    assert report.kept >= 6
    copies.check(point / "copy")


def test_a_limit_on_the_size_of_files_has_its_code(copies: Room) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK + 1000, hard))
    try:
        with pytest.raises(OutputFailed) as refused:
            copies.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (refused.value.code, refused.value.exit_status) == ("copy.limit", 74)
    copies.run()
    copies.check()


def test_a_directory_that_may_not_be_written_is_refused(copies: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Root may write everywhere, so the kernel's answer is planted.
    monkeypatch.setattr(os, "mkdir", forbid)
    with pytest.raises(OutputFailed) as refused:
        copies.run()
    assert refused.value.code == "copy.output"
    assert "permission denied" in refused.value.found
