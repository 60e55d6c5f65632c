"""The control socket: how operators and consoles reach the agent.

One JSON object a line, in both directions, over a Unix socket. A client sends ``{"command": ...}`` and reads lines
until one has ``"event": "done"`` or ``"event": "error"``; lines with ``"event": "progress"`` may come before. The
kernel says who is calling (SO_PEERCRED); the two groups of the configuration decide what they may do. No answer has a
field for keys, prompts or answers of the model.
"""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from appliance.errors import AgentUnreachable, ConfigError, NotPermitted
from attestation import strictjson
from attestation.errors import FormatError, LetheError, reason_of
from attestation.strictjson import decode_b64

# The largest signed file that goes over the socket; as base64 it fits a line with room to spare.
MAX_ENVELOPE = 4 << 20
MAX_LINE = 2 * MAX_ENVELOPE
_LAST_ANSWER_SECONDS = 5
# Who connects has this long to say what he wants, seconds; and this many who only look may be at it at once. Without
# these, viewers who say nothing would hold every descriptor of the agent, and no operator could reach it to wipe.
_COMMAND_SECONDS = 10.0
_MAX_VIEWERS = 16
_RETRY_SECONDS = 0.1
_PEER = struct.Struct("3i")

Role = Literal["operator", "viewer"]
Answers = AsyncIterator[dict[str, Any]]
Handler = Callable[[str, Mapping[str, Any], "Caller"], Answers]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is at the other end, by the kernel's word."""

    uid: int
    pid: int
    role: Role


def role_of(uid: int, gid: int, *, operator_group: str, viewer_group: str) -> Role:
    """Give the role of a user.

    Raises:
        NotPermitted: ``control.group`` for a user who is in neither group.
    """
    if uid in (0, os.geteuid()):
        return "operator"
    groups = _group_names(uid, gid)
    if operator_group in groups:
        return "operator"
    if viewer_group in groups:
        return "viewer"
    raise NotPermitted(
        "control.group",
        found=f"user {uid}",
        expected=f"a member of {operator_group} or {viewer_group}",
        hint="ask the administrator of this machine to add you to a group",
    )


def _group_names(uid: int, gid: int) -> set[str]:
    try:
        ids = os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        ids = [gid]
    names = set()
    for number in ids:
        with suppress(KeyError):
            names.add(grp.getgrgid(number).gr_name)
    return names


class ControlServer:
    """Serves one handler on a Unix socket.

    Args:
        path: where the socket is made; a left-over from a dead agent is replaced.
        operator_group, viewer_group: see :func:`role_of`.
        handler: gives the answers to one command as they come.
    """

    def __init__(self, path: Path, *, operator_group: str, viewer_group: str, handler: Handler) -> None:
        self._path = path
        self._operator_group = operator_group
        self._viewer_group = viewer_group
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._callers: set[asyncio.Task[Any]] = set()
        self._viewers = 0

    async def start(self) -> None:
        """Make the socket and begin to listen.

        Raises:
            ConfigError: ``control.taken`` when another agent answers there, ``control.socket`` when it cannot be made.
        """
        if _somebody_listens(self._path):
            raise ConfigError(
                "control.taken",
                found=f"another agent that serves {self._path}",
                expected="a runtime directory for each agent",
                hint="stop the other agent, or change node.runtime_dir",
            )
        try:
            self._path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._serve, path=self._path, limit=MAX_LINE)
            # Everyone may knock; who is let in is decided by peer credentials, not by the file's mode.
            self._path.chmod(0o666)
        except OSError as error:
            raise ConfigError(
                "control.socket",
                found=f"{self._path}: {reason_of(error)}",
                expected="a place for the control socket, at most 107 bytes of path",
                hint="change node.runtime_dir",
            ) from None

    async def stop(self) -> None:
        """Stop listening, remove the socket, and let running commands give their last answer."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        if self._callers:
            await asyncio.wait(self._callers, timeout=_LAST_ANSWER_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._callers.add(task)
            task.add_done_callback(self._callers.discard)
        try:
            async for answer in self._answers(reader, writer):
                writer.write(strictjson.dumps(answer) + b"\n")
                await writer.drain()
        except ConnectionError:
            pass  # the caller left; the agent goes on with what it was told to do
        finally:
            writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answers:
        try:
            caller = self._identify(writer.get_extra_info("socket"))
            with self._place(caller):
                members = strictjson.loads(await _read_command(reader), limit=MAX_LINE)
                command = members.pop("command", None)
                if not isinstance(command, str):
                    raise FormatError(
                        "control.command",
                        found="no command",
                        expected='{"command": "..."}',
                        hint="use the lethe program",
                    )
                async for answer in self._handler(command, members, caller):
                    yield answer
        except LetheError as error:
            yield {"event": "error", "exit_status": error.exit_status} | error.as_payload()

    @contextmanager
    def _place(self, caller: Caller) -> Iterator[None]:
        """Give a place; operators always have one.

        Raises:
            NotPermitted: ``control.busy`` when too many viewers are connected.
        """
        viewing = caller.role == "viewer"
        if viewing and self._viewers >= _MAX_VIEWERS:
            raise NotPermitted(
                "control.busy",
                found=f"{self._viewers} viewers connected",
                expected=f"at most {_MAX_VIEWERS} at once",
                hint="close other consoles, then try again",
            )
        self._viewers += viewing
        try:
            yield
        finally:
            self._viewers -= viewing

    def _identify(self, sock: socket.socket) -> Caller:
        pid, uid, gid = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        role = role_of(uid, gid, operator_group=self._operator_group, viewer_group=self._viewer_group)
        return Caller(uid, pid, role)


def _somebody_listens(path: Path) -> bool:
    """Say whether somebody listens there; a left-over of a dead agent refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return False
    return True


