"""Copy a sealed bundle to another medium, and believe in the copy only when it was read back.

Three passes. What an earlier run left is read from the medium and kept where its digest is the owner's. The other
blocks are read from the source, compared, and written only if they are whole, so damage is never copied. Then all is
synced and read back from the medium, also what an earlier run left: on a stick with less room than it claims, a block
written now may lie where an older one was. Only then does the copy get its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from provisioning import blocks
from provisioning.blocks import Block, Files, Plan
from provisioning.bundle import TABLE_NAME, SealedFiles, open_unsigned
from provisioning.destination import refuse_taken
from provisioning.errors import BundleDamaged, InputFailed, OutputFailed
from provisioning.files import read_bounded
from provisioning.manifest import FILE_NAME, MAX_ENVELOPE_BYTES
from provisioning.medium import Road
from provisioning.partial import IDENTITY, Partial, open_partial, partial_path
from provisioning.verify import Damage, damage_of, describe, misplaced, plan_for, refuse_damage, verify

CHECKING: Final = "checking what is there"
COPYING: Final = "copying"
READING_BACK: Final = "reading back"

# Told (one of the passes above, bytes done, bytes in all) now and then.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """A whole copy.

    Attributes:
        files: data files.
        bytes: bytes of ciphertext.
        blocks: digests compared.
        copied: blocks that this run wrote.
        kept: blocks that were there and whole.
        copied_bytes: bytes of the blocks that this run wrote.
        left_out: names beside the bundle's files in the source, which were not copied.
        seconds: wall time.
        road: where the bytes came from when they were read back; the worst road of all.
    """

    files: int
    bytes: int
    blocks: int
    copied: int
    kept: int
    copied_bytes: int
    left_out: tuple[str, ...]
    seconds: float
    road: Road

    def as_payload(self) -> dict[str, Any]:
        """Give the report as JSON members, time in whole milliseconds."""
        return {
            "files": self.files,
            "bytes": self.bytes,
            "blocks": self.blocks,
            "copied": self.copied,
            "kept": self.kept,
            "copied_bytes": self.copied_bytes,
            "left_out": list(self.left_out),
            "milliseconds": round(self.seconds * 1000),
            "read_from": self.road.word,
        }


def copy(source: SealedFiles, destination: Path, *, progress: Progress | None = None) -> CopyReport:
    """Copy an open bundle, or go on where an earlier run broke off, and read the copy back.

    Args:
        source: the bundle; its digests are the owner's if it is a signed one.
        destination: path that the copy gets when it is whole; until then it grows beside it, in ``DEST.partial``.
        progress: told what is done.

    Raises:
        InputFailed: ``copy.place``.
        OutputFailed: ``copy.*``; the copy stays partial, and another run goes on with it.
        BundleDamaged: as :func:`provisioning.verify.verify`, for the source, or for a destination that is this bundle
            already; a partial copy stays, with all blocks that were whole.
    """
    started = time.monotonic()
    _refuse_place(source.path, destination)
    # A link at its name is no copy of ours, wherever it leads.
    if destination.is_symlink() or destination.exists():
        return _check_finished(source, destination, _Passes(progress), started)
    refuse_damage(misplaced(source))
    with open_partial(source, destination) as partial:
        return _Copy(source, partial, _Passes(progress), started).run()


class _Passes:
    """Progress of the passes."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def of(self, label: str, total: int) -> Callable[[int], None]:
        def report(done: int) -> None:
            if self._progress is not None:
                self._progress(label, done, total)

        return report


def _refuse_place(source: Path, destination: Path) -> None:
    """Refuse a destination that is the bundle itself or lies in it, whatever names and links it is given by."""
    # Path.resolve raises for links that lead in a circle; a circle is no bundle.
    here = Path(os.path.realpath(source))
    there = Path(os.path.realpath(destination))
    growing = Path(os.path.realpath(partial_path(destination)))
    if any(place.exists() and place.samefile(here) for place in (growing, there, *there.parents)):
        raise InputFailed(
            "copy.place",
            found=f"{destination}, which is the bundle itself or lies in it",
            expected="a place outside of the bundle",
            hint="name a directory on the medium that is to take the copy",
        )


def _check_finished(source: SealedFiles, destination: Path, passes: _Passes, started: float) -> CopyReport:
    """A run that is repeated after it was done checks its copy once more; anything else is not touched."""
    if destination.is_symlink() or not destination.is_dir():
        refuse_taken(destination, "which is no bundle")
    try:
        envelope = read_bounded(destination / FILE_NAME, limit=MAX_ENVELOPE_BYTES)
    except InputFailed:
        envelope = b""
    if envelope != source.envelope:
        refuse_taken(destination, "which is not this bundle")
    report = passes.of(CHECKING, source.contents.geometry.data_bytes)
    try:
        with open_unsigned(destination) as finished:
            seen = verify(finished, lambda done, _: report(done))
    except BundleDamaged as damage:
        raise BundleDamaged(
            damage.code,
            found=f"in {destination}: {damage.found}",
            expected=damage.expected,
            hint=f"rename it to {partial_path(destination).name} and run this again: what is damaged is copied",
        ) from None
    return CopyReport(
        files=seen.files,
        bytes=seen.bytes,
        blocks=seen.blocks,
        copied=0,
        kept=seen.blocks,
        copied_bytes=0,
        left_out=(),
        seconds=time.monotonic() - started,
        road=seen.road,
    )


