"""Reading past the page cache, and saying how far that was possible."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioning import medium
from provisioning.medium import (
    MediumFile,
    Road,
    file_system,
    file_system_at,
    is_fat,
    read_whole,
    seeks,
    write_all,
    write_past_cache,
)

PAGE = mmap.PAGESIZE


def pages(count: int) -> memoryview:
    return memoryview(mmap.mmap(-1, count * PAGE))


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    made = os.urandom(5 * PAGE + 77)
    (tmp_path / "file").write_bytes(made)
    return made


@pytest.fixture
def descriptor(tmp_path: Path, data: bytes) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR)
    os.fsync(opened)
    yield opened
    os.close(opened)


def read(descriptor: int, count: int, offset: int = 0) -> tuple[bytes, Road]:
    target = pages(count)
    with MediumFile(descriptor, offset, offset + len(target)) as file:
        done = file.read_into(target, offset)
        return bytes(target[:done]), file.road


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def open_plainly(path: str, flags: int, *more: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", open_plainly)


def needs_a_disk(descriptor: int) -> None:
    if file_system(descriptor) not in {"ext4", "xfs", "btrfs"}:
        pytest.skip("the directory for temporary files is not on a disk")


def test_reads_whole_files_and_their_odd_ends(descriptor: int, data: bytes) -> None:
    assert read(descriptor, 6)[0] == data
    assert read(descriptor, 2, PAGE)[0] == data[PAGE : 3 * PAGE]
    assert read(descriptor, 1, 8 * PAGE)[0] == b""


def test_a_read_past_the_cache_is_called_so(descriptor: int, data: bytes) -> None:
    needs_a_disk(descriptor)
    assert read(descriptor, 6) == (data, Road.MEDIUM)


def test_what_the_cache_holds_is_not_what_is_read(descriptor: int, data: bytes) -> None:
    needs_a_disk(descriptor)
    os.pread(descriptor, len(data), 0)
    before = medium._any_resident(descriptor, 0, len(data))
    assert read(descriptor, 6)[1] is Road.MEDIUM
    assert before


def test_without_direct_reads_pages_are_dropped_first_and_behind(
    descriptor: int, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_a_disk(descriptor)
    os.pread(descriptor, len(data), 0)
    assert medium._any_resident(descriptor, 0, len(data))
    refuse_direct(monkeypatch)
    assert read(descriptor, 6) == (data, Road.DROPPED)
    assert not medium._any_resident(descriptor, 0, len(data))


def test_pages_that_stay_are_noticed(descriptor: int, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    os.pread(descriptor, len(data), 0)
    refuse_direct(monkeypatch)
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None)
    assert read(descriptor, 6) == (data, Road.CACHE)


def test_a_kernel_that_does_not_tell_counts_as_the_cache(
    descriptor: int, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        mmap = staticmethod(lambda *_: None)

    refuse_direct(monkeypatch)
    monkeypatch.setattr(medium, "_libc", Silent)
    assert read(descriptor, 6) == (data, Road.CACHE)


def test_a_flag_that_is_taken_and_then_refused_is_no_error(
    descriptor: int, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_a_disk(descriptor)
    real = os.preadv

    def refuse(used: int, buffers: list[memoryview], offset: int) -> int:
        if used != descriptor:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(used, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    assert read(descriptor, 6) == (data, Road.DROPPED)


def test_another_error_is_one(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output"):
        read(descriptor, 6)


@pytest.mark.parametrize(("kind", "road"), [("nfs4", Road.REMOTE), ("fuse.sshfs", Road.REMOTE), ("tmpfs", Road.MEMORY)])
def test_servers_and_memory_are_named(descriptor: int, monkeypatch: pytest.MonkeyPatch, kind: str, road: Road) -> None:
    monkeypatch.setattr(medium, "file_system", lambda _: kind)
    assert read(descriptor, 1)[1] is road


def test_a_server_without_direct_reads_stays_a_server(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_a_disk(descriptor)
    monkeypatch.setattr(medium, "file_system", lambda _: "nfs")
    refuse_direct(monkeypatch)
    assert read(descriptor, 6)[1] is Road.REMOTE


def test_no_descriptor_is_left(descriptor: int) -> None:
    def descriptors() -> set[Path]:
        return {path for path in Path("/proc/self/fd").iterdir() if path.exists()}

    before = descriptors()
    read(descriptor, 6)
    assert descriptors() == before


@pytest.mark.parametrize(("extra", "found"), [(0, 0), (-1, 1), (-500, 1), (7, 0)])
def test_a_small_file_is_read_with_at_most_one_byte_more(descriptor: int, data: bytes, extra: int, found: int) -> None:
    size = len(data) + extra
    assert read_whole(descriptor, size)[0] == data[: size + found]


def test_the_file_system_is_named() -> None:
    opened = os.open("/proc/self/status", os.O_RDONLY)
    try:
        assert file_system(opened) == "proc"
    finally:
        os.close(opened)


def test_the_file_system_of_a_directory_is_named() -> None:
    assert file_system_at(Path("/proc")) == "proc"


def test_a_file_system_that_cannot_be_found_has_no_name() -> None:
    assert file_system(1 << 30) == ""


def test_fat_is_known() -> None:
    assert is_fat("vfat")
    assert not is_fat("exfat")


def test_virtual_disks_do_not_turn(descriptor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "devices" / "usb1" / "block" / "sda"
    (device / "queue").mkdir(parents=True)
    (device / "queue" / "rotational").write_text("1\n")
    (device / "sda1").mkdir()
    monkeypatch.setattr(Path, "resolve", lambda self, strict=False: device / "sda1")
    assert seeks(descriptor)
    (device / "queue" / "rotational").write_text("0\n")
    assert not seeks(descriptor)
    virtual = tmp_path / "devices" / "virtio1" / "block" / "vda"
    (virtual / "queue").mkdir(parents=True)
    (virtual / "queue" / "rotational").write_text("1\n")
    monkeypatch.setattr(Path, "resolve", lambda self, strict=False: virtual)
    assert not seeks(descriptor)


def test_a_file_without_a_device_does_not_turn() -> None:
    opened = os.open("/proc/self/status", os.O_RDONLY)
    try:
        assert not seeks(opened)
    finally:
        os.close(opened)


def written(descriptor: int) -> bool:
    """Whether writes go past the cache."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def test_pages_are_written_past_the_cache(tmp_path: Path, descriptor: int) -> None:
    needs_a_disk(descriptor)
    target = os.open(tmp_path / "new", os.O_WRONLY | os.O_CREAT)
    try:
        write_past_cache(target)
        page = pages(1)
        page[:] = os.urandom(PAGE)
        write_all(target, page, 0)
        assert written(target)
        assert (tmp_path / "new").read_bytes() == page
    finally:
        os.close(target)


def test_what_cannot_go_past_the_cache_goes_through_it(tmp_path: Path) -> None:
    target = os.open(tmp_path / "new", os.O_WRONLY | os.O_CREAT)
    try:
        write_past_cache(target)
        write_all(target, memoryview(b"odd"), 0)
        assert not written(target) or (tmp_path / "new").stat().st_size == 3
    finally:
        os.close(target)
    assert (tmp_path / "new").read_bytes() == b"odd"


def test_a_failed_write_is_an_error_past_the_cache_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = os.open(tmp_path / "new", os.O_WRONLY | os.O_CREAT)
    try:
        write_past_cache(target)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fail)
            with pytest.raises(OSError, match="No space"):
                write_all(target, pages(1), 0)
    finally:
        os.close(target)


def test_a_refusal_that_has_nothing_to_do_with_the_cache_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    target = os.open("/dev/null", os.O_WRONLY)
    try:
        monkeypatch.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="Invalid"):
            write_all(target, memoryview(b"x"), 0)
    finally:
        os.close(target)
