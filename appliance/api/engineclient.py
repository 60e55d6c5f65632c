"""The API's end of the channel to the engine: requests out, tokens back, each to the request that waits for it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Self

from appliance.api.errors import ApiRefused, engine_refused, not_serving, out_of_time
from appliance.channel import AsyncChannel
from appliance.protocol import Cancel, Message, ModelReady, Rejected, Submit, Tokens, misdirected


class EngineClient:
    """Shares one channel between all requests."""

    def __init__(self, channel: AsyncChannel) -> None:
        self._channel = channel
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._waiting: dict[str, tuple[Generation, int]] = {}

    async def run(self, on_ready: Callable[[ModelReady], Awaitable[None]]) -> None:
        """Carry messages until the engine has gone.

        Raises:
            ProtocolError: the engine speaks another language.
        """
        sender = asyncio.create_task(self._send_all())
        try:
            while (message := await self._channel.receive()) is not None:
                match message:
                    case Tokens(request=request) | Rejected(request=request):
                        self._deliver(request, message)
                    case ModelReady():
                        await on_ready(message)
                    case _:
                        raise misdirected(message, expected="a message of the engine")
        finally:
            sender.cancel()

    def generate(self, submits: Iterable[Submit], *, seconds: int) -> Generation:
        """Start one generation per submit, as one unit; use it in a ``with`` block, which cancels what still runs.

        Args:
            submits: what to generate; their ids are replaced by unique ones.
            seconds: time for all of them.
        """
        generation = Generation(self, seconds=seconds)
        stem = secrets.token_hex(8)
        for index, submit in enumerate(submits):
            name = f"{stem}.{index}"
            self._waiting[name] = (generation, index)
            generation.running[index] = name
            self._outbox.put_nowait(replace(submit, request=name))
        return generation

    def end_all(self, why: Callable[[], ApiRefused]) -> None:
        """End every generation with an error: the appliance stops serving."""
        for generation in {generation for generation, _ in self._waiting.values()}:
            generation.put(why())
            generation.cancel_all()

    def forget(self, name: str) -> None:
        """Cancel a generation that is still under way."""
        if self._waiting.pop(name, None) is not None:
            self._outbox.put_nowait(Cancel(name))

    def _deliver(self, name: str, message: Tokens | Rejected) -> None:
        # Tokens that were on the way when a request was cancelled belong to nobody.
        generation, index = self._waiting.get(name, (None, 0))
        if generation is None:
            return
        if isinstance(message, Rejected):
            self._waiting.pop(name)
            generation.running.pop(index)
            generation.put(engine_refused(message.code))
            return
        if message.finish:
            self._waiting.pop(name)
            generation.running.pop(index)
        generation.put((index, message))

    async def _send_all(self) -> None:
        try:
            while True:
                await self._channel.send(await self._outbox.get())
        except OSError:
            # The reading side sees the same end and tells everyone.
            return


class Generation:
    """What the engine generates for one HTTP request: one or more answers, told apart by index.

    Attributes:
        running: engine ids of the answers that are not finished, by index.
    """

    def __init__(self, client: EngineClient, *, seconds: int) -> None:
        self._client = client
        self._events: asyncio.Queue[tuple[int, Tokens] | ApiRefused] = asyncio.Queue()
        self._seconds = seconds
        self._deadline = asyncio.get_running_loop().time() + seconds
        self.running: dict[int, str] = {}

    async def receive(self, patience: float) -> tuple[int, Tokens] | None:
        """Wait for tokens of any answer.

        Args:
            patience: seconds after which to give None.

        Raises:
            ApiRefused: the engine refused or lost the request, or its time is over.
        """
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout_at(min(self._deadline, clock() + patience)):
                event = await self._events.get()
        except TimeoutError:
            if clock() >= self._deadline:
                raise out_of_time(self._seconds) from None
            return None
        if isinstance(event, ApiRefused):
            raise event
        if event[1].finish == "cancelled":
            raise not_serving("draining")
        return event

    def put(self, event: tuple[int, Tokens] | ApiRefused) -> None:
        """Add an event for :meth:`receive`."""
        self._events.put_nowait(event)

    def cancel(self, index: int) -> None:
        """Stop one answer; a finished one is left alone."""
        name = self.running.pop(index, None)
        if name is not None:
            self._client.forget(name)

    def cancel_all(self) -> None:
        """Stop every answer that still runs."""
        for index in list(self.running):
            self.cancel(index)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel_all()


def submits_for(prompts: Sequence[Submit], *, answers: int) -> list[Submit]:
    """Repeat each prompt for several answers; with a seed, each answer gets its own."""
    return [
        replace(submit, seed=submit.seed if submit.seed < 0 else (submit.seed + number) % 2**63)
        for submit in prompts
        for number in range(answers)
    ]
