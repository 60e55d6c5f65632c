"""Let Python's cycle collector rest while a parser makes a million values that have no cycles.

The collector walks all containers again and again as their number grows, which doubles the time to read the header of a
model with hundreds of thousands of tensors.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """Pause the collector for the length of a ``with`` block, unless it is paused already.

    It is the whole process's. Two threads that pause it at once may wake it early, which costs time and nothing else.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
