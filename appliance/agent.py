"""The conductor: drives the lifecycle, owns the processes, and performs the effect that belongs to each state.

It contains no checks of its own: whether something may be done is decided by the proof types of the lower floors, what
follows by the table in appliance/lifecycle.py. It imports no torch, and no weight ever enters this process.

Theory of operation. One asyncio loop. Operators come in through the control socket; ranks and the API report over
their channels; signals, a fault or the end of the grant all call :meth:`Agent.zeroize`, which runs once, as a task that
nothing cancels, and whose result is the exit status of the program.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from appliance import children
from appliance.apilink import ApiLink
from appliance.config import Config
from appliance.control import Answers, Caller, ControlServer, read_envelope
from appliance.custody import Custody
from appliance.drill import Drill
from appliance.errors import JournalError, NotPermitted, StateRefused, ZeroizeIncomplete
from appliance.hardening import examine_machine
from appliance.journal import Journal
from appliance.lifecycle import Event, State, after
from appliance.notify import keep_watchdog, notify
from appliance.orders import api_settings, load_order
from appliance.preflight import make_public_directory, require_places, write_public
from appliance.protocol import Resident
from appliance.ranklink import RankLink, load_stopped
from appliance.status import NEXT, snapshot
from attestation.clock import SystemClock
from attestation.errors import FormatError, LetheError
from attestation.result import AttestationResult
from attestation.strictjson import b64
from provisioning.grant import Grant

_PROGRESS_SECONDS = 0.2
_SLICE_SECONDS = 30.0


class Agent:
    """One run of the appliance, from start to zeroized.

    Args:
        config: the node's configuration.
        tell: takes a line for people whenever the state changes.

    Attributes:
        fault: why it ended, once it has ended by anything but an order or the end of the grant.
    """

    def __init__(self, config: Config, *, tell: Callable[[str], None] = lambda _: None) -> None:
        self.config = config
        self._tell = tell
        self.clock = SystemClock()
        self.facts = examine_machine()
        self.state = State.COLD
        self.journal = Journal(config.journal, node=config.node.name, clock=self.clock)
        self.custody: Custody | None = None
        self.result: AttestationResult | None = None
        self.api: ApiLink | None = None
        self.ranks: list[RankLink] = []
        self.fault: LetheError | None = None
        self.drill: Drill | None = None
        self.deadline: float | None = None
        self._engine_socket: socket.socket | None = None
        self._grant_in_hand: Grant | None = None
        # Request and grant are one exchange, and each collects evidence beside the loop: one at a time.
        self._exchange = asyncio.Lock()
        self._control = ControlServer(
            config.control_socket,
            operator_group=config.control.operator_group,
            viewer_group=config.control.viewer_group,
            handler=self._handle,
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ending: asyncio.Task[int] | None = None
        self._exit_status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._commands: dict[str, Callable[[Mapping[str, Any], Caller], Answers]] = {
            "status": self._status,
            "request": self._request,
            "grant": self._grant,
            "zeroize": self._zeroize_command,
        }

    # --- life ------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Run until zeroized.

        Returns:
            The exit status: 0, that of the fault that ended it, or 9 when the wipe could not be shown.

        Raises:
            LetheError: the agent could not start; nothing was loaded.
        """
        self.journal.open()
        try:
            await self._start()
        except BaseException as error:
            if self.api is not None:
                await self.api.end()
            code = error.code if isinstance(error, LetheError) else type(error).__name__
            self.journal.record("agent.failed", outcome="failed", error=code)
            raise
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.zeroize, f"signal {signal.Signals(number).name}")
        self._announce("waiting for a challenge", READY="1")
        self._spawn(keep_watchdog())
        status = await self._exit_status
        await self._control.stop()
        return status

    async def _start(self) -> None:
        require_places(self.config)
        make_public_directory(self.config.node.runtime_dir)
        self.custody = Custody(self.config, self.clock)
        self.journal.record(
            "agent.started",
            node=self.config.node.name,
            bundle=self.custody.manifest.bundle_id.hex(),
            manifest=self.custody.manifest.digest.hex(),
            session=self.custody.session.digest.hex(),
            config=self.config.digest.hex(),
            weak=[fact.name for fact in self.facts if fact.state == "weak"],
        )
        self._advance(Event.PROCESS_HARDENED)
        await self._start_api()
        await self._control.start()

    async def _start_api(self) -> None:
        ours, theirs = socket.socketpair()
        self._engine_socket = ours
        child = await children.start_api(theirs)
        custody = self._custody()
        self.api = await ApiLink.start(child, api_settings(self.config, custody), self._on_fault)
        custody.tls_key_digest = self.api.listening.tls_key_sha384
        write_public(self.config.certificate, self.api.listening.certificate)

    # --- lifecycle -------------------------------------------------------------------------------------------------

    def _announce(self, text: str, **fields: str) -> None:
        notify(STATUS=f"{self.state.value}: {text}", **fields)
        self._tell(f"{self.state.value}: {text}")

    def _advance(self, event: Event) -> None:
        self.state = after(self.state, event)
        self._announce(event.value)
        if (
            self._ending is None
            and self.state is State.ZEROIZING
            and event not in (Event.ZEROIZE_ASKED, Event.FAULT, Event.DRAINED)
        ):
            self.zeroize(f"unforeseen event: {event.value}")

    def _on_fault(self, error: LetheError) -> None:
        """End the run because a process failed, unless it is ending already."""
        if self._ending is not None:
            return
        self.fault = error
        self.state = after(self.state, Event.FAULT)
        self.zeroize(f"fault {error.code}")

    def zeroize(self, reason: str, *, hold_seconds: float = 0.0) -> asyncio.Task[int]:
        """Begin to forget everything; the first call decides, and a later one joins it and ends its hold."""
        if self.drill is not None and not hold_seconds:
            self.drill.release.set()
        if self._ending is None:
            self.state = after(self.state, Event.ZEROIZE_ASKED)
            if self._grant_in_hand is not None:
                self._grant_in_hand.close()  # whatever is being started now gets no key any more
            self._ending = asyncio.get_running_loop().create_task(self._forget(reason, hold_seconds))
            self._ending.add_done_callback(self._leave)
        return self._ending

    async def _forget(self, reason: str, hold_seconds: float) -> int:
        self._announce(reason, STOPPING="1")
        self.drill = Drill(
            node=self.config.node.name,
            reason=reason,
            records=self.config.node.state_dir,
            journal=self.journal,
            clock=self.clock,
            custody=self._custody(),
            api=self.api,
            ranks=self.ranks,
        )
        # What is wrong with the wipe outweighs what led to it.
        self.fault = await self.drill.run(hold_seconds=hold_seconds) or self.fault
        self._advance(Event.WIPED)
        self.deadline = None
        return self.fault.exit_status if self.fault else 0

    def _leave(self, ending: asyncio.Task[int]) -> None:
        # A drill that broke has shown nothing: that is the same as a wipe that failed.
        broken = ending.cancelled() or ending.exception() is not None
        self._exit_status.set_result(ZeroizeIncomplete.exit_status if broken else ending.result())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._after_task)
        return task

    def _after_task(self, task: asyncio.Task[None]) -> None:
        # A task that ended by an error no longer does what it was for, such as ending the service with the grant.
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self._ending is None:
            self.zeroize("internal error")

    def _custody(self) -> Custody:
        if self.custody is None:
            raise StateRefused(
                "agent.state", found=self.state.value, expected="a started agent", hint="wait until it has started"
            )
        return self.custody

    def _demand_state(self, *states: State) -> None:
        if self.state not in states:
            raise StateRefused(
                "agent.state",
                found=self.state.value,
                expected=" or ".join(state.value for state in states),
                hint=NEXT.get(self.state, "wait: this state passes by itself"),
            )

    # --- commands --------------------------------------------------------------------------------------------------

    async def _handle(self, command: str, members: Mapping[str, Any], caller: Caller) -> Answers:
        perform = self._commands.get(command)
        if perform is None:
            raise FormatError(
                "control.command", found=command[:40], expected=", ".join(self._commands), hint="use the lethe program"
            )
        if command != "status" and caller.role != "operator":
            raise NotPermitted(
                "control.role",
                found=f"user {caller.uid} as {caller.role}",
                expected=f"a member of {self.config.control.operator_group}",
                hint="ask an operator",
            )
        async for answer in perform(members, caller):
            yield answer

    async def _status(self, _members: Mapping[str, Any], _caller: Caller) -> Answers:
        yield {"event": "done", "status": snapshot(self)}

    async def _request(self, members: Mapping[str, Any], caller: Caller) -> Answers:
        envelope = read_envelope(members)
        async with self._exchange:
            self._demand_state(State.HARDENED, State.REQUESTED)
            custody = self._custody()
            custody.refuse_weak_machine(self.facts)
            request = await asyncio.to_thread(custody.answer, envelope)
            self._demand_state(State.HARDENED, State.REQUESTED)
            self.journal.record("request.created", uid=caller.uid, request=custody.request_digest.hex())
            self._advance(Event.REQUEST_MADE)
        yield {"event": "done", "envelope": b64(request)}

    async def _grant(self, members: Mapping[str, Any], caller: Caller) -> Answers:
        envelope = read_envelope(members)
        async with self._exchange:
            load = self._spawn(self._load(await self._open_grant(envelope, caller)))
        while not load.done():
            await asyncio.wait([load], timeout=_PROGRESS_SECONDS)
            opened = sum(rank.progress.opened_bytes for rank in self.ranks)
            total = sum(rank.progress.total_bytes for rank in self.ranks)
            yield {"event": "progress", "opened_bytes": opened, "total_bytes": total}
        await load
        if self.state is not State.SERVING:
            raise load_stopped()
        yield {"event": "done", "status": snapshot(self)}

    async def _open_grant(self, envelope: bytes, caller: Caller) -> Grant:
        self._demand_state(State.REQUESTED)
        custody = self._custody()
        try:
            signed = custody.read_grant(envelope)
            self.journal.record("grant.imported", uid=caller.uid, grant=signed.digest.hex())
            self._advance(Event.GRANT_ARRIVED)
            self.result = await asyncio.to_thread(custody.appraise_here)
            # A wipe may have begun while the evidence was collected: no key is opened after that.
            self._demand_state(State.ANSWERED)
            self.journal.record("attest.passed", result=self.result.digest.hex(), assurance=self.result.assurance)
            self._advance(Event.EVIDENCE_APPRAISED)
            grant = custody.open(signed, self.result)
        except LetheError as error:
            if self.state is not State.REQUESTED:
                self._advance(Event.GRANT_REFUSED)
            self.journal.record("grant.rejected", outcome="refused", uid=caller.uid, error=error.code)
            raise
        self._grant_in_hand = grant
        self._advance(Event.GRANT_OPENED)
        return grant

    async def _zeroize_command(self, members: Mapping[str, Any], caller: Caller) -> Answers:
        phrase = f"ZEROIZE {self.config.node.name}"
        if members.get("confirm") != phrase:
            raise FormatError(
                "zeroize.confirm", found="another phrase", expected=repr(phrase), hint="type the phrase as shown"
            )
        hold = members.get("hold_seconds", 0)
        if type(hold) is not int or not 0 <= hold <= 3600:
            raise FormatError(
                "zeroize.hold", found=repr(hold), expected="0 to 3600 seconds", hint="give a shorter time"
            )
        ending = self.zeroize(f"operator {caller.uid}", hold_seconds=hold)
        await asyncio.sleep(0)  # the drill begins with the next turn of the loop
        if self.drill is not None and hold:
            await asyncio.wait(
                [ending, wiped := asyncio.ensure_future(self.drill.wiped.wait())], return_when=asyncio.FIRST_COMPLETED
            )
            wiped.cancel()
            yield {"event": "progress", "status": snapshot(self)}
        exit_status = await asyncio.shield(ending)
        error = self.fault.as_payload() if self.fault else {}
        yield {"event": "done", "exit_status": exit_status, "error": error, "status": snapshot(self)}

    # --- load and serve --------------------------------------------------------------------------------------------

    async def _load(self, grant: Grant) -> None:
        """Bring the weights in and serve them; whatever goes wrong ends in zeroizing."""
        try:
            with grant:
                await self._start_ranks(grant)
            residents = await asyncio.gather(*(rank.resident for rank in self.ranks))
            await self._begin_to_serve(residents, grant.deadline)
        except LetheError as error:
            self._on_fault(error)
            with suppress(JournalError):
                self.journal.record("load.failed", outcome="failed", error=error.code)
            raise
        except BaseException:
            self.zeroize("internal error while loading")
            raise

    async def _begin_to_serve(self, residents: Sequence[Resident], deadline: float) -> None:
        self.journal.record(
            "load.done",
            weight_bytes=sum(resident.weight_bytes for resident in residents),
            segments=sum(resident.segments for resident in residents),
            peak_plaintext_bytes=max(resident.peak_plaintext_bytes for resident in residents),
        )
        if self.state is not State.LOADING or self.api is None:
            return
        self.journal.record("serve.started")
        await self.api.admit()
        self._advance(Event.MODEL_RESIDENT)
        self.deadline = deadline
        self._spawn(self._expire(deadline))

    async def _start_ranks(self, grant: Grant) -> None:
        custody = self._custody()
        slots = self.config.devices.slots
        key_pipes: list[int] = []
        try:
            for index, device in enumerate(slots):
                engine, self._engine_socket = self._engine_socket, None
                if engine is None:
                    engine = socket.socketpair()[0]
                child, key_pipe = await children.start_rank(index, engine)
                key_pipes.append(key_pipe)
                if self.state is not State.GRANTED:
                    # A wipe began meanwhile and knows nothing of this process: it gets no order and no key.
                    await child.dismiss()
                self._demand_state(State.GRANTED)
                self.ranks.append(RankLink(child, device, self._on_fault))
                await child.channel.send(load_order(self.config, custody, index))
            self._demand_state(State.GRANTED)
            self.journal.record("key.released", ranks=len(slots))
            self._advance(Event.LOAD_STARTED)
            grant.hand_over(key_pipes)
        finally:
            for pipe in key_pipes:
                os.close(pipe)

    async def _expire(self, deadline: float) -> None:
        while (left := deadline - self.clock.monotonic()) > 0:
            # In slices: the loop's own clock stands still in suspend, the grant's does not.
            await asyncio.sleep(min(left, _SLICE_SECONDS))
        if self.state is not State.SERVING or self.api is None:
            return
        with suppress(JournalError):  # a journal that cannot be written is one more reason to stop
            self.journal.record("grant.expired")
        self._advance(Event.GRANT_EXPIRED)
        await self.api.drain(self.config.api.request_seconds)
        self._advance(Event.DRAINED)
        self.zeroize("the grant has expired")
