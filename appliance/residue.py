"""Search files and the memory of processes, from outside, for what must not be there.

The method is the one Common Criteria evaluators use for key destruction: know the value, use it, destroy it, then
search all memory and all files for it, with a positive control that must be found or the search proves nothing. A value
is looked for in every form it may have taken (raw, hexadecimal, base64, UTF-16, UTF-32), at any alignment.

All needles are searched in one pass: the first eight bytes of each are looked up at every offset with numpy, and only
candidates are compared in full, so thousands of weight windows cost little more than one.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

MIN_NEEDLE = 16
_CHUNK = 16 << 20
_MAP_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+\s*(.*)")
# Kernel pages and device registers are not memory of the process; reading some of them has side effects.
_NOT_MEMORY = ("[vvar", "[vsyscall]", "/dev/")


@dataclass(frozen=True, slots=True)
class Needle:
    """What to look for.

    Attributes:
        label: what it is, such as ``prompt canary``; the value itself is never shown.
        data: at least 16 bytes.
    """

    label: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Hit:
    """A needle that was found."""

    label: str
    where: str
    offset: int


@dataclass(slots=True)
class Findings:
    """What a search covered and what it found."""

    hits: list[Hit] = field(default_factory=list)
    searched_bytes: int = 0
    places: int = 0
    unreadable: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Take in the findings of another search."""
        self.hits += other.hits
        self.searched_bytes += other.searched_bytes
        self.places += other.places
        self.unreadable += other.unreadable


def forms_of(label: str, value: bytes) -> list[Needle]:
    """Give the needles for a secret or a canary in all the forms a program may keep it in."""
    forms = [value, value.hex().encode(), value.hex().upper().encode()]
    for shift in range(3):
        # Base64 groups three bytes; inside a longer text the value may start at any of three phases.
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            text = encode(b"\0" * shift + value)
            forms.append(text[4:-4] if shift else text[:-4])
    if value.isascii():
        forms += [value.decode("ascii").encode(wide) for wide in ("utf-16-le", "utf-32-le")]
    return [Needle(label, form) for form in dict.fromkeys(forms) if len(form) >= MIN_NEEDLE]


_SIEVE_BITS = 18


def _hash(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # Multiplicative hashing (Knuth, TAOCP 6.4) by the golden ratio; overflow is meant.
    return (words * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - _SIEVE_BITS)


class Searcher:
    """Finds any of many needles in byte streams."""

    def __init__(self, needles: Iterable[Needle]) -> None:
        self._by_prefix: dict[int, list[Needle]] = {}
        longest = 0
        for needle in needles:
            if len(needle.data) < MIN_NEEDLE:
                message = f"a needle needs at least {MIN_NEEDLE} bytes"
                raise ValueError(message)
            prefix = int.from_bytes(needle.data[:8], "little")
            self._by_prefix.setdefault(prefix, []).append(needle)
            longest = max(longest, len(needle.data))
        self._prefixes = np.array(sorted(self._by_prefix), dtype=np.uint64)
        # A bit per hash of a prefix: one small table look-up dismisses nearly every offset.
        self._sieve = np.zeros(1 << _SIEVE_BITS, dtype=np.bool_)
        self._sieve[_hash(self._prefixes)] = True
        self.overlap = longest

    def find(self, data: bytes, where: str, base: int) -> Iterator[Hit]:
        """Give the hits in one chunk whose first byte is at offset ``base`` of ``where``."""
        for shift in range(min(8, len(data))):
            words = np.frombuffer(data, dtype="<u8", offset=shift, count=(len(data) - shift) // 8)
            for index in self._candidates(words):
                at = shift + 8 * int(index)
                for needle in self._by_prefix[int(words[index])]:
                    if data.startswith(needle.data, at):
                        yield Hit(needle.label, where, base + at)

    def _candidates(self, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        maybe = np.flatnonzero(self._sieve[_hash(words)])
        return maybe[np.isin(words[maybe], self._prefixes)]

    def search(self, descriptor: int, where: str, ranges: Iterable[tuple[int, int]]) -> Findings:
        """Search byte ranges of an open file or of ``/proc/PID/mem``."""
        findings = Findings(places=1)
        seen: set[tuple[str, int]] = set()
        for start, stop in ranges:
            position = start
            while position < stop:
                try:
                    data = os.pread(descriptor, min(_CHUNK, stop - position), position)
                except OSError:
                    # memfd_secret pages answer EIO to everyone else: that is their purpose.
                    findings.unreadable.append(f"{where}:{position:#x}-{stop:#x}")
                    break
                if not data:
                    break
                for hit in self.find(data, where, position):
                    if (hit.label, hit.offset) not in seen:
                        seen.add((hit.label, hit.offset))
                        findings.hits.append(hit)
                findings.searched_bytes += len(data)
                # The end is read again with the next chunk, so that no needle hides on the edge.
                position += len(data) if position + len(data) >= stop else max(len(data) - self.overlap, 1)
        return findings

    def search_file(self, path: Path) -> Findings:
        """Search one regular file; a file that cannot be opened is listed as unreadable."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return Findings(unreadable=[str(path)])
        try:
            return self.search(descriptor, str(path), _written(descriptor))
        finally:
            os.close(descriptor)

    def search_tree(self, root: Path) -> Findings:
        """Search every regular file below a directory."""
        findings = Findings()
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder, name)
                if path.is_file() and not path.is_symlink():
                    findings.add(self.search_file(path))
        return findings

    def search_process(self, pid: int) -> Findings:
        """Search all readable memory of a process.

        Raises:
            PermissionError: processes of the appliance can be read by root only (PR_SET_DUMPABLE).
            ProcessLookupError, FileNotFoundError: there is no such process.
        """
        descriptor = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self.search(descriptor, f"memory of process {pid}", _ranges(pid))
        finally:
            os.close(descriptor)


def _written(descriptor: int) -> Iterator[tuple[int, int]]:
    """Give the byte ranges of a file that were written; a hole of a terabyte holds nothing to find (lseek(2))."""
    end = os.fstat(descriptor).st_size
    position = 0
    while position < end:
        try:
            start = os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but a hole is left
            return
        position = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, min(position, end)


def _ranges(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        found = _MAP_LINE.match(line)
        if found is None or "r" not in found[3] or found[4].startswith(_NOT_MEMORY):
            continue
        yield int(found[1], 16), int(found[2], 16)
