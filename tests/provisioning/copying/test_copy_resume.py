"""A copy that broke off, at any point and however the medium looks afterwards, is completed by the same command."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from provisioning.bundle import TABLE_NAME, Bundle
from provisioning.copying import CHECKING, COPYING, READING_BACK
from provisioning.errors import BundleDamaged, OutputFailed
from provisioning.manifest import FILE_NAME
from provisioning.partial import IDENTITY
from tests.provisioning.copying.conftest import BLOCK, Room, descriptors, flip, name_of

# What a copy does to its medium, step by step; a run is killed before, in or after one of them.
_STEPS = ("pwrite", "fsync", "fdatasync", "rename", "ftruncate", "mkdir")


def kill_in_a_child(room: Room, step: int) -> bool:
    """Copy in a child that SIGKILL ends at its ``step``-th step; says whether it was killed before it was done."""
    child = os.fork()
    if child == 0:
        try:
            _plant_kill(step)
            room.run()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def _plant_kill(step: int) -> None:
    """Only ever called in a child, whose modules are its own."""
    left = [step]

    def planted(real: Callable[..., object], name: str) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            left[0] -= 1
            if left[0] == 0 and name == "pwrite":
                # Half of it arrives.
                descriptor, data, offset = arguments
                real(descriptor, data[: len(data) // 2], offset)  # type: ignore[index,arg-type]
            if left[0] == 0 and random.Random(step).random() < 0.5:
                real(*arguments, **named)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return call

    for name in _STEPS:
        setattr(os, name, planted(getattr(os, name), name))


def spoil(room: Room, chance: random.Random) -> None:
    """What a power cut may leave: files cut off, grown, with zeros or rubbish in them, or not there."""
    for entry in sorted(room.partial.glob("data-*")):
        size = entry.stat().st_size
        what = chance.choice(("nothing", "nothing", "cut", "grow", "zeros", "rubbish", "gone"))
        if what == "gone":
            entry.unlink()
        elif what == "cut" and size:
            os.truncate(entry, chance.randrange(size))
        elif what == "grow":
            os.truncate(entry, size + chance.randrange(1, 3 * BLOCK))
        elif what in ("zeros", "rubbish") and size:
            with entry.open("r+b") as file:
                file.seek(chance.randrange(size))
                file.write(bytes(4096) if what == "zeros" else chance.randbytes(4096))


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.integers(1, 110), min_size=1, max_size=3), seed=st.integers(0, 1000), power_cut=st.booleans())
def test_a_copier_killed_at_any_point_is_completed_by_the_next(
    copies: Room, steps: list[int], seed: int, power_cut: bool
) -> None:
    for path in (copies.copy, copies.partial):
        shutil.rmtree(path, ignore_errors=True)
    chance = random.Random(seed)
    for step in steps:
        if kill_in_a_child(copies, step):
            # Whatever has the name of a copy is whole.
            if copies.copy.exists():
                copies.check()
            elif power_cut and copies.partial.exists():
                spoil(copies, chance)
    copies.run()
    copies.check()
    assert not copies.partial.exists()


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step=st.integers(1, 110), number=st.sampled_from([errno.EIO, errno.ENODEV, errno.EACCES]))
@example(step=1, number=errno.EACCES)
@example(step=2, number=errno.EIO)
@example(step=3, number=errno.EIO)
@example(step=4, number=errno.EIO)
@example(step=5, number=errno.EIO)
@example(step=6, number=errno.EIO)
@example(step=7, number=errno.EIO)
def test_a_step_that_fails_is_a_refusal_of_the_output_and_the_next_run_completes_the_copy(
    copies: Room, step: int, number: int
) -> None:
    for path in (copies.copy, copies.partial):
        shutil.rmtree(path, ignore_errors=True)
    left = [step]

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(number, os.strerror(number))
            return real(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in _STEPS:
            patch.setattr(os, name, failing(getattr(os, name)))
        refused: OutputFailed | None = None
        try:
            copies.run()
        except OutputFailed as error:
            refused = error
    assert (refused is not None) == (left[0] <= 0)
    if refused is not None:
        assert refused.code == "copy.output"
        assert refused.found.endswith(os.strerror(number).lower())
    copies.run()
    copies.check()


def test_the_steps_of_a_whole_run_are_within_those_that_it_is_killed_at(
    copies: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The property above kills in steps 1 to 110."""
    steps: list[str] = []

    def counted(real: Callable[..., object], name: str) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            steps.append(name)
            return real(*arguments, **named)

        return call

    for name in _STEPS:
        monkeypatch.setattr(os, name, counted(getattr(os, name), name))
    copies.run()
    assert 30 < len(steps) < 110
    assert set(steps) == set(_STEPS)


