"""Attention over blocks against its definition, for every way in which a request can lie in the cache."""

from __future__ import annotations

import math

import pytest
import torch

from appliance.engine.attention import Known, attend, places
from appliance.engine.batch import build
from appliance.engine.blocks import BLOCK_TOKENS
from appliance.engine.sequence import Sequence, accept
from appliance.protocol import Submit

KV_HEADS, GROUPS, HEAD_DIM = 2, 3, 8


def sequence_with(blocks: list[int], length: int, computed: int) -> Sequence:
    sequence = accept(Submit("r", [1] * length, 1, 0.0, 1.0, 0, 0, []), vocabulary=2, max_context=1000)
    for block in blocks:
        sequence.table.append(block)
    sequence.computed = computed
    return sequence


def definition(query: torch.Tensor, known: torch.Tensor, start: int) -> torch.Tensor:
    """Compute row by row and head by head in float64, ``[rows, heads * head_dim]``."""
    rows = []
    for at in range(query.shape[0]):
        seen = known[: start + at + 1].double()
        for head in range(KV_HEADS * GROUPS):
            key, value = seen[:, head // GROUPS], seen[:, KV_HEADS + head // GROUPS]
            weights = torch.softmax(key @ query[at, head].double() / math.sqrt(HEAD_DIM), dim=0)
            rows.append(weights @ value)
    return torch.stack(rows).view(query.shape[0], -1).float()


IN_PLACE, SCATTERED = [3, 4, 5, 6], [9, 2, 7, 1]


@pytest.mark.parametrize("rectangle", [False, True], ids=["each", "rectangle"])
@pytest.mark.parametrize(
    "requests",
    [
        [(IN_PLACE, 60, 59)],
        [(SCATTERED, 60, 59)],
        [(IN_PLACE, 50, 0)],
        [(SCATTERED, 50, 0)],
        [(IN_PLACE, 60, 21)],
        [(SCATTERED, 60, 21)],
        [([0], 1, 0)],
        [(IN_PLACE, 60, 59), ([0], 1, 0), (SCATTERED, 33, 32), ([10, 11], 20, 7), ([8], 9, 0)],
    ],
    ids=["one", "one scattered", "whole", "whole scattered", "rest", "rest scattered", "first", "mixed"],
)
def test_equals_the_definition(requests: list[tuple[list[int], int, int]], rectangle: bool) -> None:
    torch.manual_seed(1)
    cache = torch.randn(2, 12 * BLOCK_TOKENS, 2 * KV_HEADS, HEAD_DIM)
    sequences = [sequence_with(*request) for request in requests]
    plan = sorted(((sequence, sequence.pending) for sequence in sequences), key=lambda item: item[1] > 1)
    batch = build(plan, torch.device("cpu"), rectangle=rectangle)
    heads = torch.randn(sum(count for _, count in plan), KV_HEADS * GROUPS, HEAD_DIM)
    known = [places(cache, span)[1] for span in batch.spans]
    found = attend(heads, cache[1], batch, known)
    first = 0
    for sequence, count in plan:
        content = cache[1, sequence.table.slots(0, len(sequence.tokens))]
        expected = definition(heads[first : first + count], content, sequence.computed)
        torch.testing.assert_close(found[first : first + count], expected, rtol=1e-5, atol=1e-5)
        first += count


def test_views_of_contiguous_blocks_are_not_copies() -> None:
    cache = torch.zeros(2, 12 * BLOCK_TOKENS, 2 * KV_HEADS, HEAD_DIM)
    batch = build([(sequence_with(IN_PLACE, 60, 59), 1)], torch.device("cpu"), rectangle=False)
    before = cache.untyped_storage().data_ptr()
    for place in places(cache, batch.spans[0]):
        assert isinstance(place, Known)
        assert place.keys.untyped_storage().data_ptr() == place.values.untyped_storage().data_ptr() == before
