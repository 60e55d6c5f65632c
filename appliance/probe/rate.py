"""How much in how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """A measured rate.

    Attributes:
        nbytes: bytes moved or opened.
        seconds: wall time.
    """

    nbytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> int:
        """Bytes per second of wall time."""
        return round(self.nbytes / max(self.seconds, 1e-9))

    @property
    def gb_s(self) -> float:
        """The same in units of 1e9 bytes per second."""
        return self.nbytes / max(self.seconds, 1e-9) / 1e9


def run_together(works: Iterable[Callable[[], int]]) -> Rate:
    """Run each work on a thread of its own and time them together, from the first start to the last end.

    Args:
        works: each gives how many bytes it did.

    Raises:
        Whatever the first failing work raised.
    """
    done: list[int] = []
    errors: list[BaseException] = []

    def guarded(work: Callable[[], int]) -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - carried over to the caller's thread, which raises it
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    if errors:
        raise errors[0]
    return Rate(sum(done), seconds)
