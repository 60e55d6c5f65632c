"""A blocking end of a socket pair: how a test plays the other process."""

from __future__ import annotations

import socket

from appliance.protocol import LENGTH, MAX_FRAME, Message, decode, encode, refuse_message


class Channel:
    """A blocking end of a socket pair, for one reader and one writer thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        """Give the descriptor, for selectors."""
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        """Send one message; blocks until the kernel has taken it.

        Raises:
            OSError: the other side has gone.
        """
        self._sock.sendall(encode(message))

    def receive(self) -> Message | None:
        """Wait for one message; None when the other side has closed.

        Raises:
            ProtocolError: the frame is too long, cut short, or not a message.
        """
        prefix = self._exactly(LENGTH.size)
        if prefix is None:
            return None
        (length,) = LENGTH.unpack(prefix)
        if length > MAX_FRAME:
            refuse_message(f"a frame of {length} bytes", f"at most {MAX_FRAME}")
        body = self._exactly(length)
        if body is None:
            refuse_message("a frame cut short", f"{length} bytes")
        return decode(body)

    def _exactly(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            part = self._sock.recv(min(count - len(parts), 1 << 20))
            if not part:
                return None
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """Close this end."""
        self._sock.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
