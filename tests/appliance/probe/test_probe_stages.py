"""The measuring functions do what they say they measure; what they measure is not looked at here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pytest
import torch
from cryptography.exceptions import InvalidTag

from appliance import pages
from appliance.errors import ConfigError
from appliance.probe import aead, cache, copying, medium
from appliance.probe.rate import Rate, run_together
from appliance.slot_cpu import CpuSlot
from provisioning.errors import InputFailed
from provisioning.medium import file_system_at

PAGE = pages.PAGE


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files; the first ends inside a page, so the second begins behind a gap."""
    made = []
    for name, size in (("a", 5 * PAGE + 100), ("b", 3 * PAGE)):
        path = tmp_path / name
        path.write_bytes(os.urandom(size))
        made.append(path)
    return made


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_read_whole_puts_every_byte_in_its_place(files: list[Path], threads: int, direct: bool) -> None:
    mapping = pages.map_private(medium.room(files))
    rate = medium.read_whole(files, memoryview(mapping), block_bytes=2 * PAGE, threads=threads, direct=direct)
    for path, start in zip(files, medium.places(files), strict=True):
        content = path.read_bytes()
        assert mapping[start : start + len(content)] == content
    assert rate.nbytes == sum(path.stat().st_size for path in files)


def test_read_through_reads_every_byte_once(files: list[Path]) -> None:
    rate = medium.read_through(files, block_bytes=2 * PAGE, threads=2, direct=True)
    assert rate.nbytes == sum(path.stat().st_size for path in files)


def test_read_through_stops_at_its_time(files: list[Path]) -> None:
    assert medium.read_through(files, block_bytes=PAGE, threads=1, direct=False, seconds=-1.0).nbytes == 0


def test_sweep_measures_every_way_and_tells_of_each_size(files: list[Path]) -> None:
    told: list[str] = []
    found = medium.sweep(files, seconds=10.0, blocks=(PAGE, 2 * PAGE), threads=(1, 2), tell=told.append)
    assert [(one.block_bytes, one.threads) for one in found] == [(PAGE, 1), (PAGE, 2), (2 * PAGE, 1), (2 * PAGE, 2)]
    assert len(told) == 2


def test_best_way_of_equal_ones_takes_least_memory() -> None:
    same = Rate(1000, 1.0)
    ways = [medium.MediumRate(4, 2, same), medium.MediumRate(4, 1, same), medium.MediumRate(8, 8, Rate(999, 1.0))]
    assert medium.best(ways) == ways[1]


def test_file_system_without_direct_reads_is_named(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def without_direct(path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags)

    monkeypatch.setattr(medium.os, "open", without_direct)
    with pytest.raises(InputFailed) as caught:
        medium.read_through(files, block_bytes=PAGE, threads=1, direct=True)
    assert caught.value.code == "probe.direct"


def test_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFailed) as caught:
        medium._open(tmp_path / "absent", direct=False)
    assert caught.value.code == "probe.read"


def test_medium_that_fails_is_refused_with_the_place(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(medium.os, "preadv", fail)
    with pytest.raises(InputFailed) as caught:
        medium.read_through(files, block_bytes=PAGE, threads=2, direct=False)
    assert caught.value.code == "probe.read"
    assert "input/output error" in caught.value.found


def test_file_that_ends_early_is_refused(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medium.os, "preadv", lambda *_: 0)
    with pytest.raises(InputFailed) as caught:
        medium.read_through(files, block_bytes=PAGE, threads=1, direct=False)
    assert caught.value.code == "probe.read"


@pytest.mark.parametrize("threads", [1, 3])
def test_cipher_opens_every_segment_once(threads: int) -> None:
    ciphertext = aead.Ciphertext(5 * PAGE, segment_bytes=PAGE)
    assert ciphertext.open_all(threads=threads).nbytes == 5 * PAGE == ciphertext.nbytes


def test_cipher_measures_genuine_segments() -> None:
    ciphertext = aead.Ciphertext(2 * PAGE, segment_bytes=PAGE)
    ciphertext._sealed[0] ^= 1
    with pytest.raises(InvalidTag):
        ciphertext.open_all(threads=2)


def test_authenticating_looks_at_every_segment_once() -> None:
    assert aead.Ciphertext(3 * PAGE, segment_bytes=PAGE).authenticate_all(threads=2).nbytes == 3 * PAGE


@pytest.mark.parametrize(("open_on", "absent"), [("host", "_authenticate"), ("device", "_open")])
def test_only_what_is_left_to_the_cores_is_measured(
    open_on: Literal["host", "device"], absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(aead.Ciphertext, absent)
    assert list(aead.scaling(nbytes=1 << 20, threads=[1], repeats=1, open_on=open_on)) == [1]


def test_scaling_has_a_rate_for_each_number_of_threads() -> None:
    assert list(aead.scaling(nbytes=1 << 20, threads=[1, 2], repeats=1)) == [1, 2]


def test_first_error_of_any_thread_is_raised() -> None:
    def fail() -> int:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        run_together([lambda: 1, fail])


def test_copies_are_measured_for_each_size() -> None:
    found = copying.by_size(CpuSlot, sizes=(PAGE, 4 * PAGE), nbytes=64 * PAGE)
    assert {size: rate.nbytes for size, rate in found.items()} == {PAGE: 64 * PAGE, 4 * PAGE: 64 * PAGE}


def _slot_that_locks(limit: int) -> type[CpuSlot]:
    class Poor(CpuSlot):
        def staging(self, nbytes: int) -> torch.Tensor:
            if nbytes > limit:
                raise ConfigError("ring.memlock", found="", expected="", hint="")
            return super().staging(nbytes)

    return Poor


def test_size_that_cannot_be_locked_is_left_out() -> None:
    assert list(copying.by_size(_slot_that_locks(PAGE), sizes=(PAGE, 4 * PAGE), nbytes=8 * PAGE)) == [PAGE]


def test_copies_are_refused_where_nothing_can_be_locked() -> None:
    with pytest.raises(ConfigError) as caught:
        copying.by_size(_slot_that_locks(0), sizes=(PAGE,), nbytes=8 * PAGE)
    assert caught.value.code == "ring.memlock"


def test_filled_files_are_in_the_page_cache(files: list[Path]) -> None:
    cache.fill(files)
    assert cache.share(files) == 1.0


def test_evicted_files_are_not_in_the_page_cache(files: list[Path], tmp_path: Path) -> None:
    if file_system_at(tmp_path) in {"tmpfs", "ramfs", "overlay"}:
        pytest.skip("this file system keeps its files in memory")
    cache.fill(files)
    cache.evict(files)
    assert cache.share(files) < 0.5


def test_share_counts_all_windows_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "long"
    with path.open("wb") as stream:
        stream.truncate(cache._WINDOW + 3 * PAGE)
    with path.open("rb") as stream:
        stream.read(1)
    assert 0 < cache.share([path]) < 1
