"""What names say: the dimension that is cut, what belongs together, and whose expert a tensor is."""

from __future__ import annotations

import pytest

from provisioning.naming import Kind, role_of
from tests.sim.planned import planned

DIMENSIONS = [
    ("model.embed_tokens.weight", (100, 8), 0),
    ("lm_head.weight", (100, 8), 0),
    ("model.layers.3.self_attn.q_proj.weight", (8, 8), 0),
    ("model.layers.3.self_attn.q_proj.bias", (8,), 0),
    ("model.layers.3.self_attn.k_proj.weight", (4, 8), 0),
    ("model.layers.3.self_attn.v_proj.weight", (4, 8), 0),
    ("model.layers.3.self_attn.o_proj.weight", (8, 8), 1),
    ("model.layers.3.self_attn.o_proj.bias", (8,), None),
    ("model.layers.3.mlp.gate_proj.weight", (16, 8), 0),
    ("model.layers.3.mlp.up_proj.weight_scale_inv", (2, 2), 0),
    ("model.layers.3.mlp.down_proj.weight", (8, 16), 1),
    ("model.layers.3.mlp.down_proj.weight_scale_inv", (2, 4), 1),
    ("model.layers.3.mlp.down_proj.weight_scale", (8, 1), None),
    ("model.layers.3.mlp.down_proj.weight_scale", (8,), None),
    ("model.layers.3.mlp.down_proj.weight_packed", (8, 16), 1),
    ("model.layers.3.mlp.down_proj.weight_shape", (2,), None),
    ("model.layers.3.mlp.down_proj.weight_g_idx", (64,), 0),
    ("model.layers.3.mlp.gate_proj.weight_g_idx", (64,), None),
    ("model.layers.3.mlp.gate_proj.qweight", (16, 64), 1),
    ("model.layers.3.mlp.gate_proj.qzeros", (2, 8), 1),
    ("model.layers.3.mlp.gate_proj.scales", (2, 64), 1),
    ("model.layers.3.mlp.gate_proj.g_idx", (128,), None),
    ("model.layers.3.mlp.down_proj.qweight", (16, 64), 0),
    ("model.layers.3.mlp.down_proj.qzeros", (2, 8), 0),
    ("model.layers.3.mlp.down_proj.scales", (2, 64), 0),
    ("model.layers.3.mlp.down_proj.g_idx", (128,), 0),
    ("model.layers.3.mlp.experts.7.w2.weight", (8, 16), None),
    ("model.layers.3.mlp.shared_experts.gate_proj.weight", (16, 8), 0),
    ("model.layers.3.mlp.experts.gate_up_proj", (4, 8, 32), 0),
    ("model.layers.3.mlp.experts.down_proj", (4, 16, 8), 0),
    ("model.layers.3.mlp.experts.down_proj_blocks", (4, 16, 2, 16), 0),
    ("model.layers.3.mlp.experts.gate_up_proj_bias", (4, 16), 0),
    ("model.layers.3.mlp.experts.mlp.w1", (64, 8), None),
    ("model.layers.3.mlp.experts", (64, 8), None),
    ("model.layers.3.mlp.gate.weight", (4, 8), None),
    ("model.layers.3.mlp.gate_up_proj.weight", (32, 8), None),
    ("model.layers.3.self_attn.qkv_proj.weight", (32, 8), None),
    ("model.layers.3.self_attn.q_proj.lora_A.weight", (32, 8), None),
    ("model.layers.3.input_layernorm.weight", (8,), None),
    ("model.norm.weight", (8,), None),
    ("q_proj", (8, 8), 0),
    ("q_proj.weight", (), None),
    ("weight", (8,), None),
    ("lm_head.weight", (1, 8), None),
]


@pytest.mark.parametrize(("name", "shape", "expected"), DIMENSIONS)
def test_cuts_by_the_names_of_checkpoints(name: str, shape: tuple[int, ...], expected: int | None) -> None:
    assert planned(name, "U8", shape).parallel == expected


def test_a_matrix_its_scales_and_its_bias_are_one_unit() -> None:
    roles = [role_of(f"m.0.q_proj.{parameter}") for parameter in ("weight", "weight_scale", "bias", "weight.absmax")]
    assert {role.unit for role in roles if role} == {"m.0.q_proj"}
    assert [role.known for role in roles if role] == [True, True, True, False]


def test_the_matrices_of_a_feed_forward_block_are_one_family_and_those_of_attention_are_not() -> None:
    names = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
    roles = [role_of(f"m.{layer}.mlp.{name}.weight") for layer in range(2) for name in names]
    assert len({role.family for role in roles if role}) == 2
    attention = [role_of(f"m.0.{name}_proj.weight") for name in "qkvo"]
    assert len({role.family for role in attention if role}) == 4


def test_everything_of_a_numbered_expert_is_its_own() -> None:
    for rest in ("w1.weight", "gate_proj.weight_scale_inv", "anything"):
        role = role_of(f"m.experts.12.{rest}")
        assert role is not None
        assert (role.kind, role.family, role.expert) == (Kind.EXPERT, "m.experts", 12)


@pytest.mark.parametrize("number", ["1234567", "\N{SUPERSCRIPT TWO}", "-1", "1_0", ""])
def test_takes_only_plain_small_numbers_for_experts(number: str) -> None:
    role = role_of(f"m.experts.{number}.w1.weight")
    assert role is not None
    assert (role.kind, role.known) == (Kind.STACK, False)
