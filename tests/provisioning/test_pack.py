"""Pack: what goes in comes out; nothing that is interrupted opens; memory is bounded; outsiders learn nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attestation.errors import FormatError, LetheError
from attestation.policy import AppraisalPolicy
from provisioning.bundle import Bundle
from provisioning.errors import BundleDamaged, KeyRefused, ModelRefused, OutputFailed
from provisioning.manifest import FILE_NAME
from provisioning.ownerkey import OwnerSigner
from provisioning.pack import PackReport, pack
from provisioning.sealing import Sealing
from provisioning.source import Source
from provisioning.verify import verify
from tests.provisioning.conftest import SEGMENT, Packed
from tests.sim import modelfiles
from tests.sim.modelfiles import assemble, catalog_of, open_streams, tensors_of, write_model

Pack = Callable[..., PackReport]


@pytest.fixture
def packer(tmp_path: Path, lab_signer: OwnerSigner, lab_policy: AppraisalPolicy) -> Pack:
    """Give ``pack`` with this test's directories."""

    def run(source: Path, **more: Any) -> PackReport:
        arguments: dict[str, Any] = {
            "signer": lab_signer,
            "key_dir": tmp_path / "keys",
            "policy": lab_policy,
            "name": "a model",
            "out": tmp_path / "out" / "bundle",
            "segment_size": SEGMENT,
            **more,
        }
        (tmp_path / "out").mkdir(exist_ok=True)
        return pack(source, **arguments)

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", modelfiles.llama(hidden=64, inter=128, layers=2, vocab=1024))


def left_in(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "out").iterdir())


def unpack(bundle: Bundle, signer: OwnerSigner, keys: Path) -> dict[str, bytes]:
    with signer.bundle_key(keys, bundle.manifest.bundle_id) as key:
        return assemble(catalog_of(bundle, key), open_streams(bundle, key))


def round_trip(tmp_path: Path, packer: Pack, signer: OwnerSigner, tensors: modelfiles.Tensors, **more: Any) -> None:
    packer(write_model(tmp_path / "tensors", tensors), **more)
    with Bundle.open(tmp_path / "out" / "bundle", [signer.owner]) as bundle:
        made = unpack(bundle, signer, tmp_path / "keys")
        assert made == {name: data for name, (_, _, data) in tensors.items()}
        verify(bundle)


def test_what_is_packed_opens_to_the_same_tensors_and_files(packed: Packed) -> None:
    with packed.open() as bundle, packed.key() as key:
        catalog = catalog_of(bundle, key)
        assert assemble(catalog, open_streams(bundle, key)) == {
            name: data for name, (_, _, data) in packed.tensors.items()
        }
        assert {spec.name: (spec.dtype, spec.shape) for spec in catalog.tensors} == {
            name: (dtype, shape) for name, (dtype, shape, _) in packed.tensors.items()
        }
        for name in ("config.json", "tokenizer.json"):
            assert catalog.file(name) == (packed.source / name).read_bytes()


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_each_rank_gets_its_share_of_each_parallel_tensor(packed: Packed, world: int) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    _, (rows, columns), data = packed.tensors[name]
    with packed.open() as bundle, packed.key() as key:
        catalog = catalog_of(bundle, key)
        for rank in range(world):
            streams = catalog.layout.rank_streams(rank, world)
            made = assemble(catalog, open_streams(bundle, key, streams=streams))[name]
            width = columns // world * 2
            for row in range(rows):
                start = row * columns * 2 + rank * width
                assert made[start : start + width] == data[start : start + width]
            assert made.count(0xEE) >= len(data) * (world - 1) // world


def test_small_sections_and_files_change_nothing_but_their_number(packed: Packed) -> None:
    with packed.open() as bundle:
        sections = bundle.manifest.sections
        assert len(sections) > len({section.stream for section in sections})
        assert len(bundle.manifest.files) > len(sections)


