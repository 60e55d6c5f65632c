"""Whole models: what belongs together is cut alike, and what cannot be is left whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioning.layout import TensorSpec
from provisioning.tiling import block_of, expert_column, plan

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def planned(shapes: Shapes, *, tiles: int = 8) -> dict[str, TensorSpec]:
    specs = plan([(name, dtype, shape) for name, (dtype, shape) in shapes.items()], tiles=tiles)
    return {spec.name: spec for spec in specs}


def cuts(specs: dict[str, TensorSpec]) -> dict[str, tuple[int | None, int]]:
    return {name: (spec.parallel, spec.block) for name, spec in specs.items()}


FORMATS: dict[str, tuple[Shapes, dict[str, tuple[int | None, int]]]] = {
    "FP8 in blocks of 128, by outputs": (
        {
            "q_proj.weight": ("F8_E4M3", (576, 256)),
            "q_proj.weight_scale_inv": ("F32", (5, 2)),
            "q_proj.bias": ("BF16", (576,)),
        },
        {"q_proj.weight": (0, 128), "q_proj.weight_scale_inv": (0, 1), "q_proj.bias": (0, 128)},
    ),
    "FP8 in blocks of 128, by inputs": (
        {
            "o_proj.weight": ("F8_E5M2", (256, 4096)),
            "o_proj.weight_scale_inv": ("F8_E8M0", (2, 32)),
            "o_proj.bias": ("BF16", (256,)),
        },
        {"o_proj.weight": (1, 128), "o_proj.weight_scale_inv": (1, 1), "o_proj.bias": (None, 1)},
    ),
    "FP8 by channel, by outputs": (
        {"q_proj.weight": ("F8_E4M3", (576, 256)), "q_proj.weight_scale": ("BF16", (576, 1))},
        {"q_proj.weight": (0, 1), "q_proj.weight_scale": (0, 1)},
    ),
    "FP8 by channel, by inputs": (
        {"o_proj.weight": ("F8_E4M3", (256, 576)), "o_proj.weight_scale": ("BF16", (256, 1))},
        {"o_proj.weight": (1, 1), "o_proj.weight_scale": (None, 1)},
    ),
    "FP8 with one scale": (
        {
            "q_proj.weight": ("F8_E4M3", (576, 256)),
            "q_proj.weight_scale": ("F32", ()),
            "q_proj.input_scale": ("F32", (1,)),
        },
        {"q_proj.weight": (0, 1), "q_proj.weight_scale": (None, 1), "q_proj.input_scale": (None, 1)},
    ),
    "packed int4 with packed zero points, by outputs": (
        {
            "q_proj.weight_packed": ("I32", (96, 32)),
            "q_proj.weight_scale": ("BF16", (96, 2)),
            "q_proj.weight_zero_point": ("I32", (12, 2)),
            "q_proj.weight_shape": ("I64", (2,)),
        },
        {
            "q_proj.weight_packed": (0, 8),
            "q_proj.weight_scale": (0, 8),
            "q_proj.weight_zero_point": (0, 1),
            "q_proj.weight_shape": (None, 1),
        },
    ),
    "packed int4, by inputs": (
        {
            "down_proj.weight_packed": ("I32", (64, 1376)),
            "down_proj.weight_scale": ("BF16", (64, 86)),
            "down_proj.weight_zero_point": ("I32", (8, 86)),
        },
        {
            "down_proj.weight_packed": (1, 16),
            "down_proj.weight_scale": (1, 1),
            "down_proj.weight_zero_point": (1, 1),
        },
    ),
    "packed int4 with groups out of order, by inputs": (
        {
            "down_proj.weight_packed": ("I32", (64, 128)),
            "down_proj.weight_scale": ("BF16", (64, 8)),
            "down_proj.weight_g_idx": ("I32", (1024,)),
        },
        {
            "down_proj.weight_packed": (1, 1),
            "down_proj.weight_scale": (None, 1),
            "down_proj.weight_g_idx": (0, 8),
        },
    ),
    "GPTQ, by outputs": (
        {
            "q_proj.qweight": ("I32", (32, 96)),
            "q_proj.qzeros": ("I32", (2, 12)),
            "q_proj.scales": ("F16", (2, 96)),
            "q_proj.g_idx": ("I32", (256,)),
            "q_proj.bias": ("F16", (96,)),
        },
        {
            "q_proj.qweight": (1, 8),
            "q_proj.qzeros": (1, 1),
            "q_proj.scales": (1, 8),
            "q_proj.g_idx": (None, 1),
            "q_proj.bias": (0, 8),
        },
    ),
    "GPTQ, by inputs": (
        {
            "o_proj.qweight": ("I32", (128, 64)),
            "o_proj.qzeros": ("I32", (8, 8)),
            "o_proj.scales": ("F16", (8, 64)),
            "o_proj.g_idx": ("I32", (1024,)),
            "o_proj.bias": ("F16", (64,)),
        },
        {
            "o_proj.qweight": (0, 1),
            "o_proj.qzeros": (None, 1),
            "o_proj.scales": (None, 1),
            "o_proj.g_idx": (0, 8),
            "o_proj.bias": (None, 1),
        },
    ),
    "AWQ, by inputs": (
        {
            "o_proj.qweight": ("I32", (1024, 8)),
            "o_proj.qzeros": ("I32", (8, 8)),
            "o_proj.scales": ("F16", (8, 64)),
        },
        {"o_proj.qweight": (0, 128), "o_proj.qzeros": (0, 1), "o_proj.scales": (0, 1)},
    ),
    "NVFP4, by inputs": (
        {
            "o_proj.weight": ("U8", (64, 256)),
            "o_proj.weight_scale": ("F8_E4M3", (64, 32)),
            "o_proj.weight_scale_2": ("F32", ()),
        },
        {"o_proj.weight": (1, 8), "o_proj.weight_scale": (1, 1), "o_proj.weight_scale_2": (None, 1)},
    ),
    "FP4 with E8M0 scales, by inputs": (
        {"o_proj.weight": ("F4", (64, 512)), "o_proj.weight_scale": ("F8_E8M0", (64, 16))},
        {"o_proj.weight": (1, 32), "o_proj.weight_scale": (1, 1)},
    ),
    "FP4 by outputs, whose rows are no whole bytes": (
        {"q_proj.weight": ("F4", (64, 3)), "q_proj.weight_scale": ("F8_E8M0", (64, 1))},
        {"q_proj.weight": (0, 2), "q_proj.weight_scale": (0, 2)},
    ),
    "MXFP4 experts in one tensor": (
        {
            "experts.gate_up_proj_blocks": ("U8", (32, 8, 2, 16)),
            "experts.gate_up_proj_scales": ("F8_E8M0", (32, 8, 2)),
            "experts.gate_up_proj_bias": ("BF16", (32, 8)),
            "experts.down_proj_blocks": ("U8", (32, 4, 2, 16)),
        },
        {
            "experts.gate_up_proj_blocks": (0, 1),
            "experts.gate_up_proj_scales": (0, 1),
            "experts.gate_up_proj_bias": (0, 1),
            "experts.down_proj_blocks": (0, 1),
        },
    ),
    "FP8 experts in one tensor": (
        {
            "experts.gate_up_proj": ("F8_E4M3", (16, 4, 8)),
            "experts.gate_up_proj_scale": ("BF16", (16, 1, 8)),
            "experts.down_proj": ("F8_E4M3", (16, 4, 4)),
        },
        {
            "experts.gate_up_proj": (0, 1),
            "experts.gate_up_proj_scale": (0, 1),
            "experts.down_proj": (0, 1),
        },
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_tensor_of_a_unit_has_as_many_blocks(name: str) -> None:
    shapes, expected = FORMATS[name]
    specs = planned(shapes)
    assert cuts(specs) == expected
    assert len({spec.blocks for spec in specs.values() if spec.parallel is not None}) == 1


LEFT_WHOLE: dict[str, Shapes] = {
    "a block that the sizes leave open": {
        "q_proj.weight": ("F8_E4M3", (960, 256)),
        "q_proj.weight_scale_inv": ("F32", (8, 2)),
    },
    "scales that do not divide the matrix": {
        "q_proj.weight": ("F8_E4M3", (7, 256)),
        "q_proj.weight_scale_inv": ("F32", (3, 2)),
    },
    "a parameter that is not known": {
        "q_proj.weight": ("U8", (512, 1)),
        "q_proj.weight.absmax": ("F32", (16,)),
    },
    "a matrix of one row whose scales have two": {
        "q_proj.weight": ("U8", (1, 64)),
        "q_proj.weight_scale": ("F32", (2, 1)),
    },
    "experts in one tensor with scales of another number": {
        "experts.down_proj": ("F8_E4M3", (16, 4, 4)),
        "experts.down_proj_scale": ("F32", (8, 1, 1)),
    },
    "experts in one tensor with something unknown beside them": {
        "experts.down_proj": ("U8", (16, 4, 4)),
        "experts.down_proj_codebook": ("F32", (256, 8)),
    },
    "a block that would cut a byte": {
        "q_proj.weight": ("F4", (30, 3)),
        "q_proj.weight_scale": ("F8_E8M0", (10, 1)),
    },
}


@pytest.mark.parametrize("name", LEFT_WHOLE)
def test_leaves_a_unit_whole_rather_than_guess(name: str) -> None:
    assert {(spec.parallel, spec.column) for spec in planned(LEFT_WHOLE[name]).values()} == {(None, None)}


def test_the_matrices_of_a_block_are_cut_where_their_coarsest_blocks_are() -> None:
    specs = planned(
        {
            "gate_proj.weight": ("BF16", (11008, 4)),
            "up_proj.weight": ("BF16", (11008, 4)),
            "down_proj.weight": ("F8_E4M3", (4, 11008)),
            "down_proj.weight_scale_inv": ("F32", (1, 86)),
        }
    )
    edges = {name: [spec.edge(tile, 8) for tile in range(9)] for name, spec in specs.items() if name.endswith("weight")}
    assert edges["gate_proj.weight"] == edges["up_proj.weight"] == edges["down_proj.weight"]
    assert edges["down_proj.weight"] == [128 * specs["down_proj.weight_scale_inv"].edge(tile, 8) for tile in range(9)]


def test_matrices_of_a_block_that_do_not_fit_together_are_cut_each_for_itself() -> None:
    specs = planned({"up_proj.weight": ("BF16", (3000, 4)), "down_proj.weight": ("BF16", (4, 1999))})
    assert cuts(specs) == {"up_proj.weight": (0, 1), "down_proj.weight": (1, 1)}


def test_one_unit_that_is_left_whole_leaves_others_of_its_block_cut() -> None:
    odd = LEFT_WHOLE["a parameter that is not known"]
    shapes = {name.replace("q_proj", "up_proj"): shape for name, shape in odd.items()}
    specs = planned({**shapes, "down_proj.weight": ("BF16", (4, 512))})
    assert specs["up_proj.weight"].parallel is None
    assert specs["down_proj.weight"].parallel == 1


def test_alone_a_tensor_below_eight_bits_is_cut_at_bytes() -> None:
    assert cuts(planned({"o_proj.weight": ("F4", (2, 256))})) == {"o_proj.weight": (1, 2)}


@given(st.integers(1, 300), st.sampled_from([1, 2, 4, 8, 16]))
def test_an_expert_lies_where_it_would_lie_in_a_stack(experts: int, tiles: int) -> None:
    if experts > 1:
        stack = TensorSpec("experts.down_proj", "U8", (experts,), 0)
        for number in range(experts):
            column = expert_column(number, experts, tiles=tiles)
            assert stack.edge(column, tiles) <= number < stack.edge(column + 1, tiles)
    else:
        assert 0 <= expert_column(0, 1, tiles=tiles) < tiles


def test_all_tensors_of_an_expert_lie_in_one_column_and_experts_are_spread_evenly() -> None:
    shapes: Shapes = {}
    for number in range(16):
        shapes[f"experts.{number}.w1.weight"] = ("F8_E4M3", (5, 3))
        shapes[f"experts.{number}.w1.weight_scale_inv"] = ("F32", (1, 1))
    specs = plan([(name, dtype, shape) for name, (dtype, shape) in shapes.items()], tiles=8)
    assert [spec.column for spec in specs] == [number // 2 for number in range(16) for _ in range(2)]


def test_an_unknown_type_is_left_for_the_layout_to_refuse() -> None:
    assert plan([("q_proj.weight", "Q9", (4, 4))], tiles=8) == [TensorSpec("q_proj.weight", "Q9", (4, 4), None)]


@given(st.integers(1, 9000), st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256]))
def test_finds_the_block_or_says_that_it_is_open(size: int, block: int) -> None:
    blocks = -(-size // block)
    found = block_of(size, blocks)
    if blocks < 2:
        assert found is None
    elif found is None:
        # Another block, of no power of two, gives the same number.
        assert size % blocks == 0
        assert size // blocks != block
    else:
        assert found == block


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_a_block_gives_back_the_number_of_blocks(size: int, blocks: int) -> None:
    block = block_of(size, blocks)
    if block is not None:
        assert -(-size // block) == blocks
    elif blocks > 1 and size % blocks == 0:
        # Equal blocks would do: they are refused only where a power of two would do as well.
        assert any(-(-size // (1 << power)) == blocks for power in range(12))
