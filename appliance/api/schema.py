"""From a request body to a typed request; nothing else in this process reads a client's JSON.

Three kinds of field: those that are done; hints that change no answer and are accepted; and those that would change
the answer but are not done, which are refused by name unless their value asks for nothing. A field of no kind is
refused too, so that a misspelt one is not silently without effect.

Content is kept out of ``repr``, so that no traceback or log line can show it by accident.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from appliance.api.errors import ApiRefused, invalid, missing, unknown, unsupported

MAX_MESSAGES = 1024
MAX_CHOICES = 16
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 256
# OpenAI's own default for this endpoint; chat answers get the room that is left.
COMPLETION_TOKENS = 16

_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_HINTS = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)

# Fields that are not done, with the values that ask for nothing. Null always asks for nothing.
_UNDONE: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
}
_CHAT_UNDONE: dict[str, tuple[Any, ...]] = _UNDONE | {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
_COMPLETION_UNDONE: dict[str, tuple[Any, ...]] = _UNDONE | {
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "suffix": ("",),
}
_MESSAGE_UNDONE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What both endpoints share.

    Attributes:
        model: the name that the client used.
        max_tokens: of one answer; None for the room that is left.
        temperature: 0 is greedy.
        top_p: 0 < top_p <= 1.
        top_k: 0 means no limit.
        seed: None for a random one.
        stop: strings that end an answer; never part of it.
        n: answers per prompt.
        stream: answer as server-sent events.
        include_usage: end a stream with a chunk of token counts.
    """

    model: str
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...] = field(repr=False)
    n: int
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; ``developer`` has become ``system``."""

    role: str
    content: str = field(repr=False)
    name: str = ""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Body of ``/v1/chat/completions``."""

    messages: tuple[ChatMessage, ...] = field(repr=False)
    options: Options


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Body of ``/v1/completions``; each prompt is text or token ids."""

    prompts: tuple[str | tuple[int, ...], ...] = field(repr=False)
    options: Options


def read_chat(body: bytes) -> ChatRequest:
    """Read a chat request.

    Raises:
        ApiRefused: 400, naming the field.
    """
    fields = _Fields(_read_json(body))
    fields.accept_hints()
    fields.refuse_undone(_CHAT_UNDONE)
    messages = fields.take("messages")
    if messages is None:
        raise missing("messages")
    if type(messages) is not list or not 1 <= len(messages) <= MAX_MESSAGES:
        raise invalid("messages", found=_kind(messages), expected=f"a list of 1 to {MAX_MESSAGES} messages")
    turns = tuple(_message(item, f"messages[{index}]") for index, item in enumerate(messages))
    longest, other = fields.take("max_completion_tokens"), fields.peek("max_tokens")
    if longest is not None:
        if other is not None and other != longest:
            raise invalid("max_tokens", found="two different caps", expected="max_completion_tokens or max_tokens")
        fields.put("max_tokens", longest)
    return ChatRequest(turns, _options(fields, answer_tokens=None))


def read_completion(body: bytes) -> CompletionRequest:
    """Read a completion request.

    Raises:
        ApiRefused: 400, naming the field.
    """
    fields = _Fields(_read_json(body))
    fields.accept_hints()
    fields.refuse_undone(_COMPLETION_UNDONE)
    prompts = _prompts(fields.take("prompt"))
    return CompletionRequest(prompts, _options(fields, answer_tokens=COMPLETION_TOKENS))


class _Fields:
    """The members of one JSON object that nobody has taken yet."""

    def __init__(self, value: Any, where: str = "") -> None:
        if type(value) is not dict:
            raise invalid(where or None, found=_kind(value), expected="an object")
        self._left: dict[str, Any] = value
        self._where = where

    def path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def peek(self, name: str) -> Any:
        return self._left.get(name)

    def put(self, name: str, value: Any) -> None:
        self._left[name] = value

    def take(self, name: str) -> Any:
        """Give a member, None when it is absent or null."""
        return self._left.pop(name, None)

    def accept_hints(self) -> None:
        for name in _HINTS:
            self._left.pop(name, None)

    def refuse_undone(self, undone: Mapping[str, tuple[Any, ...]]) -> None:
        for name, neutral in undone.items():
            value = self.take(name)
            # Types too are compared: in Python 0 equals False, but logprobs 0 asks for log probabilities.
            if value is not None and not any(type(value) is type(other) and value == other for other in neutral):
                raise unsupported(self.path(name))

    def text(self, name: str) -> str:
        value = self.take(name)
        if value is None:
            raise missing(self.path(name))
        return _text(value, self.path(name))

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value not in (None, False, True) or type(value) in (int, float):
            raise invalid(self.path(name), found=_kind(value), expected="true or false")
        return bool(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise invalid(self.path(name), found=_kind(value), expected=f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not low <= value <= high:
            raise invalid(self.path(name), found=_kind(value), expected=f"a number from {low:g} to {high:g}")
        return float(value)

    def finish(self) -> None:
        for name in self._left:
            # The name is the client's own text: only a plain one is repeated.
            raise unknown(self.path(name if _NAME.fullmatch(name) else "(a field)"))


def _options(fields: _Fields, *, answer_tokens: int | None) -> Options:
    stream = fields.flag("stream")
    include_usage = False
    if (stream_options := fields.take("stream_options")) is not None:
        if not stream:
            raise invalid("stream_options", found="stream false", expected="stream true")
        inner = _Fields(stream_options, "stream_options")
        include_usage = inner.flag("include_usage")
        inner.take("include_obfuscation")
        inner.finish()
    max_tokens = fields.integer("max_tokens", 1, 2**31 - 1)
    top_p = fields.number("top_p", 0, 1, 1.0)
    if top_p == 0:
        raise invalid("top_p", found="0", expected="more than 0; temperature 0 is greedy")
    options = Options(
        model=fields.text("model"),
        max_tokens=answer_tokens if max_tokens is None else max_tokens,
        temperature=fields.number("temperature", 0, 2, 1.0),
        top_p=top_p,
        top_k=max(fields.integer("top_k", -1, 2**31 - 1) or 0, 0),
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        stop=_stops(fields.take("stop")),
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        stream=stream,
        include_usage=include_usage,
    )
    fields.finish()
    return options


def _message(value: Any, where: str) -> ChatMessage:
    fields = _Fields(value, where)
    fields.refuse_undone(_MESSAGE_UNDONE)
    role = fields.text("role")
    if role in ("tool", "function"):
        raise unsupported(f"{where}.role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", found="another role", expected=", ".join(_ROLES))
    content = _content(fields.take("content"), f"{where}.content")
    name = fields.take("name")
    if name is not None and not _NAME.fullmatch(_text(name, f"{where}.name")):
        raise invalid(f"{where}.name", found="this name", expected="up to 64 letters, digits, _ and -")
    fields.finish()
    return ChatMessage(_ROLES[role], content, name or "")


def _content(value: Any, where: str) -> str:
    """Read the text of a message: a string, or a list of text parts."""
    if value is None:
        raise missing(where)
    if type(value) is not list:
        return _text(value, where)
    parts = []
    for index, item in enumerate(value):
        fields = _Fields(item, f"{where}[{index}]")
        if fields.text("type") != "text":
            raise unsupported(f"{where}[{index}].type")
        parts.append(fields.text("text"))
        fields.finish()
    return "".join(parts)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Read a prompt in any of its four forms: text, texts, token ids, lists of token ids."""
    if value is None:
        raise missing("prompt")
    if type(value) is str:
        return (_text(value, "prompt"),)
    if type(value) is not list or not value:
        raise invalid("prompt", found=_kind(value), expected="text, token ids, or a list of these")
    if all(type(item) is int for item in value):
        return (tuple(value),)
    if len(value) > MAX_CHOICES:
        raise invalid("prompt", found=f"{len(value)} prompts", expected=f"at most {MAX_CHOICES}")
    return tuple(_prompt(item, f"prompt[{index}]") for index, item in enumerate(value))


