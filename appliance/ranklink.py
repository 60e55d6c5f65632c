"""The agent's view of one rank: what it loads, what it serves, what it wiped, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from appliance.children import Child
from appliance.errors import DeviceFault, ProtocolError
from appliance.protocol import Message, Progress, RankFailed, RankStats, Resident, Wiped, misdirected
from attestation.errors import LetheError

_Report = TypeVar("_Report", Resident, Wiped)


class RankError(LetheError):
    """What a rank refused, in its own words and with its own exit status."""

    def __init__(self, failed: RankFailed) -> None:
        super().__init__(failed.code, found=failed.found, expected=failed.expected, hint=failed.hint)
        self.exit_status = failed.exit_status  # type: ignore[misc]  # per instance, as the rank said


class RankLink:
    """Follows the messages of one rank.

    Args:
        child: the rank's process.
        device: the device it fills.
        on_fault: called when the rank fails or vanishes before it has wiped itself.
    """

    def __init__(self, child: Child, device: str, on_fault: Callable[[LetheError], None]) -> None:
        loop = asyncio.get_running_loop()
        self.child = child
        self.device = device
        self.progress = Progress(0, 0, 0, 0)
        self.stats: RankStats | None = None
        self.resident: asyncio.Future[Resident] = loop.create_future()
        self.wiped: asyncio.Future[Wiped] = loop.create_future()
        self._on_fault = on_fault
        self._watch = loop.create_task(self._follow())

    async def _follow(self) -> None:
        error: LetheError = DeviceFault(
            "rank.lost",
            found=f"the process of {self.device} is gone",
            expected="a running rank",
            hint="its memory went back to the kernel unseen; see the journal, then start again with a new grant",
        )
        try:
            while (message := await self.child.channel.receive()) is not None:
                self._take(message)
        except ProtocolError as malformed:
            error = malformed
        self._fault(error)
        _fail(self.wiped, error)

    def _take(self, message: Message) -> None:
        match message:
            case Progress():
                self.progress = message
            case RankStats():
                self.stats = message
            case Resident():
                if not self.resident.done():
                    self.resident.set_result(message)
            case Wiped():
                if not self.wiped.done():
                    self.wiped.set_result(message)
                _fail(self.resident, load_stopped())
            case RankFailed():
                self._fault(RankError(message))
            case _:
                self._fault(misdirected(message, expected="a message of a rank"))

    def _fault(self, error: LetheError) -> None:
        """The rank serves no more. It still wipes itself, and says so in :attr:`wiped`, unless it is gone."""
        _fail(self.resident, error)
        if not self.wiped.done():
            self._on_fault(error)

    @property
    def loaded(self) -> Resident | None:
        """Give the rank's report of its load, once there is one."""
        return _result_of(self.resident)

    @property
    def overwritten(self) -> Wiped | None:
        """Give the rank's report of its wipe, once there is one."""
        return _result_of(self.wiped)

    async def end(self, seconds: float) -> bool:
        """Wait for the process to leave, kill it if it does not, and stop following it."""
        left = await self.child.end(seconds)
        self._watch.cancel()
        _fail(self.resident, load_stopped())
        return left


def load_stopped() -> DeviceFault:
    """Give the refusal of a load that a wipe has ended."""
    return DeviceFault(
        "load.stopped",
        found="a load that was stopped by a wipe",
        expected="a load that runs to its end",
        hint="start the agent again and ask for a new grant",
    )


def _fail(future: asyncio.Future[_Report], error: LetheError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # whoever awaits it sees it; nobody awaiting it is no fault


def _result_of(future: asyncio.Future[_Report]) -> _Report | None:
    done = future.done() and not future.cancelled() and future.exception() is None
    return future.result() if done else None
