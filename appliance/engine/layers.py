"""Arithmetic that layers share. No function here makes a copy of a weight, not even for the length of a call.

A copy would be plaintext that no slot knows of and no wipe covers.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

# For few rows a float32 product x @ w.T is slow in the CPU's library; w @ x.T is the same numbers up to 2.3 times
# faster, because the library then packs the few rows and not the weight. benchmarks/decode.py measures the crossing.
_SWAP_FROM: Final = 4
_SWAP_TO: Final = 40


def project(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Give ``rows @ weight.T + bias``.

    Args:
        rows: ``[rows, inputs]``.
        weight: ``[outputs, inputs]``.
        bias: ``[outputs]``.

    Returns:
        ``[rows, outputs]``, not always contiguous.
    """
    if rows.device.type == "cpu" and rows.dtype == torch.float32 and _SWAP_FROM <= rows.shape[0] <= _SWAP_TO:
        product = torch.mm(weight, rows.t()).t()
        return product if bias is None else product.add_(bias)
    return functional.linear(rows, weight, bias)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Give ``rows`` scaled to unit root mean square, times ``weight``; the mean is taken in float32.

    Args:
        rows: ``[rows, hidden]``.
        weight: ``[hidden]``.
        epsilon: added to the mean square.
    """
    if rows.dtype == torch.float32:
        return functional.rms_norm(rows, weight.shape, weight, epsilon)
    # Rounded to the model's type before the weight is applied, as the reference implementation of Llama does.
    exact = rows.to(torch.float32)
    return weight * functional.rms_norm(exact, weight.shape, None, epsilon).to(rows.dtype)


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """Give ``silu(gate) * up``.

    Args:
        gate_up: ``[rows, 2 * intermediate]``, the gate first; it is overwritten.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
