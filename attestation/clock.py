"""Time in an air gap: a clock is an argument, and a floor stops it from going back.

No clock inside a confidential guest is trusted wall time. Every signed object carries its issue time; the largest one
seen is a floor under "now", so turning the system clock back gains nothing.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol

from attestation.errors import FormatError

TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


class Clock(Protocol):
    """Wall time and elapsed time."""

    def now(self) -> datetime:
        """Give UTC wall time, whole seconds."""
        ...

    def monotonic(self) -> float:
        """Give seconds since an arbitrary point of this boot; never goes back."""
        ...


class SystemClock:
    """The machine's clock, never below the highest issue time that it was shown."""

    def __init__(self) -> None:
        self._floor = datetime.fromtimestamp(0, UTC)

    def now(self) -> datetime:
        """Give UTC wall time, whole seconds, at least the floor."""
        return max(datetime.now(UTC).replace(microsecond=0), self._floor)

    def monotonic(self) -> float:
        """Give seconds of CLOCK_BOOTTIME, which counts suspend too, so sleeping does not stretch a grant."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def raise_floor(self, seen: datetime) -> None:
        """Note an authenticated issue time: "now" can no longer be before it."""
        self._floor = max(self._floor, seen)


def format_time(at: datetime) -> str:
    """Write a UTC time as ``YYYY-MM-DDThh:mm:ssZ``, the only form in signed objects."""
    return at.astimezone(UTC).strftime(TIME_FORMAT)


def parse_time(text: str) -> datetime:
    """Read a time in the one accepted form.

    Raises:
        FormatError: ``time.form`` for any other form (other zones, fractions, missing digits).
    """
    try:
        at = datetime.strptime(text, TIME_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        at = None
    if at is None or format_time(at) != text:
        raise FormatError(
            "time.form", found=repr(text[:40]), expected="YYYY-MM-DDThh:mm:ssZ", hint="make the object again"
        )
    return at
