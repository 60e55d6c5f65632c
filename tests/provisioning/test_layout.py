"""The plan: every byte once, tiles aligned and cut where ranks need them, sections described by their digest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioning.geometry import COMMON_STREAM, FIRST_COLUMN, Geometry, Section, rank_streams
from provisioning.layout import ALIGNMENT, Layout, Piece, TensorSpec, descriptor_digest
from provisioning.stheader import DTYPE_BITS, tensor_bytes
from tests.sim.planned import planned

SEGMENT = 256 << 10

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.bias",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.mlp.down_proj.weight_scale_inv",
    "model.layers.0.mlp.experts.down_proj",
    "model.layers.0.input_layernorm.weight",
)


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    """Give tensors of all sizes of elements and any shape, cut as the writer cuts them."""
    made: list[TensorSpec] = []
    for number in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = tuple(draw(st.lists(st.integers(0, 40), min_size=0, max_size=3)))
        if tensor_bytes(dtype, shape) is None:
            shape = (*shape, 8)
        name = f"p{number}.{draw(st.sampled_from(NAMES))}"
        spec = planned(name, dtype, shape)
        if spec.parallel is None and draw(st.booleans()):
            spec = replace(spec, column=0)
        blocked = replace(spec, block=spec.block * draw(st.integers(1, 5)))
        made.append(spec if blocked.check() else blocked)
    return made


def tile_ranges(spec: TensorSpec, piece: Piece) -> list[tuple[int, int]]:
    """Give the byte ranges of the tensor that a piece holds, in the piece's order."""
    if spec.parallel is None:
        return [(0, spec.nbytes)]
    unit = math.prod(spec.shape[spec.parallel + 1 :]) * DTYPE_BITS[spec.dtype]
    row = unit * spec.shape[spec.parallel]
    return [
        ((outer * row + piece.tile_start * unit) // 8, (outer * row + piece.tile_stop * unit) // 8)
        for outer in range(math.prod(spec.shape[: spec.parallel]))
    ]


@settings(deadline=None)
@given(specs(), st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 16]))
def test_every_byte_of_every_tensor_lands_once_over_the_ranks(
    tensors: list[TensorSpec], world: int, tiles: int
) -> None:
    layout = Layout(tensors, tiles)
    seen = [bytearray(spec.nbytes) for spec in tensors]
    for rank in range(world):
        for stream in layout.rank_streams(rank, world):
            if stream == COMMON_STREAM and rank:
                continue
            for piece in layout.streams[stream].pieces:
                ranges = tile_ranges(tensors[piece.tensor_index], piece)
                assert sum(stop - start for start, stop in ranges) == piece.length
                for start, stop in ranges:
                    for at in range(start, stop):
                        seen[piece.tensor_index][at] += 1
    assert all(count == 1 for tensor in seen for count in tensor)


@settings(deadline=None)
@given(specs(), st.sampled_from([1, 2, 8]))
def test_pieces_of_a_stream_are_aligned_in_order_and_apart(tensors: list[TensorSpec], tiles: int) -> None:
    for stream in Layout(tensors, tiles).streams:
        end = 0
        for piece in stream.pieces:
            assert piece.stream == stream.number
            assert piece.offset % ALIGNMENT == 0
            assert 0 <= piece.offset - end < ALIGNMENT
            assert piece.length > 0
            end = piece.offset + piece.length
        assert stream.length == end


