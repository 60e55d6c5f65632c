"""The account of a load: every segment of the wanted sections was opened once, and no other.

It is kept apart from the plan of runs, so that a fault in the plan shows here and not in wrong weights.
"""

from __future__ import annotations

from collections.abc import Iterable

from provisioning.errors import BundleDamaged
from provisioning.geometry import Section


class Account:
    """Counts how often each segment was opened.

    Args:
        segments: how many the bundle has.
    """

    __slots__ = ("_opened",)

    def __init__(self, segments: int) -> None:
        self._opened = bytearray(segments)

    def note(self, segment: int) -> None:
        """Count one segment, by its number in the bundle, as found authentic and opened."""
        # One thread works on a segment, so no two write to one byte, unless the plan is wrong: a lost count shows too.
        self._opened[segment] = min(self._opened[segment] + 1, 2)

    def settle(self, sections: Iterable[Section]) -> int:
        """Give the number of segments opened, if it was every one of these sections once and no other.

        Raises:
            BundleDamaged: ``load.account``.
        """
        planned = bytearray(len(self._opened))
        for section in sections:
            planned[section.base : section.base + section.segments] = b"\x01" * section.segments
        if self._opened != planned:
            wrong = next(number for number, count in enumerate(self._opened) if count != planned[number])
            raise BundleDamaged(
                "load.account",
                found=f"segment {wrong} opened {('never', 'once', 'more than once')[self._opened[wrong]]}",
                expected=("not at all", "once")[planned[wrong]],
                hint="this is a fault of the loader; report it, and do not serve",
            )
        return planned.count(1)
