"""What a probe found, as values that cross from its process to the command line as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from attestation.strictjson import Fields

_MOST = 1 << 16


@dataclass(frozen=True, slots=True)
class ReadRate:
    """Direct reads of one size, so many at once."""

    block_bytes: int
    threads: int
    bytes_per_second: int


@dataclass(frozen=True, slots=True)
class CipherRate:
    """AES-256-GCM in memory on so many threads: opened, or where a device decrypts only authenticated."""

    threads: int
    bytes_per_second: int


@dataclass(frozen=True, slots=True)
class CopyRate:
    """Copies of one size onto the device."""

    copy_bytes: int
    bytes_per_second: int


@dataclass(frozen=True, slots=True)
class LoadRate:
    """One sealed load, from opening the bundle to the last byte on the device.

    Attributes:
        nbytes: bytes of ciphertext opened.
        milliseconds: wall time.
        ring_bytes: staging memory.
        peak_plaintext_bytes: most plaintext in it at once.
    """

    nbytes: int
    milliseconds: int
    ring_bytes: int
    peak_plaintext_bytes: int

    @property
    def bytes_per_second(self) -> int:
        """Bytes per second of wall time."""
        return round(self.nbytes * 1000 / max(1, self.milliseconds))


@dataclass(frozen=True, slots=True)
class Findings:
    """All that was measured.

    Attributes:
        directory: on the medium that was read.
        file_system: its type.
        device: where the weights went.
        open_on: who decrypted, ``host`` or ``device``.
        cores: that this process may use.
        readers, openers: threads of the loader.
        reads: the medium, by size and number of reads.
        ciphers: by number of threads.
        copies: by size of one copy.
        cold: a load whose files were in no cache; None where the file system keeps its files in memory.
        warm: a load from the page cache.
    """

    directory: str
    file_system: str
    device: str
    open_on: str
    cores: int
    readers: int
    openers: int
    reads: tuple[ReadRate, ...]
    ciphers: tuple[CipherRate, ...]
    copies: tuple[CopyRate, ...]
    cold: LoadRate | None
    warm: LoadRate

    @property
    def medium(self) -> ReadRate | None:
        """The fastest way of reading the medium; None where it has no direct reads."""
        return max(self.reads, key=lambda one: one.bytes_per_second, default=None)

    @property
    def cipher(self) -> CipherRate:
        """The rate on as many threads as the loader has openers."""
        return next(one for one in self.ciphers if one.threads == self.openers)

    @property
    def copy(self) -> CopyRate:
        """The fastest copy."""
        return max(self.copies, key=lambda one: one.bytes_per_second)

    def as_payload(self) -> dict[str, Any]:
        """Give the findings as JSON members; rates are whole bytes per second."""
        return asdict(self)

    @classmethod
    def from_payload(cls, members: Mapping[str, Any]) -> Findings:
        """Take findings from JSON members.

        Raises:
            FormatError: ``json.*`` when they are of another form.
        """
        fields = Fields(dict(members), "findings")

        def rows(name: str) -> list[Fields]:
            return [Fields(row, f"findings.{name}") for row in fields.mappings(name, limit=_MOST)]

        return cls(
            directory=fields.text("directory", limit=4096),
            file_system=fields.text("file_system", limit=64),
            device=fields.text("device", limit=16),
            open_on=fields.text("open_on", limit=16),
            cores=fields.integer("cores"),
            readers=fields.integer("readers"),
            openers=fields.integer("openers"),
            reads=tuple(ReadRate(*_numbers(row, "block_bytes", "threads")) for row in rows("reads")),
            ciphers=tuple(CipherRate(*_numbers(row, "threads")) for row in rows("ciphers")),
            copies=tuple(CopyRate(*_numbers(row, "copy_bytes")) for row in rows("copies")),
            cold=_load(fields.mapping("cold")) if members.get("cold") is not None else None,
            warm=_load(fields.mapping("warm")),
        )


def _numbers(fields: Fields, *names: str) -> list[int]:
    return [fields.integer(name) for name in (*names, "bytes_per_second")]


def _load(members: dict[str, Any]) -> LoadRate:
    fields = Fields(members, "findings.load")
    names = ("nbytes", "milliseconds", "ring_bytes", "peak_plaintext_bytes")
    return LoadRate(*[fields.integer(name) for name in names])
