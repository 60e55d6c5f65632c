"""One end of a socket pair for a process that must never wait for the other side.

A rank computes, and has to hear at any moment that it must wipe. So nothing here blocks: frames are put together from
whatever has arrived, and what cannot be sent yet is kept, up to a bound. A peer that sends half a frame, or that stops
reading, can delay its own messages only.
"""

from __future__ import annotations

import select
import socket
import time

from appliance.errors import ProtocolError
from appliance.protocol import LENGTH, Message, decode, encode, refuse_message

# A model's tokenizer files are the largest thing that is ever sent.
MAX_BACKLOG = 128 << 20


class Mailbox:
    """Sends and receives messages without blocking.

    Args:
        sock: connected; the mailbox owns it.
        max_frame: largest body accepted from the other side, bytes.
    """

    def __init__(self, sock: socket.socket, *, max_frame: int) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._max_frame = max_frame
        self._inward = bytearray()
        self._outward = bytearray()
        self._open = True

    def fileno(self) -> int:
        """Give the descriptor, for selectors."""
        return self._sock.fileno()

    def is_open(self) -> bool:
        """Say whether the other side was still there at the last look."""
        return self._open

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return len(self._outward)

    def receive(self) -> list[Message]:
        """Give the messages that have arrived whole.

        Raises:
            ProtocolError: ``protocol.message`` for a frame that is too long or is no message.
        """
        self._fill()
        messages = []
        while len(self._inward) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._inward)
            if length > self._max_frame:
                refuse_message(f"a frame of {length} bytes", f"at most {self._max_frame}")
            stop = LENGTH.size + length
            if len(self._inward) < stop:
                break
            messages.append(decode(bytes(self._inward[LENGTH.size : stop])))
            del self._inward[:stop]
        return messages

    def _fill(self) -> None:
        # No more than one frame is kept, so the other side cannot make this one's memory grow.
        while self._open and len(self._inward) <= LENGTH.size + self._max_frame:
            try:
                part = self._sock.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            if not part:
                self._open = False
            self._inward += part

    def send(self, message: Message) -> None:
        """Send a message, or as much of it as the kernel takes now; the rest goes with later calls and :meth:`flush`.

        Raises:
            ProtocolError: ``protocol.backlog`` when the other side has not read for too long.
        """
        if not self._open:
            return
        self._outward += encode(message)
        if len(self._outward) > MAX_BACKLOG:
            raise ProtocolError(
                "protocol.backlog",
                found=f"{len(self._outward)} bytes that nobody reads",
                expected=f"at most {MAX_BACKLOG}",
                hint="the other process hangs; restart the agent",
            )
        self.flush()

    def flush(self) -> None:
        """Send what the kernel takes now."""
        while self._outward and self._open:
            try:
                sent = self._sock.send(memoryview(self._outward)[: 1 << 20])
            except BlockingIOError:
                return
            except OSError:
                self._open = False
                return
            del self._outward[:sent]

    def drain(self, seconds: float) -> None:
        """Send all that waits, for at most ``seconds``; used for a last message before the process ends."""
        deadline = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        while self._outward and self._open and (left := deadline - time.monotonic()) > 0:
            poller.poll(left * 1000)
            self.flush()

    def close(self) -> None:
        """Close this end."""
        self._open = False
        self._sock.close()
