"""Progress of long commands on standard error: one rewritten line on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Final

import click

_BAR: Final = 30
_TERMINAL_SECONDS: Final = 0.1
_PLAIN_SECONDS: Final = 10.0


class Meter:
    """Shows bytes done, bytes in all, the rate and the time left.

    A context manager: a rewritten line is ended when the block is left.

    Args:
        label: what is being done, such as ``packing``.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._terminal = sys.stderr.isatty()
        self._interval = _TERMINAL_SECONDS if self._terminal else _PLAIN_SECONDS
        self._started = time.monotonic()
        self._shown = self._started
        self._open = False

    def __call__(self, done: int, total: int) -> None:
        """Take note of progress; shows it when the last showing is long enough ago."""
        now = time.monotonic()
        if now - self._shown < self._interval:
            return
        self._shown = now
        click.echo(self._line(done, total, now - self._started), err=True, nl=not self._terminal)
        self._open = self._terminal

    def _line(self, done: int, total: int, seconds: float) -> str:
        share = done / total if total else 1.0
        rate = done / max(seconds, 1e-9)
        text = f"{self._label} {share:4.0%}, {done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s"
        text += f", {_duration((total - done) / rate)} left" if done else ""
        if not self._terminal:
            return text
        filled = round(share * _BAR)
        return f"\r[{'#' * filled}{'.' * (_BAR - filled)}] {text}\x1b[K"

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            click.echo(err=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
