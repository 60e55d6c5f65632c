"""How both programs speak: results on standard output, talk on standard error, one exit status for each decision.

``--json`` makes standard output exactly one JSON object, also when the command is refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import click

from attestation.errors import LetheError
from attestation.result import AppraisalRefused

SCHEMA: Final = 1
_USAGE: Final = 2
_INTERNAL: Final = 1
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
    try:
        with group.make_context(program, list(arguments)) as context:
            group.invoke(context)
            sys.stdout.flush()
        return 0
    except LetheError as error:
        show_error(error, program=program, as_json="--json" in arguments)
        return error.exit_status
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.UsageError as error:
        error.show()
        return _USAGE
    except click.ClickException as error:
        error.show()
        return _INTERNAL
    except (click.Abort, KeyboardInterrupt):
        say(f"{program}: stopped")
        return _INTERRUPTED
    except BrokenPipeError:
        # Who read the output has gone; Python would complain once more when it closes it.
        sys.stdout = None
        return _INTERNAL
