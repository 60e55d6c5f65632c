from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engine.blocks import BLOCK_TOKENS, BlockPool, BlockTable
from appliance.errors import DeviceFault

ROW_BYTES = 2 * 2 * 4 * 3 * 4  # keys and values, 2 heads of 4 in 3 layers, float32


def pool_of(blocks: int) -> BlockPool:
    def dirty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, 7.0, dtype=dtype)

    budget = blocks * BLOCK_TOKENS * ROW_BYTES + 100
    return BlockPool(layers=3, kv_heads=2, head_dim=4, dtype=torch.float32, budget=budget, empty=dirty)


def write(pool: BlockPool, table: BlockTable, tokens: int, value: float) -> None:
    pool.kv[:, table.slots(0, tokens)] = value


def test_takes_as_many_blocks_as_the_budget_holds_and_starts_with_zeros() -> None:
    pool = pool_of(5)
    assert (pool.total, pool.used) == (5, 0)
    assert pool.kv.shape == (3, 5 * BLOCK_TOKENS, 4, 4)
    assert pool.kv.count_nonzero() == 0


def test_refuses_a_budget_without_room_for_one_block() -> None:
    with pytest.raises(DeviceFault) as caught:
        pool_of(0)
    assert caught.value.code == "engine.kv.small"


def test_freed_blocks_are_zero_and_others_are_untouched() -> None:
    pool = pool_of(8)
    mine, other = BlockTable(), BlockTable()
    for tokens in (16, 40, 60):
        assert pool.claim(mine, tokens)
        assert pool.claim(other, tokens - 10)
    write(pool, mine, 60, 1.0)
    write(pool, other, 50, 2.0)
    pool.release(mine)
    assert pool.kv.count_nonzero() == 3 * 50 * 16
    assert torch.equal(pool.kv[:, other.slots(0, 50)], torch.full((3, 50, 4, 4), 2.0))
    pool.release(other)
    assert pool.kv.count_nonzero() == 0
    assert pool.used == 0


def test_gives_nothing_when_not_everything_can_be_given() -> None:
    pool = pool_of(3)
    table = BlockTable()
    assert not pool.claim(table, 3 * BLOCK_TOKENS + 1)
    assert (table.blocks, pool.used) == ([], 0)
    assert pool.claim(table, 3 * BLOCK_TOKENS)
    assert pool.used == 3


@pytest.mark.parametrize(("tokens", "fits"), [(1, True), (48, True), (49, False)])
def test_says_what_fits_alone(tokens: int, fits: bool) -> None:
    assert pool_of(3).fits(tokens) is fits


def test_requests_that_grow_in_turns_stay_contiguous_while_there_is_room() -> None:
    pool = pool_of(64)
    tables = [BlockTable() for _ in range(4)]
    for tokens in range(1, 12 * BLOCK_TOKENS, 8):
        for table in tables:
            assert pool.claim(table, tokens)
    assert all(table.contiguous for table in tables)
    for table in tables:
        assert table.blocks == list(range(table.blocks[0], table.blocks[0] + len(table.blocks)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 90)), max_size=60))
def test_no_block_is_ever_held_twice_and_none_is_lost(actions: list[tuple[int, int]]) -> None:
    pool = pool_of(12)
    tables = [BlockTable() for _ in range(5)]
    for which, tokens in actions:
        table = tables[which]
        if tokens == 0:
            pool.release(table)
        elif pool.claim(table, tokens):
            assert len(table.blocks) * BLOCK_TOKENS >= tokens
        held = [block for each in tables for block in each.blocks]
        assert len(set(held)) == len(held) == pool.used
        assert set(held) <= set(range(12))
        for each in tables:
            follows = [after == before + 1 for before, after in zip(each.blocks, each.blocks[1:], strict=False)]
            assert each.contiguous is all(follows)


def test_slots_follow_the_blocks() -> None:
    table = BlockTable()
    for block in (5, 2):
        table.append(block)
    assert not table.contiguous
    assert table.slots(14, 18) == [5 * 16 + 14, 5 * 16 + 15, 2 * 16, 2 * 16 + 1]
