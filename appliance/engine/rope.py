"""Rotary position embedding: default, linear and llama3 wave lengths.

Sources: Su et al., "RoFormer" (2021), section 3.2; the llama3 blend is the published one of the Llama 3.1 models.
"""

from __future__ import annotations

import math

import torch

from appliance.engine.config import Rope


def inverse_wave_lengths(rope: Rope, head_dim: int) -> torch.Tensor:
    """Give the angle per position of each rotary pair, ``[head_dim / 2] float32``, on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _llama3(rope: Rope, frequencies: torch.Tensor) -> torch.Tensor:
    """Stretch long waves by the factor, keep short ones, blend between."""
    waves = 2 * math.pi / frequencies
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(waves > longest, frequencies / rope.factor, frequencies)
    return torch.where((waves >= shortest) & (waves <= longest), blended, stretched)


def rotation(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give cosine and signed sine for a batch of rows.

    Args:
        positions: ``[rows] int64``.
        frequencies: ``[head_dim / 2] float32``.
        dtype: of the result; the angles are computed in float32.

    Returns:
        Two tensors ``[rows, 1, head_dim]``; the first half of the sines is negative, as :func:`rotate_` wants it.
    """
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((cosine, cosine), dim=-1).to(dtype), torch.cat((-sine, sine), dim=-1).to(dtype)


def rotate_(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
    """Rotate heads in place, ``[rows, heads, head_dim]``; the two members of a pair lie half a head apart."""
    swapped = torch.roll(heads, heads.shape[-1] // 2, dims=-1).mul_(sine)
    heads.mul_(cosine).add_(swapped)
