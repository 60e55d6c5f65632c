"""The shapes of OpenAI's two endpoints: how each asks, and how each is answered, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from appliance.api.schema import Options, read_chat, read_completion
from appliance.api.servedmodel import ServedModel


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read.

    Attributes:
        options: what both endpoints share.
        prompts: gives the token ids of each prompt; takes a while, so it runs beside the event loop.
    """

    options: Options
    prompts: Callable[[ServedModel], list[list[int]]]


class Chat:
    """``/v1/chat/completions``."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def read(self, body: bytes) -> Asked:
        """Read a request body."""
        request = read_chat(body)
        return Asked(request.options, lambda model: [model.chat_prompt(request.messages)])

    def choice(self, index: int, text: str, finish: str) -> dict[str, Any]:
        """Give one complete answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Give the chunk that names the speaker, before any text."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def delta(self, index: int, text: str, finish: str) -> dict[str, Any]:
        """Give more text, or the end of an answer."""
        return self._chunk(index, {"content": text} if text else {}, finish or None)

    def _chunk(self, index: int, delta: dict[str, str], finish: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


class Completion:
    """``/v1/completions``."""

    prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"

    def read(self, body: bytes) -> Asked:
        """Read a request body."""
        request = read_completion(body)
        return Asked(request.options, lambda model: [model.text_prompt(prompt) for prompt in request.prompts])

    def choice(self, index: int, text: str, finish: str) -> dict[str, Any]:
        """Give one complete answer."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish or None}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Give nothing: a completion has no speaker."""
        del index
        return None

    def delta(self, index: int, text: str, finish: str) -> dict[str, Any]:
        """Give more text, or the end of an answer."""
        return self.choice(index, text, finish)


Dialect: TypeAlias = Chat | Completion
