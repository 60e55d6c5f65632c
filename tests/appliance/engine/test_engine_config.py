"""config.json: understood, without effect, or refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from appliance.engine.config import MAX_BYTES, ModelConfig
from appliance.errors import ModelUnsupported

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def read(members: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_json(json.dumps(members).encode())


def refusal(text: bytes) -> str:
    with pytest.raises(ModelUnsupported) as caught:
        ModelConfig.from_json(text)
    assert caught.value.hint
    return caught.value.code


# Each would silently change what the model computes.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architectures": ["GemmaForCausalLM"]}, "architectures"),
    "two architectures": ({"architectures": ["LlamaForCausalLM", "LlamaForCausalLM"]}, "architectures"),
    "no architecture": ({"architectures": None}, "architectures"),
    "architectures no list": ({"architectures": "LlamaForCausalLM"}, "architectures"),
    "architecture no text": ({"architectures": [{}]}, "architectures"),
    "another model type": ({"model_type": "mistral"}, "model_type"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "activation null": ({"hidden_act": None}, "hidden_act"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias"),
    "mlp bias as a number": ({"mlp_bias": 0}, "mlp_bias"),
    "attention bias as text": ({"attention_bias": "yes"}, "attention_bias"),
    "tied head as a number": ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    "pre-training split": ({"pretraining_tp": 2}, "pretraining_tp"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "sliding window switched on": ({"use_sliding_window": True}, "use_sliding_window"),
    "sliding window of a Llama": ({"sliding_window": 4096}, "sliding_window"),
    "mixed layers": ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
    "too few layer types": ({"layer_types": ["full_attention"]}, "layer_types"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "rope yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
    "rope dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling"),
    "rope of two kinds": ({"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 4.0}}, "rope_scaling"),
    "rope no object": ({"rope_scaling": [1]}, "rope_scaling"),
    "rope kind no text": ({"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}}, "rope_scaling"),
    "rope with a field more": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "rope_scaling"),
    "rope with a field less": ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling"),
    "rope factor as text": ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling"),
    "rope factor zero": ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling"),
    "rope with an empty band": ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "rope_scaling"),
    "rope twice": ({"rope_scaling": LLAMA3, "rope_parameters": LLAMA3}, "rope_scaling"),
    "rope_parameters yarn": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters"),
    "rope theta negative": ({"rope_theta": -1.0}, "rope_theta"),
    "rope theta beyond floats": ({"rope_theta": 10**400}, "rope_theta"),
    "epsilon zero": ({"rms_norm_eps": 0}, "rms_norm_eps"),
    "epsilon absent": ({"rms_norm_eps": None}, "rms_norm_eps"),
    "no hidden size": ({"hidden_size": None}, "hidden_size"),
    "hidden size not split by heads": ({"hidden_size": 50, "head_dim": None}, "hidden_size"),
    "hidden size absurd": ({"hidden_size": 1 << 40}, "hidden_size"),
    "vocabulary zero": ({"vocab_size": 0}, "vocab_size"),
    "vocabulary as a float": ({"vocab_size": 131.0}, "vocab_size"),
    "layers true": ({"num_hidden_layers": True}, "num_hidden_layers"),
    "layers absurd": ({"num_hidden_layers": 1 << 20}, "num_hidden_layers"),
    "key heads no divisor": ({"num_key_value_heads": 4}, "num_key_value_heads"),
    "more key heads than heads": ({"num_key_value_heads": 12}, "num_key_value_heads"),
    "odd head size": ({"head_dim": 15}, "head_dim"),
    "end token outside the vocabulary": ({"eos_token_id": 131}, "eos_token_id"),
    "end token negative": ({"eos_token_id": [-1]}, "eos_token_id"),
    "end token as text": ({"eos_token_id": "</s>"}, "eos_token_id"),
    "end tokens without end": ({"eos_token_id": [1] * 65}, "eos_token_id"),
    "unknown number": ({"attention_multiplier": 0.1}, "unknown"),
    "unknown zero": ({"logit_softcap": 0}, "unknown"),
    "unknown switch": ({"use_qk_norm": True}, "unknown"),
    "unknown object": ({"auto_map": {"AutoModel": "evil.Model"}}, "unknown"),
}


@pytest.mark.parametrize(("changes", "field"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses_by_name(tools: Any, changes: dict[str, Any], field: str) -> None:
    assert refusal(json.dumps(tools.TINY | changes).encode()) == f"model.config.{field}"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe{}",
        b'{"architectures": ["LlamaForCausalLM"], "architectures": ["LlamaForCausalLM"]}',
        b'{"rms_norm_eps": NaN}',
        b'{"rope_theta": Infinity}',
        b"[" * 100_000,
        b'{"vocab_size": ' + b"1" * 5000 + b"}",
        b" " * (MAX_BYTES + 1),
    ],
    ids=["empty", "list", "null", "cut", "no utf-8", "repeated", "nan", "infinity", "deep", "digits", "too long"],
)
def test_refuses_what_is_no_json_object(text: bytes) -> None:
    assert refusal(text) == "model.config.syntax"


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_scale": None},
        {"use_qk_norm": False},
        {"pruned_heads": {}},
        {"extra_layers": []},
        {"torch_dtype": "bfloat16", "transformers_version": "4.40.0", "use_cache": True, "attention_dropout": 0.1},
        {"hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1, "partial_rotary_factor": 1.0},
        {"layer_types": ["full_attention"] * 3},
        {"rope_scaling": None},
        {"rope_scaling": {}},
        {"rope_scaling": {"rope_type": "default"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_accepts_what_changes_nothing(tools: Any, changes: dict[str, Any]) -> None:
    assert read(tools.TINY | changes) == read(tools.TINY)


def test_absent_activation_is_silu(tools: Any) -> None:
    members = dict(tools.TINY)
    del members["hidden_act"]
    assert read(members) == read(tools.TINY)
    assert transformers.LlamaConfig().hidden_act == transformers.Qwen2Config().hidden_act == "silu"


def test_absent_key_heads_of_a_llama_are_as_many_as_heads(tools: Any) -> None:
    members = dict(tools.TINY)
    del members["num_key_value_heads"]
    assert read(members).kv_heads == 6


def test_absent_key_heads_of_a_mistral_are_refused(tools: Any) -> None:
    """Transformers assumes 8 there, whatever the other numbers say."""
    members = tools.TINY | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    del members["num_key_value_heads"]
    assert refusal(json.dumps(members).encode()) == "model.config.num_key_value_heads"


@pytest.mark.parametrize(("window", "refused"), [(None, False), (256, False), (255, True), ("256", True)])
def test_mistral_window_counts_where_a_context_can_leave_it(tools: Any, window: object, refused: bool) -> None:
    members = tools.TINY | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    if refused:
        assert refusal(json.dumps(members).encode()) == "model.config.sliding_window"
    else:
        assert read(members).max_context == 256


def test_absent_window_of_a_mistral_is_refused_because_it_means_4096(tools: Any) -> None:
    members = tools.TINY | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert refusal(json.dumps(members).encode()) == "model.config.sliding_window"
    assert transformers.MistralConfig().sliding_window == 4096


def test_qwen2_has_biases_and_may_name_an_unused_window(tools: Any) -> None:
    members = tools.TINY | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 32}
    config = read(members | {"use_sliding_window": False, "max_window_layers": 3})
    assert config.qkv_bias
    assert not config.output_bias


def test_qwen2_with_a_bias_switch_is_refused(tools: Any) -> None:
    members = tools.TINY | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_bias": True}
    assert refusal(json.dumps(members).encode()) == "model.config.attention_bias"


@pytest.mark.parametrize(
    "scaling", [None, LLAMA3, {"rope_type": "linear", "factor": 2.0}], ids=["default", "llama3", "linear"]
)
def test_reads_what_transformers_writes(tools: Any, scaling: dict[str, Any] | None) -> None:
    """Its own spelling of a configuration, short or with everything it adds, means the same."""
    written = transformers.LlamaConfig(**tools.TINY | {"rope_scaling": scaling})
    expected = read(tools.TINY | {"rope_scaling": scaling})
    for whole in (False, True):
        assert ModelConfig.from_json(written.to_json_string(use_diff=not whole).encode()) == expected


def test_end_ids_come_from_the_generation_config_first(tools: Any) -> None:
    config = read(tools.TINY)
    assert config.end_ids(b"") == (2,)
    assert config.end_ids(b'{"eos_token_id": [5, 6], "temperature": 0.7}') == (5, 6)
    assert config.end_ids(b"{}") == (2,)


def test_end_ids_outside_the_vocabulary_are_refused(tools: Any) -> None:
    with pytest.raises(ModelUnsupported) as caught:
        read(tools.TINY).end_ids(b'{"eos_token_id": 131}')
    assert caught.value.code == "model.config.eos_token_id"


def test_a_refusal_shows_no_more_than_a_line(tools: Any) -> None:
    with pytest.raises(ModelUnsupported) as caught:
        read(tools.TINY | {"hidden_act": "x" * 100_000})
    assert len(caught.value.found) < 120
