"""Copying a bundle: whole and byte-identical or not there; damage of the source is named and never copied."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from attestation.errors import LetheError
from attestation.policy import AppraisalPolicy
from provisioning import partial as partial_module
from provisioning.bundle import TABLE_NAME, Bundle, SealedFiles, open_unsigned
from provisioning.copying import COPYING, READING_BACK, copy
from provisioning.errors import BundleDamaged, InputFailed, OutputFailed
from provisioning.manifest import FILE_NAME
from provisioning.medium import Road
from provisioning.ownerkey import OwnerSigner
from provisioning.pack import pack
from provisioning.partial import IDENTITY
from tests.provisioning.conftest import SEGMENT, Packed
from tests.provisioning.copying.conftest import BLOCK, Room, content, descriptors, flip, name_of


def refusal(work: Callable[[], object]) -> LetheError:
    with pytest.raises(LetheError) as refused:
        work()
    return refused.value


def code_of(work: Callable[[], object]) -> tuple[str, int]:
    error = refusal(work)
    return error.code, error.exit_status


def test_the_bundle_has_files_of_several_blocks(copies: Room) -> None:
    assert sum(size > 2 * BLOCK for _, size in copies.files()) >= 2


def test_a_copy_is_byte_identical_and_verifies(copies: Room) -> None:
    report = copies.run()
    copies.check()
    blocks = sum(-(-size // BLOCK) for _, size in copies.files())
    assert (report.copied, report.kept, report.blocks) == (blocks, 0, blocks)
    assert report.bytes == report.copied_bytes == sum(size for _, size in copies.files())
    assert not copies.partial.exists()


def test_the_passes_are_told_in_order_and_to_their_ends(copies: Room) -> None:
    seen: list[tuple[str, int, int]] = []
    copies.run(progress=lambda *step: seen.append(step))
    total = sum(size for _, size in copies.files())
    labels = [label for label, _, _ in seen]
    assert list(dict.fromkeys(labels)) == [COPYING, READING_BACK]
    for label in (COPYING, READING_BACK):
        steps = [step for step in seen if step[0] == label]
        assert steps == sorted(steps)
        assert steps[-1] == (label, total, total)


def test_until_it_is_whole_nothing_has_the_names_of_a_bundle(copies: Room) -> None:
    seen: set[bool] = set()

    def look(*_: object) -> None:
        seen.add(copies.copy.exists() or (copies.partial / FILE_NAME).exists())

    copies.run(progress=look)
    assert seen == {False}


def test_files_can_be_read_by_all_and_the_directory_entered(copies: Room) -> None:
    before = os.umask(0o022)
    try:
        copies.run()
    finally:
        os.umask(before)
    assert copies.copy.stat().st_mode & 0o777 == 0o755
    assert {entry.stat().st_mode & 0o777 for entry in copies.copy.iterdir()} == {0o644}


def test_only_the_files_of_the_manifest_are_copied_and_others_are_named(copies: Room) -> None:
    room = copies.own_source()
    (room.bundle / "autorun.inf").write_text("no")
    assert room.run().left_out == ("autorun.inf",)
    assert "autorun.inf" not in content(room.copy)


def test_every_descriptor_is_closed_again(copies: Room) -> None:
    before = descriptors()
    copies.run()
    assert descriptors() == before


def test_a_bundle_with_more_files_than_a_process_may_open_is_copied(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # this bundle has blocks of the usual size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with packed.open() as source:
        used = max(descriptors())
        assert len(source.files) > 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
        try:
            copy(source, tmp_path / "copy")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert content(tmp_path / "copy") == content(packed.path)


def test_without_a_key_the_digests_are_compared_all_the_same(copies: Room) -> None:
    room = copies.own_source()
    flip(room.bundle / room.files()[0][0], 3)
    with open_unsigned(room.bundle) as source:
        assert not isinstance(source, Bundle)
        assert code_of(lambda: copy(source, room.copy)) == ("bundle.digest", 7)


# Sources


def test_damage_of_the_source_is_named_and_not_copied(copies: Room) -> None:
    room = copies.own_source()
    name = next(name for name, size in room.files() if size > 2 * BLOCK)
    flip(room.bundle / name, BLOCK + 5)
    last = room.files()[-1][0]
    flip(room.bundle / last, 0)
    error = refusal(room.run)
    assert isinstance(error, BundleDamaged)
    assert error.code == "bundle.digest"
    assert f"{name} block 1, bytes {BLOCK} to {2 * BLOCK - 1}" in error.found
    assert f"{last} block 0" in error.found
    assert not room.copy.exists()
    written = (room.partial / name).read_bytes()
    sound = (copies.bundle / name).read_bytes()
    assert written[:BLOCK] == sound[:BLOCK]
    assert written[2 * BLOCK :] == sound[2 * BLOCK :]
    assert written[BLOCK : 2 * BLOCK] == bytes(BLOCK)


def test_a_mended_source_completes_a_copy_with_its_damaged_blocks_only(copies: Room) -> None:
    room = copies.own_source()
    name = room.files()[1][0]
    flip(room.bundle / name, 5)
    refusal(room.run)
    flip(room.bundle / name, 5)
    report = room.run()
    assert report.copied == 1
    copies.check()


def test_bytes_that_the_source_does_not_give_are_named_and_the_rest_is_copied(
    copies: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = copies.own_source()
    name = next(name for name, size in room.files() if size > 2 * BLOCK)
    bad = (room.bundle / name).stat().st_ino
    real = os.preadv

    def fail(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(descriptor).st_ino == bad and offset <= 2 * BLOCK < offset + len(buffers[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        error = refusal(room.run)
    assert (error.code, error.exit_status) == ("bundle.file.unreadable", 7)
    assert f"{name} block 2" in error.found
    assert "input/output error" in error.found
    assert room.run().copied == 1
    copies.check()


@pytest.mark.parametrize("fault", ["missing", "short", "long", "link"])
def test_a_source_with_wrong_files_is_refused_before_anything_is_written(copies: Room, fault: str) -> None:
    room = copies.own_source()
    name, size = room.files()[1]
    path = room.bundle / name
    if fault == "missing":
        path.unlink()
    elif fault == "link":
        path.unlink()
        path.symlink_to(copies.bundle / name)
    else:
        os.truncate(path, size + (1 if fault == "long" else -1))
    codes = {"missing": "bundle.file.missing", "link": "bundle.file.kind"}
    error = refusal(room.run)
    assert (error.code, error.exit_status) == (codes.get(fault, "bundle.file.size"), 7)
    assert name in error.found
    assert not room.partial.exists()


def test_a_source_that_shrinks_meanwhile_is_named(copies: Room) -> None:
    room = copies.own_source()
    name, size = room.files()[-1]

    def shrink(label: str, done: int, _: int) -> None:
        if label == COPYING and done:
            os.truncate(room.bundle / name, size - 1)

    assert code_of(lambda: room.run(progress=shrink)) == ("bundle.file.size", 7)
    assert not room.copy.exists()


# Destinations


def lying(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[int, memoryview, int], tuple[bytes | memoryview, int]]
) -> None:
    """A medium that stores something else, or elsewhere."""
    real = os.pwrite

    def write(descriptor: int, data: memoryview, offset: int) -> int:
        changed, place = change(descriptor, data, offset)
        return real(descriptor, changed, place)

    monkeypatch.setattr(os, "pwrite", write)


def test_a_medium_that_stores_other_bytes_is_refused(copies: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    name = copies.files()[1][0]

    def change(descriptor: int, data: memoryview, offset: int) -> tuple[bytes | memoryview, int]:
        if name_of(descriptor) == name and offset == 0:
            return bytes([data[0] ^ 1]) + bytes(data[1:]), offset
        return data, offset

    with monkeypatch.context() as patch:
        lying(patch, change)
        error = refusal(copies.run)
    assert isinstance(error, OutputFailed)
    assert (error.code, error.exit_status) == ("copy.medium", 74)
    assert f"{name} block 0" in error.found
    assert not copies.copy.exists()
    assert copies.run().copied == 1
    copies.check()


def test_a_stick_with_less_room_than_it_claims_is_refused_also_when_the_run_before_left_it_whole(
    copies: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = copies.files()[0][0], copies.files()[-1][0]
    shutil.copytree(copies.bundle, copies.partial)
    flip(copies.partial / last, 0)

    def change(descriptor: int, data: memoryview, offset: int) -> tuple[bytes | memoryview, int]:
        # What goes to the last file lands in the first one too.
        (copies.partial / first).write_bytes(bytes(data[:100]))
        os.truncate(copies.partial / first, copies.files()[0][1])
        return data, offset

    lying(monkeypatch, change)
    error = refusal(copies.run)
    assert error.code == "copy.medium"
    assert first in error.found


@pytest.mark.parametrize("name", [TABLE_NAME, IDENTITY])
def test_small_files_are_read_back_too(copies: Room, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def change(descriptor: int, data: memoryview, offset: int) -> tuple[bytes | memoryview, int]:
        wrong = name in name_of(descriptor)
        return (bytes(len(data)), offset) if wrong else (data, offset)

    lying(monkeypatch, change)
    assert code_of(copies.run) == ("copy.medium", 74)
    assert not copies.copy.exists()


def test_a_full_disk_is_refused_before_anything_is_written(copies: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(copies.place)
    state = os.statvfs_result((real.f_bsize, real.f_frsize, real.f_blocks, 10, 10, *tuple(real)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: state)
    error = refusal(copies.run)
    assert (error.code, error.exit_status) == ("copy.full", 74)
    assert f"{10 * real.f_frsize} bytes free" in error.found
    assert not copies.partial.exists()


def test_what_is_there_already_needs_no_room(copies: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(copies.bundle, copies.partial)
    real = os.statvfs(copies.place)
    state = os.statvfs_result((real.f_bsize, real.f_frsize, real.f_blocks, 1, 1, *tuple(real)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: state)
    assert copies.run().copied == 0
    copies.check()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "copy.full"),
        (errno.EDQUOT, "copy.full"),
        (errno.EFBIG, "copy.limit"),
        (errno.EIO, "copy.output"),
        (errno.EROFS, "copy.output"),
        (errno.ENODEV, "copy.output"),
    ],
)
def test_a_failed_write_has_its_code_and_another_run_goes_on(
    copies: Room, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    real, calls = os.pwrite, []

    def fail(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 6:
            raise OSError(number, os.strerror(number))
        return real(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        error = refusal(copies.run)
    assert (error.code, error.exit_status) == (code, 74)
    assert "data-" in error.found
    assert not copies.copy.exists()
    report = copies.run()
    # The identity was the first write.
    assert report.kept == 5
    copies.check()


def test_a_failed_sync_is_a_failed_write(copies: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fail(descriptor: int) -> None:
        if ".seal" in name_of(descriptor):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    assert code_of(copies.run) == ("copy.output", 74)
    assert not copies.copy.exists()


def test_a_file_system_that_cannot_sync_directories_is_taken(copies: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def sync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    copies.run()
    copies.check()


def test_a_file_system_without_locks_is_taken_and_another_refusal_is_one(
    copies: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(number: int) -> Callable[..., None]:
        def lock(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return lock

    monkeypatch.setattr("fcntl.flock", without(errno.EIO))
    assert code_of(copies.run) == ("copy.output", 74)
    monkeypatch.setattr("fcntl.flock", without(errno.ENOLCK))
    copies.run()
    copies.check()


@pytest.mark.parametrize(("name", "code"), [(".seal", "copy.medium"), (TABLE_NAME, "copy.output")])
def test_bytes_that_the_destination_does_not_give_back_are_a_refusal(
    copies: Room, monkeypatch: pytest.MonkeyPatch, name: str, code: str
) -> None:
    real = os.preadv

    def fail(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.parent == copies.partial and path.name.endswith(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        error = refusal(copies.run)
    assert (error.code, error.exit_status) == (code, 74)
    assert "input/output error" in error.found
    copies.run()
    copies.check()


def test_a_slow_medium_is_synced_after_fewer_bytes(copies: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_module, "_SYNC_SECONDS", -1.0)
    monkeypatch.setattr(partial_module, "DIGEST_BLOCK", 2 * BLOCK)
    monkeypatch.setattr(partial_module, "PIECE", BLOCK // 4)
    syncs: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (syncs.append(descriptor), real(descriptor))[1])
    copies.run()
    copies.check()
    total = sum(size for _, size in copies.files())
    assert len(syncs) > total // (BLOCK // 4) * 0.9


def test_a_file_beyond_the_bound_of_fat_is_refused_before_anything_is_written(
    copies: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_module, "file_system", lambda _: "vfat")
    monkeypatch.setattr(partial_module, "_FAT_FILE", 2 * BLOCK)
    assert code_of(copies.run) == ("copy.limit", 74)
    assert not copies.partial.exists()


def test_a_file_system_that_changes_names_is_refused(copies: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename
    monkeypatch.setattr(os, "rename", lambda old, new, **more: real(old, new[:8].upper(), **more))
    assert code_of(copies.run) == ("copy.names", 74)


def test_a_directory_without_a_parent_or_permission_is_refused(copies: Room) -> None:
    assert code_of(lambda: copies.run(copies.place / "no" / "copy")) == ("copy.output", 74)


@pytest.mark.parametrize("name", ["..", "/"])
def test_a_destination_without_a_name_is_refused(copies: Room, name: str) -> None:
    assert code_of(lambda: copies.run(Path(name))) == ("copy.place", 2)


def test_the_bundle_itself_and_places_in_it_are_refused(copies: Room) -> None:
    room = copies.own_source()
    before = content(room.bundle)
    link = room.place / "link"
    link.symlink_to(room.bundle)
    for place in (room.bundle, room.bundle / "copy", link / "copy", room.bundle / "a" / "b", link):
        error = refusal(lambda place=place: room.run(place))
        assert isinstance(error, InputFailed)
        assert (error.code, error.exit_status) == ("copy.place", 2)
    assert content(room.bundle) == before


def test_a_copy_does_not_grow_in_its_own_source(copies: Room) -> None:
    shutil.copytree(copies.bundle, copies.partial)
    room = Room(copies.partial, copies.owner, copies.place)
    assert code_of(room.run) == ("copy.place", 2)


TAKEN: dict[str, Callable[[Room], object]] = {
    "an empty directory": lambda room: room.copy.mkdir(),
    "a file": lambda room: room.copy.write_bytes(b"mine"),
    "a foreign directory": lambda room: (room.copy.mkdir(), (room.copy / "thesis.tex").write_bytes(b"mine")),
    "a dangling link": lambda room: room.copy.symlink_to(room.place / "nothing"),
    "a link to the same bundle": lambda room: (
        shutil.copytree(room.bundle, room.place / "other"),
        room.copy.symlink_to(room.place / "other"),
    ),
    "a pipe in place of the manifest": lambda room: (room.copy.mkdir(), os.mkfifo(room.copy / FILE_NAME)),
}


def shape(path: Path) -> list[tuple[str, bytes | None]]:
    return sorted(
        (str(entry.relative_to(path)), entry.read_bytes() if entry.is_file() else None) for entry in path.rglob("*")
    )


@pytest.mark.parametrize("what", TAKEN)
def test_what_is_at_the_destination_is_never_overwritten(copies: Room, what: str) -> None:
    TAKEN[what](copies)
    before = shape(copies.place)
    assert code_of(copies.run) == ("copy.exists", 74)
    assert shape(copies.place) == before


def test_another_bundle_at_the_destination_is_never_overwritten(copies: Room, packed: Packed) -> None:
    shutil.copytree(packed.path, copies.copy)
    assert code_of(copies.run) == ("copy.exists", 74)
    assert content(copies.copy) == content(packed.path)


def test_a_name_that_is_taken_at_the_last_moment_is_not_overwritten(copies: Room) -> None:
    def take(label: str, *_: int) -> None:
        if label == READING_BACK and not copies.copy.exists():
            copies.copy.mkdir()
            (copies.copy / "mine").write_text("mine")

    assert code_of(lambda: copies.run(progress=take)) == ("copy.exists", 74)
    assert content(copies.copy) == {"mine": b"mine"}
    assert copies.partial.exists()


def test_a_finished_copy_is_read_once_more_and_not_touched(copies: Room) -> None:
    copies.run()
    before = {entry.name: entry.stat().st_mtime_ns for entry in copies.copy.iterdir()}
    report = copies.run()
    assert (report.copied, report.kept) == (0, report.blocks)
    assert {entry.name: entry.stat().st_mtime_ns for entry in copies.copy.iterdir()} == before


def test_a_finished_copy_that_was_damaged_since_is_never_called_good_and_can_be_mended(copies: Room) -> None:
    copies.run()
    flip(copies.copy / copies.files()[1][0], 9)
    error = refusal(copies.run)
    assert (error.code, error.exit_status) == ("bundle.digest", 7)
    assert f"in {copies.copy}" in error.found
    assert "rename it to copy.partial" in error.hint
    copies.copy.rename(copies.partial)
    assert copies.run().copied == 1
    copies.check()


FOREIGN: dict[str, Callable[[Room], object]] = {
    "a file": lambda room: room.partial.write_bytes(b"mine"),
    "a link": lambda room: (
        (room.place / "mine").mkdir(),
        room.partial.symlink_to(room.place / "mine", target_is_directory=True),
    ),
    "a foreign directory": lambda room: (room.partial.mkdir(), (room.partial / "thesis.tex").write_bytes(b"mine")),
    "data of nobody knows which bundle": lambda room: (
        room.partial.mkdir(),
        (room.partial / "data-00000.seal").write_bytes(b"mine"),
    ),
    "a foreign file beside ours": lambda room: (
        shutil.copytree(room.bundle, room.partial),
        (room.partial / "thesis.tex").write_bytes(b"mine"),
    ),
    "a linked file among ours": lambda room: (
        shutil.copytree(room.bundle, room.partial),
        (room.place / "mine").write_bytes(bytes(10 * BLOCK)),
        (room.partial / "data-00001.seal").unlink(),
        (room.partial / "data-00001.seal").symlink_to(room.place / "mine"),
    ),
    "a file with a second name among ours": lambda room: (
        shutil.copytree(room.bundle, room.partial),
        (room.place / "mine").write_bytes(bytes(10 * BLOCK)),
        (room.partial / "data-00001.seal").unlink(),
        (room.partial / "data-00001.seal").hardlink_to(room.place / "mine"),
    ),
    "a pipe among ours": lambda room: (
        shutil.copytree(room.bundle, room.partial),
        (room.partial / TABLE_NAME).unlink(),
        os.mkfifo(room.partial / TABLE_NAME),
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_partial_directory_with_anything_else_in_it_is_refused_and_not_changed(copies: Room, what: str) -> None:
    FOREIGN[what](copies)
    before = shape(copies.place)
    assert code_of(copies.run) == ("copy.partial", 74)
    after = [
        (name.replace(IDENTITY, FILE_NAME), data) for name, data in shape(copies.place)
    ]  # ours may be renamed, and nothing else
    assert sorted(after) == before


def test_a_partial_copy_of_another_bundle_is_refused(copies: Room, packed: Packed) -> None:
    shutil.copytree(packed.path, copies.partial)
    (copies.partial / FILE_NAME).rename(copies.partial / IDENTITY)
    for entry in copies.partial.glob("data-*"):
        if entry.name not in dict(copies.files()):
            entry.unlink()
    error = refusal(copies.run)
    assert error.code == "copy.partial"
    assert "another bundle's" in error.found


def test_a_second_run_into_the_same_place_is_refused(copies: Room) -> None:
    codes: list[str] = []

    def again(*_: object) -> None:
        if not codes:
            codes.append(refusal(copies.run).code)

    copies.run(progress=again)
    assert codes == ["copy.busy"]
    copies.check()


def test_the_source_packed_again_under_the_same_name_does_not_mix_with_what_was_copied(
    copies: Room, packed: Packed, lab_policy: AppraisalPolicy, lab_signer: OwnerSigner
) -> None:
    first = copies.own_source()
    flip(first.bundle / first.files()[0][0], 0)
    refusal(first.run)
    shutil.rmtree(first.bundle)
    pack(
        packed.source,
        signer=lab_signer,
        key_dir=copies.place / "keys",
        policy=lab_policy,
        name="again",
        out=first.bundle,
        tiles=2,
        segment_size=SEGMENT,
        file_cap=5 * SEGMENT,
    )
    before = content(copies.partial)
    assert code_of(first.run) == ("copy.partial", 74)
    assert content(copies.partial) == before


def test_the_result_says_where_the_bytes_were_read_back_from(copies: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioning.medium.file_system", lambda _: "tmpfs")
    assert copies.run().road is Road.MEMORY
    assert copies.run(copies.place / "second").as_payload()["read_from"] == "memory"


def test_a_bundle_that_nobody_signed_is_no_bundle_by_type(copies: Room) -> None:
    with open_unsigned(copies.bundle) as source:
        assert type(source) is SealedFiles
        assert not hasattr(source, "manifest")
