"""Tell systemd how the service is doing: the datagrams of sd_notify(3), or nothing without systemd."""

from __future__ import annotations

import asyncio
import os
import socket


def notify(**fields: str) -> None:
    """Send ``NAME=value`` lines, such as ``READY="1"`` or ``STATUS="loading"``.

    A lost status line must never stop a load or a wipe, so failures to send are ignored.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    message = "\n".join(f"{name}={value}" for name, value in fields.items())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto(message.encode(), address.replace("@", "\0", 1))
        except OSError:
            return


async def keep_watchdog() -> None:
    """Tell the service manager, where it asks, that the loop turns: three times in each of its intervals."""
    microseconds = int(os.environ.get("WATCHDOG_USEC", "0"))
    while microseconds:
        notify(WATCHDOG="1")
        await asyncio.sleep(microseconds / 3e6)
