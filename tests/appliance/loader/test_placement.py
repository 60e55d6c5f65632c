"""Placement: every byte of a stream lands where the checkpoint has it, whatever the cuts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from appliance import placement
from appliance.errors import ModelUnsupported
from provisioning.layout import Layout, TensorSpec
from tests.sim.planned import planned

SPECS = (
    planned("model.embed_tokens.weight", "BF16", (37, 8)),
    planned("model.layers.0.self_attn.o_proj.weight", "BF16", (9, 40)),
    planned("model.layers.0.self_attn.q_proj.bias", "F32", (17,)),
    planned("model.layers.0.input_layernorm.weight", "F32", (13,)),
    planned("model.layers.0.mlp.experts.down_proj", "F16", (8, 3, 5)),
    planned("model.layers.0.mlp.down_proj.weight", "F16", (6, 24)),
    TensorSpec("stack", "I64", (2, 3, 16, 5), 2),
    planned("scalar", "I64", ()),
    planned("nothing", "F32", (0, 4)),
)


def source(spec: TensorSpec) -> torch.Tensor:
    dtype = placement.TORCH_DTYPES[spec.dtype]
    # Small whole numbers are exact in every type here.
    values = torch.arange(torch.Size(spec.shape).numel()) * 7 % 251
    return values.to(dtype).reshape(spec.shape)


def stream_bytes(layout: Layout, number: int) -> torch.Tensor:
    """Write a stream the slow and plain way, straight from the definition of a piece."""
    stream = layout.streams[number]
    plain = torch.zeros(-(-stream.length // 64) * 64, dtype=torch.uint8)
    for piece in stream.pieces:
        spec = layout.tensors[piece.tensor_index]
        tile = source(spec)
        if spec.parallel is not None:
            tile = tile.narrow(spec.parallel, piece.tile_start, piece.tile_stop - piece.tile_start)
        plain[piece.offset : piece.offset + piece.length] = tile.contiguous().view(-1).view(torch.uint8)
    return plain


def expected(spec: TensorSpec, layout: Layout, rank: int, world: int) -> torch.Tensor:
    if spec.parallel is None:
        return source(spec)
    start, stop = (spec.edge(part * layout.tiles // world, layout.tiles) for part in (rank, rank + 1))
    return source(spec).narrow(spec.parallel, start, stop - start)


@settings(max_examples=60, deadline=None)
@given(
    tiles=st.sampled_from([1, 2, 4, 8]),
    world=st.sampled_from([1, 2, 4, 8]),
    rank=st.integers(0, 7),
    cut=st.integers(1, 40).map(lambda n: n * 64),
    order=st.randoms(use_true_random=False),
    convert=st.booleans(),
)
def test_every_element_lands_once_for_every_rank_and_every_cut(
    tiles: int, world: int, rank: int, cut: int, order: object, convert: bool
) -> None:
    if tiles % world or rank >= world:
        return
    layout = Layout(SPECS, tiles)
    destinations = {}
    for spec in SPECS:
        part = expected(spec, layout, rank, world)
        dtype = torch.float32 if convert and part.dtype.is_floating_point else part.dtype
        destinations[spec.name] = torch.full(part.shape, 99, dtype=dtype)
    targets = placement.plan(layout, rank=rank, world=world, destinations=destinations, skip=lambda _: False)
    work = []
    for number in targets:
        plain = stream_bytes(layout, number)
        work += [(number, start, plain[start : start + cut]) for start in range(0, plain.numel(), cut)]
    order.shuffle(work)  # type: ignore[attr-defined]
    for number, start, plain in work:
        placement.place(targets[number], start, plain)
    for spec in SPECS:
        wanted = expected(spec, layout, rank, world)
        assert torch.equal(destinations[spec.name], wanted.to(destinations[spec.name].dtype)), spec.name


def test_fills_slices_of_fused_tensors() -> None:
    specs = [planned(f"x.{name}_proj.weight", "F32", (4, 6)) for name in "qk"]
    layout = Layout(specs, 2)
    fused = torch.zeros(8, 6)
    destinations = {spec.name: part for spec, part in zip(specs, fused.split(4), strict=True)}
    targets = placement.plan(layout, rank=0, world=1, destinations=destinations, skip=lambda _: False)
    for number in targets:
        placement.place(targets[number], 0, stream_bytes(layout, number))
    assert torch.equal(fused, torch.cat([source(spec) for spec in specs]))


def test_leaves_out_skipped_tensors_and_padding() -> None:
    layout = Layout(SPECS, 1)
    keep = "model.layers.0.input_layernorm.weight"
    destinations = {keep: torch.zeros(13)}
    targets = placement.plan(layout, rank=0, world=1, destinations=destinations, skip=lambda name: name != keep)
    for number in targets:
        placement.place(targets[number], 0, stream_bytes(layout, number))
    assert destinations[keep].tolist() == source(SPECS[3]).tolist()


def _refused(specs: list[TensorSpec], destinations: dict[str, torch.Tensor]) -> ModelUnsupported:
    with pytest.raises(ModelUnsupported) as refused:
        placement.plan(Layout(specs, 1), rank=0, world=1, destinations=destinations, skip=lambda _: False)
    return refused.value


NORM = planned("norm.weight", "BF16", (4,))


def test_refuses_a_bundle_without_a_tensor_of_the_model() -> None:
    error = _refused([NORM], {"norm.weight": torch.zeros(4), "head.weight": torch.zeros(4)})
    assert (error.code, error.exit_status) == ("load.tensor.missing", 8)
    assert "head.weight" in error.found


def test_refuses_a_tensor_that_the_model_does_not_know() -> None:
    error = _refused([NORM, planned("bias", "BF16", (4,))], {"norm.weight": torch.zeros(4)})
    assert error.code == "load.tensor.unexpected"
    assert "bias" in error.found


@pytest.mark.parametrize("shape", [(3,), (4, 1), (1, 4), ()])
def test_refuses_another_shape(shape: tuple[int, ...]) -> None:
    assert _refused([NORM], {"norm.weight": torch.zeros(shape)}).code == "load.tensor.shape"


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("I64", torch.float32), ("BF16", torch.int16), ("F8_E4M3", torch.bfloat16), ("BF16", torch.float8_e4m3fn)],
)
def test_refuses_a_change_of_kind(stored: str, wanted: torch.dtype) -> None:
    error = _refused([planned("norm.weight", stored, (4,))], {"norm.weight": torch.zeros(4, dtype=wanted)})
    assert error.code == "load.tensor.dtype"


@pytest.mark.parametrize(("stored", "shape"), [("F6_E2M3", (4,)), ("F4", (2, 3))])
def test_refuses_types_and_shapes_that_torch_does_not_have(stored: str, shape: tuple[int, ...]) -> None:
    error = _refused([planned("norm.weight", stored, shape)], {"norm.weight": torch.zeros(shape)})
    assert error.code == "load.tensor.dtype"


PACKED = {"F4": torch.float4_e2m1fn_x2, "F8_E8M0": torch.float8_e8m0fnu}


@pytest.mark.parametrize("stored", PACKED)
@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_fills_types_of_four_bits_and_bare_exponents_byte_by_byte(stored: str, dimension: int, world: int) -> None:
    width = 32 if stored == "F4" else 16
    spec = TensorSpec("w", stored, (8, width), dimension, 2)
    layout = Layout([spec], 4)
    whole = torch.arange(128, dtype=torch.uint8).view(8, 16)
    for rank in range(world):
        wanted = torch.chunk(whole, world, dim=dimension)[rank]
        own = torch.full(wanted.shape, 255, dtype=torch.uint8).view(PACKED[stored])
        targets = placement.plan(layout, rank=rank, world=world, destinations={"w": own}, skip=lambda _: False)
        for column in range(rank * 4 // world, (rank + 1) * 4 // world):
            tile = torch.chunk(whole, 4, dim=dimension)[column].flatten()
            plain = torch.zeros(64, dtype=torch.uint8)
            plain[: tile.numel()] = tile
            placement.place(targets[2 + column], 0, plain)
        assert torch.equal(own.view(torch.uint8), wanted)


def test_wants_only_the_experts_of_its_own_columns() -> None:
    specs = [TensorSpec(f"experts.{number}.w1.weight", "BF16", (4,), None, column=number) for number in range(4)]
    layout = Layout(specs, 4)
    for rank in range(2):
        own = {specs[number].name: torch.full((4,), 99, dtype=torch.bfloat16) for number in (2 * rank, 2 * rank + 1)}
        targets = placement.plan(layout, rank=rank, world=2, destinations=own, skip=lambda _: False)
        for number in targets:
            placement.place(targets[number], 0, stream_bytes(layout, number))
        assert all(torch.equal(tensor, source(specs[0])) for tensor in own.values())


def test_refuses_an_engine_that_wants_the_experts_of_another_rank() -> None:
    specs = [TensorSpec(f"experts.{number}.w1.weight", "BF16", (4,), None, column=number) for number in range(2)]
    own = {spec.name: torch.zeros(4, dtype=torch.bfloat16) for spec in specs}
    with pytest.raises(ModelUnsupported) as refused:
        placement.plan(Layout(specs, 2), rank=0, world=2, destinations=own, skip=lambda _: False)
    assert refused.value.code == "load.tensor.missing"


def test_refuses_a_destination_that_is_no_row_by_row_view() -> None:
    spec = planned("x.q_proj.weight", "F32", (4, 4))
    error = _refused([spec], {"x.q_proj.weight": torch.zeros(4, 4).t()})
    assert error.code == "load.tensor.layout"


def _allocated(work: Callable[[], object]) -> int:
    """Give the bytes that torch allocated on the CPU meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    return sum(max(0, event.self_cpu_memory_usage) for event in seen.key_averages())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_copies_make_no_temporary_of_the_plaintext(dtype: torch.dtype) -> None:
    spec = planned("x.down_proj.weight", "BF16", (512, 1024))
    layout = Layout([spec], 2)
    destination = torch.zeros(512, 1024, dtype=dtype)
    targets = placement.plan(layout, rank=0, world=1, destinations={spec.name: destination}, skip=lambda _: False)
    plain = stream_bytes(layout, 3)
    # A part that begins and ends inside a row takes all three kinds of copies.
    part = plain[64 * 7 : 64 * 7001]
    assert _allocated(lambda: placement.place(targets[3], 64 * 7, part)) == 0
    assert _allocated(lambda: plain.view(torch.bfloat16).to(torch.float32)) > 0
