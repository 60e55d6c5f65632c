"""A watch over the agent's life, for a process that may be busy when the agent dies.

The kernel closes a dead agent's end of the control channel at once. The busy process sees that when it next looks; if
it does not look in time, because it computes or hangs in a device, the watch overwrites and ends the process itself.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

# POLLRDHUP, which ``select`` names only from Python 3.13 on (poll(2)).
_POLLRDHUP = 0x2000
# How long a process may take to notice and to wipe in order, seconds; a second is the promise.
_GRACE = 0.7
# How often the watch looks whether it is still wanted, milliseconds.
_LOOK = 200


class Watch:
    """Ends the process when the other end of a socket is closed and the process does not end by itself.

    Args:
        descriptor: of a connected Unix socket.
        at_last: called on the watch's thread before the process is ended.
        status: exit status then.
    """

    def __init__(self, descriptor: int, *, at_last: Callable[[], None], status: int) -> None:
        self._descriptor = descriptor
        self._at_last = at_last
        self._status = status
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._descriptor, _POLLRDHUP)
        while not self._over.is_set():
            if poller.poll(_LOOK):
                if not self._over.wait(_GRACE):
                    self._end()
                return

    def _end(self) -> None:
        try:
            self._at_last()
        finally:
            os._exit(self._status)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
