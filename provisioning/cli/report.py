"""How both programs speak: results on standard output, talk on standard error, one exit status for each decision.

``--json`` makes standard output exactly one JSON object, also when the command is refused.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import click

from attestation.errors import LetheError, reason_of
from attestation.result import AppraisalRefused

SCHEMA: Final = 1
_USAGE: Final = 2
_INTERNAL: Final = 1
_OUTPUT: Final = 74
_INTERRUPTED: Final = 130

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def say(text: str) -> None:
    """Print a line for people to standard error."""
    click.echo(_printable(text), err=True)


def emit(members: Mapping[str, Any]) -> None:
    """Print a result as one line of JSON to standard output, with the schema's number."""
    click.echo(json.dumps({"schema": SCHEMA, **members}, sort_keys=True))


def show_error(error: LetheError, *, program: str, as_json: bool) -> None:
    """Print a refusal: code, found, expected, hint."""
    say(f"{program}: error: {error}")
    if error.hint:
        say(f"{program}: hint: {error.hint}")
    if as_json:
        members = error.trail_payload() if isinstance(error, AppraisalRefused) else error.as_payload()
        emit({"error": members, "exit_status": error.exit_status})


def _printable(text: str) -> str:
    # Names from files and messages end up here; none may move the cursor or recolour the terminal.
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def run(group: click.Group, program: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a program to its end.

    Args:
        group: its commands.
        program: its name in messages.
        arguments: of the command line; those of this process when not given.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_run(group, program, given))


def _run(group: click.Group, program: str, arguments: list[str]) -> int:
    as_json = "--json" in arguments
    try:
        return _act(group, program, arguments, as_json=as_json)
    except BrokenPipeError:
        _drop_output()
        return _INTERNAL
    except OSError as error:
        return _end_without_output(error, program=program, as_json=as_json)
    except Exception as error:  # noqa: BLE001 - the top of the program: a text of unknown content must not get out
        fault = _Fault(
            "internal",
            found=type(error).__name__,
            expected="no fault of the program",
            hint="report this with the command and version",
        )
        show_error(fault, program=program, as_json=as_json)
        return fault.exit_status


def _act(group: click.Group, program: str, arguments: list[str], *, as_json: bool) -> int:
    try:
        with group.make_context(program, list(arguments)) as context:
            group.invoke(context)
            _flush()
        return 0
    except LetheError as error:
        show_error(error, program=program, as_json=as_json)
        _flush()
        return error.exit_status
    except click.exceptions.Exit as leave:
        _flush()
        return leave.exit_code
    except click.UsageError as error:
        error.show()
        _show_usage(error, program=program, as_json=as_json)
        return _USAGE
    except click.ClickException as error:
        error.show()
        return _INTERNAL
    except (click.Abort, KeyboardInterrupt):
        say(f"{program}: interrupted")
        return _INTERRUPTED


class _Fault(LetheError):
    """The program itself failed."""

    exit_status = _INTERNAL


class _OutputLost(LetheError):
    """What was to be printed could not be, or the system failed in a way that no command foresaw."""

    exit_status = _OUTPUT


def _show_usage(error: click.UsageError, *, program: str, as_json: bool) -> None:
    # Without any argument click shows its help as if it were the error's text.
    nothing = isinstance(error, click.exceptions.NoArgsIsHelpError)
    found = "no arguments" if nothing else " ".join(error.format_message().split())
    command = error.ctx.command_path if error.ctx else program
    hint = f"{command} --help says what it takes"
    say(f"{program}: error: usage: {found}")
    say(f"{program}: hint: {hint}")
    if as_json:
        members = {"code": "usage", "found": found, "expected": "a command line as its help says", "hint": hint}
        emit({"error": members, "exit_status": _USAGE})


def _end_without_output(error: OSError, *, program: str, as_json: bool) -> int:
    """Say what the system refused, on whatever can still be written to."""
    name = f"{error.filename}: " if isinstance(error.filename, str) else ""
    lost = _OutputLost(
        "output.failed",
        found=f"{name}{reason_of(error)}",
        expected="room and permission to write",
        hint="check where the output goes, then run the command again",
    )
    with contextlib.suppress(OSError):
        show_error(lost, program=program, as_json=False)
    try:
        # First what is still buffered: if it cannot go, standard output is what failed, and takes no error either.
        _flush()
        if as_json:
            emit({"error": lost.as_payload(), "exit_status": lost.exit_status})
    except OSError:
        _drop_output()
    return lost.exit_status


def _flush() -> None:
    # None when the caller closed the descriptor before the start.
    if sys.stdout is not None:
        sys.stdout.flush()


def _drop_output() -> None:
    # Nobody takes the output; Python would complain once more when it closes it.
    sys.stdout = None
