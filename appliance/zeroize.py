"""The device half of zeroizing: overwrite everything a slot gave out, read it back, count what is not zero.

The agent judges the result, so nothing here needs torch. An error of a device ends neither the overwrite of the other
blocks nor the count: what could not be read back is missing from ``read_back_bytes``, and that is refused as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from appliance.errors import ZeroizeIncomplete
from appliance.protocol import Wiped
from attestation.clock import Clock


@dataclass(frozen=True, slots=True)
class Overwritten:
    """What an overwrite covered and what reading it back showed.

    Attributes:
        overwritten_bytes: bytes that were to be filled with zeros.
        read_back_bytes: bytes read again after the fill.
        nonzero_bytes: bytes that were not zero on reading back.
    """

    overwritten_bytes: int
    read_back_bytes: int
    nonzero_bytes: int


class Erasable(Protocol):
    """What of a slot (appliance/slot.py) the wipe needs."""

    @property
    def name(self) -> str:
        """``cpu`` or ``cuda:N``."""
        ...

    def zeroize(self) -> Overwritten:
        """Overwrite all device memory, read it back, and refuse every later allocation."""
        ...

    def wipe_staging(self) -> Overwritten:
        """Overwrite all staging memory and read it back."""
        ...


def zeroize(slot: Erasable, *, clock: Clock) -> Wiped:
    """Overwrite the slot's device memory, then its staging memory, and read both back.

    Bytes of the staging memory that are not zero count like those of the device. May be called again.
    """
    begin = clock.monotonic()
    device = slot.zeroize()
    staging = slot.wipe_staging()
    return Wiped(
        device=slot.name,
        overwritten_bytes=device.overwritten_bytes,
        read_back_bytes=device.read_back_bytes,
        nonzero_bytes=device.nonzero_bytes + staging.nonzero_bytes,
        staging_bytes=staging.read_back_bytes,
        seconds=clock.monotonic() - begin,
    )


def require_zero(wiped: Wiped) -> None:
    """Refuse an overwrite that reading back did not confirm.

    Raises:
        ZeroizeIncomplete: ``zeroize.nonzero`` or ``zeroize.unread``.
    """
    if wiped.nonzero_bytes:
        raise ZeroizeIncomplete(
            "zeroize.nonzero",
            found=f"{wiped.nonzero_bytes} bytes of {wiped.device} not zero after the overwrite",
            expected="0",
            hint="power the machine off",
        )
    if wiped.read_back_bytes != wiped.overwritten_bytes:
        raise ZeroizeIncomplete(
            "zeroize.unread",
            found=f"{wiped.read_back_bytes} bytes of {wiped.device} read back",
            expected=f"{wiped.overwritten_bytes}",
            hint="power the machine off",
        )
