"""A scripted engine: speaks the engine's side of appliance/protocol.py over a socket pair and says what it is told to.

It runs in a thread of the test, records every request and cancellation, and answers each request by its script.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from appliance.protocol import Cancel, Message, ModelReady, Rejected, Submit, Tokens
from tests.sim.channel import Channel

Script = Callable[[Submit], Iterable[Message]]
PATIENCE = 20.0


class EnginePeer:
    """The engine's end of a channel.

    Attributes:
        script: gives the messages that answer a request at once; what it leaves out, a test sends later.
        submits, cancels: what the API sent, in order.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._channel = Channel(sock)
        self._sock = sock
        self._lock = threading.Lock()
        self.script: Script = silent
        self.submits: queue.Queue[Submit] = queue.Queue()
        self.cancels: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        with self._lock:
            self._channel.send(message)

    def ready(self, model: ModelReady) -> None:
        self.send(model)

    def next_submit(self) -> Submit:
        return self.submits.get(timeout=PATIENCE)

    def next_cancel(self) -> str:
        return self.cancels.get(timeout=PATIENCE)

    def reset(self) -> None:
        """Forget what was recorded, between two tests that share one API process."""
        self.script = silent
        for record in (self.submits, self.cancels):
            while not record.empty():
                record.get()

    def close(self) -> None:
        """Go away, as an engine does that dies."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE)
        self._channel.close()

    def _run(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                match message:
                    case Submit():
                        self.submits.put(message)
                        for answer in self.script(message):
                            self.send(answer)
                    case Cancel(request=request):
                        self.cancels.put(request)
        except OSError:
            return


def silent(_: Submit) -> Iterable[Message]:
    """Answer nothing."""
    return ()


def says(ids: list[int], *, end: int | None = None, batch: int = 1) -> Script:
    """Say these tokens, ``batch`` at a time; end with the token ``end`` as a model does, or at the asked length."""

    def script(submit: Submit) -> Iterable[Message]:
        whole = ids + ([] if end is None else [end])
        said = whole[: submit.max_tokens]
        finish = "stop" if end is not None and len(said) == len(whole) else "length"
        pieces = [said[at : at + batch] for at in range(0, len(said), batch)]
        for number, piece in enumerate(pieces):
            yield Tokens(submit.request, piece, finish if number == len(pieces) - 1 else "")

    return script


def begins(ids: list[int]) -> Script:
    """Say these tokens and then nothing more: an answer that is under way."""

    def script(submit: Submit) -> Iterable[Message]:
        return (Tokens(submit.request, ids, ""),)

    return script


def rejects(code: str, message: str) -> Script:
    """Refuse every request."""

    def script(submit: Submit) -> Iterable[Message]:
        return (Rejected(submit.request, code, message),)

    return script
