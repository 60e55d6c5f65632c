"""The agent's and the API's side of a rank, for tests: on a thread of the test, or as a real process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from appliance import rank as rank_module
from appliance.protocol import Load, Message, Submit
from appliance.rank import Rank
from tests.sim.channel import Channel
from tests.sim.sealedmodel import SEGMENT, Sealed

M = TypeVar("M", bound=Message)

_SECONDS = 60.0


def order(sealed: Sealed, **changes: Any) -> Load:
    """Give the order for a load of the packed model."""
    with sealed.open() as bundle:
        digest = bundle.manifest.digest
    members: dict[str, Any] = {
        "bundle": str(sealed.bundle),
        "manifest_digest": digest,
        "owner_key": sealed.owner_file(),
        "device": "cpu",
        "rank": 0,
        "world": 1,
        "dtype": "auto",
        "reader_threads": 2,
        "opener_threads": 2,
        "ring_bytes": 8 * SEGMENT,
        "open_on": "host",
        "kv_cache_bytes": 8 << 20,
        "max_context": 256,
        "max_concurrent": 4,
        "compute_threads": 1,
    }
    return Load(**members | changes)


def submit(request: str = "r1", *, prompt: str = "hello", max_tokens: int = 5) -> Submit:
    """Give a greedy request; token ids of the byte tokenizer need not mean anything."""
    return Submit(request, [3 + byte % 250 for byte in prompt.encode()], max_tokens, 0.0, 1.0, 0, 1, [])


class Ends:
    """The other ends of a rank's channels."""

    def __init__(self) -> None:
        control, self.rank_control = socket.socketpair()
        engine, self.rank_engine = socket.socketpair()
        for sock in (control, engine):
            sock.settimeout(_SECONDS)
        self.control_socket, self.engine_socket = control, engine
        self.control, self.api = Channel(control), Channel(engine)
        self.rank_key, self.key = os.pipe2(os.O_CLOEXEC)

    def send_key(self, sealed: Sealed) -> None:
        """Write the bundle key to the pipe and close it."""
        with sealed.key() as key, key.expose() as view:
            os.writev(self.key, [view])
        self.close_key()

    def close_key(self) -> None:
        """Close the pipe."""
        if self.key >= 0:
            os.close(self.key)
            self.key = -1

    def expect(self, kind: type[M], channel: Channel | None = None) -> M:
        """Read messages up to the first one of a kind, which is given."""
        while True:
            message = (channel or self.control).receive()
            if isinstance(message, kind):
                return message
            if message is None:
                raise AssertionError(f"the rank has gone without a {kind.__name__}")

    def close(self) -> None:
        """Close everything."""
        self.close_key()
        self.control.close()
        self.api.close()


class ThreadRank(Ends):
    """A rank on a thread of this process; its watch, which would end the process, is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = Rank(self.rank_control, self.rank_key, self.rank_engine)
        self.status: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.status = self.rank.run()
        self.rank_control.close()
        self.rank_engine.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def end(self) -> int:
        """Close the control channel and give the exit status."""
        self.control.close()
        return self.join()

    def join(self) -> int:
        """Wait for the end and give the exit status."""
        self._thread.join(_SECONDS)
        if self.status is None:
            raise AssertionError("the rank does not end")
        return self.status

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._thread.join(_SECONDS)


class NoWatch:
    """In place of the watch on threads of a test."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what the watch takes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


class ProcessRank(Ends):
    """A rank as the agent starts it."""

    def __init__(self) -> None:
        super().__init__()
        numbers = (self.rank_control.fileno(), self.rank_key, self.rank_engine.fileno())
        arguments = [f"--{name}={number}" for name, number in zip(("control", "key", "engine"), numbers, strict=True)]
        root = Path(rank_module.__file__).parents[1]
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-m", "appliance.rank", *arguments],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            env=dict(os.environ) | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        os.close(self.rank_key)
        self.rank_control.close()
        self.rank_engine.close()

    def __enter__(self) -> Self:
        return self

    def wait(self, seconds: float = _SECONDS) -> int:
        """Wait for the end and give the exit status."""
        return self.process.wait(seconds)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()