ODD: dict[str, modelfiles.Tensors] = {
    "uneven tiles": tensors_of({"a.q_proj.weight": ("BF16", (13, 7)), "a.o_proj.weight": ("F32", (5, 11))}),
    "scalar and empty tensors": tensors_of(
        {"s": ("F32", ()), "e": ("F32", (0, 4)), "x.o_proj.weight": ("F32", (0, 8)), "t": ("U8", (3,))}
    ),
    "types of all sizes": tensors_of(
        {
            "f.down_proj.weight": ("F4", (6, 512)),
            "g.q_proj.weight": ("F4", (130, 3, 2)),
            "h": ("F6_E2M3", (4, 3)),
            "i.o_proj.weight": ("F8_E4M3", (3, 1300)),
            "j.up_proj.weight": ("I64", (9, 3)),
            "k": ("BOOL", (7,)),
            "l.down_proj.weight": ("F64", (9, 17)),
        }
    ),
    "experts in a stack": tensors_of({"mlp.experts.down_proj": ("BF16", (5, 6, 7))}),
    "rows wider than a segment": tensors_of({"a.o_proj.weight": ("BF16", (3, 400_000))}),
    "rows that cross segments": tensors_of({"a.o_proj.weight": ("U8", (700, 8000))}),
    "inner sizes behind the cut": tensors_of({"a.o_proj.weight": ("F8_E4M3", (2, 300, 1000))}),
}


@pytest.mark.parametrize("which", ODD)
@pytest.mark.parametrize("tiles", [1, 8])
def test_odd_models_survive_the_round_trip(
    tmp_path: Path, packer: Pack, lab_signer: OwnerSigner, which: str, tiles: int
) -> None:
    round_trip(tmp_path, packer, lab_signer, ODD[which], tiles=tiles)


