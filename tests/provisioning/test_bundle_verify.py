"""Opening and verifying a bundle: every kind of damage is found without a key, named, and has its code."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attestation.errors import LetheError
from attestation.policy import AppraisalPolicy
from provisioning.blocks import Plan
from provisioning.bundle import TABLE_NAME, Bundle
from provisioning.errors import BundleDamaged
from provisioning.manifest import FILE_NAME
from provisioning.ownerkey import OwnerSigner
from provisioning.pack import pack
from provisioning.verify import verify
from tests.provisioning.conftest import SEGMENT, Packed
from tests.sim.modelfiles import open_streams

Copy = Callable[[], Path]


def check(packed: Packed, path: Path) -> None:
    with packed.open(path) as bundle:
        verify(bundle)


def refusal(packed: Packed, path: Path) -> LetheError:
    with pytest.raises(LetheError) as refused:
        check(packed, path)
    return refused.value


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_a_sound_bundle_verifies_and_says_what_was_read(packed: Packed) -> None:
    seen: list[tuple[int, int]] = []
    with packed.open() as bundle:
        report = verify(bundle, lambda done, total: seen.append((done, total)))
        geometry = bundle.manifest.geometry
    assert (report.files, report.segments, report.bytes) == (
        len(geometry.files),
        geometry.segments,
        geometry.data_bytes,
    )
    assert report.blocks == len(geometry.files)
    assert report.as_payload()["bytes"] == report.bytes
    assert seen[-1] == (report.bytes, report.bytes)
    assert seen == sorted(seen)


def test_a_copy_verifies(packed: Packed, damaged: Copy) -> None:
    check(packed, damaged())


def test_verifying_needs_no_key(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnerSigner, "bundle_key", None)
    monkeypatch.setattr("provisioning.secret.SecretBytes.__init__", None)
    check(packed, packed.path)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_in_any_file_of_ciphertext_is_found_and_named(packed: Packed, data: st.DataObject) -> None:
    with packed.open() as bundle:
        number = data.draw(st.integers(0, len(bundle.manifest.files) - 1))
        file = bundle.manifest.files[number]
        place = data.draw(st.integers(0, file.size - 1))
    path = packed.path / file.name
    flip(path, place)
    try:
        error = refusal(packed, packed.path)
    finally:
        flip(path, place)
    assert (error.code, error.exit_status) == ("bundle.digest", 7)
    first, last = file.base, file.base + file.size // SEGMENT - 1
    assert error.found == f"{file.name} block 0, bytes 0 to {file.size - 1} (segments {first} to {last})"


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_in_the_table_is_found(packed: Packed, data: st.DataObject) -> None:
    path = packed.path / TABLE_NAME
    place = data.draw(st.integers(0, path.stat().st_size - 1))
    flip(path, place)
    try:
        error = refusal(packed, packed.path)
    finally:
        flip(path, place)
    assert (error.code, error.exit_status) == ("bundle.table", 7)


def test_a_flipped_bit_in_the_manifest_is_found(packed: Packed, damaged: Copy) -> None:
    path = damaged() / FILE_NAME
    sound = path.read_bytes()
    codes = set()
    for place in range(0, len(sound), 151):
        flip(path, place)
        error = refusal(packed, path.parent)
        codes.add(error.code)
        assert error.exit_status == 6
        path.write_bytes(sound)
    assert "signature.wrong" in codes


def test_refuses_a_bundle_of_an_owner_who_is_not_configured(packed: Packed) -> None:
    with OwnerSigner.generate("someone", "lab") as other, pytest.raises(LetheError) as refused:
        Bundle.open(packed.path, [other.owner])
    assert (refused.value.code, refused.value.exit_status) == ("signature.unknown", 6)


def names(packed: Packed) -> list[str]:
    with packed.open() as bundle:
        return [file.name for file in bundle.manifest.files]


def swap_segments(path: Path, packed: Packed) -> None:
    one, other = path / names(packed)[2], path / names(packed)[3]
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def repeat_a_segment(path: Path, packed: Packed) -> None:
    shutil.copyfile(path / names(packed)[2], path / names(packed)[3])


def drop_a_segment(path: Path, packed: Packed) -> None:
    for number, name in enumerate(names(packed)[2:-1], start=3):
        shutil.copyfile(path / names(packed)[number], path / name)


def take_another_bundles_segment(path: Path, packed: Packed) -> None:
    (path / names(packed)[4]).write_bytes(os.urandom(SEGMENT))


REPLACED = (swap_segments, repeat_a_segment, drop_a_segment, take_another_bundles_segment)


@pytest.mark.parametrize("damage", REPLACED)
def test_finds_segments_that_are_not_in_their_places(
    packed: Packed, damaged: Copy, damage: Callable[[Path, Packed], None]
) -> None:
    path = damaged()
    damage(path, packed)
    error = refusal(packed, path)
    assert (error.code, error.exit_status) == ("bundle.digest", 7)
    assert ".seal block 0, bytes 0 to " in error.found


@pytest.mark.parametrize("damage", REPLACED)
def test_segments_that_are_not_in_their_places_do_not_open_either(
    packed: Packed, damaged: Copy, damage: Callable[[Path, Packed], None]
) -> None:
    path = damaged()
    damage(path, packed)
    with packed.open(path) as bundle, packed.key() as key, pytest.raises(BundleDamaged) as refused:
        open_streams(bundle, key)
    assert refused.value.code == "segment.tag"


@pytest.mark.parametrize("change", [-SEGMENT, -1, 1, SEGMENT])
def test_finds_files_of_another_size(packed: Packed, damaged: Copy, change: int) -> None:
    path = damaged() / names(packed)[1]
    os.truncate(path, path.stat().st_size + change)
    error = refusal(packed, path.parent)
    assert (error.code, error.exit_status) == ("bundle.file.size", 7)
    assert path.name in error.found


@pytest.mark.parametrize("which", ["data", "table", "manifest"])
def test_finds_missing_files(packed: Packed, damaged: Copy, which: str) -> None:
    path = damaged()
    name = {"data": names(packed)[-1], "table": TABLE_NAME, "manifest": FILE_NAME}[which]
    (path / name).unlink()
    error = refusal(packed, path)
    assert (error.code, error.exit_status) == ("bundle.file.missing", 7)
    assert name in error.found


@pytest.mark.parametrize("which", ["data", "table", "manifest"])
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "directory"])
def test_takes_regular_files_only(packed: Packed, damaged: Copy, which: str, kind: str) -> None:
    path = damaged()
    name = {"data": names(packed)[0], "table": TABLE_NAME, "manifest": FILE_NAME}[which]
    target = path / name
    target.unlink()
    if kind == "link":
        target.symlink_to(packed.path / name)
    elif kind == "dangling":
        target.symlink_to(path / "nothing")
    elif kind == "pipe":
        os.mkfifo(target)
    else:
        target.mkdir()
    error = refusal(packed, path)
    assert (error.code, error.exit_status) == ("bundle.file.kind", 7)


@pytest.mark.parametrize("name", ["data-99999.seal", ".hidden", "autorun.inf", "sub", "na\nme"])
def test_finds_files_that_do_not_belong(packed: Packed, damaged: Copy, name: str) -> None:
    path = damaged()
    (path / name).write_bytes(b"x")
    error = refusal(packed, path)
    assert (error.code, error.exit_status) == ("bundle.file.extra", 7)
    assert "\n" not in error.found


def test_names_every_damaged_place_up_to_a_bound(packed: Packed, damaged: Copy) -> None:
    path = damaged()
    for name in names(packed)[:10]:
        flip(path / name, 5)
    error = refusal(packed, path)
    assert all(name in error.found for name in names(packed)[:8])
    assert error.found.endswith("and 2 more")


def test_names_the_block_within_a_file_of_several(
    packed: Packed, lab_policy: AppraisalPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of one segment, so that a small file has several.
    for module in ("table", "sealing"):
        monkeypatch.setattr(f"provisioning.{module}.DIGEST_BLOCK", SEGMENT)
    report = pack(
        packed.source,
        signer=packed.signer,
        key_dir=tmp_path / "keys",
        policy=lab_policy,
        name="blocks",
        out=tmp_path / "bundle",
        tiles=1,
        segment_size=SEGMENT,
    )
    with packed.open(report.path) as bundle:
        file = bundle.manifest.files[-1]
        assert file.size > 3 * SEGMENT
        verify(bundle)
    flip(report.path / file.name, 2 * SEGMENT + 7)
    error = refusal(packed, report.path)
    segment = file.base + 2
    expected = f"{file.name} block 2, bytes {2 * SEGMENT} to {3 * SEGMENT - 1} (segments {segment} to {segment})"
    assert error.found == expected


def test_a_file_that_shrinks_while_it_is_read_is_noticed(packed: Packed, damaged: Copy) -> None:
    path = damaged()
    last = names(packed)[-1]

    def shrink(*_: object) -> None:
        os.truncate(path / last, 100)

    with packed.open(path) as bundle:
        bundle.open_file(len(bundle.files) - 1)
        with pytest.raises(BundleDamaged) as refused:
            verify(bundle, shrink, plan=Plan.streaming(1))
    assert refused.value.code == "bundle.file.size"
    assert "cut off" in refused.value.found


def test_a_medium_that_cannot_be_read_is_named(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with packed.open() as bundle:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(BundleDamaged) as refused:
            verify(bundle)
    assert refused.value.code == "bundle.file.unreadable"
    assert "input/output error" in refused.value.found


def test_a_file_is_opened_once_so_that_what_was_checked_is_read(packed: Packed, damaged: Copy) -> None:
    path = damaged()
    with packed.open(path) as bundle:
        first = bundle.open_file(0)
        (path / names(packed)[0]).unlink()
        (path / names(packed)[0]).write_bytes(os.urandom(SEGMENT))
        assert bundle.open_file(0) == first
        assert os.pread(first, SEGMENT, 0) == (packed.path / names(packed)[0]).read_bytes()


def test_refuses_what_is_no_directory(packed: Packed, tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", packed.path / FILE_NAME):
        with pytest.raises(BundleDamaged) as refused:
            packed.open(path)
        assert refused.value.code == "bundle.directory"


@pytest.mark.parametrize("name", [FILE_NAME, TABLE_NAME])
def test_does_not_read_a_huge_file_in_place_of_a_small_one(packed: Packed, damaged: Copy, name: str) -> None:
    path = damaged() / name
    os.truncate(path, 1 << 40)
    error = refusal(packed, path.parent)
    assert error.code == "bundle.file.size"


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_closes_every_file_again(packed: Packed, damaged: Copy) -> None:
    before = descriptors()
    check(packed, packed.path)
    path = damaged()
    (path / TABLE_NAME).unlink()
    refusal(packed, path)
    assert descriptors() == before


def test_a_closed_bundle_opens_nothing(packed: Packed) -> None:
    bundle = packed.open()
    bundle.close()
    bundle.close()
    with pytest.raises(ValueError, match="closed"):
        bundle.open_file(0)
    with pytest.raises(ValueError, match="closed"):
        bundle.names()


def test_a_table_of_another_bundle_of_the_same_owner_is_refused(
    packed: Packed, lab_policy: AppraisalPolicy, damaged: Copy, tmp_path: Path
) -> None:
    report = pack(
        packed.source,
        signer=packed.signer,
        key_dir=tmp_path / "keys",
        policy=lab_policy,
        name="small",
        out=tmp_path / "other",
        segment_size=SEGMENT,
        section_bytes=2 * SEGMENT,
        file_cap=SEGMENT,
    )
    path = damaged()
    shutil.copyfile(report.path / TABLE_NAME, path / TABLE_NAME)
    assert refusal(packed, path).code == "bundle.table"


def test_the_manifest_is_the_only_thing_read_before_its_signature(
    packed: Packed, damaged: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damaged()
    envelope = json.loads((path / FILE_NAME).read_bytes())
    envelope["payload"] = envelope["payload"][::-1]
    (path / FILE_NAME).write_text(json.dumps(envelope))
    monkeypatch.setattr(Bundle, "_read_table", None)
    with pytest.raises(LetheError):
        packed.open(path)
