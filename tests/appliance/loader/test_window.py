"""Windows: what they show, what they give back, and how a bad medium ends."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance import window as module
from appliance.window import Window, can_populate

SIZE = 1 << 20

pytestmark = pytest.mark.skipif(not can_populate(), reason="this kernel does not fill mappings on demand")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "data").write_bytes(os.urandom(SIZE))
    descriptor = os.open(tmp_path / "data", os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def resident(view: memoryview) -> int:
    """Count the pages of a view that this process has mapped (proc(5), pagemap)."""
    import numpy as np

    start = np.frombuffer(view, np.uint8).ctypes.data
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(start // 4096 * 8)
        entries = np.frombuffer(pagemap.read(len(view) // 4096 * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum())


def test_shows_the_bytes_of_a_file_and_lets_nobody_write_them(file: int) -> None:
    window = Window()
    view = window.show(file, SIZE, 8192, 65536)
    assert view == os.pread(file, 65536, 8192)
    assert view.readonly


def test_pages_are_there_before_they_are_touched_and_gone_after_a_drop(file: int) -> None:
    window = Window()
    view = window.show(file, SIZE, 0, SIZE // 2)
    assert resident(view) == SIZE // 2 // 4096
    window.drop(0, SIZE // 2)
    assert resident(view) == 0


def test_goes_from_one_file_to_another(file: int, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"\x07" * 8192)
    other = os.open(tmp_path / "other", os.O_RDONLY)
    window = Window()
    first = window.show(file, SIZE, 0, 4096)
    assert window.show(other, 8192, 4096, 4096) == b"\x07" * 4096
    assert first == os.pread(file, 4096, 0)
    os.close(other)


def test_a_file_that_became_shorter_is_an_error_and_not_a_signal(file: int) -> None:
    window = Window()
    window.show(file, SIZE, 0, 4096)
    os.ftruncate(file, SIZE // 2)
    with pytest.raises(OSError, match="Bad address"):
        window.show(file, SIZE, SIZE // 2, 4096)


def test_a_file_that_was_always_too_short_is_an_error(file: int) -> None:
    with pytest.raises(OSError, match="fewer than"):
        Window().show(file, SIZE + 4096, 0, 4096)


def test_an_error_of_the_medium_is_passed_on(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def madvise(self, address: int, length: int, advice: int) -> int:
            ctypes.set_errno(errno.EIO)
            return -1

    monkeypatch.setattr(module, "_libc", Failing())
    with pytest.raises(OSError, match="Input/output error") as refused:
        Window().show(file, SIZE, 0, 4096)
    assert refused.value.errno == errno.EIO
