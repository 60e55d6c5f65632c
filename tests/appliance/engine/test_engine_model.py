"""The network against transformers: same configuration, same weights, same logits."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch

from appliance.engine.batch import build
from appliance.engine.blocks import BLOCK_TOKENS, BlockPool
from appliance.engine.config import ModelConfig
from appliance.engine.model import Decoder
from appliance.engine.sequence import Sequence, accept
from appliance.protocol import Submit

TOKENS = [(index * 37 + 11) % 131 for index in range(75)]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": 8, "use_sliding_window": False}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied head": {"tie_word_embeddings": False},
    "one head per key head": {"num_key_value_heads": 6},
    "one key head": {"num_key_value_heads": 1},
    "attention biases": {"attention_bias": True},
    "rope linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "rope linear, old spelling": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "rope llama3": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "rope_parameters": {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}, "rope_theta": None},
    "mistral": MISTRAL,
    "qwen2": QWEN2 | {"tie_word_embeddings": False},
}


def logits_in_chunks(oracle: Any, sizes: list[int]) -> torch.Tensor:
    """Give our logits for the last token of each chunk."""
    decoder = oracle.decoder
    config = decoder.config
    pool = BlockPool(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=decoder.dtype,
        budget=1 << 20,
        empty=oracle.slot.empty,
    )
    sequence = sequence_of([])
    rows = []
    for size in sizes:
        sequence.tokens += TOKENS[sequence.computed : sequence.computed + size]
        assert pool.claim(sequence.table, len(sequence.tokens))
        with torch.inference_mode():
            rows.append(decoder.forward(build([(sequence, size)], decoder.device, rectangle=False), pool.kv))
        sequence.computed += size
    return torch.cat(rows)


def sequence_of(tokens: list[int]) -> Sequence:
    submit = Submit("r", [0], 1, 0.0, 1.0, 0, 0, [])
    sequence = accept(submit, vocabulary=131, max_context=256)
    sequence.tokens = tokens
    return sequence


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_equal_the_reference(tools: Any, changes: dict[str, Any]) -> None:
    members = {
        name: value for name, value in (tools.TINY | changes).items() if value is not None or name == "sliding_window"
    }
    oracle = tools.Oracle(members)
    # Prefill, single tokens, a chunk on top of a cache, widths at which products are swapped and are not.
    sizes = [7, 1, 1, 20, 1, 45]
    ends = [sum(sizes[: index + 1]) - 1 for index in range(len(sizes))]
    expected = oracle.logits(TOKENS)[ends]
    torch.testing.assert_close(logits_in_chunks(oracle, sizes), expected, rtol=0, atol=1e-4)
    assert expected.abs().max() > 0.5  # the comparison is between numbers that mean something


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_in_half_precision_stay_close_to_the_reference(tools: Any, dtype: torch.dtype) -> None:
    oracle = tools.Oracle(tools.TINY | {"initializer_range": 0.1}, dtype)
    found = logits_in_chunks(oracle, [75])
    torch.testing.assert_close(found, oracle.logits(TOKENS)[-1:], rtol=0.05, atol=0.05)


def test_padded_attention_equals_one_call_per_request(tiny: Any) -> None:
    """The way that a GPU takes, on the CPU."""
    decoder = tiny.decoder
    pool = BlockPool(layers=3, kv_heads=2, head_dim=16, dtype=torch.float32, budget=1 << 20, empty=tiny.slot.empty)
    sequences = [sequence_of(TOKENS[:length]) for length in (40, 1, 17)]
    # Claimed turn by turn, so that the blocks of the long ones interleave.
    for tokens in range(1, 41, BLOCK_TOKENS):
        for sequence in sequences:
            assert pool.claim(sequence.table, min(tokens, len(sequence.tokens)))
    for sequence in sequences:
        assert pool.claim(sequence.table, len(sequence.tokens))
    with torch.inference_mode():
        before = [(sequence, len(sequence.tokens) - 1) for sequence in sequences if len(sequence.tokens) > 1]
        decoder.forward(build(before, decoder.device, rectangle=False), pool.kv)
        for sequence in sequences:
            sequence.computed = len(sequence.tokens) - 1
        late = sequence_of(TOKENS[:5])
        assert pool.claim(late.table, 5)
        plan = [*((sequence, 1) for sequence in sequences), (late, 5)]
        expected = decoder.forward(build(plan, decoder.device, rectangle=False), pool.kv)
        rectangle = build(plan, decoder.device, rectangle=True)
        found = decoder.forward(rectangle, pool.kv)
    assert rectangle.padded is not None
    assert len(rectangle.spans) == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_destinations_cover_every_weight_once(tiny: Any) -> None:
    destinations = tiny.decoder.destinations()
    spans = sorted((view.data_ptr(), view.data_ptr() + view.nbytes) for view in destinations.values())
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert all(view.is_contiguous() for view in destinations.values())
    held = sum(-(-view.nbytes // 64) * 64 for view in destinations.values())
    assert held <= tiny.slot.held_bytes
    assert set(destinations) == {name for name in tiny.reference.state_dict() if name != "lm_head.weight"}


def test_skips_a_repeated_head_and_rotary_tables_only(tools: Any, tiny: Any) -> None:
    untied = tools.Oracle(tools.TINY | {"tie_word_embeddings": False}).decoder
    assert tiny.decoder.skips("lm_head.weight")
    assert not untied.skips("lm_head.weight")
    assert tiny.decoder.skips("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not tiny.decoder.skips("model.layers.0.self_attn.q_norm.weight")


def test_memory_for_weights_comes_from_empty_alone(tools: Any) -> None:
    asked: list[int] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.zeros(shape, dtype=dtype)
        asked.append(tensor.data_ptr())
        return tensor

    decoder = Decoder(ModelConfig.from_json(json.dumps(tools.TINY).encode()), empty=empty, dtype=torch.float32)
    assert {view.untyped_storage().data_ptr() for view in decoder.destinations().values()} == set(asked)
