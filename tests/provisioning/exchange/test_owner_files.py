from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from provisioning.errors import InputFailed, OutputFailed
from provisioning.files import make_private_directory, read_bounded, refuse_existing, write_new
from provisioning.fingerprint import envelope_fingerprint, fingerprint


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def test_writes_a_whole_file_and_nothing_else(tmp_path: Path) -> None:
    write_new(tmp_path / "out", b"data", mode=0o600)
    assert (tmp_path / "out").read_bytes() == b"data"
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o600
    assert _names(tmp_path) == ["out"]


def test_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(OutputFailed) as caught:
        write_new(tmp_path / "out", b"new")
    assert (caught.value.code, caught.value.exit_status) == ("output.exists", 74)
    assert (tmp_path / "out").read_bytes() == b"old"
    assert _names(tmp_path) == ["out"]


def test_never_writes_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputFailed) as caught:
        write_new(tmp_path / "out", b"new")
    assert caught.value.code == "output.exists"
    assert not (tmp_path / "elsewhere").exists()


def test_a_dangling_link_counts_as_existing(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputFailed) as caught:
        refuse_existing(tmp_path / "out")
    assert caught.value.code == "output.exists"


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputFailed) as caught:
        write_new(tmp_path / "out", b"data")
    assert caught.value.code == "output.failed"
    assert "no space" in caught.value.found
    assert _names(tmp_path) == []


def test_refuses_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OutputFailed) as caught:
        write_new(tmp_path / "no" / "out", b"data")
    assert caught.value.code == "output.failed"


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as FAT on a stick does."""

    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)


@pytest.mark.usefixtures("no_links")
def test_writes_where_the_file_system_has_no_links(tmp_path: Path) -> None:
    write_new(tmp_path / "out", b"data")
    assert (tmp_path / "out").read_bytes() == b"data"
    assert _names(tmp_path) == ["out"]


@pytest.mark.usefixtures("no_links")
def test_never_overwrites_where_the_file_system_has_no_links(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(OutputFailed) as caught:
        write_new(tmp_path / "out", b"new")
    assert caught.value.code == "output.exists"
    assert (tmp_path / "out").read_bytes() == b"old"


def test_reads_up_to_the_limit(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"12345")
    assert read_bounded(tmp_path / "in", limit=5) == b"12345"
    with pytest.raises(InputFailed) as caught:
        read_bounded(tmp_path / "in", limit=4)
    assert (caught.value.code, caught.value.exit_status) == ("input.size", 2)


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputFailed) as caught:
        read_bounded(tmp_path / "in", limit=5)
    assert caught.value.code == "input.missing"


def test_refuses_a_directory_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputFailed) as caught:
        read_bounded(tmp_path, limit=5)
    assert caught.value.code == "input.kind"


def test_does_not_wait_for_a_pipe_in_place_of_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in")
    with pytest.raises(InputFailed) as caught:
        read_bounded(tmp_path / "in", limit=5)
    assert caught.value.code == "input.kind"


def test_a_file_in_the_way_of_a_key_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"")
    with pytest.raises(OutputFailed) as caught:
        make_private_directory(tmp_path / "keys")
    assert caught.value.code == "output.failed"


def test_a_read_that_fails_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_bytes(b"data")

    def broken(descriptor: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "dup", broken)
    with pytest.raises(InputFailed) as caught:
        read_bounded(tmp_path / "in", limit=5)
    assert caught.value.code == "input.failed"


@pytest.mark.parametrize(("number", "refused"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_only_a_file_system_that_cannot_sync_directories_is_excused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, refused: bool
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if not refused:
        write_new(tmp_path / "out", b"data")
        return
    with pytest.raises(OutputFailed) as caught:
        write_new(tmp_path / "out", b"data")
    assert caught.value.code == "output.failed"


def test_a_fingerprint_is_the_first_sixteen_digits_in_groups() -> None:
    assert fingerprint(bytes.fromhex("1f0a77c309bed2e4") + bytes(40)) == "1f0a-77c3-09be-d2e4"


def test_an_envelope_has_the_fingerprint_of_its_payload() -> None:
    # printf '{}' | sha384sum
    assert envelope_fingerprint(b'{"payload":"e30="}') == "d2a2-3bc7-83e3-aa38"
