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

    def __init_subclass__(cls, **members: Any) -> None:
        # A subclass with a constructor of its own would be a proof to every isinstance and signature there is.
        if Proof not in cls.__bases__:
            raise TypeError(f"{cls.__name__} would be a proof without its check: proofs have no subclasses")
        super().__init_subclass__(**members)

    def __setattr__(self, name: str, value: object) -> None:
        # What was checked stays what it was: only private state, such as a key that gets wiped, may change.
        if not name.startswith("_") and hasattr(self, name):
            raise AttributeError(f"{type(self).__name__} is a proof: {name} cannot be changed")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is a proof: {name} cannot be taken away")

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
