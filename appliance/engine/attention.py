"""Attention of a ragged batch over the paged KV cache.

A step's rows belong to several requests: one row for a request that decodes, many for one whose prompt is being read.
Two ways compute the same numbers: one call per request, which reads contiguous blocks in place and suits a CPU, and
one padded call for all decoding requests, which suits a GPU, where the number of calls counts.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from appliance.engine.batch import Padded, Span


def attend_span(heads: torch.Tensor, cache: torch.Tensor, span: Span, out: torch.Tensor) -> None:
    """Compute attention for one request's rows.

    Args:
        heads: ``[rows, query_heads, head_dim]``, the batch's rotated queries.
        cache: ``[cache rows, 2 * kv_heads, head_dim]`` of this layer; it already holds this step's keys and values.
        span: the request.
        out: ``[rows, query_heads, head_dim]``, filled for the request's rows.
    """
    if span.slots is None:
        known = cache[span.first_slot : span.first_slot + span.length]
    else:
        known = cache.index_select(0, span.slots)
    kv_heads, head_dim = cache.shape[1] // 2, cache.shape[2]
    keys, values = torch.split(known.transpose(0, 1), kv_heads)  # each [kv_heads, length, head_dim]
    rows = span.stop - span.start
    groups = heads.shape[1] // kv_heads
    queries = heads[span.start : span.stop].view(rows, kv_heads, groups, head_dim)
    result = out[span.start : span.stop].view(rows, kv_heads, groups, head_dim)
    if rows == 1:
        # The queries that share a key head go where the rows would: no key is repeated.
        result.copy_(attention(queries, keys[None], values[None]))
        return
    shape = (kv_heads, groups, span.length, head_dim)
    attended = attention(
        queries.permute(1, 2, 0, 3),
        keys[:, None].expand(shape),
        values[:, None].expand(shape),
        attn_mask=span.mask,
        is_causal=span.mask is None,
    )
    result.copy_(attended.permute(2, 0, 1, 3))


def attend_padded(heads: torch.Tensor, cache: torch.Tensor, padded: Padded, out: torch.Tensor) -> None:
    """Compute attention for all decoding requests in one call; arguments as for :func:`attend_span`."""
    kv_heads, head_dim = cache.shape[1] // 2, cache.shape[2]
    requests, longest = padded.slots.shape
    known = cache.index_select(0, padded.slots.view(-1)).view(requests, longest, 2 * kv_heads, head_dim)
    keys, values = torch.split(known.transpose(1, 2), kv_heads, dim=1)  # each [requests, kv_heads, longest, head_dim]
    queries = heads.index_select(0, padded.rows).view(requests, kv_heads, -1, head_dim)
    attended = attention(queries, keys, values, attn_mask=padded.mask)
    out.index_copy_(0, padded.rows, attended.reshape(requests, -1, head_dim))
