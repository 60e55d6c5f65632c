"""What a request body may say; every refusal names its field and repeats no text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from appliance.api import schema
from appliance.api.errors import ApiRefused
from appliance.api.schema import read_chat, read_completion

CANARY = "canary-7f21"
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": HELLO} | fields).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "hello"} | fields).encode()


def refusal(body: bytes, *, completions: bool = False) -> ApiRefused:
    with pytest.raises(ApiRefused) as caught:
        (read_completion if completions else read_chat)(body)
    assert caught.value.status == 400
    return caught.value


def test_reads_a_plain_chat_with_openais_defaults() -> None:
    request = read_chat(chat())
    assert request.messages == (schema.ChatMessage("user", "hello"),)
    assert (request.options.temperature, request.options.top_p, request.options.top_k) == (1.0, 1.0, 0)
    assert (request.options.n, request.options.stream, request.options.max_tokens) == (1, False, None)


def test_null_means_absent() -> None:
    fields = ("temperature", "top_p", "n", "stop", "seed", "max_tokens", "stream", "tools", "logprobs", "user", "top_k")
    assert read_chat(chat(**dict.fromkeys(fields))) == read_chat(chat())


def test_developer_speaks_as_system() -> None:
    assert read_chat(chat(messages=[{"role": "developer", "content": "x"}])).messages[0].role == "system"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert read_chat(chat(messages=[{"role": "user", "content": parts}])).messages[0].content == "one two"


def test_an_answer_of_the_client_library_can_be_sent_back() -> None:
    answer = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert read_chat(chat(messages=[*HELLO, answer])).messages[1].content == "hi"


def test_both_names_of_the_answer_cap_are_read() -> None:
    assert read_chat(chat(max_completion_tokens=7)).options.max_tokens == 7
    assert read_chat(chat(max_tokens=7, max_completion_tokens=7)).options.max_tokens == 7


def test_two_different_caps_are_refused() -> None:
    assert refusal(chat(max_tokens=7, max_completion_tokens=8)).param == "max_tokens"


def test_completion_has_openais_default_cap() -> None:
    assert read_completion(completion()).options.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_prompt_comes_in_four_forms(prompt: Any, prompts: Any) -> None:
    assert read_completion(completion(prompt=prompt)).prompts == prompts


@pytest.mark.parametrize("prompt", [[], {}, 5, [[]], [[1], ["a"]], [None], ["a"] * 17, [[1.5]], [True]])
def test_refuses_other_prompts(prompt: Any) -> None:
    error = refusal(completion(prompt=prompt), completions=True)
    assert error.code == "invalid_value"
    assert str(error.param).startswith("prompt")


@pytest.mark.parametrize(
    ("stop", "stops"), [("a", ("a",)), (["a", "b"], ("a", "b")), ([], ()), (["x"] * 64, ("x",) * 64)]
)
def test_stop_is_a_string_or_a_list(stop: Any, stops: Any) -> None:
    assert read_chat(chat(stop=stop)).options.stop == stops


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**63),
        ("seed", 1.5),
        ("n", 0),
        ("n", 17),
        ("n", True),
        ("max_tokens", 0),
        ("max_tokens", "9"),
        ("stop", ["x"] * 65),
        ("stop", ""),
        ("stop", ["a", 1]),
        ("stop", "x" * 257),
        ("stream", 1),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("messages", []),
        ("messages", "hello"),
        ("messages", HELLO * 1025),
        ("model", 5),
    ],
)
def test_refuses_a_value_out_of_range_by_name(field: str, value: Any) -> None:
    error = refusal(chat(**{field: value}))
    assert (error.code, error.param) == ("invalid_value", field)


@pytest.mark.parametrize("field", ["model", "messages"])
def test_refuses_a_missing_field_by_name(field: str) -> None:
    error = refusal(chat(**{field: None}))
    assert (error.code, error.param) == ("missing_required_parameter", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("logit_bias", {"5": 100}),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("moderation", {}),
    ],
)
def test_refuses_what_would_change_the_answer_but_is_not_done(field: str, value: Any) -> None:
    error = refusal(chat(**{field: value}))
    assert (error.code, error.param) == ("unsupported_parameter", field)


@pytest.mark.parametrize(
    ("field", "value"), [("echo", True), ("suffix", "x"), ("logprobs", 0), ("best_of", 2), ("logit_bias", {"1": 1})]
)
def test_refuses_what_completions_do_not_do(field: str, value: Any) -> None:
    error = refusal(completion(**{field: value}), completions=True)
    assert (error.code, error.param) == ("unsupported_parameter", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("logprobs", False),
        ("top_logprobs", 0),
        ("logit_bias", {}),
        ("frequency_penalty", 0),
        ("presence_penalty", 0.0),
        ("modalities", ["text"]),
        ("user", "someone"),
        ("metadata", {"a": "b"}),
        ("store", False),
        ("service_tier", "auto"),
        ("parallel_tool_calls", True),
    ],
)
def test_accepts_hints_and_values_that_ask_for_nothing(field: str, value: Any) -> None:
    assert read_chat(chat(**{field: value})) == read_chat(chat())


def test_refuses_an_unknown_field_by_name() -> None:
    error = refusal(chat(temprature=0))
    assert (error.code, error.param) == ("unknown_parameter", "temprature")


def test_does_not_repeat_a_field_name_that_is_no_name() -> None:
    assert CANARY not in json.dumps(refusal(chat(**{f"{CANARY} and a sentence": 1})).as_body())


@pytest.mark.parametrize("field", ["chat_template", "chat_template_kwargs", "documents", "add_generation_prompt"])
def test_refuses_to_take_a_template_or_its_parts_from_a_request(field: str) -> None:
    assert refusal(chat(**{field: "{{ 1 }}"})).code == "unknown_parameter"


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ({"role": "user"}, "messages[0].content", "missing_required_parameter"),
        ({"role": "user", "content": 5}, "messages[0].content", "invalid_value"),
        ({"content": "x"}, "messages[0].role", "missing_required_parameter"),
        ({"role": "wizard", "content": "x"}, "messages[0].role", "invalid_value"),
        ({"role": "tool", "content": "x", "tool_call_id": None}, "messages[0].role", "unsupported_parameter"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls", "unsupported_parameter"),
        ({"role": "user", "content": "x", "name": "a b"}, "messages[0].name", "invalid_value"),
        ({"role": "user", "content": "x", "colour": 1}, "messages[0].colour", "unknown_parameter"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text", "missing_required_parameter"),
        ("hello", "messages[0]", "invalid_value"),
    ],
)
def test_refuses_a_message_by_the_path_of_its_fault(message: Any, param: str, code: str) -> None:
    error = refusal(chat(messages=[message]))
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b'{"model": "m"',
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'\xff{"a": 1}',
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
    ids=["empty", "text", "cut", "twice", "nan", "infinity", "not utf-8", "deep", "huge number"],
)
def test_refuses_what_is_not_json(body: bytes) -> None:
    assert refusal(body).code == "invalid_json"


def test_refuses_json_that_is_no_object() -> None:
    assert refusal(b"[1]").code == "invalid_value"


def test_refuses_half_a_surrogate_pair() -> None:
    assert refusal(b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}').code == "invalid_value"


@pytest.mark.parametrize(
    "body",
    [
        chat(messages=[{"role": CANARY, "content": CANARY}]),
        chat(messages=[{"role": "user", "content": {CANARY: CANARY}}]),
        chat(stop=[CANARY * 100]),
        chat(temperature=CANARY),
        chat(model={"x": CANARY}),
        chat(messages=CANARY),
        f'{{"messages": "{CANARY}'.encode(),
    ],
)
def test_refusals_repeat_no_text_of_the_request(body: bytes) -> None:
    error = refusal(body)
    assert CANARY not in json.dumps(error.as_body()) + str(error)


def test_no_content_shows_in_the_repr_of_a_request() -> None:
    asked = read_chat(chat(messages=[{"role": "user", "content": CANARY}], stop=CANARY))
    assert CANARY not in repr(asked) + repr(asked.messages[0]) + repr(asked.options)
    assert CANARY not in repr(read_completion(completion(prompt=CANARY)))


@pytest.mark.parametrize(
    ("parameters", "read", "base"),
    [
        (chat_create_params.CompletionCreateParamsBase, read_chat, chat),
        (completion_create_params.CompletionCreateParamsBase, read_completion, completion),
    ],
    ids=["chat", "completions"],
)
def test_every_field_of_the_client_library_is_known(parameters: Any, read: Any, base: Any) -> None:
    """None of them may end as an unknown field, which would call a documented field a spelling mistake."""
    names = set(parameters.__annotations__) - {"model", "messages", "prompt"}
    assert read(base(**dict.fromkeys(names))) == read(base())
