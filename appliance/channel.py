"""The agent's and the API's end of a socket pair that carries messages (appliance/protocol.py), for asyncio.

A rank, which must never wait, has another: appliance/mailbox.py.
"""

from __future__ import annotations

import asyncio
import socket

from appliance.protocol import LENGTH, MAX_FRAME, Message, decode, encode, refuse_message


class AsyncChannel:
    """One end of a socket pair."""

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
            ProtocolError: the frame is too long, or not a message.
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
