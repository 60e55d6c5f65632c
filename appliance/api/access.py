"""Client keys: a file of salted hashes, and the check of a bearer key against it.

A key is 32 random bytes as text, shown once when it is issued. The file holds, per key, a label, a salt, the SHA-256
of salt and key, and dates; one fast hash is enough because nobody can guess 256 random bits. The file is read again
when it changes, so issuing and revoking need no restart. A file that is absent or cannot be read admits nobody.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from appliance.api.errors import key_refused
from appliance.api.quiet import LOG
from appliance.errors import ConfigError
from attestation.clock import format_time, parse_time
from attestation.errors import FormatError, reason_of

MAX_KEYS = 1024
_MAX_FILE = 1 << 20
_PREFIX = "lethe-"
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HEX = re.compile(r"[0-9a-f]+")
_SALT_BYTES = 16
_MAX_KEY = 128


@dataclass(frozen=True, slots=True)
class ClientKey:
    """What the file knows of one key.

    Attributes:
        label: who it is for; unique in the file.
        salt: 16 bytes, hexadecimal.
        digest: SHA-256 of salt and key text, hexadecimal.
        created: UTC time.
        expires: UTC time from which the key is refused; empty for never.
    """

    label: str
    salt: str
    digest: str
    created: str
    expires: str

    def expired(self, at: datetime) -> bool:
        """Say whether the key is past its end."""
        return bool(self.expires) and at >= parse_time(self.expires)

    def as_payload(self) -> dict[str, str]:
        """Give label and dates for ``--json``."""
        return {"label": self.label, "created": self.created, "expires": self.expires}

    def describe(self) -> str:
        """Give label and dates as one line."""
        return f"{self.label}  created {self.created}  expires {self.expires or 'never'}"


class AccessList:
    """The keys file as the API sees it: the last contents, read again when the file changes."""

    def __init__(self, path: Path, *, now: Callable[[], datetime]) -> None:
        self._path = path
        self._now = now
        self._seen: tuple[int, int, int] | None = None
        self._keys: tuple[ClientKey, ...] = ()
        self._trouble = ""

    def check(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Require one authorization header with a key of the file.

        Every entry is compared, each in constant time, so the time taken tells nothing about which one matched.

        Raises:
            ApiRefused: 401 ``invalid_api_key``.
        """
        values = [value for name, value in headers if name == b"authorization"]
        if len(values) != 1:
            raise key_refused("no key" if not values else "several authorization headers")
        scheme, _, key = values[0].partition(b" ")
        if scheme.lower() != b"bearer" or len(key) > _MAX_KEY:
            raise key_refused("another authorization")
        matches = [entry for entry in self._current() if hmac.compare_digest(_digest(entry.salt, key), entry.digest)]
        if not matches:
            raise key_refused("an unknown key")
        if matches[0].expired(self._now()):
            raise key_refused("an expired key")

    def _current(self) -> tuple[ClientKey, ...]:
        try:
            status = self._path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                self._keys, self._seen, self._trouble = list_keys(self._path), seen, ""
        except ConfigError as error:
            self._forget(error.code)
        except OSError:
            self._forget("api.keys.absent")
        return self._keys

    def _forget(self, trouble: str) -> None:
        """Admit nobody; say so once, not once per request."""
        if trouble != self._trouble:
            LOG.error(trouble)
        self._keys, self._seen, self._trouble = (), None, trouble


