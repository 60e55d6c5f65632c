"""Proof objects: facts that took a check to establish.

A proof can be made only by code that holds the mint of its floor; it cannot be copied or pickled. That keeps an honest
mistake from passing an unchecked value off as a checked one. It is no defence against hostile code in the process
(docs/limitations.md).
"""

from __future__ import annotations

from typing import Any, NoReturn


class Proof:
    """Base of proof objects: refuses copy and pickle, and demands the mint."""

    __slots__ = ()

    @classmethod
    def _demand(cls, given: object, mint: object) -> None:
        """Raise TypeError unless ``given`` is the floor's own mint."""
        if given is not mint:
            raise TypeError(f"{cls.__name__} is a proof: only its checker can make one")

    def __copy__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} is a proof and cannot be copied")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(f"{type(self).__name__} is a proof and cannot be copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} is a proof and cannot be pickled")
