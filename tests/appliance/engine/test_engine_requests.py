"""Requests through the whole engine: limits, ends, cancellation, and nobody's business but one's own."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from appliance.engine.engine import Engine
from appliance.errors import ModelUnsupported, RequestRefused
from appliance.protocol import Rejected, Submit, Tokens


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 131), k=length)


def mixed(tools: Any) -> list[Submit]:
    """Give requests of all kinds, greedy and sampled, short and long."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 12},
        {"temperature": 0.7, "top_p": 0.7, "top_k": 40},
    ]
    lengths = [1, 70, 16, 15, 17, 33, 5, 100, 2, 48]
    return [
        tools.ask(
            f"r{at}", prompt_of(at, length), 25 + at * 3 % 20, seed=at, stop_ids=[at, 99], **kinds[at % len(kinds)]
        )
        for at, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def alone(tools: Any, tiny: Any) -> dict[str, tuple[list[int], str]]:
    """Give each request's answer when it has an engine for itself."""
    found: dict[str, tuple[list[int], str]] = {}
    for submit in mixed(tools):
        found |= tools.answers(tiny.engine(), [submit])
    return found


ENGINES: dict[str, dict[str, int]] = {
    "together": {"max_concurrent": 16},
    "two at a time": {"max_concurrent": 2},
    "prompts in pieces": {"max_concurrent": 16, "step_tokens": 11},
    "so little memory that requests are preempted": {"max_concurrent": 16, "kv_cache_bytes": 10 * 16 * 768},
    "all of it": {"max_concurrent": 5, "step_tokens": 7, "kv_cache_bytes": 9 * 16 * 768},
}


@pytest.mark.parametrize("settings", ENGINES.values(), ids=ENGINES.keys())
@pytest.mark.parametrize("order", range(3))
def test_a_request_gets_the_same_answer_in_any_company(
    tools: Any, tiny: Any, alone: dict[str, tuple[list[int], str]], settings: dict[str, int], order: int
) -> None:
    submits = mixed(tools)
    random.Random(order).shuffle(submits)
    engine = tiny.engine(**settings)
    assert tools.answers(engine, submits) == alone
    assert engine._pool.kv.count_nonzero() == 0
    assert engine.stats().kv_blocks_used == 0


def test_the_engines_above_really_preempt(tools: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import deque

    returned = []

    class Counting(deque):  # type: ignore[type-arg]
        def appendleft(self, item: Any) -> None:
            returned.append(item)
            super().appendleft(item)

    engine = tiny.engine(**ENGINES["so little memory that requests are preempted"])
    engine._scheduler.waiting = Counting()
    tools.answers(engine, mixed(tools))
    assert len(returned) >= 3


def test_answers_are_the_same_when_others_are_cancelled_around_them(
    tools: Any, tiny: Any, alone: dict[str, tuple[list[int], str]]
) -> None:
    engine = tiny.engine(max_concurrent=6, kv_cache_bytes=12 * 16 * 768, step_tokens=20)
    dice = random.Random(7)
    submits = mixed(tools)
    victims = {submit.request for submit in submits[::3]}
    collected: dict[str, list[int]] = {submit.request: [] for submit in submits}
    ends: dict[str, str] = {}
    for submit in submits:
        engine.submit(submit)
    while not engine.idle:
        for message in engine.step():
            assert isinstance(message, Tokens)
            collected[message.request] += message.tokens
            if message.finish:
                ends[message.request] = message.finish
        if victims and dice.random() < 0.5:
            engine.cancel(victims.pop())
    for request, (tokens, finish) in alone.items():
        if ends[request] != "cancelled":
            assert (collected[request], ends[request]) == (tokens, finish)
        else:
            assert collected[request] == tokens[: len(collected[request])]
    assert "cancelled" in ends.values()
    assert engine._pool.kv.count_nonzero() == 0


def test_greedy_answer_equals_generate_of_the_reference(tools: Any, tiny: Any) -> None:
    for seed in range(20):
        prompt = prompt_of(seed, 1 + seed * 3)
        tokens, finish = tools.answers(tiny.engine(), [tools.ask("a", prompt, 12)])["a"]
        ids = torch.tensor([prompt])
        expected = tiny.reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert tokens == expected[0, len(prompt) :].tolist()
        assert finish == "length"


def test_a_seed_repeats_an_answer_and_another_gives_another(tools: Any, tiny: Any) -> None:
    def answer(seed: int) -> list[int]:
        submit = tools.ask("a", prompt_of(1, 9), 30, temperature=1.0, seed=seed)
        return list(tools.answers(tiny.engine(), [submit])["a"][0])

    assert answer(5) == answer(5)
    assert answer(5) != answer(6)
    assert answer(-1) != answer(-1)


def test_a_stop_id_ends_the_answer_and_is_not_in_it(tools: Any, tiny: Any) -> None:
    prompt = prompt_of(3, 20)
    whole, _ = tools.answers(tiny.engine(), [tools.ask("a", prompt, 20)])["a"]
    stop = whole[9]
    tokens, finish = tools.answers(tiny.engine(), [tools.ask("a", prompt, 20, stop_ids=[stop])])["a"]
    assert finish == "stop"
    assert tokens == whole[: whole.index(stop)]


def test_one_token_is_an_answer(tools: Any, tiny: Any) -> None:
    tokens, finish = tools.answers(tiny.engine(), [tools.ask("a", [5], 1)])["a"]
    assert (len(tokens), finish) == (1, "length")


def test_a_context_may_be_filled_to_the_last_token(tools: Any, tiny: Any) -> None:
    tokens, finish = tools.answers(tiny.engine(max_context=64), [tools.ask("a", prompt_of(0, 60), 4)])["a"]
    assert (len(tokens), finish) == (4, "length")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"prompt": []}, "prompt.empty"),
    "token outside the vocabulary": ({"prompt": [1, 131]}, "prompt.token"),
    "negative token": ({"prompt": [-1]}, "prompt.token"),
    "no answer wanted": ({"max_tokens": 0}, "max_tokens"),
    "longer than the context": ({"prompt": [1] * 200, "max_tokens": 57}, "context"),
    "answer longer than any": ({"max_tokens": 1 << 62}, "context"),
    "negative temperature": ({"temperature": -0.1}, "temperature"),
    "temperature no number": ({"temperature": math.nan}, "temperature"),
    "temperature infinite": ({"temperature": math.inf}, "temperature"),
    "top_p zero": ({"top_p": 0.0}, "top_p"),
    "top_p above one": ({"top_p": 1.01}, "top_p"),
    "top_p no number": ({"top_p": math.nan}, "top_p"),
    "negative top_k": ({"top_k": -1}, "top_k"),
    "seed too small": ({"seed": -2}, "seed"),
    "seed too large": ({"seed": 1 << 63}, "seed"),
    "stop id outside the vocabulary": ({"stop_ids": [131]}, "stop_ids"),
    "negative stop id": ({"stop_ids": [-5]}, "stop_ids"),
    "stop ids without end": ({"stop_ids": [1] * 2000}, "stop_ids"),
}


