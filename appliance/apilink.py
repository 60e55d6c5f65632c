"""The agent's view of the API process: whether it listens, whom it serves, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from appliance.children import Child
from appliance.errors import DeviceFault, ProtocolError
from appliance.protocol import Admit, ApiListening, ApiSettings, ApiStats, Drain
from attestation.errors import LetheError

_START_SECONDS = 60
_LEAVE_SECONDS = 10


class ApiLink:
    """Follows the messages of the API process.

    Args:
        child: the process.
        listening: what it said when it began to listen.
        on_fault: called when it vanishes without being told to.
    """

    def __init__(self, child: Child, listening: ApiListening, on_fault: Callable[[LetheError], None]) -> None:
        self.child = child
        self.listening = listening
        self.stats = ApiStats(serving=False, active=0, served=0, refused=0)
        self._on_fault = on_fault
        self._serving = asyncio.Event()
        self._idle = asyncio.Event()
        self._watch = asyncio.get_running_loop().create_task(self._follow())

    @classmethod
    async def start(cls, child: Child, settings: ApiSettings, on_fault: Callable[[LetheError], None]) -> ApiLink:
        """Give the process its settings and wait until it listens; it answers 503 until :meth:`admit`.

        Raises:
            DeviceFault: ``api.start``; the process is gone then.
        """
        message = None
        with suppress(OSError, TimeoutError, ProtocolError):
            await child.channel.send(settings)
            message = await asyncio.wait_for(child.channel.receive(), _START_SECONDS)
        if isinstance(message, ApiListening):
            return cls(child, message, on_fault)
        child.channel.close()
        await child.end(_LEAVE_SECONDS)
        raise DeviceFault(
            "api.start",
            found="an API process that did not start",
            expected=f"a listener on {settings.host} port {settings.port}",
            hint="look at its messages; the port may be taken, or the keys file unreadable",
        )

    async def _follow(self) -> None:
        with suppress(ProtocolError):
            while (message := await self.child.channel.receive()) is not None:
                if isinstance(message, ApiStats):
                    self.stats = message
                    if message.serving:
                        self._serving.set()
                    elif message.active == 0:
                        self._idle.set()
        self._on_fault(
            DeviceFault(
                "api.lost",
                found="the API process is gone",
                expected="a running API",
                hint="see its messages, then start again with a new grant",
            )
        )

    async def admit(self) -> None:
        """Open admission, and wait until the API really serves: it prepares the tokenizer first.

        Raises:
            DeviceFault: ``api.serving`` when it does not within a minute.
        """
        await self._send(Admit(open=True))
        try:
            await asyncio.wait_for(self._serving.wait(), _START_SECONDS)
        except TimeoutError:
            raise DeviceFault(
                "api.serving",
                found="an API that does not serve",
                expected="a tokenizer ready within a minute",
                hint="see its messages; the sealed tokenizer may be one that it cannot use",
            ) from None

    async def close_admission(self) -> None:
        """Refuse new requests and end the running ones."""
        await self._send(Admit(open=False))

    async def drain(self, seconds: float) -> None:
        """Refuse new requests and wait at most ``seconds`` for the running ones."""
        self._idle.clear()
        await self._send(Drain())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    async def _send(self, message: Admit | Drain) -> None:
        with suppress(OSError):  # it is gone; the watch has said so
            await self.child.channel.send(message)

    async def end(self) -> bool:
        """End the process; its prompts go with its memory. Says whether it left by itself."""
        self._watch.cancel()
        return await self.child.dismiss()
