"""The real model against transformers: greedy answers, token for token, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from appliance.engine.engine import Engine
from appliance.engine.model import Decoder
from appliance.slot_cpu import CpuSlot

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "List three prime numbers above 100.",
    "Who wrote Hamlet, and when?",
    "Translate 'good morning' into Spanish, German and Italian.",
    "What is 17 + 26?",
    "Explain photosynthesis to a child.",
    "Give me a recipe for pancakes with 200 g of flour.",
    "What does a compiler do?",
    "Was ist die Hauptstadt von Österreich?",
    "Name the planets in order from the sun.",
)
TEXTS = (
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "The quick brown fox",
    "In 1969, the first",
    "Water boils at",
    "The river Lethe, in Greek myth,",
    "import numpy as np\n\nx = np.",
    "Dear Sir or Madam,\n\n",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    " ",
    "∑ x² — naïve café, 日本語: ",
    "The " * 300,
)
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    chats = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    return [tokenizer.encode(text).ids for text in (*chats, *TEXTS)]


@pytest.fixture(scope="module")
def expected(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
        )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


def without_end(tokens: list[int]) -> list[int]:
    return tokens[:-1] if tokens[-1] == 2 else tokens


@pytest.mark.parametrize(
    "settings",
    [
        {"max_concurrent": 1, "step_tokens": 512},
        {"max_concurrent": 16, "step_tokens": 512},
        {"max_concurrent": 5, "step_tokens": 48},
    ],
    ids=["one at a time", "sixteen together", "prompts in pieces"],
)
def test_greedy_answers_equal_the_reference_token_for_token(
    tools: Any,
    real_decoder: tuple[Decoder, CpuSlot],
    prompts: list[list[int]],
    expected: list[list[int]],
    settings: dict[str, int],
) -> None:
    decoder, slot = real_decoder
    engine = Engine(tools.resident_of(decoder, slot), kv_cache_bytes=256 << 20, max_context=1024, **settings)
    submits = [tools.ask(str(index), prompt, NEW_TOKENS, stop_ids=[2]) for index, prompt in enumerate(prompts)]
    found = tools.answers(engine, submits)
    assert len(prompts) >= 20
    for index, tokens in enumerate(expected):
        assert found[str(index)][0] == without_end(tokens), index
        assert found[str(index)][1] == ("stop" if tokens[-1] == 2 else "length")


def test_the_answer_is_right(
    tools: Any, real_decoder: tuple[Decoder, CpuSlot], prompts: list[list[int]], model_dir: Path
) -> None:
    decoder, slot = real_decoder
    engine = Engine(tools.resident_of(decoder, slot), kv_cache_bytes=16 << 20, max_context=256, max_concurrent=1)
    tokens, finish = tools.answers(engine, [tools.ask("a", prompts[0], 24, stop_ids=[2])])["a"]
    assert Tokenizer.from_file(str(model_dir / "tokenizer.json")).decode(tokens) == "The capital of France is Paris."
    assert finish == "stop"
