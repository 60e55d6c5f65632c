"""Raw completions as the official client library sees them."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types import Completion

from tests.sim.api_process import MODEL, ApiProcess
from tests.sim.chat_model import end_id, ids
from tests.sim.engine_peer import says


def ask(client: openai.OpenAI, **fields: Any) -> Completion:
    answer = client.completions.create(**{"model": MODEL, "prompt": "hello", **fields})
    assert isinstance(answer, Completion)
    return answer


def test_answers_whole(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids(" world"), end=end_id())
    answer = ask(client)
    assert answer.object == "text_completion"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" world", "stop")
    assert api.engine.next_submit().prompt == ids("hello")


def test_prompt_may_be_token_ids(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids("x"))
    ask(client, prompt=[5, 6, 7])
    assert api.engine.next_submit().prompt == [5, 6, 7]


def test_several_prompts_give_their_answers_in_order(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = lambda submit: says(submit.prompt, end=end_id())(submit)
    answer = ask(client, prompt=["one", "two"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["one", "one", "two", "two"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids("one")) + len(ids("two"))


def test_streams_text(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids(" world"), end=end_id())
    chunks = list(client.completions.create(model=MODEL, prompt="hello", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " world"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("suffix", "x"), ("best_of", 3), ("logprobs", 1)])
def test_refuses_by_name_what_is_not_done(client: openai.OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **{field: value})
    assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")


def test_refuses_a_token_id_that_the_model_does_not_have(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, prompt=[10**6])
    assert caught.value.param == "prompt"


def test_refuses_more_answers_than_the_cap(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, prompt=["a"] * 5, n=4)
    assert caught.value.param == "n"