class _Copy:
    """One run."""

    def __init__(self, source: SealedFiles, partial: Partial, passes: _Passes, started: float) -> None:
        self._source = source
        self._partial = partial
        self._passes = passes
        self._started = started
        self._road = Road.MEDIUM

    def run(self) -> CopyReport:
        partial, everything = self._partial, blocks.blocks_of(self._source.files)
        partial.require_room()
        partial.begin()
        whole = self._whole(partial.present(everything))
        todo = [block for block in everything if block not in whole]
        self._write(todo)
        self._write_table()
        if todo:
            self._read_back(everything)
        self._read_back_small()
        partial.publish()
        return CopyReport(
            files=len(self._source.files),
            bytes=self._source.contents.geometry.data_bytes,
            blocks=len(everything),
            copied=len(todo),
            kept=len(whole),
            copied_bytes=_bytes_of(todo),
            left_out=self._left_out(),
            seconds=time.monotonic() - self._started,
            road=self._road,
        )

    def _left_out(self) -> tuple[str, ...]:
        known = {FILE_NAME, TABLE_NAME, *(file.name for file in self._source.files)}
        return tuple(sorted(self._source.names() - known))

    def _judge(self, files: Files, label: str, some: list[Block]) -> list[tuple[Block, Damage | None]]:
        """Read blocks from the destination's medium and compare them with the owner's digests."""
        report = self._passes.of(label, _bytes_of(some))
        judged: list[tuple[Block, Damage | None]] = []
        plan = plan_for(self._partial.directory)
        with contextlib.closing(blocks.read_blocks(files, some, plan, report)) as outcomes:
            for outcome, _ in outcomes:
                judged.append((outcome.block, damage_of(self._source, outcome)))
                self._road = max(self._road, outcome.road)
        return judged

    def _whole(self, present: list[Block]) -> frozenset[Block]:
        if not present:
            return frozenset()
        judged = self._judge(self._partial, CHECKING, present)
        return frozenset(block for block, damage in judged if damage is None)

    def _write(self, todo: list[Block]) -> None:
        """Copy blocks; a damaged one is left out and the others go on, so that one run finds all damage.

        Raises:
            BundleDamaged: the source is damaged.
            OutputFailed: as :func:`provisioning.partial.refuse_write`.
        """
        partial = self._partial
        report, done = self._passes.of(COPYING, _bytes_of(todo)), 0
        damages: list[Damage] = []
        last: int | None = None
        # Blocks are written from the memory that they were hashed in, so that what was compared is what is written.
        with contextlib.closing(
            blocks.read_blocks(self._source, todo, Plan.in_turns(), lambda _: report(done))
        ) as outcomes:
            for outcome, memory in outcomes:
                block = outcome.block
                if last is not None and last != block.file:
                    partial.close_file(last)
                last = block.file
                damage = damage_of(self._source, outcome)
                if damage is None:
                    partial.write_block(block, memory)
                else:
                    damages.append(damage)
                done += block.stop - block.start
                report(done)
        if last is not None:
            partial.close_file(last)
        partial.sync()
        if damages:
            self._refuse_source(damages)

    def _refuse_source(self, damages: list[Damage]) -> NoReturn:
        raise BundleDamaged(
            damages[0].code,
            found=f"in {self._source.path}: {describe(damages)}",
            expected="the ciphertext that the owner signed",
            hint=f"{self._partial.path.name} keeps all other blocks; run this again with a source that is whole",
        )

    def _write_table(self) -> None:
        partial, data = self._partial, self._source.table_data
        if TABLE_NAME not in partial.names() or partial.read_small(TABLE_NAME, len(data))[0] != data:
            partial.write_small(TABLE_NAME, data)
        partial.sync()

    def _read_back(self, everything: list[Block]) -> None:
        # Every block is read again, so how the first look read them says nothing any more.
        self._road = Road.MEDIUM
        self._refuse_medium([damage for _, damage in self._judge(self._partial, READING_BACK, everything) if damage])

    def _read_back_small(self) -> None:
        partial = self._partial
        for file, data in ((IDENTITY, self._source.envelope), (TABLE_NAME, self._source.table_data)):
            found, road = partial.read_small(file, len(data))
            self._road = max(self._road, road)
            if hashlib.sha384(found).digest() != hashlib.sha384(data).digest():
                self._refuse_medium([Damage("copy.medium", file)])

    def _refuse_medium(self, damages: list[Damage]) -> None:
        if not damages:
            return
        raise OutputFailed(
            "copy.medium",
            found=f"other bytes than were written, in {self._partial.path}: {describe(damages)}",
            expected="a medium that gives back what was written to it",
            hint="run this again to write those blocks once more; if it fails again, use another medium",
        )


def _bytes_of(some: Iterable[Block]) -> int:
    return sum(block.stop - block.start for block in some)
