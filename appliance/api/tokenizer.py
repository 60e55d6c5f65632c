"""The model's tokenizer, from bytes in memory, without a memory of past prompts.

Two instances do the work: one that reads control tokens in text, and one that does not. A rendered conversation is cut
at its control tokens, which are the template's own (disguise.py); between them the disguised text is put back and
encoded by the second. Where a message spells none, the ids are exactly those of encoding the rendered prompt at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokenizers import Encoding, Tokenizer

from appliance.api.disguise import ControlWords, Disguise
from appliance.api.errors import ApiRefused, invalid, too_long
from appliance.api.schema import ChatMessage
from appliance.api.template import ChatTemplate
from appliance.errors import ModelUnsupported


class PromptTokenizer:
    """Encodes prompts and decodes answers. Safe to use from several threads.

    Args:
        description: ``tokenizer.json``.
        max_context: tokens; a text that cannot fit is refused before the work of encoding it.
    """

    def __init__(self, description: bytes, *, max_context: int) -> None:
        self._parsing = _load(description)
        self._plain = _load(description)
        self._plain.encode_special_tokens = True
        added = self._parsing.get_added_tokens_decoder().items()
        self._control = {token: entry.content for token, entry in added if entry.special}
        self._words = ControlWords(self._control.values())
        # The unknown token stands for any text that the vocabulary lacks: an ordinary outcome of ordinary text.
        self._unknown = self._parsing.token_to_id(getattr(self._parsing.model, "unk_token", None) or "")
        self._max_context = max_context
        self._max_characters = max_context * max(map(len, self._parsing.get_vocab()), default=1)

    def encode_text(self, text: str) -> list[int]:
        """Encode a whole prompt that the client wrote itself: control tokens in it count.

        Raises:
            ApiRefused: ``context_length_exceeded``.
        """
        self._refuse_long(text)
        ids: list[int] = self._parsing.encode(text, add_special_tokens=True).ids
        return ids

    def encode_chat(self, template: ChatTemplate, messages: Sequence[ChatMessage]) -> list[int]:
        """Render a conversation and encode it; control tokens come from the template only.

        Raises:
            ApiRefused: ``context_length_exceeded``; ``invalid_value`` when the conversation cannot be rendered, or
                when its text would become a control token all the same.
        """
        disguise = Disguise(self._words, [turn.content for turn in messages])
        text = template.render([replace(turn, content=disguise.hide(turn.content)) for turn in messages])
        self._refuse_long(text)
        encoding = self._parsing.encode(text, add_special_tokens=False)
        cuts = self._control_tokens(text, encoding)
        if disguise.mark not in text:
            return list(encoding.ids)
        ids: list[int] = []
        begin = 0
        for token, start, stop in cuts:
            ids += self._encode_plain(disguise.reveal(text[begin:start]))
            ids.append(token)
            begin = stop
        return ids + self._encode_plain(disguise.reveal(text[begin:]))

    def decode(self, ids: list[int]) -> str:
        """Give the text of an answer; control tokens have none."""
        text: str = self._parsing.decode(ids, skip_special_tokens=True)
        return text

    def _control_tokens(self, text: str, encoding: Encoding) -> list[tuple[int, int, int]]:
        """Give id, start and stop of each control token that the text spells."""
        found = []
        for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token not in self._control:
                continue
            if text[start:stop].strip() == self._control[token].strip():
                found.append((token, start, stop))
            elif token != self._unknown:
                # Normalization can turn other characters into a control token; the template spells it as it is.
                raise _not_plain()
        return found

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids if text else []
        if any(token in self._control and token != self._unknown for token in ids):
            raise _not_plain()
        return ids

    def _refuse_long(self, text: str) -> None:
        """Refuse a text that needs more tokens than fit, even if each were the longest of the vocabulary."""
        if len(text) > self._max_characters:
            least = -(-len(text) * self._max_context // self._max_characters)
            raise too_long(prompt_tokens=least, answer_tokens=1, limit=self._max_context)


def _load(description: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(description)
    except Exception as error:  # noqa: BLE001  # the library raises bare Exception, nothing narrower
        raise ModelUnsupported(
            "model.tokenizer",
            found=f"a tokenizer that cannot be read ({type(error).__name__})",
            expected="a tokenizer.json of the tokenizers library",
            hint="pack the model again with its tokenizer.json",
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # The library remembers words of past prompts to be faster; here they must not outlive their request.
    resize = getattr(tokenizer.model, "_resize_cache", None)
    if resize is not None:
        resize(0)
    return tokenizer


def _not_plain() -> ApiRefused:
    return invalid("messages", found="text that would become a control token", expected="text that stays text")