def _prompt(value: Any, where: str) -> str | tuple[int, ...]:
    if type(value) is not list:
        return _text(value, where)
    if not value or not all(type(item) is int for item in value):
        raise invalid(where, found="another list", expected="token ids")
    return tuple(value)


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if type(value) is str else value
    if type(items) is not list or len(items) > MAX_STOPS:
        raise invalid("stop", found=_kind(value), expected=f"a string, or a list of up to {MAX_STOPS}")
    stops = tuple(_text(item, "stop") for item in items)
    if not all(1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise invalid("stop", found="an empty or long string", expected=f"1 to {MAX_STOP_CHARACTERS} characters")
    return stops


def _text(value: Any, where: str) -> str:
    if type(value) is not str:
        raise invalid(where, found=_kind(value), expected="a string")
    # JSON can spell half of a surrogate pair, which is no text and has no UTF-8 form.
    if _SURROGATE.search(value):
        raise invalid(where, found="half a surrogate pair", expected="unicode text")
    return value


def _kind(value: Any) -> str:
    """Describe a value without repeating text: numbers as they are, else the JSON type."""
    if type(value) in (int, float):
        return f"{value:.6g}" if abs(value) < 1e15 else "a number too large"
    return {str: "a string", list: "a list", dict: "an object", bool: "a boolean"}.get(type(value), "null")


def _read_json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_members, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ApiRefused(400, "invalid_json", found="another body", expected="one JSON object in UTF-8") from None


def _members(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError
    return members


def _no_constant(_: str) -> NoReturn:
    raise ValueError
