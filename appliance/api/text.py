"""From tokens to the text of one answer, piece by piece: incremental UTF-8, and stop strings held back.

Feeding tokens one by one or all at once gives the same text, so a streamed answer equals the whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Tokens after which a piece is closed though its last character is still incomplete: it never will be complete.
_PATIENCE = 64


class IncrementalText:
    """Turns token ids into text as they come, never showing part of a character.

    A token's text can depend on the one before it (leading spaces), so each piece is decoded behind the ids of the last
    piece. A piece ends with a whole character; an incomplete one decodes to U+FFFD at the end and waits.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []
        self._piece: list[int] = []
        self._shown = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Give the text that is complete after these ids."""
        return "".join(self._one(token) for token in ids)

    def finish(self) -> str:
        """Give what is left; an incomplete character shows as U+FFFD."""
        return self._close(self._text())

    def _one(self, token: int) -> str:
        self._piece.append(token)
        text = self._text()
        if text and (not text.endswith("\ufffd") or len(self._piece) >= _PATIENCE):
            return self._close(text)
        new = text[self._shown : -1]
        self._shown += len(new)
        return new

    def _text(self) -> str:
        return self._decode(self._before + self._piece)[len(self._decode(self._before)) :]

    def _close(self, text: str) -> str:
        new = text[self._shown :]
        self._before, self._piece, self._shown = self._piece, [], 0
        return new


class StopStrings:
    """Ends text at the stop string that completes first, and shows no prefix of one before it is known not to be one.

    Attributes:
        hit: whether a stop string was met.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._reach = max(map(len, stops), default=0) - 1
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """Give the text that can be shown now; nothing more once a stop string was met."""
        if self.hit:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.hit, self._held = True, ""
            return text[: min(ends)[1]]
        show = next(
            (at for at in range(max(len(text) - self._reach, 0), len(text)) if self._may_begin(text[at:])), len(text)
        )
        self._held = text[show:]
        return text[:show]

    def finish(self) -> str:
        """Give what was held back: the answer ended before it became a stop string."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stops)


class Answer:
    """The text of one choice while it grows.

    Attributes:
        tokens: how many the engine has generated for it.
        finish: empty while it grows; ``stop`` or ``length`` at its end.
    """

    def __init__(self, decode: Callable[[list[int]], str], *, stops: Sequence[str], end_ids: Sequence[int]) -> None:
        self._text = IncrementalText(decode)
        self._stops = StopStrings(stops)
        self._end_ids = frozenset(end_ids)
        self.tokens = 0
        self.finish = ""

    def feed(self, ids: Sequence[int], finish: str) -> tuple[str, str]:
        """Take the engine's tokens, and its reason when they are the last.

        Returns:
            The text that can be shown now, and why the answer ends with it, or an empty reason.
        """
        self.tokens += len(ids)
        if finish == "stop" and ids and ids[-1] in self._end_ids:
            ids = ids[:-1]
        text = self._stops.feed(self._text.feed(ids))
        if finish and not self._stops.hit:
            text += self._stops.feed(self._text.finish())
        if self._stops.hit:
            self.finish = "stop"
        elif finish:
            self.finish = finish
            text += self._stops.finish()
        return text, self.finish
