from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from appliance.engine.sampler import MAX_SEED, Sampling, random_seed, sample, uniform

VOCABULARY = 2000


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def reference(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Give the probabilities that transformers would sample from."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return torch.softmax(scores, dim=-1)[0]


SETTINGS = {
    "temperature alone": Sampling(temperature=0.5, top_p=1.0, top_k=0, seed=0),
    "top_k": Sampling(temperature=1.0, top_p=1.0, top_k=7, seed=0),
    "top_p, few tokens": Sampling(temperature=0.7, top_p=0.6, top_k=0, seed=0),
    "top_p, nearly all tokens": Sampling(temperature=3.0, top_p=0.999, top_k=0, seed=0),
    "top_k then top_p": Sampling(temperature=1.5, top_p=0.8, top_k=20, seed=0),
    "top_k above the vocabulary": Sampling(temperature=1.0, top_p=0.9, top_k=VOCABULARY * 2, seed=0),
    "tiny top_p": Sampling(temperature=1.0, top_p=1e-9, top_k=0, seed=0),
}


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS.keys())
def test_draws_follow_the_probabilities_of_the_reference(sampling: Sampling) -> None:
    logits = logits_of(3)
    expected = reference(logits, sampling)
    count = 4000
    drawn = Counter(token for number in range(count) for token in sample(logits, [(sampling, number)]))
    assert {token for token in drawn if token is not None} <= set(torch.nonzero(expected)[:, 0].tolist())
    for token, probability in enumerate(expected.tolist()):
        # Five standard deviations; the draws are fixed by seed and position, so this is the same in every run.
        assert abs(drawn[token] / count - probability) <= 5 * math.sqrt(probability * (1 - probability) / count) + 5e-4


def test_greedy_takes_the_largest_logit() -> None:
    logits = logits_of(4, rows=5)
    greedy = Sampling(temperature=0.0, top_p=0.1, top_k=3, seed=1)
    assert sample(logits, [(greedy, at) for at in range(5)]) == logits.argmax(dim=-1).tolist()


def test_one_candidate_is_greedy_at_any_temperature() -> None:
    logits = logits_of(5)
    for sampling in (
        Sampling(temperature=9.0, top_p=1.0, top_k=1, seed=2),
        Sampling(temperature=9.0, top_p=1e-12, top_k=0, seed=2),
    ):
        assert sample(logits, [(sampling, 0)]) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("temperature", [1e-30, 5e-324])
def test_a_vanishing_temperature_is_greedy_and_never_overflows(temperature: float) -> None:
    logits = logits_of(6)
    sampling = Sampling(temperature=temperature, top_p=1.0, top_k=0, seed=3)
    assert sample(logits, [(sampling, 0)]) == logits.argmax(dim=-1).tolist()


def test_a_row_chooses_the_same_in_any_batch() -> None:
    logits = logits_of(7, rows=16)
    choices = [(Sampling(temperature=1.0, top_p=0.95, top_k=row % 3 * 20, seed=row), row) for row in range(16)]
    together = sample(logits, choices)
    alone = [sample(logits[row : row + 1], [choices[row]])[0] for row in range(16)]
    backwards = sample(logits.flip(0), choices[::-1])
    assert together == alone == backwards[::-1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_numbers_fails_alone(bad: float) -> None:
    logits = logits_of(8, rows=3)
    expected = sample(logits, [(Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0), 0)] * 3)
    logits[1, 700] = bad
    found = sample(logits, [(Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0), 0)] * 3)
    assert found == [expected[0], None, expected[2]]


def test_a_row_of_minus_infinity_fails() -> None:
    assert sample(torch.full((1, 9), -math.inf), [(SETTINGS["top_k"], 0)]) == [None]


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 50), -math.inf)
    logits[0, [7, 9]] = 0.0
    drawn = {sample(logits, [(Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=0), at)])[0] for at in range(200)}
    assert drawn == {7, 9}


def test_no_rows_choose_nothing() -> None:
    assert sample(torch.empty(0, VOCABULARY), []) == []


def test_uniform_depends_on_seed_and_position_and_fills_the_interval() -> None:
    numbers = [uniform(seed, position) for seed in (0, 1, MAX_SEED) for position in range(2000)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert uniform(0, 0) == 0.4485239887895337  # a known answer: the numbers are the same on every machine


def test_random_seeds_differ_and_are_in_range() -> None:
    seeds = {random_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
