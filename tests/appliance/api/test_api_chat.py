"""Chat completions as the official client library sees them."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from appliance.protocol import Tokens
from tests.sim import chat_model
from tests.sim.api_process import MODEL, ApiProcess
from tests.sim.chat_model import end_id, ids
from tests.sim.engine_peer import begins, rejects, says

HELLO: Any = [{"role": "user", "content": "hello"}]


def ask(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    answer = client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **fields})
    assert isinstance(answer, ChatCompletion)
    return answer


def stream(client: openai.OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    return list(client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "stream": True, **fields}))


def refusal(client: openai.OpenAI, **fields: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, **fields)
    return caught.value


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_answers_whole(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids("hello world"), end=end_id())
    answer = ask(client)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].finish_reason == "stop"


def test_counts_tokens(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids("hello world"), end=end_id())
    usage = ask(client).usage
    assert usage is not None
    submit = api.engine.next_submit()
    assert usage.prompt_tokens == len(submit.prompt)
    assert usage.completion_tokens == len(ids("hello world")) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_engine_gets_the_rendered_conversation(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids("x"))
    ask(client, messages=[{"role": "developer", "content": "be brief"}, *HELLO])
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert api.engine.next_submit().prompt == ids(expected)


def test_engine_gets_the_sampling_parameters(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids("x"))
    ask(client, temperature=0.5, top_p=0.25, seed=7, max_tokens=3, extra_body={"top_k": 9})
    submit = api.engine.next_submit()
    assert (submit.temperature, submit.top_p, submit.top_k, submit.seed) == (0.5, 0.25, 9, 7)
    assert (submit.max_tokens, submit.stop_ids) == (3, [end_id()])


def test_seed_is_random_unless_given_and_never_negative(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids("x"))
    ask(client)
    ask(client, seed=-1)
    assert [api.engine.next_submit().seed for _ in range(2)] == [-1, 2**63 - 1]


def test_answer_may_take_the_owners_cap_or_the_room_that_is_left(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids("x"))
    ask(client)
    assert api.engine.next_submit().max_tokens == 64
    ask(client, messages=[{"role": "user", "content": "x" * 220}])
    submit = api.engine.next_submit()
    assert len(submit.prompt) + submit.max_tokens == chat_model.MAX_CONTEXT


def test_length_ends_an_answer(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids("hello world"), end=end_id())
    choice = ask(client, max_tokens=1).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("length", "hello")


def test_stream_opens_with_the_role_and_ends_each_choice_once(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids("hello world"), end=end_id())
    chunks = stream(client)
    first, *middle, last = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert all(choice.delta.content and choice.finish_reason is None for choice in middle)
    assert (last.delta.content, last.finish_reason) == (None, "stop")
    assert text_of(chunks) == "hello world"


def test_all_chunks_of_a_stream_share_id_time_and_model(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids("hello world"), end=end_id())
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in stream(client)}) == 1


def test_usage_comes_in_a_last_chunk_only_when_asked_for(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids("hello"), end=end_id())
    assert all(chunk.choices and chunk.usage is None for chunk in stream(client))
    *others, last = stream(client, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in others)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 2


def test_stream_is_made_of_data_lines_and_ends_with_done(api: ApiProcess) -> None:
    api.engine.script = says(ids("hello"), end=end_id())
    with api.http() as http:
        answer = http.post(
            f"{api.url}/v1/chat/completions",
            headers={"authorization": f"Bearer {api.key}"},
            json={"model": MODEL, "messages": HELLO, "stream": True},
        )
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


@pytest.mark.parametrize("batch", [1, 3])
def test_stream_and_whole_answer_say_the_same(api: ApiProcess, client: openai.OpenAI, batch: int) -> None:
    said = "héllo 😀 — world\n"
    api.engine.script = says(ids(said), end=end_id(), batch=batch)
    assert text_of(stream(client)) == ask(client).choices[0].message.content == said


def test_stop_string_ends_the_answer_and_the_work_of_the_engine(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = begins(ids("one two END three"))
    answer = ask(client, stop=["never", "END"]).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("one two ", "stop")
    assert api.engine.next_cancel() == api.engine.next_submit().request


def test_stream_shows_no_part_of_a_stop_string(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids("one two END three"), end=end_id())
    chunks = stream(client, stop="two END")
    assert text_of(chunks) == "one "
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_several_answers_come_with_an_index_each(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids("hello"), end=end_id())
    answer = ask(client, n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["hello"] * 3
    assert [api.engine.next_submit().seed for _ in range(3)] == [5, 6, 7]


def test_several_answers_share_one_stream(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = says(ids("hello world"), end=end_id())
    chunks = stream(client, n=2)
    finishes = [(choice.index, choice.finish_reason) for chunk in chunks for choice in chunk.choices]
    assert [text_of(chunks, index) for index in (0, 1)] == ["hello world"] * 2
    assert sorted(item for item in finishes if item[1]) == [(0, "stop"), (1, "stop")]


def test_answers_do_not_mix(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = begins(ids("a"))
    first = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    ours = api.engine.next_submit().request
    api.engine.script = begins(ids("b"))
    second = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    theirs = api.engine.next_submit().request
    api.engine.send(Tokens(theirs, ids("B"), "length"))
    api.engine.send(Tokens(ours, ids("A"), "length"))
    assert (text_of(list(first)), text_of(list(second))) == ("aA", "bB")


def test_refuses_another_model(client: openai.OpenAI) -> None:
    error = refusal(client, model="gpt-4")
    assert (error.status_code, error.code, error.param) == (404, "model_not_found", "model")


def test_refuses_an_answer_above_the_owners_cap(client: openai.OpenAI) -> None:
    error = refusal(client, max_tokens=65)
    assert (error.status_code, error.code, error.param) == (400, "invalid_value", "max_tokens")


@pytest.mark.parametrize("content", ["x" * 300, "x" * 60_000], ids=["by tokens", "by characters"])
def test_refuses_a_prompt_longer_than_the_context(client: openai.OpenAI, content: str) -> None:
    error = refusal(client, messages=[{"role": "user", "content": content}])
    assert (error.status_code, error.code) == (400, "context_length_exceeded")


def test_refuses_prompt_and_answer_that_do_not_fit_together(client: openai.OpenAI) -> None:
    error = refusal(client, messages=[{"role": "user", "content": "x" * 220}], max_tokens=64)
    assert (error.status_code, error.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize("streamed", [False, True])
def test_refusal_of_the_engine_has_a_status_line(api: ApiProcess, client: openai.OpenAI, streamed: bool) -> None:
    api.engine.script = rejects("request.context", "private words of the engine")
    error = refusal(client, stream=streamed)
    assert (error.status_code, error.code) == (400, "request.context")
    assert "private" not in str(error)


def test_library_sees_its_own_error_class(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=[{"type": "function", "function": {"name": "f"}}])
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
    assert caught.value.type == "invalid_request_error"


def test_late_tokens_of_a_cancelled_answer_go_nowhere(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = begins(ids("one."))
    ask(client, stop=".")
    cancelled = api.engine.next_cancel()
    api.engine.next_submit()
    api.engine.send(Tokens(cancelled, ids("ghost"), ""))
    api.engine.send(Tokens(cancelled, [], "cancelled"))
    api.engine.script = says(ids("two"), end=end_id())
    assert ask(client).choices[0].message.content == "two"
