"""Keeps text that a client sends from becoming control tokens.

A chat template marks who speaks with control tokens such as ``<|im_end|>``. A message that spells one must not become
one, or a quoted document could end the user's turn and speak as the system. So before rendering, each control token
that a message spells is replaced by a stand-in: a code point that Unicode reserves for a program's inner use, around a
number. Pieces of one at either end of a message are replaced too, so none can form at a seam with what comes before or
after. Whatever control tokens the rendered prompt then spells are the template's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from appliance.api.errors import invalid

# Noncharacters: no text that is exchanged between programs may hold them (The Unicode Standard, section 23.7).
_MARKS = [chr(point) for point in range(0xFDD0, 0xFDF0)]


class ControlWords:
    """How the control tokens of one tokenizer are spelt."""

    def __init__(self, words: Iterable[str]) -> None:
        longest_first = sorted(filter(None, words), key=len, reverse=True)
        self.reach = max(map(len, longest_first), default=0)
        self.beginnings = frozenset(word[:size] for word in longest_first for size in range(1, len(word)))
        self.endings = frozenset(word[size:] for word in longest_first for size in range(1, len(word)))
        self.anywhere = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class Disguise:
    """The stand-ins of one request.

    Attributes:
        mark: a code point that occurs in none of the request's texts.
    """

    def __init__(self, control: ControlWords, texts: Sequence[str]) -> None:
        """Choose a mark for these texts.

        Raises:
            ApiRefused: the texts use up every mark, which no honest text does.
        """
        self.mark = next((mark for mark in _MARKS if not any(mark in text for text in texts)), "")
        if not self.mark:
            raise invalid("messages", found="all 32 code points from U+FDD0 to U+FDEF", expected="text")
        self._control = control
        self._hidden: list[str] = []

    def hide(self, text: str) -> str:
        """Replace what spells a control token, or part of one at either end (where a template may trim spaces)."""
        text = self._control.anywhere.sub(lambda found: self._stand_in(found[0]), text)
        body = text.rstrip()
        for size in range(min(self._control.reach, len(body)), 0, -1):
            if body[-size:] in self._control.beginnings:
                text = body[:-size] + self._stand_in(body[-size:]) + text[len(body) :]
                break
        body = text.lstrip()
        for size in range(min(self._control.reach, len(body)), 0, -1):
            if body[:size] in self._control.endings:
                return text[: len(text) - len(body)] + self._stand_in(body[:size]) + body[size:]
        return text

    def reveal(self, text: str) -> str:
        """Put the hidden text back."""
        return re.sub(f"{self.mark}([0-9]+){self.mark}", lambda found: self._hidden[int(found[1])], text)

    def _stand_in(self, hidden: str) -> str:
        self._hidden.append(hidden)
        return f"{self.mark}{len(self._hidden) - 1}{self.mark}"
