"""The model's own chat template, rendered in Jinja's immutable sandbox; never one that a request brings.

The template comes out of the sealed catalog, so its author is the model's owner. The sandbox and the bounds on size
and time are there because client text flows through it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from appliance.api.errors import ApiRefused, invalid
from appliance.api.schema import ChatMessage
from appliance.errors import ModelUnsupported

MAX_CHARACTERS = 64 << 20
MAX_SECONDS = 5.0


class _GenerationTag(Extension):
    """Accepts ``{% generation %}``, which marks the assistant's text for training and means nothing here."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja2 declares a mutable set

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Give the statements inside the tag as they are."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_TEMPLATE_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_EXTENSIONS = [LoopControlExtension, _GenerationTag]


class ChatTemplate:
    """A compiled template with the constants that it may use (``bos_token`` and the like)."""

    def __init__(self, source: str, constants: Mapping[str, str], *, now: Callable[[], datetime]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelUnsupported(
                "model.template",
                found=f"a chat template that does not compile ({type(error).__name__})",
                expected="a Jinja template",
                hint="pack the model again with a working chat_template",
            ) from None
        self._constants = dict(constants)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Give the prompt text of a conversation, ready for the assistant's turn.

        Raises:
            ApiRefused: 400 ``invalid_value`` when the template refuses the conversation or exceeds its bounds.
        """
        turns = [
            {"role": turn.role, "content": turn.content} | ({"name": turn.name} if turn.name else {})
            for turn in messages
        ]
        pieces: list[str] = []
        size, start = 0, time.monotonic()
        try:
            for piece in self._template.generate(self._constants, messages=turns, add_generation_prompt=True):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARACTERS or time.monotonic() - start > MAX_SECONDS:
                    raise _refused("a conversation that takes too long to format", "a smaller one")
        except _TemplateSaysNo:
            raise _refused("a sequence of roles that the model's template refuses", "one that it accepts") from None
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS):
            raise _refused("a conversation that the model's template fails on", "one that it accepts") from None
        return "".join(pieces)


class _TemplateSaysNo(jinja2.TemplateError):
    """The template called ``raise_exception``. Its message may hold content, so it is dropped."""


def _raise_exception(_: str) -> NoReturn:
    raise _TemplateSaysNo


def _to_json(value: Any, indent: int | None = None) -> str:
    """Write JSON as templates expect it: not escaped for HTML, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refused(found: str, expected: str) -> ApiRefused:
    return invalid("messages", found=found, expected=expected)
