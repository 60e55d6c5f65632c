"""The nearest known name, for hints about a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Give a hint such as ``did you mean tcb``, or the list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(name[:64], names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}" if close else f"known: {', '.join(names)}"
