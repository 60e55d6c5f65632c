"""Loads that fail, on every way from a file to a device: nothing is left, and the error says where."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from appliance import reader as reader_module
from appliance import window as window_module
from appliance.errors import DeviceFault
from appliance.loader import Loaded
from appliance.slot_cpu import CpuSlot
from appliance.slot_cuda import CudaSlot
from attestation.errors import LetheError
from provisioning.errors import BundleDamaged
from tests.sim.cuda import LazyCuda, LazyStream
from tests.sim.sealedmodel import SEGMENT, Sealed

Host = CpuSlot | CudaSlot
ROADS = ("mapped", "cached", "direct")
_POPULATE = 22


@pytest.fixture(params=ROADS)
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make every data file be read in one way, whatever the page cache holds."""
    chosen: str = request.param
    monkeypatch.setattr(reader_module, "cached_share", lambda *_: 0.0 if chosen == "direct" else 1.0)
    monkeypatch.setattr(reader_module, "may_map", lambda *_: chosen == "mapped")
    return chosen


@pytest.fixture(params=["memory", "converted", "lazy-cuda"])
def target(request: pytest.FixtureRequest) -> tuple[Host, torch.dtype]:
    if request.param == "lazy-cuda":
        return CudaSlot(LazyCuda()), torch.bfloat16
    return CpuSlot(), torch.float32 if request.param == "converted" else torch.bfloat16


def load(
    sealed: Sealed,
    target: tuple[Host, torch.dtype],
    bundle: Path | None = None,
    before: Callable[[], None] | None = None,
) -> tuple[Loaded | LetheError, dict[str, torch.Tensor]]:
    """Load, or give the refusal; look that a failed load left zeros everywhere."""
    slot, dtype = target
    made = {name: slot.empty(tuple(tensor.shape), dtype).fill_(7) for name, tensor in sealed.weights().items()}
    with sealed.open(bundle) as opened, sealed.loader(opened, slot, ring_bytes=24 * SEGMENT) as loader:
        loader.catalog()
        if before is not None:
            for number in range(len(opened.manifest.files)):
                opened.open_file(number)
            before()
        try:
            return loader.load(made, skip=lambda _: False, on_progress=lambda *_: None), made
        except LetheError as error:
            assert not any(bool(tensor.any()) for tensor in made.values())
            assert not any(bool(block.any()) for block in slot._staging)
            assert loader.plaintext.alive == 0
            return error, made


def refused(result: tuple[Loaded | LetheError, dict[str, torch.Tensor]]) -> LetheError:
    assert isinstance(result[0], LetheError)
    return result[0]


def test_every_road_brings_the_same_weights(sealed: Sealed, road: str, target: tuple[Host, torch.dtype]) -> None:
    done, made = load(sealed, target)
    assert isinstance(done, Loaded)
    for name, tensor in sealed.weights().items():
        assert torch.equal(made[name], tensor.to(target[1])), name
    files = len(sorted(sealed.bundle.glob("data-*.seal"))) - 1
    assert done.mapped_files == (files if road == "mapped" else 0)
    assert done.plaintext_bytes == 0


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_wrong_tag_leaves_zeros_and_names_device_file_and_segment(
    sealed: Sealed, road: str, target: tuple[Host, torch.dtype], place: str, tmp_path: Path
) -> None:
    copy = sealed.copy(tmp_path / "bundle")
    files = sorted(copy.glob("data-*.seal"))
    number = max(range(1, len(files)), key=lambda n: files[n].stat().st_size)
    size = files[number].stat().st_size
    offset = {"first": 0, "middle": size // 2, "last": size - 1}[place]
    with files[number].open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x80]))
    error = refused(load(sealed, target, copy))
    assert (error.code, error.exit_status) == ("segment.tag", 7)
    assert f"({target[0].name}, data file {number}, segments " in error.found
    assert error.found.startswith("segment ")


