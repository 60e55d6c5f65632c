"""The model's own chat template in its sandbox."""

from __future__ import annotations

import json

import pytest

from appliance.api import template as template_module
from appliance.api.errors import ApiRefused
from appliance.api.schema import ChatMessage
from appliance.api.servedmodel import prepare
from appliance.api.template import ChatTemplate
from appliance.errors import ModelUnsupported
from appliance.protocol import ModelReady
from tests.sim import chat_model
from tests.sim.times import NOW

HELLO = [ChatMessage("user", "hello", "ann")]


def render(source: str, messages: list[ChatMessage] = HELLO, **constants: str) -> str:
    return ChatTemplate(source, constants, now=lambda: NOW).render(messages)


def refusal(source: str) -> ApiRefused:
    with pytest.raises(ApiRefused) as caught:
        render(source)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_value", "messages")
    return caught.value


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0]['role'] }}:{{ messages[0].content }}", "user:hello"),
        ("{{ messages[0].name }}", "ann"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{{ bos_token }}", "<s>"),
        ("{{ strftime_now('%Y-%m-%d') }}", "2026-11-30"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("  {% if true %}\nx{% endif %}", "x"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}", "3"),
    ],
)
def test_renders_what_templates_use(source: str, text: str) -> None:
    assert render(source, bos_token="<s>") == text


def test_message_text_is_data_and_never_template() -> None:
    assert render("{{ messages[0].content }}", [ChatMessage("user", "{{ 7 * 7 }}")]) == "{{ 7 * 7 }}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ messages[5].content.x }}",
        "{{ 1 / 0 }}",
        "{{ 'x' + 1 }}",
        "{% for x in range(10000000) %}{% endfor %}",
    ],
)
def test_template_that_leaves_the_sandbox_or_fails_is_that_requests_error(source: str) -> None:
    refusal(source)


def test_template_may_refuse_a_conversation_without_showing_its_text() -> None:
    error = refusal("{{ raise_exception('bad: ' + messages[0].content) }}")
    assert "hello" not in json.dumps(error.as_body())


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_CHARACTERS", 1000)
    refusal("{% for x in range(2000) %}{{ x }}{% endfor %}")


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_SECONDS", -1.0)
    refusal("{{ 1 }}")


def test_refuses_a_template_that_does_not_compile() -> None:
    with pytest.raises(ModelUnsupported) as caught:
        render("{% if %}")
    assert caught.value.code == "model.template"


def served_template(config: object, separate: bytes = b"") -> str | None:
    ready = chat_model.ready()
    raw = json.dumps(config).encode()
    changed = ModelReady(ready.max_context, ready.vocabulary, ready.eos_ids, ready.tokenizer, raw, separate)
    model = prepare(changed, name="m", max_output_tokens=8, now=lambda: NOW)
    return None if model.template is None else model.template.render(HELLO)


def test_template_file_wins_over_the_configuration() -> None:
    assert served_template({"chat_template": "config"}, b"file") == "file"


def test_default_is_taken_of_several_templates() -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert served_template({"chat_template": several}) == "plain"


def test_special_tokens_come_as_text_or_as_objects() -> None:
    config = {"bos_token": {"content": "<b>"}, "eos_token": "<e>", "pad_token": None}
    assert served_template(config | {"chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}"}) == "<b><e>"


@pytest.mark.parametrize("config", [{}, {"chat_template": None}, {"chat_template": [5]}, {"chat_template": 5}])
def test_model_without_a_template_refuses_chat_but_not_text(config: object) -> None:
    assert served_template(config) is None


def test_chat_without_a_template_names_the_other_endpoint() -> None:
    model = prepare(chat_model.ready(template=""), name="m", max_output_tokens=8, now=lambda: NOW)
    with pytest.raises(ApiRefused, match="chat_template_missing"):
        model.chat_prompt(HELLO)


@pytest.mark.parametrize("config", [[], "text", 5])
def test_refuses_a_tokenizer_configuration_that_is_no_object(config: object) -> None:
    with pytest.raises(ModelUnsupported) as caught:
        served_template(config)
    assert caught.value.code == "model.tokenizer"
