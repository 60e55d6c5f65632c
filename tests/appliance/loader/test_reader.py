"""Reading ciphertext: past the page cache when a file is not in it, through it when it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance import pages
from appliance import reader as module
from appliance.reader import Reader, cached_share
from provisioning.errors import BundleDamaged

SIZE = (3 << 20) + 4096


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(SIZE))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    yield descriptor
    os.close(descriptor)


def evict(descriptor: int) -> None:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_share(descriptor, SIZE) > 0:
        pytest.skip("this filesystem keeps its pages")


def test_tells_a_cached_file_from_one_that_is_not(file: int) -> None:
    os.pread(file, SIZE, 0)
    assert cached_share(file, SIZE) == 1.0
    evict(file)
    assert cached_share(file, SIZE) == 0.0


@pytest.mark.skipif(Path("/dev/shm").stat().st_dev == Path("/tmp").stat().st_dev, reason="memory is never cold")
def test_tells_them_apart_also_where_the_kernel_does_not_say(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_told", lambda _: False)
    os.pread(file, SIZE, 0)
    assert cached_share(file, SIZE) == 1.0
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    assert cached_share(file, SIZE) < 0.5


def test_a_file_system_that_cannot_read_without_waiting_counts_as_cached(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(module, "_is_told", lambda _: False)
    monkeypatch.setattr(module.os, "preadv", refuse)
    assert cached_share(file, SIZE) == 1.0


def test_the_kernel_tells_owners_and_writers(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._is_told(file)
    monkeypatch.setattr(module.os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(module.os, "access", lambda *_: False)
    assert not module._is_told(file)


def test_an_empty_file_counts_as_cached(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    descriptor = os.open(path, os.O_RDONLY)
    assert cached_share(descriptor, 0) == 1.0
    os.close(descriptor)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1 << 20), (1 << 20, 1 << 20), (2 << 20, (1 << 20) + 4096), (4096, 100)]
)
def test_reads_the_same_bytes_either_way(file: int, direct: bool, offset: int, length: int) -> None:
    os.pread(file, SIZE, 0)
    if direct:
        evict(file)
    memory = pages.map_private(2 << 20)
    with memoryview(memory) as view, Reader({5: file}) as reader:
        assert reader.direct_files == int(direct)
        reader.read(5, offset, view, length)
        assert view[:length] == os.pread(file, length, offset)


def test_a_filesystem_without_direct_reads_is_read_through_the_cache(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    evict(file)

    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(module.os, "open", refuse)
    with Reader({0: file}) as reader:
        assert reader.direct_files == 0


def test_a_file_that_cannot_be_mapped_counts_as_cached(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(module.mmap, "mmap", refuse)
    assert cached_share(file, SIZE) == 1.0


def test_direct_reads_that_are_refused_go_through_the_cache(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    evict(file)
    inner = os.preadv

    def refuse_direct(descriptor: int, views: list[memoryview], offset: int) -> int:
        if descriptor != file:
            raise OSError(22, "Invalid argument")
        return inner(descriptor, views, offset)

    memory = pages.map_private(1 << 20)
    with memoryview(memory) as view, Reader({0: file}) as reader:
        assert reader.direct_files == 1
        monkeypatch.setattr(module.os, "preadv", refuse_direct)
        reader.read(0, 4096, view, 1 << 20)
        assert view == os.pread(file, 1 << 20, 4096)


@pytest.mark.parametrize("cold", [True, False])
def test_a_file_that_ends_early_is_refused(file: int, cold: bool) -> None:
    if cold:
        evict(file)
    memory = pages.map_private(2 << 20)
    with memoryview(memory) as view, Reader({0: file}) as reader, pytest.raises(BundleDamaged) as refused:
        reader.read(0, 3 << 20, view, 1 << 20)
    assert refused.value.code == "bundle.read"
    assert refused.value.exit_status == 7


def test_a_medium_that_fails_is_reported_with_its_place(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module.os, "preadv", fail)
    memory = pages.map_private(4096)
    with memoryview(memory) as view, Reader({3: file}) as reader, pytest.raises(BundleDamaged) as refused:
        reader.read(3, 8192, view, 4096)
    assert refused.value.found == "input/output error at byte 8192 of data file 3"


def test_short_reads_are_continued(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.pread(file, SIZE, 0)
    inner = os.preadv
    monkeypatch.setattr(module.os, "preadv", lambda fd, views, at: inner(fd, [views[0][:5000]], at))
    memory = pages.map_private(1 << 20)
    with memoryview(memory) as view, Reader({0: file}) as reader:
        reader.read(0, 0, view, 100_000)
        assert view[:100_000] == os.pread(file, 100_000, 0)


def test_closes_its_own_descriptors_only(file: int) -> None:
    evict(file)
    before = set(Path("/proc/self/fd").iterdir())
    with Reader({0: file}):
        assert set(Path("/proc/self/fd").iterdir()) - before != set()
    assert set(Path("/proc/self/fd").iterdir()) == before
    os.fstat(file)
