"""Passphrases: from a file, a descriptor or the terminal, straight into protected memory.

Never from the command line or the environment: other programs can see those.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from attestation.errors import reason_of
from provisioning.errors import InputFailed, KeyRefused
from provisioning.secret import SecretBytes

MAX_BYTES: Final = 1024
MIN_NEW_BYTES: Final = 12

_Command = TypeVar("_Command", bound=Callable[..., Any])


def passphrase_options(command: _Command) -> _Command:
    """Give a command the options ``--passphrase-file`` and ``--passphrase-fd``."""
    of_descriptor = click.option(
        "--passphrase-fd", type=click.IntRange(min=0), metavar="N", help="Read the passphrase from this descriptor."
    )
    of_file = click.option(
        "--passphrase-file",
        type=click.Path(path_type=Path, allow_dash=True),
        metavar="PATH",
        help="Read the passphrase from a file; - is standard input. Asked for when neither is given.",
    )
    return of_file(of_descriptor(command))


def read_passphrase(file: Path | None, descriptor: int | None, *, new: bool = False) -> SecretBytes:
    """Read a passphrase; one line end at its end is not part of it.

    Args:
        file: where from; ``-`` is standard input.
        descriptor: where from, if no file is given; without both the terminal is asked.
        new: ask twice at a terminal, and refuse a short one.

    Raises:
        InputFailed: ``passphrase.read``, ``passphrase.terminal``, ``passphrase.size`` or ``passphrase.short``.
        KeyRefused: ``passphrase.differs``.
    """
    if file is not None and descriptor is not None:
        raise click.UsageError("give --passphrase-file or --passphrase-fd, not both")
    if file is not None and str(file) != "-":
        passphrase = _read_file(file)
    elif file is not None or descriptor is not None:
        passphrase = _read_all(sys.stdin.fileno() if descriptor is None else descriptor)
    else:
        passphrase = _ask_twice() if new else _ask("passphrase: ")
    if new and len(passphrase) < MIN_NEW_BYTES:
        length = len(passphrase)
        passphrase.close()
        raise InputFailed(
            "passphrase.short",
            found=f"{length} bytes",
            expected=f"at least {MIN_NEW_BYTES}",
            hint="take several random words; who copies the key directory can guess at leisure",
        )
    return passphrase


def _read_file(path: Path) -> SecretBytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InputFailed(
            "passphrase.read",
            found=f"{path}: {reason_of(error)}",
            expected="a readable file",
            hint="check the path and its permissions",
        ) from None
    try:
        return _read_all(descriptor)
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, *, one_line: bool = False) -> SecretBytes:
    """Read to the end, or one line, into protected memory; refuses nothing at all and too much."""
    with SecretBytes(MAX_BYTES + 1) as buffer, buffer.expose() as view:
        length = 0
        while length < len(view):
            try:
                with view[length:] as rest:
                    count = os.readv(descriptor, [rest])
            except OSError as error:
                raise InputFailed(
                    "passphrase.read",
                    found=reason_of(error),
                    expected="a passphrase",
                    hint="check the descriptor",
                ) from None
            length += count
            if count == 0 or (one_line and view[length - 1] == 0x0A):
                break
        if length > MAX_BYTES:
            raise InputFailed(
                "passphrase.size",
                found=f"more than {MAX_BYTES} bytes",
                expected=f"at most {MAX_BYTES}",
                hint="check that this is the right file",
            )
        if length and view[length - 1] == 0x0A:
            length -= 1
        if length and view[length - 1] == 0x0D:
            length -= 1
        if not length:
            raise InputFailed("passphrase.size", found="nothing", expected="a passphrase", hint="type or give one")
        with view[:length] as kept:
            return SecretBytes.take(kept)


def _ask_twice() -> SecretBytes:
    first = _ask("new passphrase: ")
    with _ask("the same again: ") as second, first.expose() as one, second.expose() as other:
        same = hmac.compare_digest(one, other)
    if not same:
        first.close()
        raise KeyRefused(
            "passphrase.differs", found="two different passphrases", expected="the same twice", hint="try again"
        )
    return first


def _ask(prompt: str) -> SecretBytes:
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        raise InputFailed(
            "passphrase.terminal",
            found="no terminal to ask at",
            expected="a passphrase",
            hint="give --passphrase-file or --passphrase-fd",
        ) from None
    try:
        with _silent(terminal):
            os.write(terminal, prompt.encode())
            return _read_all(terminal, one_line=True)
    finally:
        os.write(terminal, b"\n")
        os.close(terminal)


@contextlib.contextmanager
def _silent(terminal: int) -> Iterator[None]:
    """Turn echo off for the length of a block; what was typed before is thrown away."""
    before = termios.tcgetattr(terminal)
    silent = list(before)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSAFLUSH, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSAFLUSH, before)
