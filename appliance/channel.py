"""Ends of the socket pairs over which the processes of one appliance exchange messages (appliance/protocol.py)."""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType

from appliance.protocol import LENGTH, MAX_FRAME, Message, decode, encode, refuse_message


class Channel:
    """A blocking end of a socket pair, for one reader and one writer thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def inherited(cls, descriptor: int) -> Channel:
        """Take over a descriptor that the parent passed on."""
        return cls(socket.socket(fileno=descriptor))

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncChannel:
    """The same for an asyncio program."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> AsyncChannel:
        """Wrap a connected socket."""
        sock.setblocking(False)
        return cls(*await asyncio.open_connection(sock=sock, limit=1 << 20))

    async def send(self, message: Message) -> None:
        """Send one message and wait while the other side is slow.

        Raises:
            OSError: the other side has gone.
        """
        self._writer.write(encode(message))
        await self._writer.drain()

    async def receive(self) -> Message | None:
        """Wait for one message; None when the other side has closed.

        Raises:
            ProtocolError: as for :meth:`Channel.receive`.
        """
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > MAX_FRAME:
                refuse_message(f"a frame of {length} bytes", f"at most {MAX_FRAME}")
            return decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """Close this end."""
        self._writer.close()
