"""The network: a decoder of the Llama family, built with empty tensors that a load fills in place.

Projections that are used together lie together (q, k and v; gate and up), and a load's destination for each of them is
a slice, so the peak of a load is the weights and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from appliance.engine.attention import attend, places
from appliance.engine.batch import Batch
from appliance.engine.config import ModelConfig
from appliance.engine.layers import gated_silu, project, rms_norm
from appliance.engine.rope import inverse_wave_lengths, rotate_, rotation


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Decoder:
    """A decoder-only transformer; see ModelConfig for its switches."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Allocate every tensor.

        Args:
            config: the shape.
            empty: gives a contiguous tensor of unset content; the only source of memory for weights.
            dtype: of weights and arithmetic.
        """
        self.config = config
        self.dtype = dtype
        self._embedding = empty((config.vocabulary, config.hidden), dtype)
        self._layers = [self._layer(empty) for _ in range(config.layers)]
        self._norm = empty((config.hidden,), dtype)
        self._head = self._embedding if config.tied else empty((config.vocabulary, config.hidden), dtype)
        self._frequencies = inverse_wave_lengths(config.rope, config.head_dim).to(self._embedding.device)

    def _layer(self, empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]) -> _Layer:
        config, dtype = self.config, self.dtype
        qkv_rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        return _Layer(
            attention_norm=empty((config.hidden,), dtype),
            qkv=empty((qkv_rows, config.hidden), dtype),
            qkv_bias=empty((qkv_rows,), dtype) if config.qkv_bias else None,
            output=empty((config.hidden, config.heads * config.head_dim), dtype),
            output_bias=empty((config.hidden,), dtype) if config.output_bias else None,
            mlp_norm=empty((config.hidden,), dtype),
            gate_up=empty((2 * config.intermediate, config.hidden), dtype),
            down=empty((config.hidden, config.intermediate), dtype),
        )

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self._embedding.device

    def destinations(self) -> dict[str, torch.Tensor]:
        """Give, per Hugging Face tensor name, the contiguous view to fill; together they cover every weight once."""
        config = self.config
        found = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        if not config.tied:
            found["lm_head.weight"] = self._head
        parts = [config.heads * config.head_dim] + [config.kv_heads * config.head_dim] * 2
        for number, layer in enumerate(self._layers):
            prefix = f"model.layers.{number}"
            attention = f"{prefix}.self_attn"
            found[f"{prefix}.input_layernorm.weight"] = layer.attention_norm
            found[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm
            for name, view in zip("qkv", torch.split(layer.qkv, parts), strict=True):
                found[f"{attention}.{name}_proj.weight"] = view
            if layer.qkv_bias is not None:
                for name, view in zip("qkv", torch.split(layer.qkv_bias, parts), strict=True):
                    found[f"{attention}.{name}_proj.bias"] = view
            found[f"{attention}.o_proj.weight"] = layer.output
            if layer.output_bias is not None:
                found[f"{attention}.o_proj.bias"] = layer.output_bias
            for name, view in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True):
                found[f"{prefix}.mlp.{name}_proj.weight"] = view
            found[f"{prefix}.mlp.down_proj.weight"] = layer.down
        return found

    def skips(self, name: str) -> bool:
        """Say whether a tensor of a checkpoint is known and not needed: a repeated head, a computed rotary table."""
        return (self.config.tied and name == "lm_head.weight") or name.endswith(".rotary_emb.inv_freq")

    def one_of_each_shape(self) -> list[torch.Tensor]:
        """Give one projection of every shape, ``[outputs, inputs]`` each; the layers are alike."""
        first = self._layers[0]
        return [first.qkv, first.output, first.gate_up, first.down, self._head]

    def forward(self, batch: Batch, cache: torch.Tensor) -> torch.Tensor:
        """Run one step: write its keys and values to the cache and give logits.

        Args:
            batch: the rows.
            cache: ``[layers, cache rows, 2 * kv_heads, head_dim]``, see BlockPool.

        Returns:
            ``[outputs, vocabulary] float32``.
        """
        config = self.config
        cosine, sine = rotation(batch.positions, self._frequencies, self.dtype)
        rows = functional.embedding(batch.tokens, self._embedding)
        per_span = [places(cache, span) for span in batch.spans]
        for number, (layer, layer_cache) in enumerate(zip(self._layers, cache.unbind(0), strict=True)):
            known = [place[number] for place in per_span]
            normed = rms_norm(rows, layer.attention_norm, config.norm_epsilon)
            qkv = project(normed, layer.qkv, layer.qkv_bias).contiguous().view(normed.shape[0], -1, config.head_dim)
            rotate_(qkv[:, : config.heads + config.kv_heads], cosine, sine)
            layer_cache.index_copy_(0, batch.slots, qkv[:, config.heads :])
            attended = attend(qkv[:, : config.heads], layer_cache, batch, known)
            rows.add_(project(attended, layer.output, layer.output_bias))
            normed = rms_norm(rows, layer.mlp_norm, config.norm_epsilon)
            rows.add_(project(gated_silu(project(normed, layer.gate_up)), layer.down))
        last = rms_norm(rows.index_select(0, batch.outputs), self._norm, config.norm_epsilon)
        return project(last, self._head).to(torch.float32)