def test_only_what_is_missing_is_copied(copies: Room) -> None:
    shutil.copytree(copies.bundle, copies.partial)
    (copies.partial / FILE_NAME).rename(copies.partial / IDENTITY)
    name, size = max(copies.files(), key=lambda file: file[1])
    os.truncate(copies.partial / name, size - BLOCK - 1)
    seen: list[tuple[str, int, int]] = []
    report = copies.run(progress=lambda *step: seen.append(step))
    total = sum(size for _, size in copies.files())
    assert (report.copied, report.copied_bytes) == (2, 2 * BLOCK)
    assert report.kept == report.blocks - 2
    ends = {label: (done, of) for label, done, of in seen}
    assert ends[CHECKING] == (total - 2 * BLOCK, total - 2 * BLOCK)
    assert ends[COPYING] == (2 * BLOCK, 2 * BLOCK)
    assert ends[READING_BACK] == (total, total)
    copies.check()


def test_bad_blocks_are_copied_again_and_good_ones_are_not_written(
    copies: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(copies.bundle, copies.partial)
    name = next(name for name, size in copies.files() if size > 2 * BLOCK)
    flip(copies.partial / name, BLOCK + 1)
    written: list[tuple[str, int, int]] = []
    real = os.pwrite

    def note(descriptor: int, data: memoryview, offset: int) -> int:
        written.append((name_of(descriptor), offset, len(data)))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", note)
    copies.run()
    assert written == [(name, BLOCK, BLOCK)]
    copies.check()


def test_a_block_with_the_right_size_and_time_is_not_trusted(copies: Room) -> None:
    shutil.copytree(copies.bundle, copies.partial)
    path = copies.partial / copies.files()[0][0]
    before = path.stat()
    flip(path, 0)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert copies.run().copied == 1
    copies.check()


def test_a_torn_identity_is_begun_again(copies: Room) -> None:
    copies.partial.mkdir()
    (copies.partial / "manifest.partial.new").write_bytes(b'{"payl')
    copies.run()
    copies.check()


def test_an_empty_directory_of_a_run_that_just_began_is_taken(copies: Room) -> None:
    copies.partial.mkdir()
    copies.run()
    copies.check()


def test_a_run_that_died_between_its_two_renames_is_completed(copies: Room) -> None:
    shutil.copytree(copies.bundle, copies.partial)
    assert copies.run().copied == 0
    copies.check()


@pytest.mark.parametrize("how", ["short", "long", "other"])
def test_a_damaged_table_is_written_again(copies: Room, how: str) -> None:
    shutil.copytree(copies.bundle, copies.partial)
    path = copies.partial / TABLE_NAME
    if how == "other":
        flip(path, 100)
    else:
        os.truncate(path, path.stat().st_size + (1 if how == "long" else -1))
    copies.run()
    copies.check()


def test_another_copy_of_the_same_bundle_may_bring_the_rest(copies: Room) -> None:
    first = copies.own_source()
    flip(first.bundle / first.files()[0][0], 0)
    with pytest.raises(BundleDamaged):
        first.run()
    assert copies.run().copied == 1
    copies.check()


@pytest.mark.parametrize("label", [COPYING, READING_BACK])
def test_an_interrupt_leaves_threads_and_descriptors_closed_and_the_copy_partial(copies: Room, label: str) -> None:
    before = descriptors()

    def interrupt(at: str, done: int, _: int) -> None:
        if at == label and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copies.run(progress=interrupt)
    assert descriptors() == before
    assert not copies.copy.exists()
    copies.run()
    copies.check()


def test_an_interrupted_reading_of_a_slow_medium_stops_within_a_piece(
    copies: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that have not begun a block do not begin it after the interrupt."""
    reads: list[int] = []
    real = os.preadv

    def count(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        return real(descriptor, buffers, offset)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with Bundle.open(copies.bundle, [copies.owner]):
        monkeypatch.setattr(os, "preadv", count)
        with pytest.raises(KeyboardInterrupt):
            copies.run(progress=interrupt)
    blocks = sum(size // BLOCK for _, size in copies.files())
    assert len(reads) < blocks
