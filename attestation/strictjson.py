"""JSON with one reading: duplicate keys, floats, NaN, deep nesting and non-UTF-8 are refused.

Signatures cover exact bytes (attestation/dsse.py), so no canonical form is needed for security. The writer still has
one form (sorted keys, no spaces) so that the same object always has the same digest.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, NoReturn

from attestation.clock import parse_time
from attestation.errors import FormatError
from attestation.jsonshape import is_deeper

MAX_DEPTH = 16
MAX_SAFE_INTEGER = 2**63 - 1


def _refuse(code: str, found: str, expected: str) -> NoReturn:
    raise FormatError(code, found=found, expected=expected, hint="get the file again from who made it") from None


def _no_float(text: str) -> NoReturn:
    _refuse("json.float", text[:40], "whole numbers only")


def _whole(text: str) -> int:
    # A bound before int(): a number of a million digits would otherwise cost minutes of CPU.
    if len(text) > 20 or abs(number := int(text)) > MAX_SAFE_INTEGER:
        _refuse("json.integer", f"{len(text)} digits", "an integer of at most 63 bits")
    if text == "-0":
        # Other readers take it for a float.
        _refuse("json.integer", "-0", "0")
    return number


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        # By counting once: to look each name up in the whole list would take days for a large object.
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        _refuse("json.duplicate", f"member {name[:64]!a} twice", "each member once")
    return members


# Digits become nines and everything else spaces, so that one search finds a number too long to be taken as it is.
_DIGITS: Final = bytes(57 if 48 <= byte <= 57 else 32 for byte in range(256))
_LONG: Final = b"9" * len(str(MAX_SAFE_INTEGER))


def _read_integer(data: bytes) -> Callable[[str], int] | None:
    """Give the reader of integers; None, which is many times faster, where none can be long or a negative zero."""
    return _whole if b"-0" in data or _LONG in data.translate(_DIGITS) else None


def loads(data: bytes, *, limit: int) -> dict[str, Any]:
    """Read one JSON object.

    Args:
        data: the whole text, UTF-8 without a byte order mark.
        limit: largest accepted size in bytes, checked before anything is parsed.

    Raises:
        FormatError: ``json.*`` for every way the bytes can be wrong.
    """
    if len(data) > limit:
        _refuse("json.size", f"{len(data)} bytes", f"at most {limit} bytes")
    if not data:
        _refuse("json.syntax", "an empty file", "JSON")
    try:
        text = data.decode("utf-8", errors="strict")
    except UnicodeDecodeError as error:
        _refuse("json.utf8", f"a bad byte at offset {error.start}", "UTF-8")
    # Before parsing: the parser recurses, and a hostile file must not reach its recursion limit.
    if is_deeper(data, MAX_DEPTH):
        _refuse("json.depth", f"more than {MAX_DEPTH} levels", f"at most {MAX_DEPTH} levels")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_no_duplicates,
            parse_float=_no_float,
            parse_int=_read_integer(data),
            parse_constant=_no_float,
        )
    except json.JSONDecodeError as error:
        _refuse("json.syntax", f"{error.msg.lower().removesuffix(' at')} at offset {error.pos}", "JSON")
    if not isinstance(value, dict):
        _refuse("json.object", type(value).__name__, "an object")
    if "\\u" in text:
        _check_surrogates(value)
    return value


def _check_surrogates(value: dict[str, Any]) -> None:
    # Half a surrogate pair can be written as an escape, but has no UTF-8 form and breaks whoever prints it.
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        _refuse("json.utf8", "half of a surrogate pair", "whole characters")


def _check_writable(value: object) -> None:
    if isinstance(value, Mapping):
        for member in value.values():
            _check_writable(member)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_writable(item)
    elif isinstance(value, float) or (isinstance(value, int) and abs(value) > MAX_SAFE_INTEGER):
        raise TypeError(f"{value!r} has no form that strictjson.loads reads")


def dumps(value: Mapping[str, Any]) -> bytes:
    """Write an object in the one form: sorted keys, no spaces, UTF-8, no floats.

    Raises:
        TypeError: the caller gave a value that ``loads`` would refuse.
    """
    _check_writable(value)
    return _text(value).encode("utf-8")


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def check_form(value: Mapping[str, Any], data: bytes) -> None:
    """Check that ``data``, which :func:`loads` has read as ``value``, is what :func:`dumps` writes.

    For objects that one program writes: there is then one text for each, and no place to hide anything in.

    Raises:
        FormatError: ``json.form``.
    """
    if _text(value).encode("utf-8") != data:
        _refuse("json.form", "spaces, an order or escapes that no writer uses", "sorted members without spaces")


def b64(data: bytes) -> str:
    """Write a binary field as standard base64 with padding."""
    return base64.b64encode(data).decode("ascii")


class Fields:
    """Typed, complete reading of one JSON object: what is not read when ``end`` is called is refused as unknown.

    Args:
        members: the parsed object.
        where: its name in error messages, such as ``manifest.aead``.
    """

    def __init__(self, members: Mapping[str, Any], where: str) -> None:
        self._left = dict(members)
        self._where = where

    def _take(self, name: str, kind: type, expected: str) -> Any:
        if name not in self._left:
            _refuse("json.missing", f"no {self._where}.{name}", expected)
        value = self._left.pop(name)
        # bool is a subclass of int; an integer field must not accept true.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            _refuse("json.type", f"{self._where}.{name} as {type(value).__name__}", expected)
        return value

    def has(self, name: str) -> bool:
        """Say whether an optional member is present and not yet read."""
        return name in self._left

    def text(self, name: str, *, limit: int = 256) -> str:
        """Read text of at most ``limit`` characters without control characters."""
        value: str = self._take(name, str, "text")
        if len(value) > limit or not value.isprintable():
            _refuse("json.text", f"{self._where}.{name}", f"at most {limit} printable characters")
        return value

    def integer(self, name: str, *, low: int = 0, high: int = MAX_SAFE_INTEGER) -> int:
        """Read an integer in ``low..high``."""
        value: int = self._take(name, int, "an integer")
        if not low <= value <= high:
            _refuse("json.range", f"{self._where}.{name} = {value}", f"{low} to {high}")
        return value

    def flag(self, name: str) -> bool:
        """Read true or false."""
        value: bool = self._take(name, bool, "true or false")
        return value

    def blob(self, name: str, *, size: int | None = None, limit: int = 1 << 20) -> bytes:
        """Read base64 of exactly ``size`` bytes, or of at most ``limit``."""
        return decode_b64(self._take(name, str, "base64"), f"{self._where}.{name}", size=size, limit=limit)

    def time(self, name: str) -> datetime:
        """Read a UTC time in the one accepted form."""
        return parse_time(self.text(name, limit=20))

    def mapping(self, name: str) -> dict[str, Any]:
        """Read a nested object as it is."""
        value: dict[str, Any] = self._take(name, dict, "an object")
        return value

    def fields(self, name: str) -> Fields:
        """Read a nested object for typed reading."""
        return Fields(self.mapping(name), f"{self._where}.{name}")

    def items(self, name: str, *, limit: int) -> list[Any]:
        """Read an array of at most ``limit`` items."""
        value: list[Any] = self._take(name, list, "an array")
        if len(value) > limit:
            _refuse("json.range", f"{len(value)} items in {self._where}.{name}", f"at most {limit}")
        return value

    def mappings(self, name: str, *, limit: int) -> list[dict[str, Any]]:
        """Read an array of at most ``limit`` objects."""
        values = self.items(name, limit=limit)
        for position, value in enumerate(values):
            if not isinstance(value, dict):
                _refuse("json.type", f"{self._where}.{name}[{position}] as {type(value).__name__}", "an object")
        return values

    def end(self) -> None:
        """Refuse members that nothing has read."""
        if self._left:
            # ascii(): a hostile name must not reach a terminal as control characters.
            _refuse("json.unknown", f"{self._where} with {min(self._left)[:64]!a}", "known members only")


def decode_b64(text: str, where: str, *, size: int | None = None, limit: int = 1 << 20) -> bytes:
    """Read standard base64 in its one form (padding, no spaces, unused bits zero)."""
    # The length check comes first, so that nothing large is decoded only to be refused.
    bound = size if size is not None else limit
    try:
        data = base64.b64decode(text, validate=True) if len(text) <= (bound + 2) // 3 * 4 else None
    except (binascii.Error, ValueError):
        data = None
    if data is None or b64(data) != text or (size is not None and len(data) != size):
        _refuse("json.base64", where, f"valid base64 of {'exactly' if size is not None else 'at most'} {bound} bytes")
    return data


def header(kind: str, *, epoch: int, issued_at: str, version: int = 1) -> dict[str, Any]:
    """Give the four members that every signed payload begins with."""
    return {"type": kind, "version": version, "epoch": epoch, "issued_at": issued_at}


def read_header(fields: Fields, kind: str, *, version: int = 1) -> tuple[int, datetime]:
    """Check ``type`` and ``version`` and give ``(epoch, issued_at)``.

    Raises:
        FormatError: ``object.type`` when one kind of object is offered as another, ``object.version`` for a version
            this program does not read.
    """
    found = fields.text("type", limit=64)
    if found != kind:
        _refuse("object.type", found, kind)
    number = fields.integer("version", low=1, high=1 << 16)
    if number != version:
        _refuse("object.version", f"{kind} version {number}", f"version {version}")
    return fields.integer("epoch"), fields.time("issued_at")
