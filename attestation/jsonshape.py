"""What can be told of JSON before it is parsed: how deep it is and how many values it has, at the speed of a copy.

A parser makes an object of some hundred bytes from two bytes of hostile text, and it recurses. Counting the punctuation
that is outside of texts bounds both first. The counts are exact for valid JSON; of other text they bound what a parser
can have made of it when it meets the first fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_KEPT: Final = b'"[]{},:'
_DROPPED: Final = bytes(set(range(256)) - set(_KEPT))
_ONE_KIND: Final = bytes.maketrans(b"{}", b"[]")
# Texts are cut out of blocks of this size, so that a million quotes do not become a million objects at once.
_BLOCK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class JsonShape:
    """Counts of one JSON text.

    Attributes:
        objects: how many objects begin.
        arrays: how many arrays begin.
        commas: commas between members and items; there are at most as many values as objects, arrays and commas, and
            one more.
    """

    objects: int
    arrays: int
    commas: int


def measure(data: bytes) -> JsonShape:
    """Count the objects, arrays and commas of a JSON text."""
    marks = _marks(data)
    return JsonShape(marks.count(b"{"), marks.count(b"["), marks.count(b","))


def is_deeper(data: bytes, most: int) -> bool:
    """Say whether a JSON text nests more than ``most`` levels.

    Text that is no JSON may nest up to twice as deep before this says so; it cannot be parsed anyway.
    """
    brackets = _marks(data).translate(_ONE_KIND, b",:")
    # Each turn takes away the innermost level of every nest, all at once.
    for _ in range(most):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return b"[]" in brackets or brackets.count(b"[") > most


def _marks(data: bytes) -> bytes:
    """Give the punctuation outside of texts, in order."""
    if b"\\" in data:
        # Pairs first: what is left before a quote then escapes it.
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    # A text without punctuation is two quotes now. Two quotes of two texts never meet in JSON: a comma or colon is
    # between them.
    marks = data.translate(None, _DROPPED).replace(b'""', b"")
    return _outside_of_texts(marks) if b'"' in marks else marks


def _outside_of_texts(marks: bytes) -> bytes:
    kept: list[bytes] = []
    inside = 0
    for start in range(0, len(marks), _BLOCK):
        parts = marks[start : start + _BLOCK].split(b'"')
        kept.append(b"".join(parts[inside::2]))
        inside = (inside + len(parts) - 1) & 1
    return b"".join(kept)
