"""Attention of a ragged batch over the paged KV cache.

A step's rows belong to several requests: one row for a request that decodes, many for one whose prompt is being read.
Two ways compute the same numbers: one call per request, which reads contiguous blocks in place and suits a CPU, and
one padded call for all decoding requests, which suits a GPU, where the number of calls counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from appliance.engine.batch import Batch, Padded, Span


@dataclass(frozen=True, slots=True)
class Known:
    """What one request's rows look at in one layer: ``[1, kv_heads, length, head_dim]`` each."""

    keys: torch.Tensor
    values: torch.Tensor


def places(cache: torch.Tensor, span: Span) -> list[Known | torch.Tensor]:
    """Give, per layer, where a request's keys and values are: views of the cache, or cache rows to be gathered.

    Made once a step, for all layers at once: slicing in every layer would cost as much as attention itself.

    Args:
        cache: ``[layers, cache rows, 2 * kv_heads, head_dim]``.
        span: the request.
    """
    if span.slots is not None:
        return [span.slots] * cache.shape[0]
    rows = cache[:, span.first_slot : span.first_slot + span.length].transpose(1, 2)[:, None]
    keys, values = torch.chunk(rows, 2, dim=2)
    return [Known(*layer) for layer in zip(keys.unbind(0), values.unbind(0), strict=True)]


def attend(
    heads: torch.Tensor, cache: torch.Tensor, batch: Batch, known: Sequence[Known | torch.Tensor]
) -> torch.Tensor:
    """Compute attention in one layer.

    Args:
        heads: ``[rows, query_heads, head_dim]``, rotated queries.
        cache: ``[cache rows, 2 * kv_heads, head_dim]`` of this layer; it already holds this step's keys and values.
        batch: whose rows they are.
        known: per span of the batch, its place in this layer, see :func:`places`.

    Returns:
        ``[rows, query_heads * head_dim]``.
    """
    kv_heads, head_dim = cache.shape[1] // 2, cache.shape[2]
    # Queries that share a key head stand together; nothing is repeated for them.
    grouped = heads.view(heads.shape[0], kv_heads, -1, head_dim)
    sizes = [span.rows for span in batch.spans]
    parts = []
    if batch.padded is not None:
        first = batch.padded.slots.shape[0]
        sizes.insert(0, first)
        parts.append(_padded(grouped[:first], cache, batch.padded))
    queries = torch.split(grouped, sizes)[len(parts) :]
    for query, span, place in zip(queries, batch.spans, known, strict=True):
        parts.append(_one(query, place if isinstance(place, Known) else _gather(cache, place), span))
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.reshape(heads.shape[0], -1)


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> Known:
    """Copy a request's scattered keys and values together."""
    rows = cache.index_select(0, slots).transpose(0, 1)[None]
    return Known(*torch.chunk(rows, 2, dim=1))


def _one(query: torch.Tensor, known: Known, span: Span) -> torch.Tensor:
    """Compute one request's rows, ``[rows, kv_heads, groups, head_dim]`` like its queries."""
    if span.rows == 1:
        # The queries of a group go where the rows would.
        return attention(query, known.keys, known.values)
    _, kv_heads, groups, head_dim = query.shape
    shape = (kv_heads, groups, span.length, head_dim)
    attended = attention(
        query.permute(1, 2, 0, 3),
        known.keys.transpose(0, 1).expand(shape),
        known.values.transpose(0, 1).expand(shape),
        attn_mask=span.mask,
        is_causal=span.mask is None,
    )
    return attended.permute(2, 0, 1, 3)


def _padded(query: torch.Tensor, cache: torch.Tensor, padded: Padded) -> torch.Tensor:
    """Compute all decoding requests in one call, ``[requests, kv_heads, groups, head_dim]``."""
    requests, longest = padded.slots.shape
    rows = cache.index_select(0, padded.slots.view(-1)).view(requests, longest, *cache.shape[1:]).transpose(1, 2)
    keys, values = torch.chunk(rows, 2, dim=1)
    return attention(query, keys, values, attn_mask=padded.mask)
