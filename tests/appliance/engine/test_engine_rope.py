from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb

from appliance.engine.config import ModelConfig
from appliance.engine.rope import inverse_wave_lengths, rotate_, rotation

SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_rotation_equals_the_reference_bit_for_bit(tools: Any, scaling: dict[str, Any] | None) -> None:
    members = tools.TINY | {
        "head_dim": 64,
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        "max_position_embeddings": 131072,
    }
    config = ModelConfig.from_json(json.dumps(members).encode())
    reference = LlamaRotaryEmbedding(LlamaConfig(**members))
    frequencies = inverse_wave_lengths(config.rope, config.head_dim)
    assert torch.equal(frequencies, reference.inv_freq)
    positions = torch.tensor([0, 1, 17, 8191, 8192, 131071])
    heads = torch.randn(6, 5, 64)
    cosine, sine = rotation(positions, frequencies, torch.float32)
    expected, _ = apply_rotary_pos_emb(
        heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], *reference(heads, positions[None])
    )
    rotate_(heads, cosine, sine)
    assert torch.equal(heads, expected[0].transpose(0, 1))
