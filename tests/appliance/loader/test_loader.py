"""The loader: what lies on the device after a load, and what does not after a refusal."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from appliance.engine.config import ModelConfig
from appliance.engine.model import Decoder
from appliance.errors import ConfigError, ModelUnsupported
from appliance.loader import Loaded, SealedLoader
from appliance.slot import Slot
from appliance.slot_cpu import CpuSlot
from appliance.slot_cuda import CudaSlot
from appliance.unseal import Unsealer
from provisioning.errors import BundleDamaged, ExchangeRefused
from provisioning.layout import Layout
from tests.sim.cuda import LazyCuda
from tests.sim.sealedmodel import SEGMENT, Sealed

Weights = dict[str, torch.Tensor]


def nothing(done: int, total: int) -> None:
    """Take no notice of progress."""


def keep_all(name: str) -> bool:
    return False


def destinations(slot: Slot, weights: Weights, dtype: torch.dtype | None = None) -> Weights:
    made = {name: slot.empty(tuple(tensor.shape), dtype or tensor.dtype) for name, tensor in weights.items()}
    for tensor in made.values():
        tensor.fill_(7)
    return made


def all_zero(tensors: Weights) -> bool:
    return not any(bool(tensor.any()) for tensor in tensors.values())


def staging_is_zero(slot: CpuSlot | CudaSlot) -> bool:
    return not any(bool(block.any()) for block in slot._staging)


@pytest.fixture(params=[CpuSlot, lambda: CudaSlot(LazyCuda())], ids=["cpu", "lazy-cuda"])
def slot(request: pytest.FixtureRequest) -> CpuSlot | CudaSlot:
    made: CpuSlot | CudaSlot = request.param()
    return made


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16])
def test_every_tensor_arrives_as_the_checkpoint_has_it(
    sealed: Sealed, slot: CpuSlot | CudaSlot, dtype: torch.dtype | None
) -> None:
    weights = sealed.weights()
    made = destinations(slot, weights, dtype)
    with sealed.open() as bundle, sealed.loader(bundle, slot) as loader:
        loader.load(made, skip=keep_all, on_progress=nothing)
    for name, tensor in weights.items():
        assert torch.equal(made[name], tensor.to(made[name].dtype)), name


@pytest.mark.parametrize(("readers", "openers", "cells"), [(1, 1, 1), (3, 1, 2), (1, 3, 4), (4, 4, 20)])
def test_threads_and_ring_size_change_nothing_but_speed(sealed: Sealed, readers: int, openers: int, cells: int) -> None:
    slot = CpuSlot()
    weights = sealed.weights()
    made = destinations(slot, weights)
    with sealed.open() as bundle:
        loader = sealed.loader(bundle, slot, ring_bytes=cells * (SEGMENT + 4096), readers=readers, openers=openers)
        done = loader.load(made, skip=keep_all, on_progress=nothing)
    assert all(torch.equal(made[name], tensor) for name, tensor in weights.items())
    assert 0 < done.peak_plaintext_bytes <= cells * SEGMENT


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_together_hold_every_tensor_and_each_opens_its_own_bytes_only(sealed: Sealed, world: int) -> None:
    weights = sealed.weights()
    with sealed.open() as bundle:
        layout = sealed.loader(bundle, CpuSlot()).catalog().layout
        opened = 0
        parts: list[Weights] = []
        for rank in range(world):
            made = {
                spec.name: torch.full(_local(layout, index, rank, world), 3, dtype=torch.bfloat16)
                for index, spec in enumerate(layout.tensors)
            }
            loader = sealed.loader(bundle, CpuSlot(), rank=rank, world=world)
            opened += loader.load(made, skip=keep_all, on_progress=nothing).opened_bytes
            parts.append(made)
        columns = sum(bundle.manifest.geometry.streams[2:])
        common = bundle.manifest.geometry.streams[1]
    for spec in layout.tensors:
        whole = (
            torch.cat([part[spec.name] for part in parts], dim=spec.parallel)
            if spec.parallel is not None
            else parts[-1][spec.name]
        )
        assert torch.equal(whole, weights[spec.name]), spec.name
    assert opened == (columns + world * common) * SEGMENT


def _local(layout: Layout, index: int, rank: int, world: int) -> tuple[int, ...]:
    spec = layout.tensors[index]
    if spec.parallel is None:
        return spec.shape
    share = layout.tiles // world
    shape = list(spec.shape)
    shape[spec.parallel] = spec.edge((rank + 1) * share, layout.tiles) - spec.edge(rank * share, layout.tiles)
    return tuple(shape)


def test_reports_what_it_did(sealed: Sealed) -> None:
    slot = CpuSlot()
    weights = sealed.weights()
    made = destinations(slot, weights, torch.float32)
    seen: list[tuple[int, int]] = []
    with sealed.open() as bundle:
        geometry = bundle.manifest.geometry
        done = sealed.loader(bundle, slot).load(
            made, skip=keep_all, on_progress=lambda opened, total: seen.append((opened, total))
        )
    assert done.weight_bytes == sum(tensor.numel() * 4 for tensor in weights.values())
    assert done.segments == geometry.segments
    assert done.opened_bytes == (geometry.segments - geometry.streams[0]) * SEGMENT
    assert done.seconds > 0
    assert seen[-1] == (done.opened_bytes, done.opened_bytes)
    assert staging_is_zero(slot)


def test_catalog_gives_the_models_files_and_leaves_no_plaintext_in_the_ring(sealed: Sealed) -> None:
    slot = CpuSlot()
    with sealed.open() as bundle, sealed.loader(bundle, slot) as loader:
        catalog = loader.catalog()
        assert catalog.file("config.json") == (sealed.source / "config.json").read_bytes()
        assert catalog.file("tokenizer.json") == (sealed.source / "tokenizer.json").read_bytes()
        assert loader.catalog() is catalog
    assert staging_is_zero(slot)


def test_makes_a_resident_model_of_the_builtin_decoder(sealed: Sealed) -> None:
    slot = CpuSlot()
    with sealed.open() as bundle, sealed.loader(bundle, slot) as loader:
        config = ModelConfig.from_json(loader.catalog().file("config.json"))
        model = Decoder(config, empty=slot.empty, dtype=torch.float32)
        resident = loader.make_resident(model, on_progress=nothing)
    assert resident.model is model
    assert resident.slot is slot
    weights = sealed.weights()
    assert all(torch.equal(view, weights[name].float()) for name, view in model.destinations().items())
    assert resident.weight_bytes == sum(tensor.numel() * 4 for tensor in weights.values())


def test_a_resident_model_cannot_be_used_after_it_is_given_up(sealed: Sealed) -> None:
    slot = CpuSlot()
    with sealed.open() as bundle, sealed.loader(bundle, slot) as loader:
        config = ModelConfig.from_json(loader.catalog().file("config.json"))
        resident = loader.make_resident(Decoder(config, empty=slot.empty, dtype=torch.float32), on_progress=nothing)
    resident.give_up()
    with pytest.raises(RuntimeError, match="zeroized"):
        _ = resident.model


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def _last_data_file(directory: Path) -> Path:
    return sorted(directory.glob("data-*.seal"))[-1]


def _flipped_bit(directory: Path) -> None:
    path = _last_data_file(directory)
    flip(path, path.stat().st_size // 2)


def _flipped_first_bit(directory: Path) -> None:
    flip(sorted(directory.glob("data-*.seal"))[1], 0)


def _repeated_segment(directory: Path) -> None:
    path = max(directory.glob("data-*.seal"), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    data[SEGMENT : 2 * SEGMENT] = data[:SEGMENT]
    path.write_bytes(data)


def _swapped_segments(directory: Path) -> None:
    path = max(directory.glob("data-*.seal"), key=lambda file: file.stat().st_size)
    data = path.read_bytes()
    path.write_bytes(data[SEGMENT : 2 * SEGMENT] + data[:SEGMENT] + data[2 * SEGMENT :])


def _swapped_files(directory: Path) -> None:
    files = sorted(directory.glob("data-*.seal"))
    one, other = next((a, b) for a in files[1:] for b in files[1:] if a != b and a.stat().st_size == b.stat().st_size)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _zeroed_file(directory: Path) -> None:
    path = _last_data_file(directory)
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES: list[Callable[[Path], None]] = [
    _flipped_bit,
    _flipped_first_bit,
    _repeated_segment,
    _swapped_segments,
    _swapped_files,
    _zeroed_file,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_segment_leaves_zeros_and_no_key(
    sealed: Sealed, tmp_path: Path, slot: CpuSlot | CudaSlot, damage: Callable[[Path], None]
) -> None:
    copy = sealed.copy(tmp_path / "bundle")
    damage(copy)
    made = destinations(slot, sealed.weights())
    with sealed.open(copy) as bundle:
        loader = sealed.loader(bundle, slot)
        with pytest.raises(BundleDamaged) as refused:
            loader.load(made, skip=keep_all, on_progress=nothing)
        assert refused.value.code == "segment.tag"
        assert refused.value.exit_status == 7
        assert "section" in refused.value.found
        assert all_zero(made)
        assert staging_is_zero(slot)
        with pytest.raises(ExchangeRefused) as spent:
            loader.load(made, skip=keep_all, on_progress=nothing)
        assert spent.value.code == "grant.spent"


def test_a_damaged_catalog_is_refused_and_spends_the_grant(sealed: Sealed, tmp_path: Path) -> None:
    copy = sealed.copy(tmp_path / "bundle")
    flip(copy / "data-00000.seal", 0)
    slot = CpuSlot()
    with sealed.open(copy) as bundle:
        loader = sealed.loader(bundle, slot)
        with pytest.raises(BundleDamaged) as refused:
            loader.catalog()
        assert refused.value.code == "segment.tag"
        assert staging_is_zero(slot)
        with pytest.raises(ExchangeRefused):
            loader.catalog()


def test_a_file_that_shrinks_after_it_was_opened_is_refused(sealed: Sealed, tmp_path: Path) -> None:
    copy = sealed.copy(tmp_path / "bundle")
    made = destinations(CpuSlot(), sealed.weights())
    with sealed.open(copy) as bundle:
        for number in range(len(bundle.manifest.files)):
            bundle.open_file(number)
        os.truncate(_last_data_file(copy), SEGMENT // 2)
        with pytest.raises(BundleDamaged) as refused:
            sealed.loader(bundle, CpuSlot()).load(made, skip=keep_all, on_progress=nothing)
    assert refused.value.code == "bundle.read"
    assert all_zero(made)


def test_a_grant_loads_once(sealed: Sealed) -> None:
    slot = CpuSlot()
    made = destinations(slot, sealed.weights())
    with sealed.open() as bundle:
        loader = sealed.loader(bundle, slot)
        loader.load(made, skip=keep_all, on_progress=nothing)
        with pytest.raises(ExchangeRefused) as refused:
            loader.load(made, skip=keep_all, on_progress=nothing)
    assert refused.value.code == "grant.spent"


class StopError(Exception):
    """Raised by the caller to stop a load."""


def test_stopping_a_load_leaves_zeros_and_no_key(sealed: Sealed, slot: CpuSlot | CudaSlot) -> None:
    made = destinations(slot, sealed.weights())

    def stop(done: int, total: int) -> None:
        raise StopError

    with sealed.open() as bundle:
        loader = sealed.loader(bundle, slot)
        with pytest.raises(StopError):
            loader.load(made, skip=keep_all, on_progress=stop)
        assert all_zero(made)
        assert staging_is_zero(slot)
        with pytest.raises(ExchangeRefused):
            loader._grant.bundle_key().__enter__()


def test_a_model_that_does_not_fit_the_bundle_is_refused_before_anything_is_opened(sealed: Sealed) -> None:
    slot = CpuSlot()
    made = destinations(slot, sealed.weights())
    made["model.norm.weight"] = slot.empty((5,), torch.bfloat16)
    opened: list[int] = []
    with sealed.open() as bundle, pytest.raises(ModelUnsupported) as refused:
        sealed.loader(bundle, slot).load(made, skip=keep_all, on_progress=lambda done, _: opened.append(done))
    assert refused.value.code == "load.tensor.shape"
    assert opened == []
    assert all_zero(made)


def test_skipped_tensors_are_opened_and_dropped(sealed: Sealed) -> None:
    slot = CpuSlot()
    weights = sealed.weights()
    del weights["model.norm.weight"]
    made = destinations(slot, weights)
    with sealed.open() as bundle:
        done = sealed.loader(bundle, slot).load(
            made, skip=lambda name: name == "model.norm.weight", on_progress=nothing
        )
        assert done.segments == bundle.manifest.geometry.segments
    assert all(torch.equal(made[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("twist", ["repeat", "drop"])
def test_a_segment_opened_twice_or_never_is_refused(
    sealed: Sealed, monkeypatch: pytest.MonkeyPatch, twist: str
) -> None:
    plan = SealedLoader._plan

    def twisted(self: SealedLoader, streams: object, reader: object) -> object:
        found = plan(self, streams, reader)  # type: ignore[arg-type]
        if len(found) < 3:
            return found
        return [*found, found[1]] if twist == "repeat" else [*found[:1], *found[2:]]

    monkeypatch.setattr(SealedLoader, "_plan", twisted)
    made = destinations(CpuSlot(), sealed.weights())
    with sealed.open() as bundle, pytest.raises(BundleDamaged) as refused:
        sealed.loader(bundle, CpuSlot()).load(made, skip=keep_all, on_progress=nothing)
    assert refused.value.code == "load.account"
    assert all_zero(made)


def test_section_keys_are_dropped_when_a_load_ends(sealed: Sealed, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Unsealer] = []
    close = Unsealer.close

    def spy(self: Unsealer) -> None:
        close(self)
        closed.append(self)

    monkeypatch.setattr(Unsealer, "close", spy)
    made = destinations(CpuSlot(), sealed.weights())
    with sealed.open() as bundle:
        sealed.loader(bundle, CpuSlot()).load(made, skip=keep_all, on_progress=nothing)
    assert len(closed) == 2  # the catalog's and the weights'
    assert all(not unsealer._openers for unsealer in closed)


@pytest.mark.parametrize(("rank", "world"), [(0, 3), (1, 1), (-1, 2), (0, 0)])
def test_refuses_a_world_that_does_not_divide_the_tiles(sealed: Sealed, rank: int, world: int) -> None:
    with sealed.open() as bundle, pytest.raises(ConfigError) as refused:
        sealed.loader(bundle, CpuSlot(), rank=rank, world=world)
    assert refused.value.code == "rank.world"


def test_refuses_a_ring_smaller_than_a_segment(sealed: Sealed) -> None:
    with sealed.open() as bundle, pytest.raises(ConfigError) as refused:
        sealed.loader(bundle, CpuSlot(), ring_bytes=SEGMENT)
    assert refused.value.code == "ring.size"


def test_runs_hold_several_segments_where_the_device_wants_large_copies(sealed: Sealed) -> None:
    slot = CudaSlot(LazyCuda())
    weights = sealed.weights()
    made = destinations(slot, weights)
    with sealed.open() as bundle:
        loader = sealed.loader(bundle, slot, ring_bytes=48 * SEGMENT, readers=2, openers=2)
        assert loader._ring.cell_bytes == 7 * SEGMENT
        with loader._reader([2, 3]) as reader:
            assert any(run.count > 1 for run in loader._plan([2, 3], reader))
        loader.load(made, skip=keep_all, on_progress=nothing)
    assert all(torch.equal(made[name], tensor) for name, tensor in weights.items())


def test_damage_inside_a_long_run_leaves_no_plaintext_of_its_neighbours(sealed: Sealed, tmp_path: Path) -> None:
    copy = sealed.copy(tmp_path / "bundle")
    path = max(copy.glob("data-*.seal"), key=lambda file: file.stat().st_size)
    flip(path, path.stat().st_size - 1)
    slot = CudaSlot(LazyCuda())
    made = destinations(slot, sealed.weights())
    with sealed.open(copy) as bundle:
        loader = sealed.loader(bundle, slot, ring_bytes=48 * SEGMENT)
        with pytest.raises(BundleDamaged):
            loader.load(made, skip=keep_all, on_progress=nothing)
    assert all_zero(made)
    assert staging_is_zero(slot)


def test_result_says_how_large_the_ring_is(sealed: Sealed) -> None:
    slot = CpuSlot()
    made = destinations(slot, sealed.weights())
    with sealed.open() as bundle:
        done: Loaded = sealed.loader(bundle, slot, ring_bytes=4 * SEGMENT).load(
            made, skip=keep_all, on_progress=nothing
        )
    assert done.ring_bytes == sum(block.numel() for block in slot._staging)
    assert done.ring_bytes <= 4 * SEGMENT
