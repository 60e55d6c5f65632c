"""Every vector of the sealed bundle, through the product: it is refused where and as the index says, or it is not."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from attestation.errors import LetheError
from provisioning.bundle import Bundle
from provisioning.catalog import Catalog
from provisioning.cli import group
from provisioning.cli.report import run
from provisioning.layout import Layout
from provisioning.ownerkey import OwnerKey
from provisioning.secret import SecretBytes
from provisioning.segment import TAG_BYTES, SectionOpener, check_commitment
from provisioning.verify import verify
from tests.sim.modelfiles import assemble
from tests.vectors import make_bundle
from tests.vectors.good import CATALOG, GOOD, contents
from tests.vectors.make_bundle import PLACE
from tests.vectors.sealed import Vector, VectorSet

INDEX = json.loads((PLACE / "index.json").read_text())
ENTRIES = {entry["name"]: entry for entry in INDEX["vectors"]}
OWNER_FILES = [PLACE / "owner-lab.pub.json", PLACE / "owner-production.pub.json"]


@pytest.fixture(scope="session")
def kept() -> VectorSet:
    return make_bundle.read()


@pytest.fixture
def expanded(kept: VectorSet, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The bundle of the vector that the test is for."""
    (vector,) = [vector for vector in kept.vectors if vector.name == request.node.callspec.params["name"]]
    kept.expand(vector, tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture(scope="session")
def owners() -> list[OwnerKey]:
    return [OwnerKey.read_file(path) for path in OWNER_FILES]


def expected(entry: dict[str, str | int] | None) -> tuple[object, object]:
    return (entry["code"], entry["exit"]) if entry else (None, None)


def outcome(error: LetheError | None) -> tuple[object, object]:
    return (error.code, error.exit_status) if error else (None, None)


def load(bundle: Bundle) -> tuple[Catalog, dict[int, bytes]]:
    """Read a whole bundle in the order of docs/spec/bundle.md: key, catalog, and then every stream."""
    manifest = bundle.manifest
    with SecretBytes.take(bytearray.fromhex(INDEX["bundle_key"])) as secret, secret.expose() as key:
        check_commitment(key, manifest.bundle_id, manifest.key_commitment)
        empty = Layout([], manifest.tiles)
        catalog = Catalog.decode(_stream(bundle, key, 0, empty), geometry=manifest.geometry)
        catalog.file("config.json")
        streams = range(1, len(manifest.geometry.streams))
        return catalog, {number: _stream(bundle, key, number, catalog.layout) for number in streams}


def _stream(bundle: Bundle, key: memoryview, stream: int, layout: Layout) -> bytes:
    manifest, plain = bundle.manifest, bytearray()
    for section in manifest.geometry.sections_of(stream):
        descriptor = layout.descriptor_digest(section, manifest.segment_size)
        with SectionOpener(
            key,
            bundle_id=manifest.bundle_id,
            section=section,
            segment_size=manifest.segment_size,
            descriptor=descriptor,
        ) as opener:
            for number in range(section.segments):
                record = bundle.table.segment(section.base + number)
                buffer = bytearray(record.length + TAG_BYTES)
                with memoryview(buffer) as view, view[: record.length] as plaintext:
                    os.preadv(bundle.open_file(record.file), [plaintext], record.offset)
                    view[record.length :] = record.tag
                    opener.open_to(number, view, plaintext)
                    plain += plaintext
    return bytes(plain)


STEPS: dict[str, Callable[[Bundle], object]] = {"opened": lambda _: None, "verified": verify, "loaded": load}


def refusals(path: Path, owners: list[OwnerKey]) -> dict[str, LetheError | None]:
    """Open a bundle, and verify and load it if it opens; gives the refusal of each step."""
    seen: dict[str, LetheError | None] = dict.fromkeys(STEPS)
    for step, act in STEPS.items():
        try:
            with Bundle.open(path, owners) as bundle:
                act(bundle)
        except LetheError as error:
            seen[step] = error
        if step == "opened" and seen[step] is not None:
            break
    return seen


@pytest.mark.parametrize("name", ENTRIES)
def test_every_vector_is_refused_as_the_index_says(name: str, expanded: Path, owners: list[OwnerKey]) -> None:
    seen = {step: outcome(error) for step, error in refusals(expanded, owners).items()}
    assert seen == {step: expected(ENTRIES[name][step]) for step in STEPS}


# One for each code that verify can end with. A path that does not exist is another error of the command line.
AT_THE_COMMAND_LINE = {
    expected(entry["opened"] or entry["verified"]): name for name, entry in ENTRIES.items() if name != "no-directory"
}


@pytest.mark.parametrize("name", AT_THE_COMMAND_LINE.values())
def test_the_command_line_ends_with_the_status_of_the_index(
    name: str, expanded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [argument for path in OWNER_FILES for argument in ("--owner-key", str(path))]
    with pytest.raises(SystemExit) as left:
        run(group, "lethe-owner", ["verify", str(expanded), *keys, "--json"])
    code, status = expected(ENTRIES[name]["opened"] or ENTRIES[name]["verified"])
    assert left.value.code == (status or 0)
    said = capsys.readouterr()
    assert str(code or "") in said.out + said.err


def test_the_sound_vector_holds_its_tensors(kept: VectorSet, tmp_path: Path, owners: list[OwnerKey]) -> None:
    kept.expand(kept.vectors[0], tmp_path / "bundle")
    with Bundle.open(tmp_path / "bundle", owners) as bundle:
        catalog, streams = load(bundle)
    names = [spec.name for spec in CATALOG.tensors]
    assert assemble(catalog, streams) == dict(zip(names, contents(), strict=True))
    assert catalog.encode() == CATALOG.encode()
    assert streams == {number: bytes(GOOD.stream(number)) for number in streams}


def test_making_the_vectors_again_changes_nothing() -> None:
    files = {str(path.relative_to(PLACE)): path.read_bytes() for path in PLACE.rglob("*") if path.is_file()}
    made = make_bundle.files_of(make_bundle.build())
    assert sorted(made) == sorted(files)
    assert [name for name in files if made[name] != files[name]] == []


def test_what_is_read_back_is_what_was_made(kept: VectorSet) -> None:
    made = make_bundle.build()
    assert kept.vectors == made.vectors
    assert kept.plaintexts == made.plaintexts


def test_names_are_unique_and_every_part_is_used(kept: VectorSet) -> None:
    assert len({vector.name for vector in kept.vectors}) == len(kept.vectors)
    assert {vector.manifest for vector in kept.vectors} == set(kept.manifests)
    assert {vector.table for vector in kept.vectors} == set(kept.tables)
    assert {vector.plaintext for vector in kept.vectors} == set(kept.plaintexts)


# An I/O error is no property of a file, nor what a grant is for; sizes are compared before the table is read.
NO_VECTOR = {"bundle.file.unreadable", "bundle.read", "bundle.changed", "table.size"}


def test_every_refusal_of_a_reader_has_a_vector() -> None:
    specified = (make_bundle.PLACE.parents[2] / "docs/spec/bundle.md").read_text()
    rows = [line.split("`")[1] for line in specified.splitlines() if re.match(r"\| `[a-z_.]+` \| \d", line)]
    wanted = {code for code in rows if code.split(".")[0] in {"bundle", "segment", "table", "manifest", "catalog"}}
    seen = {
        entry[step]["code"] for entry in ENTRIES.values() for step in ("opened", "verified", "loaded") if entry[step]
    }
    assert wanted - seen == NO_VECTOR


def test_only_the_sound_vector_is_refused_nowhere() -> None:
    assert [
        name for name, entry in ENTRIES.items() if not (entry["opened"] or entry["verified"] or entry["loaded"])
    ] == ["good"]


def test_whole_bundles_are_written_for_other_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: VectorSet
) -> None:
    one = VectorSet([kept.vectors[0]], kept.plaintexts, kept.manifests, kept.tables)
    monkeypatch.setattr(make_bundle, "read", lambda: one)
    monkeypatch.setattr("sys.argv", ["make_bundle", "--expand", str(tmp_path / "all")])
    make_bundle.main()
    assert sorted(path.name for path in (tmp_path / "all" / "good").iterdir()) == [
        "data-00000.seal",
        "data-00001.seal",
        "data-00002.seal",
        "data-00003.seal",
        "manifest.dsse.json",
        "segments.idx",
    ]


def test_an_envelope_of_another_payload_is_signed_again(tmp_path: Path) -> None:
    from tests.vectors.sealed import LAB, signed

    first = signed("manifest", b"{}", [LAB], kept=tmp_path / "none")
    (tmp_path / "kept").write_bytes(first)
    assert signed("manifest", b"{}", [LAB], kept=tmp_path / "kept") == first
    assert signed("manifest", b'{"a":1}', [LAB], kept=tmp_path / "kept") != first


def test_a_change_that_nobody_knows_is_no_vector(tmp_path: Path) -> None:
    from tests.vectors.sealed import change

    with pytest.raises(ValueError, match="melt"):
        change(tmp_path, do="melt")


def test_vectors_say_what_they_are(kept: VectorSet) -> None:
    assert all(isinstance(vector, Vector) and vector.about for vector in kept.vectors)
