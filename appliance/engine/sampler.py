"""Which token follows: greedy, or drawn with temperature, top_k and top_p.

A draw depends on its request's logits, seed and position only, never on the batch around it: the random number is a
hash of seed and position, so the same request gives the same answer whoever else is served, also after a preemption.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from dataclasses import dataclass
from typing import Final

import torch

MAX_SEED: Final = (1 << 63) - 1

# Most nuclei are small: sorting this many candidates is enough, and the whole vocabulary is sorted only otherwise.
_NUCLEUS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request chooses.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the most likely tokens until their probability reaches this; 1 keeps all.
        top_k: keep this many of the most likely tokens; 0 keeps all. Applied before ``top_p``.
        seed: 0 to MAX_SEED.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int


def random_seed() -> int:
    """Give a seed that nobody can guess."""
    return secrets.randbits(63)


def uniform(seed: int, position: int) -> float:
    """Give a number in [0, 1): 53 bits of BLAKE2b over seed and position."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=b"lethe sampling").digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def sample(logits: torch.Tensor, choices: list[tuple[Sampling, int]]) -> list[int | None]:
    """Choose one token per row.

    Args:
        logits: ``[rows, vocabulary] float32``.
        choices: per row, how to choose, and the position of the token to choose in its request's answer.

    Returns:
        Token ids; None for a row whose logits are not numbers, which is that request's failure and nobody else's.
    """
    best = logits.max(dim=-1)  # NaN wins a maximum, so a finite maximum means that no logit is NaN or +inf
    peaks, tokens = best.values.tolist(), best.indices.tolist()
    chosen: list[int | None] = []
    for row, (sampling, position) in enumerate(choices):
        if not math.isfinite(peaks[row]):
            chosen.append(None)
        elif sampling.temperature == 0 or sampling.top_k == 1:
            chosen.append(tokens[row])
        else:
            chosen.append(_draw(logits[row], peaks[row], sampling, uniform(sampling.seed, position)))
    return chosen


def _draw(logits: torch.Tensor, peak: float, sampling: Sampling, number: float) -> int:
    """Invert the cumulative distribution of the kept tokens at ``number``."""
    # Differences to the peak are at most 0, so no temperature, however small, overflows.
    weights = ((logits.to(torch.float64) - peak) / sampling.temperature).exp_()
    if sampling.top_k == 0 and sampling.top_p == 1:
        return _invert(weights.cumsum(0), number)
    total = float(weights.sum())
    size = min(sampling.top_k or _NUCLEUS, weights.numel())
    kept, tokens = torch.topk(weights, size)
    cumulative = kept.cumsum(0)
    if sampling.top_k:
        total = float(cumulative[-1])
    elif float(cumulative[-1]) < sampling.top_p * total:
        kept, tokens = torch.sort(weights, descending=True)
        cumulative = kept.cumsum(0)
    # A token stays when those before it have not reached top_p yet; the first always does.
    staying = int(torch.count_nonzero(cumulative - kept < sampling.top_p * total))
    return int(tokens[_invert(cumulative[: max(staying, 1)], number)])


def _invert(cumulative: torch.Tensor, number: float) -> int:
    target = torch.tensor(number, dtype=torch.float64, device=cumulative.device) * cumulative[-1]
    return min(int(torch.searchsorted(cumulative, target, right=True)), cumulative.numel() - 1)