@pytest.mark.parametrize(("changes", "code"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses_a_bad_request_and_serves_the_others(tools: Any, tiny: Any, changes: dict[str, Any], code: str) -> None:
    engine = tiny.engine()
    engine.submit(tools.ask("good", [5, 6], 3))
    fields = {"request": "bad", "prompt": [5], "max_tokens": 3} | changes
    with pytest.raises(RequestRefused) as caught:
        engine.submit(tools.ask(**fields))
    assert caught.value.code == f"request.{code}"
    finished = [message for _ in range(5) for message in engine.step() if message.finish]
    assert [(message.request, message.finish) for message in finished] == [("good", "length")]


def test_refuses_an_id_that_is_in_use_and_takes_it_again_afterwards(tools: Any, tiny: Any) -> None:
    engine = tiny.engine()
    engine.submit(tools.ask("a", [5], 2))
    with pytest.raises(RequestRefused) as caught:
        engine.submit(tools.ask("a", [6], 2))
    assert caught.value.code == "request.id"
    while not engine.idle:
        engine.step()
    engine.submit(tools.ask("a", [6], 2))


def test_refuses_a_request_that_can_never_fit_the_cache(tools: Any, tiny: Any) -> None:
    engine = tiny.engine(kv_cache_bytes=3 * 16 * 768)
    engine.submit(tools.ask("fits", [5] * 40, 8))
    with pytest.raises(RequestRefused) as caught:
        engine.submit(tools.ask("a", [5] * 40, 9))
    assert caught.value.code == "request.memory"


def test_refuses_when_too_many_wait(tools: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.engine.engine._MAX_WAITING", 3)
    engine = tiny.engine()
    for name in "abc":
        engine.submit(tools.ask(name, [5], 2))
    with pytest.raises(RequestRefused) as caught:
        engine.submit(tools.ask("d", [5], 2))
    assert caught.value.code == "request.queue"
    engine.cancel("a")
    engine.submit(tools.ask("d", [5], 2))


def test_a_refusal_does_not_repeat_the_prompt(tools: Any, tiny: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        tiny.engine().submit(tools.ask("a", [77777, 5], 2))
    assert "77777" not in str(caught.value)


def test_broken_arithmetic_ends_one_request_and_no_other(tools: Any, tiny: Any) -> None:
    engine = tiny.engine()
    expected = tools.answers(tiny.engine(), [tools.ask("good", [5, 6, 7], 6)])["good"]
    engine.submit(tools.ask("bad", [8, 9], 6))
    engine.submit(tools.ask("good", [5, 6, 7], 6))
    messages = engine.step()
    bad = engine._sequences["bad"]
    engine._pool.kv[:, bad.table.slots(0, 1)] = math.nan
    while not engine.idle:
        messages += engine.step()
    ended = [message for message in messages if isinstance(message, Rejected)]
    assert [(message.request, message.code) for message in ended] == [("bad", "request.arithmetic")]
    assert [token for message in messages if message.request == "good" for token in message.tokens] == expected[0]
    assert engine._pool.kv.count_nonzero() == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancel_zeroes_the_blocks_at_once(tools: Any, tiny: Any, steps: int) -> None:
    engine = tiny.engine(step_tokens=16)
    engine.submit(tools.ask("a", prompt_of(1, 40), 30))
    for _ in range(steps):
        engine.step()
    engine.cancel("a")
    assert engine._pool.kv.count_nonzero() == 0
    assert engine.stats().kv_blocks_used == 0
    assert not engine.idle
    assert engine.step() == [Tokens("a", [], "cancelled")]
    assert engine.idle


def test_cancel_of_a_waiting_request_and_of_a_preempted_one(tools: Any, tiny: Any) -> None:
    engine = tiny.engine(max_concurrent=1)
    engine.submit(tools.ask("a", [5], 4))
    engine.submit(tools.ask("b", [6], 4))
    engine.step()
    engine.cancel("b")
    assert [message.request for message in engine.step()] == ["b", "a"]
    assert engine.stats().waiting == 0


def test_cancel_of_an_unknown_request_is_ignored(tiny: Any) -> None:
    engine = tiny.engine()
    engine.cancel("nobody")
    assert engine.idle
    assert engine.step() == []


def test_counters_count(tools: Any, tiny: Any) -> None:
    engine = tiny.engine(max_concurrent=2)
    for name in "abc":
        engine.submit(tools.ask(name, [5] * 20, 4))
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used, stats.prompt_tokens, stats.generated_tokens) == (
        2,
        1,
        4,
        40,
        2,
    )
    assert stats.kv_blocks_total == (1 << 20) // (16 * 768)
    while not engine.idle:
        engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used, stats.prompt_tokens, stats.generated_tokens) == (
        0,
        0,
        0,
        60,
        12,
    )


def test_preempted_prompts_are_counted_once(tools: Any, tiny: Any) -> None:
    engine = tiny.engine(**ENGINES["so little memory that requests are preempted"])
    submits = mixed(tools)
    answers = tools.answers(engine, submits)
    stats = engine.stats()
    assert stats.prompt_tokens == sum(len(submit.prompt) for submit in submits)
    assert stats.generated_tokens == sum(len(tokens) for tokens, _ in answers.values())


def test_refuses_a_context_that_the_model_was_not_made_for(tiny: Any) -> None:
    with pytest.raises(ModelUnsupported) as caught:
        tiny.engine(max_context=257)
    assert caught.value.code == "model.config.max_position_embeddings"


def test_the_cache_is_covered_by_the_wipe_of_the_slot(tools: Any) -> None:
    oracle = tools.Oracle(tools.TINY)
    before = oracle.slot.held_bytes
    engine = oracle.engine()
    assert oracle.slot.held_bytes - before >= engine._pool.kv.nbytes
    engine.submit(tools.ask("a", [5] * 20, 4))
    engine.step()
    found = oracle.slot.zeroize()
    assert (found.nonzero_bytes, found.read_back_bytes) == (0, found.overwritten_bytes)
    assert engine._pool.kv.count_nonzero() == 0


def test_wiping_caches_forgets_requests_and_ends_the_engine(tools: Any) -> None:
    oracle = tools.Oracle(tools.TINY)
    engine = oracle.engine()
    for name in "ab":
        engine.submit(tools.ask(name, [5] * 20, 4))
    engine.step()
    engine.wipe_caches()
    assert engine.idle
    assert engine._pool.kv.count_nonzero() == 0
    assert isinstance(engine, Engine)
    with pytest.raises(RuntimeError, match="wiped"):
        engine.submit(tools.ask("c", [5], 4))
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