@settings(deadline=None)
@given(specs(), st.sampled_from([1, 2, 4, 8]))
def test_no_element_is_split_between_segments(tensors: list[TensorSpec], tiles: int) -> None:
    for stream in Layout(tensors, tiles).streams:
        for piece in stream.pieces:
            bits = DTYPE_BITS[tensors[piece.tensor_index].dtype]
            if bits >= 8:
                assert (SEGMENT - piece.offset) % (bits // 8) == 0


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a_rank_opens_a_continuous_share_of_the_columns(world: int) -> None:
    opened = [rank_streams(rank, world, tiles=8) for rank in range(world)]
    assert all(streams[0] == COMMON_STREAM for streams in opened)
    columns = [stream for streams in opened for stream in streams[1:]]
    assert columns == list(range(FIRST_COLUMN, FIRST_COLUMN + 8))


@pytest.mark.parametrize(("rank", "world"), [(0, 0), (0, 3), (2, 2), (-1, 2), (0, 16)])
def test_refuses_ranks_that_the_tiles_do_not_divide_into(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        rank_streams(rank, world, tiles=8)


def test_edges_lie_at_whole_heads_when_ranks_divide_the_heads() -> None:
    keys = planned("m.k_proj.weight", "BF16", (4 * 96, 64))
    assert [keys.edge(rank * 2, 8) % 96 for rank in range(4)] == [0, 0, 0, 0]


def test_leaves_whole_what_cannot_be_cut_at_bytes() -> None:
    assert planned("m.o_proj.weight", "F4", (2, 3)).parallel is None
    assert planned("m.o_proj.weight", "F4", (2, 256)).parallel == 1


BAD_SPECS = [
    TensorSpec("a", "Q9", (4,), None),
    TensorSpec("a", "F4", (3,), None),
    TensorSpec("a", "U8", (4,), 1),
    TensorSpec("a", "U8", (1, 4), 0),
    TensorSpec("a", "U8", (4,), -1),
    TensorSpec("a", "F4", (2, 3), 1),
    TensorSpec("a", "F4", (2, 4), 1, 1),
    TensorSpec("a", "U8", (4,), None, 2),
    TensorSpec("a", "U8", (4,), 0, 0),
    TensorSpec("a", "U8", (4,), 0, -1),
    TensorSpec("a", "U8", (4,), 0, 4),
    TensorSpec("a", "U8", (4,), 0, 1, 0),
    TensorSpec("a", "U8", (4,), None, 1, -1),
    TensorSpec("a", "U8", (1 << 60, 1 << 60), None),
]


@pytest.mark.parametrize("spec", BAD_SPECS, ids=repr)
def test_refuses_tensors_that_cannot_be_laid_out(spec: TensorSpec) -> None:
    with pytest.raises(ValueError, match="tensor 0"):
        Layout([spec], 8)


@pytest.mark.parametrize("tiles", [0, 3, 128])
def test_refuses_other_numbers_of_tiles(tiles: int) -> None:
    with pytest.raises(ValueError, match="tiles"):
        Layout([], tiles)


def test_a_common_tensor_has_no_edges_and_no_blocks() -> None:
    spec = TensorSpec("a", "U8", (4,), None)
    with pytest.raises(ValueError, match="no tiles"):
        spec.edge(0, 8)
    with pytest.raises(ValueError, match="no blocks"):
        _ = spec.blocks
    with pytest.raises(ValueError, match="no rows"):
        spec.row_bytes(0, 4)


def test_edges_lie_on_blocks_and_the_last_one_at_the_end() -> None:
    spec = TensorSpec("a", "F8_E4M3", (576,), 0, 128)
    assert [spec.edge(tile, 8) for tile in range(9)] == [0, 0, 128, 128, 256, 384, 384, 512, 576]


def test_a_tensor_of_one_expert_lies_in_its_column_and_nowhere_else() -> None:
    layout = Layout([TensorSpec("a", "U8", (4,), None, column=2), TensorSpec("b", "U8", (8,), 0)], 4)
    held = [[piece.tensor_index for piece in stream.pieces] for stream in layout.streams]
    assert held == [[], [], [1], [1], [0, 1], [1]]


@pytest.mark.parametrize("column", [4, 63])
def test_refuses_a_column_that_the_layout_does_not_have(column: int) -> None:
    with pytest.raises(ValueError, match="its column"):
        Layout([TensorSpec("a", "U8", (4,), None, column=column)], 4)


@settings(deadline=None)
@given(specs(), st.integers(1, 4))
def test_a_section_names_just_the_pieces_that_touch_it(tensors: list[TensorSpec], most: int) -> None:
    layout = Layout(tensors, 2)
    size = 64
    for stream in layout.streams:
        count = -(-stream.length // size)
        for first in range(0, count, most):
            section = Section(0, stream.number, first, min(most, count - first), 0)
            begin, end = first * size, (first + section.segments) * size
            touching = tuple(
                piece for piece in stream.pieces if piece.offset < end and piece.offset + piece.length > begin
            )
            assert layout.pieces_in(section, size) == touching


SPEC = TensorSpec("m.q_proj.weight", "BF16", (16, 8), 0)
PIECE = Piece(0, 2, 4, 3, 64, 32)

CHANGED_SPECS = [
    replace(SPEC, name="m.k_proj.weight"),
    replace(SPEC, dtype="F16"),
    replace(SPEC, shape=(8, 16)),
    replace(SPEC, parallel=1),
    replace(SPEC, parallel=None),
]
CHANGED_PIECES = [
    replace(PIECE, tile_start=1),
    replace(PIECE, tile_stop=5),
    replace(PIECE, offset=128),
    replace(PIECE, length=64),
]


def test_descriptor_digest_changes_with_each_part_of_the_plan() -> None:
    plans = [((SPEC, PIECE),), (), ((SPEC, PIECE), (SPEC, PIECE))]
    plans += [((spec, PIECE),) for spec in CHANGED_SPECS]
    plans += [((SPEC, piece),) for piece in CHANGED_PIECES]
    digests = {descriptor_digest(plan) for plan in plans}
    assert len(digests) == len(plans)
    assert all(len(digest) == 48 for digest in digests)


def test_the_catalog_has_the_descriptor_of_the_empty_list() -> None:
    layout = Layout([SPEC], 8)
    section = Section(0, 0, 0, 1, 0)
    assert layout.descriptor_digest(section, SEGMENT) == descriptor_digest(())


@settings(deadline=None)
@given(specs(), st.sampled_from([1, 2, 4, 8]))
def test_stream_segments_count_every_stream_also_where_tiles_are_even(tensors: list[TensorSpec], tiles: int) -> None:
    layout = Layout(tensors, tiles)
    counted = tuple(-(-stream.length // 64) for stream in layout.streams)
    assert Layout(tensors, tiles).stream_segments(0, 64) == counted


def test_streams_are_planned_when_asked_for_and_then_kept() -> None:
    streams = Layout([SPEC], 8).streams
    assert len(streams) == 10
    assert streams[9] is streams[-1]
    assert streams[2:4] == (streams[2], streams[3])
    with pytest.raises(IndexError):
        streams[10]


@settings(deadline=None)
@given(specs(), st.sampled_from([1, 2, 4, 8]))
def test_a_stream_is_as_long_whether_it_was_planned_or_not(tensors: list[TensorSpec], tiles: int) -> None:
    fresh, planned = Layout(tensors, tiles).streams, Layout(tensors, tiles).streams
    assert [fresh.length(stream.number) for stream in planned] == [stream.length for stream in planned]
    assert [planned.length(stream.number) for stream in planned] == [stream.length for stream in planned]


def test_stream_segments_are_rounded_up_and_begin_with_the_catalog() -> None:
    spec = planned("norm.weight", "U8", (SEGMENT + 1,))
    assert Layout([spec], 1).stream_segments(1, SEGMENT) == (1, 2, 0)
    assert Geometry(segment_size=SEGMENT, section_bytes=SEGMENT, file_bytes=SEGMENT, streams=(1, 2, 0)).segments == 3