def list_keys(path: Path) -> tuple[ClientKey, ...]:
    """Read the keys file.

    Raises:
        ConfigError: ``api.keys.format`` when it is not a keys file; ``api.keys.read`` when it cannot be read.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise _refused("read", found=reason_of(error), expected="a readable keys file") from None
    try:
        keys = tuple(_entry(item) for item in _items(raw))
    except (FormatError, ValueError, TypeError, AttributeError, RecursionError):
        raise _refused("format", found="another content", expected="a keys file of version 1") from None
    if len(keys) > MAX_KEYS or len({key.label for key in keys}) != len(keys):
        raise _refused("format", found="too many keys or a label twice", expected=f"up to {MAX_KEYS} labels, each once")
    return keys


def issue_key(path: Path, label: str, *, expires: datetime | None = None, at: datetime | None = None) -> str:
    """Make a key, add its hash to the file, and give the key's text, which is kept nowhere.

    Args:
        path: the keys file; made when absent.
        label: who the key is for.
        expires: the moment from which the key is refused; None for never.
        at: now; None for the machine's time. A time without a zone is UTC.

    Raises:
        ConfigError: ``api.keys.label`` when the label is malformed or taken, ``api.keys.count`` when the file is full,
            ``api.keys.write`` when it cannot be written.
    """
    if not _LABEL.fullmatch(label):
        raise _refused("label", found="this label", expected="up to 64 letters, digits and . _ @ -")
    key = _PREFIX + secrets.token_urlsafe(32)
    salt = secrets.token_hex(_SALT_BYTES)
    entry = ClientKey(
        label=label,
        salt=salt,
        digest=_digest(salt, key.encode()),
        created=_write_time(at or datetime.now(UTC)),
        expires=_write_time(expires) if expires else "",
    )
    with _change(path) as keys:
        if any(known.label == label for known in keys):
            raise _refused("label", found=f"{label} twice", expected="a new label, or revoke the old key first")
        if len(keys) >= MAX_KEYS:
            raise _refused("count", found=f"{MAX_KEYS} keys", expected="fewer; revoke unused ones")
        keys.append(entry)
    return key


def revoke_key(path: Path, label: str) -> None:
    """Remove the key of a label; a running API refuses it from the next request on.

    Raises:
        ConfigError: ``api.keys.unknown`` when no key has the label.
    """
    with _change(path) as keys:
        kept = [key for key in keys if key.label != label]
        if len(kept) == len(keys):
            raise _refused("unknown", found="no key of this label", expected="a label of the keys file")
        keys[:] = kept


@contextmanager
def _change(path: Path) -> Iterator[list[ClientKey]]:
    """Give the keys for change, then replace the file at once: readers see the old or the new one, never half."""
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _refused("write", found=reason_of(error), expected="a directory for the keys") from None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        keys = list(list_keys(path)) if path.exists() else []
        yield keys
        _replace(path, keys, directory)
    except OSError as error:
        raise _refused("write", found=reason_of(error), expected="a writable keys file") from None
    finally:
        os.close(directory)


def _replace(path: Path, keys: Sequence[ClientKey], directory: int) -> None:
    document = {"version": 1, "keys": [asdict(key) for key in keys]}
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        # The API runs as another user: it reads through the group of the directory.
        group = os.fstat(directory).st_gid
        if os.fstat(descriptor).st_gid != group:
            os.fchown(descriptor, -1, group)
        os.fchmod(descriptor, 0o640)
        json.dump(document, file, indent=1)
        file.flush()
        os.fsync(descriptor)
    new.replace(path)
    os.fsync(directory)


def _items(raw: bytes) -> list[Any]:
    document = json.loads(raw)
    if len(raw) > _MAX_FILE or document.keys() != {"version", "keys"} or document["version"] != 1:
        raise ValueError
    return list(document["keys"])


def _entry(item: Any) -> ClientKey:
    key = ClientKey(**item)
    if not all(type(value) is str for value in asdict(key).values()):
        raise TypeError
    sizes = (len(key.salt), len(key.digest))
    if not _LABEL.fullmatch(key.label) or sizes != (2 * _SALT_BYTES, 64) or not _HEX.fullmatch(key.salt + key.digest):
        raise ValueError
    for time in filter(None, (key.created, key.expires)):
        parse_time(time)
    return key


def _digest(salt: str, key: bytes) -> str:
    return sha256(bytes.fromhex(salt) + key).hexdigest()


def _write_time(at: datetime) -> str:
    return format_time(at if at.tzinfo else at.replace(tzinfo=UTC))


def _refused(code: str, *, found: str, expected: str) -> ConfigError:
    return ConfigError(f"api.keys.{code}", found=found, expected=expected, hint="see docs/api.md, keys")
