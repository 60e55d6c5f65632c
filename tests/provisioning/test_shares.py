"""Shares of ranks: over all ranks every bit lands once and where it belongs, and planted faults are reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attestation.policy import AppraisalPolicy
from provisioning import shares
from provisioning.errors import BundleDamaged
from provisioning.geometry import COMMON_STREAM, FIRST_COLUMN, Geometry, Section
from provisioning.layout import Layout, TensorSpec
from provisioning.ownerkey import OwnerSigner
from provisioning.pack import pack
from provisioning.shares import RankShare, Slice, audit, share
from provisioning.tiling import plan
from tests.sim import modelfiles, quantized
from tests.sim.modelfiles import Tensors
from tests.sim.quantized import Bits, Model

SEGMENT = 256 << 10
TILES = st.sampled_from([1, 2, 4, 8, 16])


def lay_out(model: Model, tiles: int) -> Layout:
    return Layout(plan([(name, item.dtype, item.shape) for name, item in model.items()], tiles=tiles), tiles)


def geometry_of(layout: Layout, *, section: int = 2) -> Geometry:
    streams = layout.stream_segments(1, SEGMENT)
    return Geometry(segment_size=SEGMENT, section_bytes=section * SEGMENT, file_bytes=SEGMENT, streams=streams)


def worlds(tiles: int) -> list[int]:
    return [world for world in (1, 2, 4, 8) if tiles % world == 0]


def streams_of(layout: Layout, tensors: Tensors) -> list[bytearray]:
    """Write all streams from the definition of a piece alone."""
    made: list[bytearray] = []
    for stream in layout.streams:
        plain = bytearray(stream.length)
        for piece in stream.pieces:
            spec = layout.tensors[piece.tensor_index]
            tile = quantized.bits_of(*tensors[spec.name])
            if spec.parallel is not None:
                tile = tile.take(range(piece.tile_start, piece.tile_stop), axis=spec.parallel)
            plain[piece.offset : piece.offset + piece.length] = quantized.bytes_of(tile)
        made.append(plain)
    return made


def fill(layout: Layout, own: RankShare, streams: list[bytearray]) -> tuple[dict[str, Bits], dict[str, Bits]]:
    """Follow the slices of a rank; gives its local tensors, and how often each element was written."""
    local: dict[str, Bits] = {}
    count: dict[str, Bits] = {}
    for index, part in own.parts.items():
        spec = layout.tensors[index]
        width = quantized.DTYPE_BITS[spec.dtype]
        local[spec.name] = np.full((*part.shape, width), 2, np.uint8)
        count[spec.name] = np.zeros((*part.shape, width), np.uint8)
    for number, listed in own.slices.items():
        for item in listed:
            name = layout.tensors[item.tensor].name
            where = (slice(None),) * (item.dimension or 0) + (slice(item.first, item.last),)
            where = where if item.dimension is not None else (...,)
            bits = np.unpackbits(np.frombuffer(streams[number][item.start : item.stop], np.uint8), bitorder="little")
            local[name][where] = bits.reshape(local[name][where].shape)
            count[name][where] += 1
    return local, count


@settings(deadline=None, max_examples=120)
@given(quantized.models(), TILES)
def test_every_bit_of_every_tensor_lands_once_where_a_plain_slice_has_it(model: Model, tiles: int) -> None:
    layout = lay_out(model, tiles)
    geometry = geometry_of(layout)
    tensors = quantized.filled(model)
    streams = streams_of(layout, tensors)
    for world in worlds(tiles):
        ranks = [share(layout, geometry, rank=rank, world=world) for rank in range(world)]
        filled = [fill(layout, own, streams) for own in ranks]
        assert all(
            int(array.min(initial=1)) == int(array.max(initial=1)) == 1 for _, n in filled for array in n.values()
        )
        for spec in layout.tensors:
            whole = quantized.bits_of(*tensors[spec.name])
            held = [local[spec.name] for local, _ in filled if spec.name in local]
            if spec.parallel is not None:
                assert np.array_equal(np.concatenate(held, axis=spec.parallel), whole)
            else:
                assert len(held) == (world if spec.column is None else 1)
                assert all(np.array_equal(array, whole) for array in held)
        audit(layout, geometry, ranks)


@settings(deadline=None, max_examples=200)
@given(quantized.models(), TILES)
def test_a_rank_holds_just_the_scales_of_its_part_of_a_matrix(model: Model, tiles: int) -> None:
    layout = lay_out(model, tiles)
    for world in worlds(tiles):
        for rank in range(world):
            held: dict[str, set[tuple[int, int]]] = {}
            for index, part in shares.parts(layout, rank=rank, world=world).items():
                spec, item = layout.tensors[index], model[layout.tensors[index].name]
                if item.axis is None or item.loose:
                    assert spec.parallel is None
                    continue
                stop = part.start + part.shape[item.axis]
                # The last block may be shorter than others, so the end of all is the end of each.
                end = -1 if stop == spec.shape[item.axis] else stop * item.each
                start = -1 if part.start == spec.shape[item.axis] else part.start * item.each
                assert spec.parallel in (None, item.axis)
                held.setdefault(item.unit, set()).add((start, end))
            assert all(len(ranges) == 1 for ranges in held.values())


@settings(deadline=None, max_examples=100)
@given(quantized.matrices(at="m.", formats=("plain", "packed", "gptq", "awq", "nvfp4", "float4", "float8_channels")))
def test_formats_whose_groups_are_whole_are_always_cut(model: Model) -> None:
    layout = lay_out(model, 8)
    for spec in layout.tensors:
        item = model[spec.name]
        whole = item.axis is None or item.loose
        assert whole == (spec.parallel is None)


@settings(deadline=None, max_examples=100)
@given(quantized.models(), TILES)
def test_ranks_open_their_own_bytes_and_no_others(model: Model, tiles: int) -> None:
    layout = lay_out(model, tiles)
    geometry = geometry_of(layout)
    columns = geometry.streams[FIRST_COLUMN:]
    sizes = [sum(piece.length for piece in stream.pieces) for stream in layout.streams]
    for world in worlds(tiles):
        ranks = [share(layout, geometry, rank=rank, world=world) for rank in range(world)]
        each = tiles // world
        for rank, own in enumerate(ranks):
            assert own.segments == geometry.streams[COMMON_STREAM] + sum(columns[rank * each : (rank + 1) * each])
            used = sum(item.stop - item.start for listed in own.slices.values() for item in listed)
            assert used == sizes[COMMON_STREAM] + sum(sizes[FIRST_COLUMN:][rank * each : (rank + 1) * each])
        assert sum(own.segments for own in ranks) == sum(columns) + world * geometry.streams[COMMON_STREAM]
        total = sum(spec.nbytes for spec in layout.tensors)
        assert sum(sizes) == total


@pytest.mark.parametrize(("rank", "world"), [(0, 3), (2, 2), (-1, 1), (0, 16), (0, 0)])
def test_refuses_ranks_that_do_not_exist(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        share(LAYOUT, GEOMETRY, rank=rank, world=world)


# Streams of 2, 3, 3 segments behind the catalog, in sections of two.
SPECS = [
    TensorSpec("norm", "U8", (SEGMENT + 1,), None),
    TensorSpec("cut", "U8", (8, SEGMENT // 2), 0),
    TensorSpec("deep", "U8", (4, SEGMENT // 4), 1),
    TensorSpec("expert.0", "U8", (9,), None, column=0),
    TensorSpec("expert.1", "U8", (9,), None, column=1),
]
LAYOUT = Layout(SPECS, 2)
GEOMETRY = geometry_of(LAYOUT)
RANKS = tuple(share(LAYOUT, GEOMETRY, rank=rank, world=2) for rank in range(2))


def code_of(*ranks: RankShare) -> str:
    with pytest.raises(BundleDamaged) as refused:
        audit(LAYOUT, GEOMETRY, ranks)
    return refused.value.code


def with_section(own: RankShare, stream: int, change: dict[str, int], *, last: bool = False) -> RankShare:
    """Change one section of a stream in what a rank opens."""
    numbers = [at for at, section in enumerate(own.sections) if section.stream == stream]
    at = numbers[-1 if last else 0]
    sections = list(own.sections)
    sections[at] = replace(sections[at], **change)
    return replace(own, sections=tuple(sections))


def test_the_planted_faults_are_planted_in_a_sound_plan() -> None:
    assert GEOMETRY.streams == (1, 2, 3, 3)
    audit(LAYOUT, GEOMETRY, RANKS)
    shares.check_all(LAYOUT, GEOMETRY)


@pytest.mark.parametrize("stream", [2, 3])
def test_reports_a_column_segment_that_no_rank_opens(stream: int) -> None:
    owner = stream - FIRST_COLUMN
    ranks = list(RANKS)
    ranks[owner] = with_section(RANKS[owner], stream, {"segments": 1})
    assert code_of(*ranks) == "share.unread"
    ranks[owner] = replace(RANKS[owner], sections=RANKS[owner].sections[:-1])
    assert code_of(*ranks) == "share.unread"


def test_reports_a_common_segment_that_one_rank_leaves_out() -> None:
    assert code_of(with_section(RANKS[0], COMMON_STREAM, {"segments": 1}), RANKS[1]) == "share.unread"


def test_reports_a_rank_that_is_missing() -> None:
    assert code_of(RANKS[0]) == "share.unread"


def test_reports_a_column_segment_that_two_ranks_open() -> None:
    own = [section for section in RANKS[0].sections if section.stream == FIRST_COLUMN]
    greedy = replace(RANKS[1], sections=(*RANKS[1].sections, replace(own[0], segments=1)))
    assert code_of(RANKS[0], greedy) == "share.twice"


def test_reports_a_common_segment_that_a_rank_opens_twice() -> None:
    section = next(section for section in RANKS[0].sections if section.stream == COMMON_STREAM)
    twice = replace(RANKS[0], sections=(*RANKS[0].sections, section))
    assert code_of(twice, RANKS[1]) == "share.twice"


def test_reports_a_section_that_runs_into_the_next_stream() -> None:
    longer = with_section(RANKS[0], FIRST_COLUMN, {"segments": 2}, last=True)
    assert code_of(longer, RANKS[1]) == "share.twice"


def with_slice(own: RankShare, stream: int, at: int, change: dict[str, int | None] | None) -> RankShare:
    """Change one slice of a rank, or take it out."""
    listed = list(own.slices[stream])
    if change is None:
        del listed[at]
    else:
        listed[at] = replace(listed[at], **change)  # type: ignore[arg-type]  # fields by name
    return replace(own, slices={**own.slices, stream: tuple(listed)})


BAD_SLICES: list[tuple[int, int, dict[str, int | None] | None]] = [
    (COMMON_STREAM, 0, None),
    (FIRST_COLUMN, 0, None),
    (FIRST_COLUMN, 2, None),
    (FIRST_COLUMN, 0, {"first": 1}),
    (FIRST_COLUMN, 0, {"first": 1, "last": 5}),
    (FIRST_COLUMN, 0, {"first": -1, "last": 3}),
    (FIRST_COLUMN, 0, {"dimension": 1}),
    (FIRST_COLUMN, 0, {"dimension": None}),
    (FIRST_COLUMN, 0, {"stop": 64}),
    (FIRST_COLUMN, 1, {"start": 0}),
    (FIRST_COLUMN, 2, {"tensor": 4}),
    (FIRST_COLUMN, 2, {"start": 3 * SEGMENT, "stop": 3 * SEGMENT + 9}),
    (COMMON_STREAM, 0, {"stop": 9, "tensor": 3}),
]


@pytest.mark.parametrize("fault", BAD_SLICES, ids=repr)
def test_reports_slices_that_lose_or_misplace_elements(fault: tuple[int, int, dict[str, int | None] | None]) -> None:
    assert code_of(with_slice(RANKS[0], *fault), RANKS[1]) == "share.tensor"


def test_reports_elements_that_land_twice() -> None:
    moved = {2: replace(RANKS[1].parts[1], start=0)}
    assert code_of(RANKS[0], replace(RANKS[1], parts={**RANKS[1].parts, 1: moved[2]})) == "share.tensor"


def test_reports_a_slice_of_a_tensor_that_the_rank_has_no_part_of() -> None:
    parts = {index: part for index, part in RANKS[0].parts.items() if index != 1}
    assert code_of(replace(RANKS[0], parts=parts), RANKS[1]) == "share.tensor"


def test_a_tensor_without_elements_lands_nowhere_and_is_no_fault() -> None:
    layout = Layout([TensorSpec("empty", "F32", (4, 0), 0), TensorSpec("none", "F32", (0,), None)], 2)
    geometry = geometry_of(layout)
    shares.check_all(layout, geometry)
    assert share(layout, geometry, rank=1, world=2).parts[0] == shares.Part(2, (2, 0))


def test_pack_writes_nothing_when_its_own_plan_has_a_fault(
    tmp_path: Path, lab_signer: OwnerSigner, lab_policy: AppraisalPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(layout: Layout, geometry: Geometry, *, rank: int, world: int) -> RankShare:
        own = share(layout, geometry, rank=rank, world=world)
        return replace(own, sections=own.sections[:-1]) if (rank, world) == (3, 4) else own

    monkeypatch.setattr(shares, "share", faulty)
    tensors = modelfiles.llama(hidden=64, inter=128, layers=1, vocab=32)
    source = modelfiles.write_model(tmp_path / "model", tensors)
    with pytest.raises(BundleDamaged) as refused:
        pack(source, signer=lab_signer, key_dir=tmp_path / "keys", policy=lab_policy, name="x", out=tmp_path / "bundle")
    assert refused.value.code == "share.unread"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_slices_are_in_order_of_the_stream_and_name_local_elements() -> None:
    assert RANKS[1].slices[3] == (
        Slice(1, 0, 2 * SEGMENT, 0, 0, 4),
        Slice(2, 2 * SEGMENT, 2 * SEGMENT + SEGMENT // 2, 1, 0, SEGMENT // 8),
        Slice(4, 2 * SEGMENT + SEGMENT // 2, 2 * SEGMENT + SEGMENT // 2 + 9, None, 0, 9),
    )
    assert RANKS[1].sections == (
        Section(1, 1, 0, 2, 1),
        Section(4, 3, 0, 2, 6),
        Section(5, 3, 2, 1, 8),
    )