def test_a_medium_that_fails_is_named(
    sealed: Sealed, road: str, target: tuple[Host, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    def before() -> None:
        left = [2]

        def fails() -> bool:
            left[0] -= 1
            return left[0] < 0

        read, libc = os.preadv, window_module._libc

        def preadv(*arguments: object) -> int:
            if fails():
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(*arguments)  # type: ignore[arg-type]  # passed on as they came

        class Failing:
            def madvise(self, address: int, length: int, advice: int) -> int:
                if advice == _POPULATE and fails():
                    ctypes.set_errno(errno.EIO)
                    return -1
                return int(libc.madvise(address, length, advice))

        monkeypatch.setattr(reader_module.os, "preadv", preadv)
        if road == "mapped":
            monkeypatch.setattr(window_module, "_libc", Failing())
            monkeypatch.setattr(reader_module, "can_populate", lambda: True)

    error = refused(load(sealed, target, before=before))
    assert (error.code, error.exit_status) == ("bundle.read", 7)
    assert error.found.startswith("input/output error at byte ")
    assert f"({target[0].name}, data file " in error.found


def test_a_file_cut_after_it_was_opened_is_refused(
    sealed: Sealed, road: str, target: tuple[Host, torch.dtype], tmp_path: Path
) -> None:
    copy = sealed.copy(tmp_path / "bundle")
    path = max(sorted(copy.glob("data-*.seal"))[1:], key=lambda file: file.stat().st_size)
    error = refused(load(sealed, target, copy, before=lambda: os.truncate(path, SEGMENT + 4096)))
    assert error.code == "bundle.read"
    assert "data file" in error.found


class FailingStream(LazyStream):
    """A stream whose device fails at some piece of work."""

    def __init__(self, error: Exception, after: int) -> None:
        super().__init__()
        self._error = error
        self._after = after

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue; the error comes when the work is done."""
        self._after -= 1
        super().run(self._fail if self._after == 0 else work)

    def _fail(self) -> None:
        raise self._error


class FailingCuda(LazyCuda):
    """A device that fails in the middle of a load."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def stream(self) -> FailingStream:
        """Make a stream."""
        return FailingStream(self._error, 3)


@pytest.mark.parametrize(
    ("error", "code"),
    [(torch.OutOfMemoryError("CUDA out of memory"), "slot.memory"), (RuntimeError("CUDA error"), "device.fault")],
)
def test_a_device_that_fails_in_the_middle_is_named(sealed: Sealed, error: Exception, code: str) -> None:
    failed = refused(load(sealed, (CudaSlot(FailingCuda(error)), torch.bfloat16)))
    assert isinstance(failed, DeviceFault)
    assert failed.code == code
    assert "data file" in failed.found


def test_a_device_without_room_for_the_lanes_is_named(sealed: Sealed) -> None:
    class Small(LazyCuda):
        room = True

        def empty(self, nbytes: int) -> torch.Tensor:
            """Give memory while there is some."""
            if not self.room:
                raise DeviceFault("slot.memory", found="no room on cuda:0", expected="room", hint="none")
            return super().empty(nbytes)

    port = Small()

    def before() -> None:
        port.room = False

    failed = refused(load(sealed, (CudaSlot(port), torch.bfloat16), before=before))
    assert failed.code == "slot.memory"


def test_destinations_that_cannot_be_overwritten_do_not_keep_the_rest(
    sealed: Sealed, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = CpuSlot()
    made = {name: slot.empty(tuple(tensor.shape), tensor.dtype).fill_(7) for name, tensor in sealed.weights().items()}
    first = next(iter(made.values()))
    zero = torch.Tensor.zero_

    def failing(self: torch.Tensor) -> torch.Tensor:
        if self is first:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return zero(self)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.Tensor, "zero_", failing)
    with sealed.open() as bundle, sealed.loader(bundle, slot) as loader:
        with pytest.raises(KeyboardInterrupt):
            loader.load(made, skip=lambda _: False, on_progress=stop)
        assert not any(bool(tensor.any()) for tensor in made.values() if tensor is not first)
        assert not any(bool(block.any()) for block in slot._staging)


def test_a_stopped_medium_is_a_damage_and_not_another_error() -> None:
    assert issubclass(BundleDamaged, LetheError)
    assert BundleDamaged.exit_status == 7
