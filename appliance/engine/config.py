"""What a model's ``config.json`` may say: every field is understood, known to change nothing, or refused by its name.

A field that is silently ignored is a model that silently computes something else, so there is no third way. Defaults
of absent fields are those of Hugging Face transformers' ``LlamaConfig``, ``MistralConfig`` and ``Qwen2Config``, and
only where all agree or the difference is spelled out here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from appliance.errors import ModelUnsupported

MAX_BYTES: Final = 1 << 20

_TYPES: Final = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}

# Bounds of a plausible model; they keep a hostile configuration from asking for absurd shapes.
_MAX_WIDTH: Final = 1 << 20
_MAX_VOCABULARY: Final = 1 << 24
_MAX_LAYERS: Final = 1 << 12
_MAX_CONTEXT: Final = 1 << 26
_MAX_NUMBER: Final = 1e30

# Fields that change nothing at inference, or are read elsewhere.
_WITHOUT_EFFECT: Final = frozenset(
    {
        "_name_or_path",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "max_window_layers",
        "pad_token_id",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding.

    Attributes:
        kind: ``default``, ``linear`` or ``llama3``.
        theta: base of the geometric series of wave lengths.
        factor: how much longer the context is than in pre-training; 1 for ``default``.
        low_freq_factor, high_freq_factor: edges of the band that ``llama3`` blends over.
        original_context: context of pre-training, tokens; 0 unless ``llama3``.
    """

    kind: str
    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape and the switches of one decoder.

    Attributes:
        qkv_bias, output_bias: whether the attention projections add a bias.
        tied: the output head is the embedding table.
        eos_ids: ids that end an answer according to this file; ``generation_config.json`` may say otherwise.
    """

    architecture: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    max_context: int
    qkv_bias: bool
    output_bias: bool
    tied: bool
    rope: Rope
    eos_ids: tuple[int, ...]

    @classmethod
    def from_json(cls, text: bytes) -> ModelConfig:
        """Read a ``config.json``.

        Raises:
            ModelUnsupported: ``model.config.FIELD``, naming the field that this engine cannot follow, or
                ``model.config.syntax``.
        """
        fields = _Fields(_object(text, "config.json"))
        architecture = fields.architecture()
        heads = fields.integer("num_attention_heads", _MAX_WIDTH)
        hidden = fields.integer("hidden_size", _MAX_WIDTH)
        attention_bias = fields.switch("attention_bias", default=False)
        qwen2 = architecture == "Qwen2ForCausalLM"
        if qwen2 and attention_bias:
            _refuse("attention_bias", "true", "absent: Qwen2 always has biases on q, k and v")
        kv_heads = fields.integer(
            "num_key_value_heads", heads, default=heads if architecture == "LlamaForCausalLM" else None
        )
        config = cls(
            architecture=architecture,
            vocabulary=fields.integer("vocab_size", _MAX_VOCABULARY),
            hidden=hidden,
            intermediate=fields.integer("intermediate_size", _MAX_WIDTH),
            layers=fields.integer("num_hidden_layers", _MAX_LAYERS),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=fields.integer("head_dim", _MAX_WIDTH, default=hidden // heads),
            norm_epsilon=fields.number("rms_norm_eps"),
            max_context=fields.integer("max_position_embeddings", _MAX_CONTEXT),
            qkv_bias=attention_bias or qwen2,
            output_bias=attention_bias,
            tied=fields.switch("tie_word_embeddings", default=False),
            rope=fields.rope(),
            eos_ids=fields.eos_ids(),
        )
        fields.refuse_what_changes_the_arithmetic(config)
        fields.refuse_unknown()
        return config

    def end_ids(self, generation_config: bytes) -> tuple[int, ...]:
        """Give the ids that end an answer.

        Args:
            generation_config: ``generation_config.json``, or empty when the model has none. Its sampling defaults are
                not applied: a request says what it wants.

        Raises:
            ModelUnsupported: ``model.config.syntax`` or ``model.config.eos_token_id``.
        """
        if not generation_config:
            return self.eos_ids
        ids = _Fields(_object(generation_config, "generation_config.json")).eos_ids()
        _within(ids, self.vocabulary)
        return ids or self.eos_ids


def _refuse(field: str, found: str, expected: str) -> NoReturn:
    raise ModelUnsupported(
        f"model.config.{field}",
        found=f"{field} = {found[:80]}",
        expected=expected,
        hint="this engine cannot run the model as its config.json describes it; choose another model or another engine",
    )


def _object(text: bytes, name: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            raise ValueError("a field occurs twice")
        return members

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    if len(text) > MAX_BYTES:
        _refuse("syntax", f"{len(text)} bytes", f"{name} of at most {MAX_BYTES} bytes")
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        _refuse("syntax", str(error), f"{name} as one JSON object without repeated fields")
    if not isinstance(value, dict):
        _refuse("syntax", type(value).__name__, f"{name} as one JSON object")
    return value


class _Fields:
    """The fields of one file; each one read is crossed off, so that the rest can be refused."""

    def __init__(self, members: dict[str, Any]) -> None:
        self._members = members
        self._read: set[str] = set()

    def _take(self, name: str) -> Any:
        self._read.add(name)
        return self._members.get(name)

    def integer(self, name: str, most: int, *, default: int | None = None) -> int:
        """Give a whole number from 1 to ``most``; null and absent mean the default, where there is one."""
        value = self._take(name)
        if value is None and default is not None:
            value = default
        if type(value) is not int or not 1 <= value <= most:
            _refuse(name, repr(value), f"a whole number from 1 to {most}")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        """Give a positive finite number."""
        value = self._take(name)
        return _positive(name, default if value is None else value)

    def switch(self, name: str, *, default: bool) -> bool:
        """Give true or false."""
        value = self._take(name)
        if value is None:
            return default
        if type(value) is not bool:
            _refuse(name, repr(value), "true or false")
        return value

    def architecture(self) -> str:
        """Give the one architecture, which ``model_type`` must agree with."""
        named = self._take("architectures")
        if not isinstance(named, list) or len(named) != 1 or str(named[0]) not in _TYPES:
            _refuse("architectures", repr(named), "one of " + ", ".join(_TYPES))
        architecture = str(named[0])
        kind = self._take("model_type")
        if kind not in (None, _TYPES[architecture]):
            _refuse("model_type", repr(kind), _TYPES[architecture])
        return architecture

    def eos_ids(self) -> tuple[int, ...]:
        """Give the ids of ``eos_token_id``: one, a list, or none."""
        value = self._take("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if len(ids) > 64 or any(type(item) is not int or item < 0 for item in ids):
            _refuse("eos_token_id", repr(value), "a token id or a short list of them")
        return tuple(ids)

    def rope(self) -> Rope:
        """Give the rotary embedding, in the old spelling (``rope_scaling``) or the new one (``rope_parameters``)."""
        scaling = self._take("rope_scaling")
        parameters = self._take("rope_parameters")
        field = "rope_parameters" if parameters else "rope_scaling"
        if parameters and scaling:
            _refuse("rope_scaling", repr(scaling), "either rope_parameters or rope_scaling")
        given = parameters or scaling or {}
        if not isinstance(given, dict):
            _refuse(field, repr(given), "a JSON object")
        values = dict(given)
        theta = self.number("rope_theta", default=10000.0)
        theta = _positive("rope_theta", values.pop("rope_theta", theta))
        kinds = {values.pop(name) for name in ("rope_type", "type") if isinstance(values.get(name), str)} or {"default"}
        kind = kinds.pop()
        known = {"default": (), "linear": ("factor",), "llama3": _LLAMA3}
        if kinds or kind not in known:
            _refuse(field, repr(given), "rope_type default, linear or llama3")
        if set(values) != set(known[kind]):
            _refuse(field, repr(given), f"exactly these fields for {kind}: " + (", ".join(known[kind]) or "none"))
        numbers = {name: _positive(field, value) for name, value in values.items()}
        low, high = numbers.get("low_freq_factor", 1.0), numbers.get("high_freq_factor", 4.0)
        if low >= high:
            _refuse(field, repr(given), "low_freq_factor below high_freq_factor")
        return Rope(
            kind=kind,
            theta=theta,
            factor=numbers.get("factor", 1.0),
            low_freq_factor=low,
            high_freq_factor=high,
            original_context=int(numbers.get("original_max_position_embeddings", 0)),
        )

    def refuse_what_changes_the_arithmetic(self, config: ModelConfig) -> None:
        """Refuse known switches that this engine does not follow, and shapes that cannot be."""
        self._only("hidden_act", ("silu",), "silu")
        self._only("mlp_bias", (None, False), "false")
        self._only("pretraining_tp", (None, 1), "1")
        self._only("partial_rotary_factor", (None, 1), "1")
        self._only("use_sliding_window", (None, False), "false")
        self._only("quantization_config", (None,), "absent: weights in bfloat16, float16 or float32")
        self._full_attention(config)
        if config.heads % config.kv_heads:
            _refuse("num_key_value_heads", str(config.kv_heads), f"a divisor of {config.heads} attention heads")
        if config.head_dim % 2:
            _refuse("head_dim", str(config.head_dim), "an even number, for rotary pairs")
        if self._members.get("head_dim") is None and config.hidden % config.heads:
            _refuse("hidden_size", str(config.hidden), f"a multiple of {config.heads} attention heads")
        _within(config.eos_ids, config.vocabulary)

    def _only(self, name: str, allowed: tuple[object, ...], expected: str) -> None:
        if name not in self._members and name == "hidden_act":
            return  # silu in all three families
        value = self._take(name)
        # 1 == True in Python; only the same type is the same value, but a factor may be written 1 or 1.0.
        if any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
            return
        _refuse(name, repr(value), expected)

    def _full_attention(self, config: ModelConfig) -> None:
        """Refuse a sliding window, except one that no context can leave."""
        window = self._take("sliding_window")
        if config.architecture == "MistralForCausalLM":
            if "sliding_window" not in self._members:
                _refuse("sliding_window", "absent, which means 4096 for Mistral", "null")
            if window is not None and (type(window) is not int or window < config.max_context):
                _refuse("sliding_window", repr(window), "null: every token attends to the whole context")
        elif config.architecture == "LlamaForCausalLM" and window is not None:
            _refuse("sliding_window", repr(window), "absent")
        # Qwen2 names a window size also when use_sliding_window is false; layer_types tells what is really used.
        kinds = self._take("layer_types")
        if kinds is not None and kinds != ["full_attention"] * config.layers:
            _refuse("layer_types", repr(kinds), f"full_attention for each of {config.layers} layers")

    def refuse_unknown(self) -> None:
        """Refuse fields that nothing has read, unless they are switched off."""
        for name in sorted(self._members.keys() - self._read - _WITHOUT_EFFECT):
            value = self._members[name]
            if value is None or value is False or value in ({}, []):
                continue
            raise ModelUnsupported(
                "model.config.unknown",
                found=f"{name[:40]!r} = {value!r}"[:120],
                expected="only fields that this engine knows",
                hint="if the field changes nothing in what the model computes, the owner may remove it before packing",
            )


_LLAMA3: Final = ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings")


def _within(ids: tuple[int, ...], vocabulary: int) -> None:
    if any(token >= vocabulary for token in ids):
        _refuse("eos_token_id", repr(ids), f"ids below {vocabulary}")


def _positive(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= _MAX_NUMBER:
        _refuse(name, repr(value), "a positive number")
    return float(value)
