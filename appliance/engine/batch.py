"""One step's rows, as the network wants them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from appliance.engine.blocks import BLOCK_TOKENS
from appliance.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one request in a step.

    Attributes:
        rows: how many.
        length: tokens in its cache, counting these rows.
        first_slot: cache row of its first token where its blocks are contiguous, else -1.
        slots: ``[length] int64``, cache rows of all its tokens, where they are not.
        mask: ``[rows, length] bool``, True where a row may look; None where row i may look at i + 1 tokens, or there is
            one row, which looks at all.
    """

    rows: int
    length: int
    first_slot: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Padded:
    """The decoding requests of a step as one rectangle; their rows come first.

    Attributes:
        slots: ``[requests, longest] int64``, cache rows; padding points anywhere.
        mask: ``[requests, 1, 1, longest] bool``, False at the padding.
    """

    slots: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows, request after request.

    Attributes:
        tokens, positions, slots: ``[rows] int64``: token id, position in its request, cache row to write.
        outputs: ``[outputs] int64``, the rows whose logits are wanted.
        spans: the requests, in the order of their rows; without the first ones where ``padded`` covers them.
        padded: the decoding requests as one rectangle, or None.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    outputs: torch.Tensor
    spans: tuple[Span, ...]
    padded: Padded | None


def build(plan: list[tuple[Sequence, int]], device: torch.device, *, rectangle: bool) -> Batch:
    """Give the batch of a plan.

    Args:
        plan: requests and how many of their pending tokens to compute; their blocks are claimed. Requests with one
            token come first.
        device: where the network is.
        rectangle: make one rectangle of the requests with one token.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    outputs: list[int] = []
    for sequence, count in plan:
        start, stop = sequence.computed, sequence.computed + count
        tokens += sequence.tokens[start:stop]
        positions += range(start, stop)
        slots += sequence.table.slots(start, stop)
        if count == sequence.pending:
            outputs.append(len(tokens) - 1)
    decoding = [sequence for sequence, count in plan if count == 1] if rectangle else []
    rows = torch.tensor([tokens, positions, slots], dtype=torch.int64).to(device)
    return Batch(
        tokens=rows[0],
        positions=rows[1],
        slots=rows[2],
        outputs=torch.tensor(outputs, dtype=torch.int64, device=device),
        spans=tuple(_span(sequence, count, device) for sequence, count in plan[len(decoding) :]),
        padded=_pad(decoding, device) if decoding else None,
    )


def _pad(decoding: list[Sequence], device: torch.device) -> Padded:
    lengths = torch.tensor([sequence.computed + 1 for sequence in decoding], dtype=torch.int64)
    longest = int(lengths.max())
    slots = torch.zeros((len(decoding), longest), dtype=torch.int64)
    for row, sequence in zip(slots, decoding, strict=True):
        row[: sequence.computed + 1] = _cache_rows(sequence, sequence.computed + 1)
    mask = torch.arange(longest) < lengths[:, None]
    return Padded(slots=slots.to(device), mask=mask[:, None, None, :].to(device))


def _span(sequence: Sequence, count: int, device: torch.device) -> Span:
    start, stop = sequence.computed, sequence.computed + count
    table = sequence.table
    mask = None
    if count > 1 and start > 0:
        mask = torch.ones((count, stop), dtype=torch.bool, device=device).tril(start)
    return Span(
        rows=count,
        length=stop,
        first_slot=table.blocks[0] * BLOCK_TOKENS if table.contiguous else -1,
        slots=None if table.contiguous else _cache_rows(sequence, stop).to(device),
        mask=mask,
    )


def _cache_rows(sequence: Sequence, length: int) -> torch.Tensor:
    """Give the cache rows of a request's first tokens, ``[length] int64``, on the CPU."""
    blocks = torch.tensor(sequence.table.blocks, dtype=torch.int64)
    return (blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).view(-1)[:length]