async def _read_command(reader: asyncio.StreamReader) -> bytes:
    """Read the one line that a caller sends.

    Raises:
        FormatError: ``control.line`` when it is too long or does not come.
    """
    try:
        async with asyncio.timeout(_COMMAND_SECONDS):
            return await reader.readline()
    except ValueError:  # what asyncio raises for a line above its limit
        _refuse_line("a line that is too long", f"at most {MAX_LINE} bytes")
    except TimeoutError:
        _refuse_line("no command", f"one line within {_COMMAND_SECONDS:g} seconds")


def _refuse_line(found: str, expected: str) -> NoReturn:
    raise FormatError("control.line", found=found, expected=expected, hint="use the lethe program") from None


def read_envelope(members: Mapping[str, Any]) -> bytes:
    """Take the signed file out of a command.

    Raises:
        FormatError: ``control.envelope`` or ``json.base64``.
    """
    text = members.get("envelope")
    if not isinstance(text, str):
        raise FormatError(
            "control.envelope", found="no envelope", expected="base64 of the file", hint="use the lethe program"
        )
    return decode_b64(text, "envelope", limit=MAX_ENVELOPE)


class RemoteError(LetheError):
    """An error that the agent reported, with the exit status it chose."""

    def __init__(self, payload: Mapping[str, Any]) -> None:
        text = {name: str(payload.get(name, "")) for name in ("code", "found", "expected", "hint")}
        super().__init__(text["code"], found=text["found"], expected=text["expected"], hint=text["hint"])
        self.exit_status = int(payload.get("exit_status", 1))  # type: ignore[misc]  # per instance, as the agent said


def ask(
    path: Path, command: str, members: Mapping[str, Any] | None = None, *, wait_seconds: float = 0.0
) -> Iterator[dict[str, Any]]:
    """Send one command to the agent and give its answers as they come; the last one has ``"event": "done"``.

    Args:
        path: the control socket.
        command: what to do.
        members: more of the command.
        wait_seconds: how long to wait for an agent that is just starting.

    Raises:
        AgentUnreachable: nobody listens, or the agent went away before it was done.
        RemoteError: the agent refused.
    """
    request = strictjson.dumps({"command": command} | dict(members or {})) + b"\n"
    with _connect(path, time.monotonic() + wait_seconds) as sock:
        try:
            sock.sendall(request)
        except OSError as error:
            raise _unreachable(path, reason_of(error)) from None
        with sock.makefile("rb") as lines:
            while line := _read_line(lines, path):
                answer = strictjson.loads(line, limit=MAX_LINE)
                if answer.get("event") == "error":
                    raise RemoteError(answer)
                yield answer
                if answer.get("event") == "done":
                    return
    raise _unreachable(path, "the agent left before it was done")


def _connect(path: Path, deadline: float) -> socket.socket:
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            if time.monotonic() >= deadline:
                raise _unreachable(path, reason_of(error)) from None
            time.sleep(_RETRY_SECONDS)
        else:
            return sock


def _read_line(lines: Any, path: Path) -> bytes:
    try:
        line: bytes = lines.readline(MAX_LINE)
    except OSError:
        raise _unreachable(path, "the connection broke") from None
    return line


def _unreachable(path: Path, found: str) -> AgentUnreachable:
    return AgentUnreachable(
        "agent.unreachable",
        found=f"{path}: {found}",
        expected="a running agent",
        hint="start it with lethe agent or systemctl start lethe-agent; its last messages say why it stopped",
    )
