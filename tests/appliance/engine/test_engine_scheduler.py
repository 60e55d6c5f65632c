"""Who runs in a step, without a network: a step computes what is planned and appends one token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engine.blocks import BLOCK_TOKENS, BlockPool
from appliance.engine.scheduler import Scheduler
from appliance.engine.sequence import Sequence, accept
from appliance.protocol import Submit


def pool_of(blocks: int) -> BlockPool:
    return BlockPool(
        layers=1,
        kv_heads=1,
        head_dim=1,
        dtype=torch.float32,
        budget=blocks * BLOCK_TOKENS * 8,
        empty=lambda shape, dtype: torch.empty(shape, dtype=dtype),
    )


def request(name: str, prompt: int, answer: int = 4) -> Sequence:
    return accept(Submit(name, [1] * prompt, answer, 0.0, 1.0, 0, 0, []), vocabulary=2, max_context=10_000)


def scheduler_of(blocks: int = 64, *, max_concurrent: int = 4, step_tokens: int = 32) -> Scheduler:
    return Scheduler(pool_of(blocks), max_concurrent=max_concurrent, step_tokens=step_tokens)


def step(scheduler: Scheduler) -> list[tuple[str, int]]:
    """Plan, and pretend that it was computed."""
    plan = scheduler.plan()
    for sequence, count in plan:
        assert sequence.computed + count <= len(sequence.table.blocks) * BLOCK_TOKENS
        sequence.computed += count
        if sequence.pending == 0:
            sequence.tokens.append(1)
    return [(sequence.request, count) for sequence, count in plan]


def test_a_long_prompt_is_read_in_pieces_of_the_budget() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", 70))
    assert [step(scheduler) for _ in range(4)] == [[("a", 32)], [("a", 32)], [("a", 6)], [("a", 1)]]


def test_decoding_goes_on_while_a_prompt_is_read() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", 5))
    step(scheduler)
    scheduler.add(request("b", 60))
    assert step(scheduler) == [("a", 1), ("b", 31)]
    assert step(scheduler) == [("a", 1), ("b", 29)]
    assert step(scheduler) == [("a", 1), ("b", 1)]


def test_requests_with_one_token_come_first() -> None:
    scheduler = scheduler_of()
    for name, prompt in (("a", 3), ("b", 1), ("c", 4), ("d", 1)):
        scheduler.add(request(name, prompt))
    assert step(scheduler) == [("b", 1), ("d", 1), ("a", 3), ("c", 4)]


def test_no_more_run_than_allowed_and_the_rest_wait_in_order() -> None:
    scheduler = scheduler_of(max_concurrent=2)
    for name in "abcd":
        scheduler.add(request(name, 3))
    assert [name for name, _ in step(scheduler)] == ["a", "b"]
    scheduler.remove(scheduler.running[0])
    assert [name for name, _ in step(scheduler)] == ["b", "c"]
    assert [sequence.request for sequence in scheduler.waiting] == ["d"]


def test_the_budget_is_never_less_than_one_token_for_everybody() -> None:
    scheduler = scheduler_of(max_concurrent=4, step_tokens=1)
    for name in "abcd":
        scheduler.add(request(name, 1))
    assert len(step(scheduler)) == 4


def test_a_request_is_admitted_only_when_its_whole_prompt_has_room() -> None:
    scheduler = scheduler_of(4)
    scheduler.add(request("a", 40))
    scheduler.add(request("b", 40))
    step(scheduler)
    step(scheduler)
    assert [sequence.request for sequence in scheduler.running] == ["a"]
    scheduler.remove(scheduler.running[0])
    assert step(scheduler) == [("b", 32)]


def test_the_youngest_is_preempted_its_blocks_are_zeroed_and_it_is_computed_again() -> None:
    scheduler = scheduler_of(3)
    pool = scheduler._pool
    old, young = request("old", 16), request("young", 15)
    scheduler.add(old)
    scheduler.add(young)
    step(scheduler)
    pool.kv[:, young.table.slots(0, 15)] = 5.0
    while len(young.tokens) < 17:
        step(scheduler)
    assert step(scheduler)[0] == ("old", 1)
    assert (list(scheduler.waiting), young.computed, young.table.blocks) == ([young], 0, [])
    assert pool.kv.count_nonzero() == 0
    scheduler.remove(old)
    assert step(scheduler) == [("young", len(young.tokens) - 1)]


def test_a_request_that_needs_a_block_itself_may_be_the_one_preempted() -> None:
    scheduler = scheduler_of(2)
    scheduler.add(request("a", 15))
    scheduler.add(request("b", 15))
    assert [len(step(scheduler)) for _ in range(3)] == [2, 2, 1]
    assert [sequence.request for sequence in scheduler.waiting] == ["b"]


def test_removing_a_waiting_request_leaves_the_running_alone() -> None:
    scheduler = scheduler_of(max_concurrent=1)
    first, second = request("a", 3), request("b", 3)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    scheduler.remove(second)
    assert (scheduler.running, list(scheduler.waiting)) == ([first], [])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=12),
    st.integers(5, 12),
    st.integers(1, 5),
    st.integers(1, 40),
)
def test_every_request_that_fits_alone_ends(
    requests: list[tuple[int, int]], blocks: int, concurrent: int, budget: int
) -> None:
    scheduler = scheduler_of(blocks, max_concurrent=concurrent, step_tokens=budget)
    for number, (prompt, answer) in enumerate(requests):
        if scheduler._pool.fits(prompt + answer):
            scheduler.add(request(str(number), prompt, answer))
    for _ in range(10_000):
        if not scheduler.running and not scheduler.waiting:
            break
        assert step(scheduler), "somebody waits and nobody runs"
        assert len(scheduler.running) <= concurrent
        for sequence in list(scheduler.running):
            if sequence.answered >= sequence.max_tokens:
                scheduler.remove(sequence)
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler._pool.used == 0