def test_rows_longer_than_a_block_are_read_slice_by_slice(
    tmp_path: Path, packer: Pack, lab_signer: OwnerSigner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provisioning.weave.BLOCK_BYTES", 4096)
    tensors = tensors_of({"a.o_proj.weight": ("U8", (5, 5000)), "b.o_proj.weight": ("U8", (50, 400))})
    round_trip(tmp_path, packer, lab_signer, tensors)


def test_reports_what_was_packed(tmp_path: Path, model: Path, packer: Pack, lab_signer: OwnerSigner) -> None:
    (model / "notes.txt").write_text("not sealed")
    seen: list[tuple[int, int]] = []
    report = packer(model, progress=lambda done, total: seen.append((done, total)))
    with Bundle.open(report.path, [lab_signer.owner]) as bundle:
        assert report.bundle_id == bundle.manifest.bundle_id.hex()
        assert report.manifest_digest == bundle.manifest.digest.hex()
        assert (report.name, report.purpose) == (bundle.manifest.name, "lab")
        assert report.segments == bundle.manifest.geometry.segments
        assert report.data_bytes == sum(path.stat().st_size for path in report.path.glob("data-*.seal"))
    weights = modelfiles.llama(hidden=64, inter=128, layers=2, vocab=1024)
    assert report.weight_bytes == sum(len(data) for _, _, data in weights.values())
    assert report.tensors == len(weights)
    assert report.left_out == ("notes.txt",)
    assert report.catalog_files == ("config.json", "tokenizer.json")
    assert report.bytes_per_second == round(report.weight_bytes / report.seconds)
    assert json.loads(json.dumps(report.as_payload()))["plaintext_bytes"] == report.weight_bytes
    assert seen[-1] == (report.data_bytes, report.data_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_every_pack_has_a_key_and_an_id_of_its_own(tmp_path: Path, model: Path, packer: Pack) -> None:
    first = packer(model)
    second = packer(model, out=tmp_path / "out" / "again")
    assert first.bundle_id != second.bundle_id
    one, other = ((report.path / "data-00002.seal").read_bytes() for report in (first, second))
    assert one != other
    assert len(list((tmp_path / "keys" / "bundles").iterdir())) == 2


def outside(path: Path, signer: OwnerSigner) -> bytes:
    """Give all that is not ciphertext."""
    with Bundle.open(path, [signer.owner]) as bundle:
        return bundle.manifest.manifest.encode() + (path / "segments.idx").read_bytes()


def test_outsiders_see_no_name_shape_type_or_file(packed: Packed) -> None:
    seen = outside(packed.path, packed.signer)
    for secret in (b"embed_tokens", b"layers", b"proj", b"BF16", b"config", b"tokenizer", b"llama", b"shape"):
        assert secret not in seen
    everything = b"".join(path.read_bytes() for path in packed.path.iterdir())
    assert b"embed_tokens" not in everything
    assert packed.tensors["model.norm.weight"][2] not in everything


def test_lengths_do_not_tell_shapes_or_the_number_of_layers(
    tmp_path: Path, packer: Pack, lab_signer: OwnerSigner
) -> None:
    shapes = [
        modelfiles.llama(hidden=64, inter=256, layers=4, vocab=1024),
        modelfiles.llama(hidden=128, inter=256, layers=1, vocab=512),
        modelfiles.llama(hidden=64, inter=256, layers=2, vocab=1024, dtype="F32"),
    ]
    seen = set()
    for number, tensors in enumerate(shapes):
        source = write_model(tmp_path / f"model{number}", tensors)
        report = packer(source, out=tmp_path / "out" / str(number))
        with Bundle.open(report.path, [lab_signer.owner]) as bundle:
            sizes = tuple(sorted((path.name, path.stat().st_size) for path in report.path.glob("data-*")))
            seen.add((bundle.manifest.geometry, sizes))
    assert len(seen) == 1


def test_the_key_is_in_the_owners_store_and_opens_only_there(
    tmp_path: Path, model: Path, packer: Pack, lab_signer: OwnerSigner
) -> None:
    report = packer(model)
    with lab_signer.bundle_key(tmp_path / "keys", bytes.fromhex(report.bundle_id)) as key, key.expose() as view:
        for path in [*report.path.iterdir(), *(tmp_path / "keys").rglob("*.key")]:
            assert bytes(view) not in path.read_bytes()


def test_published_files_can_be_read_by_those_who_carry_them(model: Path, packer: Pack) -> None:
    report = packer(model)
    assert report.path.stat().st_mode & 0o777 == 0o755


def refusal(kind: type[LetheError], run: Callable[[], object]) -> LetheError:
    with pytest.raises(kind) as refused:
        run()
    return refused.value


def test_refuses_more_names_than_a_catalog_can_hold(
    tmp_path: Path, model: Path, packer: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Such a bundle was packed, and no reader opened it.
    monkeypatch.setattr("provisioning.pack.MAX_HEADER_BYTES", 1000)
    assert refusal(ModelRefused, lambda: packer(model)).code == "pack.catalog"
    assert left_in(tmp_path) == []


def test_refuses_a_name_that_is_taken(tmp_path: Path, model: Path, packer: Pack) -> None:
    (tmp_path / "out" / "bundle").mkdir(parents=True)
    assert refusal(OutputFailed, lambda: packer(model)).code == "output.exists"
    assert left_in(tmp_path) == ["bundle"]


def test_refuses_a_name_that_was_taken_meanwhile(tmp_path: Path, model: Path, packer: Pack) -> None:
    def take(done: int, total: int) -> None:
        (tmp_path / "out" / "bundle").mkdir(exist_ok=True)

    assert refusal(OutputFailed, lambda: packer(model, progress=take)).code == "output.exists"
    assert left_in(tmp_path) == ["bundle"]
    assert not list((tmp_path / "out" / "bundle").iterdir())


def test_a_production_key_packs_no_bundle_that_simulated_evidence_opens(
    tmp_path: Path, model: Path, packer: Pack
) -> None:
    with OwnerSigner.generate("owner", "production") as signer:
        assert refusal(KeyRefused, lambda: packer(model, signer=signer)).code == "owner.purpose"
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("name", ["", "a\nb"])
def test_refuses_a_name_that_cannot_be_shown(tmp_path: Path, model: Path, packer: Pack, name: str) -> None:
    assert refusal(FormatError, lambda: packer(model, name=name)).code == "manifest.name"
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    "more", [{"tiles": 3}, {"segment_size": 1000}, {"file_cap": 1}, {"section_bytes": SEGMENT + 1}], ids=str
)
def test_refuses_sizes_out_of_the_format(tmp_path: Path, model: Path, packer: Pack, more: dict[str, int]) -> None:
    assert refusal(ModelRefused, lambda: packer(model, **more)).code == "pack.geometry"
    assert left_in(tmp_path) == []


def test_refuses_a_model_and_leaves_nothing(tmp_path: Path, model: Path, packer: Pack) -> None:
    (model / "model.safetensors").write_bytes(b"short")
    assert refusal(ModelRefused, lambda: packer(model)).code == "safetensors.truncated"
    assert left_in(tmp_path) == []


def test_a_second_look_that_objects_stops_the_pack(tmp_path: Path, model: Path, packer: Pack) -> None:
    def object_to(source: Source) -> None:
        raise ModelRefused("safetensors.opinion", found="x", expected="y", hint="z")

    assert refusal(ModelRefused, lambda: packer(model, examine=object_to)).code == "safetensors.opinion"
    assert left_in(tmp_path) == []


def test_refuses_a_file_that_changes_while_it_is_packed(tmp_path: Path, model: Path, packer: Pack) -> None:
    def touch(done: int, total: int) -> None:
        os.utime(model / "model.safetensors", ns=(1, 1))

    assert refusal(ModelRefused, lambda: packer(model, progress=touch)).code == "source.changed"
    assert left_in(tmp_path) == []


def test_refuses_a_file_that_is_cut_while_it_is_packed(tmp_path: Path, model: Path, packer: Pack) -> None:
    def cut(source: Source) -> None:
        os.truncate(model / "model.safetensors", 10_000)

    assert refusal(ModelRefused, lambda: packer(model, examine=cut)).code == "source.changed"
    assert left_in(tmp_path) == []


def test_refuses_a_medium_that_cannot_be_read(
    tmp_path: Path, model: Path, packer: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    error = refusal(ModelRefused, lambda: packer(model))
    assert error.code == "source.read"
    assert "input/output error" in error.found
    assert left_in(tmp_path) == []


def test_refuses_a_directory_that_cannot_be_written_to(tmp_path: Path, model: Path, packer: Pack) -> None:
    error = refusal(OutputFailed, lambda: packer(model, out=tmp_path / "nowhere" / "bundle"))
    assert (error.code, error.exit_status) == ("pack.output", 74)


def failing(error: int, after: int) -> Callable[[int, Any, int], int]:
    """Give an ``os.pwrite`` whose disk fails after some writes."""
    original, calls = os.pwrite, [0]

    def write(descriptor: int, data: Any, offset: int) -> int:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(error, os.strerror(error))
        return original(descriptor, data, offset)

    return write


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_ends_with_status_74_and_leaves_nothing(
    tmp_path: Path, model: Path, packer: Pack, monkeypatch: pytest.MonkeyPatch, number: int, after: int
) -> None:
    monkeypatch.setattr(os, "pwrite", failing(number, after))
    error = refusal(OutputFailed, lambda: packer(model))
    assert (error.code, error.exit_status) == ("pack.disk.full", 74)
    assert left_in(tmp_path) == []


def test_another_failure_of_the_disk_has_another_code(
    tmp_path: Path, model: Path, packer: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", failing(errno.EIO, 2))
    assert refusal(OutputFailed, lambda: packer(model)).code == "pack.output"
    assert left_in(tmp_path) == []


def test_a_disk_that_fails_when_it_is_synced_is_noticed(
    tmp_path: Path, model: Path, packer: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    assert refusal(OutputFailed, lambda: packer(model)).code == "pack.output"
    assert left_in(tmp_path) == []


def test_refuses_at_once_when_the_bundle_cannot_fit(
    tmp_path: Path, model: Path, packer: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    full = os.statvfs_result((real.f_bsize, real.f_frsize, real.f_blocks, 10, 10, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    error = refusal(OutputFailed, lambda: packer(model))
    assert error.code == "pack.disk.full"
    assert str(10 * real.f_frsize) in error.found
    assert left_in(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 6 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a small file system needs root and CAP_SYS_ADMIN")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_real_disk_that_fills_up_on_the_way_leaves_nothing(small_disk: Path, tmp_path: Path, packer: Pack) -> None:
    source = write_model(tmp_path / "model", tensors_of({"a.q_proj.weight": ("U8", (8, 250_000))}))

    def fill(done: int, total: int) -> None:
        with contextlib.suppress(OSError):
            (small_disk / "other").write_bytes(bytes(6 << 20))

    error = refusal(OutputFailed, lambda: packer(source, out=small_disk / "bundle", progress=fill))
    assert (error.code, error.exit_status) == ("pack.disk.full", 74)
    assert [path.name for path in small_disk.iterdir()] == ["other"]


def test_an_interrupt_leaves_nothing(tmp_path: Path, model: Path, packer: Pack) -> None:
    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packer(model, progress=interrupt)
    assert left_in(tmp_path) == []


def test_a_thread_that_dies_does_not_hang_the_pack(
    tmp_path: Path, packer: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "model", tensors_of({"a": ("U8", (40 << 20,))}))

    def die(self: Sealing, queue: object) -> None:
        return

    monkeypatch.setattr(Sealing, "_work", die)
    monkeypatch.setattr("provisioning.sealing._POOL_BYTES", 1 << 20)
    monkeypatch.setattr("provisioning.sealing._PATIENCE_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match="thread"):
        packer(source)
    assert left_in(tmp_path) == []


KILLED = """
import json, os, signal, sys
from pathlib import Path
from attestation.policy import AppraisalPolicy
from provisioning.ownerkey import OwnerSigner
from provisioning.pack import pack
from provisioning import pack as module

source, work, when = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
original = os.write

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def progress(done, total):
    if when == "data" and done >= total // 2:
        die()

if when == "table":
    module._write = die
if when == "rename":
    Path.rename = die
if when == "key":
    OwnerSigner.store_bundle_key = die
pack(
    source, signer=OwnerSigner.generate("o", "lab"), key_dir=work / "keys",
    policy=AppraisalPolicy.from_toml((work / "policy.toml").read_text()), name="n", out=work / "out" / "bundle",
    segment_size=256 << 10, progress=progress,
)
"""


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
    )


@pytest.mark.parametrize("when", ["data", "table", "key"])
def test_a_kill_leaves_nothing_that_opens_and_the_next_pack_tidies_up(
    tmp_path: Path, model: Path, packer: Pack, lab_signer: OwnerSigner, when: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "policy.toml").write_text(modelfiles.POLICY)
    done = run_python(KILLED, model, tmp_path, when)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (abandoned,) = (tmp_path / "out").iterdir()
    assert abandoned.name.startswith(".bundle.packing-")
    assert not (abandoned / FILE_NAME).exists()
    error = refusal(BundleDamaged, lambda: Bundle.open(abandoned, [lab_signer.owner]))
    assert error.code == "bundle.file.missing"
    packer(model)
    assert left_in(tmp_path) == ["bundle"]


def test_a_kill_just_before_the_rename_publishes_nothing_under_the_name(
    tmp_path: Path, model: Path, packer: Pack
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "policy.toml").write_text(modelfiles.POLICY)
    assert run_python(KILLED, model, tmp_path, "rename").returncode == -signal.SIGKILL
    assert not (tmp_path / "out" / "bundle").exists()
    packer(model)
    assert left_in(tmp_path) == ["bundle"]


def test_does_not_touch_the_work_of_another_run_or_what_only_looks_like_it(
    tmp_path: Path, model: Path, packer: Pack
) -> None:
    inner: list[PackReport] = []

    def pack_inside(done: int, total: int) -> None:
        # While the outer run holds its directory, another one packs to the same name and is first.
        if not inner:
            inner.append(packer(model))

    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / ".bundle.packing-link").symlink_to(tmp_path / "elsewhere")
    assert refusal(OutputFailed, lambda: packer(model, progress=pack_inside)).code == "output.exists"
    assert left_in(tmp_path) == [".bundle.packing-link", "bundle"]
    assert (tmp_path / "elsewhere").exists()


PEAK = """
import sys
from pathlib import Path
from attestation.policy import AppraisalPolicy
from provisioning.ownerkey import OwnerSigner
from provisioning.pack import pack

work = Path(sys.argv[1])
pack(
    work / "model", signer=OwnerSigner.generate("o", "lab"), key_dir=work / "keys",
    policy=AppraisalPolicy.from_toml((work / "policy.toml").read_text()), name="n", out=work / "bundle",
)
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) << 10)
"""

PEAK_BYTES = 176 << 20


def write_sparse_model(directory: Path, size: int) -> None:
    """Write a model of one large row-parallel and one large column-parallel tensor, all zeros, taking no disk."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    rows = size // 2 // 8192
    header = {
        "a.down_proj.weight": {"dtype": "BF16", "shape": [rows, 4096], "data_offsets": [0, size // 2]},
        "a.up_proj.weight": {"dtype": "BF16", "shape": [rows, 4096], "data_offsets": [size // 2, size]},
    }
    start = modelfiles.file_of(header, b"")
    with (directory / "model.safetensors").open("wb") as file:
        file.write(start)
        file.truncate(len(start) + size)


def test_memory_is_bounded_on_a_model_larger_than_the_bound(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(modelfiles.POLICY)
    write_sparse_model(tmp_path / "model", 2 * PEAK_BYTES)
    done = run_python(PEAK, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < PEAK_BYTES


def test_buffers_are_given_back_after_a_pack(tmp_path: Path, model: Path, packer: Pack) -> None:
    def mapped() -> int:
        return sum(1 for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("00:00 0 "))

    packer(model)
    before = mapped()
    for number in range(3):
        packer(model, out=tmp_path / "out" / str(number))
    assert mapped() < before + 40
