"""Logging that cannot show a prompt: of an exception only its type and place, of a library's message nothing.

Libraries format what they like into messages and exceptions, such as the text that could not be decoded. So the
formatter prints the message only for this program's own logger, whose messages are codes, and every hook that Python
would use to print a traceback is replaced.
"""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import PurePath
from types import TracebackType

LOG = logging.getLogger("lethe.api")


class ContentFree(logging.Formatter):
    """Formats a record as level, logger, code, exception type and place."""

    def format(self, record: logging.LogRecord) -> str:
        """Give one line without any text of a request."""
        code = record.getMessage() if record.name == LOG.name else "library.message"
        line = f"lethe-api: {record.levelname.lower()}: {record.name}: {code}"
        if record.exc_info and record.exc_info[0] is not None:
            line = f"{line}: {record.exc_info[0].__name__} at {_place(record.exc_info[2])}"
        return line


def _place(trace: TracebackType | None) -> str:
    """Give file and line where an exception was raised."""
    if trace is None:
        return "an unknown place"
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{PurePath(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


def install() -> None:
    """Send all logging and all uncaught exceptions of this process through the formatter, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ContentFree())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.raiseExceptions = False
    # Anyone can send bytes that are no HTTP; a warning for each would fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    logging.captureWarnings(True)

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        LOG.critical("api.uncaught", exc_info=(kind, error, trace))

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            uncaught(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook = uncaught
    threading.excepthook = uncaught_in_thread
    sys.unraisablehook = lambda args: LOG.critical("api.unraisable: %s", args.exc_type.__name__)
