"""What the API knows of the model: how to make prompts for it, and how much it takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from appliance.api.errors import ApiRefused, invalid, too_long
from appliance.api.schema import ChatMessage, Options
from appliance.api.template import ChatTemplate
from appliance.api.tokenizer import PromptTokenizer
from appliance.errors import ModelUnsupported
from appliance.protocol import ModelReady


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that is resident now.

    Attributes:
        name: what clients call it.
        created: Unix time, seconds, when it became ready.
        max_context: longest prompt plus answer, tokens.
        max_output_tokens: longest answer by the owner's serving policy, tokens.
        vocabulary: token ids are below this.
        end_ids: token ids that end an answer.
        template: None for a model that has no chat template.
    """

    name: str
    created: int
    max_context: int
    max_output_tokens: int
    vocabulary: int
    end_ids: tuple[int, ...]
    tokenizer: PromptTokenizer
    template: ChatTemplate | None

    def chat_prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Give the token ids of a conversation.

        Raises:
            ApiRefused: 400, also when the model has no chat template.
        """
        if self.template is None:
            raise ApiRefused(
                400,
                "chat_template_missing",
                found="a model without a chat template",
                expected="a chat model",
                hint="use /v1/completions",
            )
        return self.tokenizer.encode_chat(self.template, messages)

    def text_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Give the token ids of a raw prompt.

        Raises:
            ApiRefused: 400 for an empty prompt or an id outside the vocabulary.
        """
        ids = self.tokenizer.encode_text(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise invalid("prompt", found="no tokens", expected="at least one")
        if not all(0 <= token < self.vocabulary for token in ids):
            raise invalid("prompt", found="a token id outside the vocabulary", expected=f"0 to {self.vocabulary - 1}")
        return ids

    def answer_tokens(self, options: Options, prompt_tokens: int) -> int:
        """Give how many tokens an answer may have.

        Raises:
            ApiRefused: ``context_length_exceeded``, or ``invalid_value`` above the owner's cap.
        """
        room = self.max_context - prompt_tokens
        asked = options.max_tokens
        if asked is not None and asked > self.max_output_tokens:
            raise invalid("max_tokens", found=str(asked), expected=f"at most {self.max_output_tokens}")
        if room < (asked or 1):
            raise too_long(prompt_tokens=prompt_tokens, answer_tokens=asked or 1, limit=self.max_context)
        return asked or min(room, self.max_output_tokens)


def prepare(ready: ModelReady, *, name: str, max_output_tokens: int, now: Callable[[], datetime]) -> ServedModel:
    """Make tokenizer and template of the model that became resident.

    Raises:
        ModelUnsupported: ``model.tokenizer`` or ``model.template``.
    """
    config = _read_config(ready.tokenizer_config)
    source = ready.chat_template.decode("utf-8", "replace") or _template_of(config)
    constants = {key: _token_text(value) for key, value in config.items() if key.endswith("_token")}
    return ServedModel(
        name=name,
        created=int(now().timestamp()),
        max_context=ready.max_context,
        max_output_tokens=max_output_tokens,
        vocabulary=ready.vocabulary,
        end_ids=tuple(ready.eos_ids),
        tokenizer=PromptTokenizer(ready.tokenizer, max_context=ready.max_context),
        template=ChatTemplate(source, constants, now=now) if source else None,
    )


def _read_config(raw: bytes) -> dict[str, Any]:
    try:
        config = json.loads(raw or b"{}")
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ModelUnsupported(
            "model.tokenizer",
            found="a tokenizer_config.json that is no JSON object",
            expected="one",
            hint="pack the model again with its tokenizer_config.json",
        )
    return config


def _template_of(config: dict[str, Any]) -> str:
    """Find the template in ``tokenizer_config.json``: text, or a list of named ones of which ``default`` counts."""
    entry = config.get("chat_template") or ""
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default") or ""
    return entry if isinstance(entry, str) else ""


def _token_text(value: Any) -> str:
    """Give the text of a special token, which is written plainly or as an object with ``content``."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""
