"""Read every byte of a bundle's ciphertext from its medium and compare it with the digests in its table; needs no key.

The loader needs no ``verify``: each segment is authentic or does not open. ``verify`` is for couriers and operators,
who want to know that a copy is whole before it travels or is loaded, and where it is not.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from attestation.errors import reason_of
from provisioning import blocks
from provisioning.blocks import Outcome, Plan
from provisioning.bundle import TABLE_NAME, SealedFiles
from provisioning.errors import BundleDamaged
from provisioning.geometry import DataFile
from provisioning.manifest import FILE_NAME
from provisioning.medium import Road, seeks

Progress = Callable[[int, int], None]

_MOST_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read and found whole.

    Attributes:
        files: data files.
        segments: segments in them.
        blocks: blocks of ciphertext whose digest was compared.
        bytes: bytes of ciphertext read.
        seconds: wall time.
        road: where the bytes came from; the worst road of all blocks.
    """

    files: int
    segments: int
    blocks: int
    bytes: int
    seconds: float
    road: Road

    def as_payload(self) -> dict[str, Any]:
        """Give the report as JSON members, time in whole milliseconds."""
        return {
            "files": self.files,
            "segments": self.segments,
            "blocks": self.blocks,
            "bytes": self.bytes,
            "milliseconds": round(self.seconds * 1000),
            "read_from": self.road.word,
        }


@dataclass(frozen=True, slots=True)
class Damage:
    """Something of a bundle that is not as its owner wrote it.

    Attributes:
        code: of the refusal.
        where: for people: file, block, bytes and segments.
    """

    code: str
    where: str


def verify(files: SealedFiles, progress: Progress | None = None, *, plan: Plan | None = None) -> VerifyReport:
    """Read every byte of ciphertext and compare it with the digests of the table.

    Args:
        files: an open bundle; the digests are the owner's if it is a signed one.
        progress: told (bytes read, bytes in all) now and then.
        plan: how to read; chosen by the medium when not given.

    Raises:
        BundleDamaged: ``bundle.file.extra``, ``bundle.file.missing``, ``bundle.file.kind``, ``bundle.file.size``,
            ``bundle.file.unreadable`` or ``bundle.digest``. Damage to names and sizes is reported together, before
            anything is hashed; damaged blocks are reported together when all were read.
    """
    started = time.monotonic()
    refuse_damage([*_extra(files), *misplaced(files)])
    everything = blocks.blocks_of(files.files)
    total = files.contents.geometry.data_bytes
    road = Road.MEDIUM
    damages: list[Damage] = []

    def on_bytes(done: int) -> None:
        if progress is not None:
            progress(done, total)

    chosen = plan or plan_for(files.directory)
    with contextlib.closing(blocks.read_blocks(files, everything, chosen, on_bytes)) as outcomes:
        for outcome, _ in outcomes:
            damage = damage_of(files, outcome)
            if damage is not None:
                damages.append(damage)
            road = max(road, outcome.road)
    refuse_damage(damages)
    return VerifyReport(
        files=len(files.files),
        segments=files.contents.geometry.segments,
        blocks=len(everything),
        bytes=total,
        seconds=time.monotonic() - started,
        road=road,
    )


def plan_for(directory: int) -> Plan:
    """Choose how to read the files of a directory."""
    return Plan.in_turns() if seeks(directory) else Plan.streaming()


def damage_of(files: SealedFiles, outcome: Outcome) -> Damage | None:
    """Judge one block; None when it is whole."""
    block, fault = outcome.block, outcome.fault
    if fault is not None:
        return Damage(fault.code, f"{_where(files, outcome, fault.start)}, {fault.reason}")
    if outcome.digest != files.table.digest(block.file, block.number):
        return Damage("bundle.digest", _where(files, outcome, block.start))
    return None


def _where(files: SealedFiles, outcome: Outcome, start: int) -> str:
    block = outcome.block
    file, size = files.files[block.file], files.contents.geometry.segment_size
    first, last = file.base + start // size, file.base + (block.stop - 1) // size
    return f"{file.name} block {block.number}, bytes {start} to {block.stop - 1} (segments {first} to {last})"


def describe(damages: Sequence[Damage]) -> str:
    """Name damages, up to a bound."""
    named = "; ".join(damage.where for damage in damages[:_MOST_NAMED])
    return f"{named}; and {len(damages) - _MOST_NAMED} more" if len(damages) > _MOST_NAMED else named


def refuse_damage(damages: Sequence[Damage]) -> None:
    """Refuse, if there is any damage, with the code of the first.

    Raises:
        BundleDamaged: as :func:`verify`.
    """
    if not damages:
        return
    code = damages[0].code
    only_extra = all(damage.code == "bundle.file.extra" for damage in damages)
    raise BundleDamaged(
        code,
        found=describe(damages),
        expected="the files of the manifest only" if only_extra else "the files that the owner signed",
        hint="remove what does not belong there" if only_extra else "copy those files again from the owner's medium",
    )


def _extra(files: SealedFiles) -> list[Damage]:
    known = {FILE_NAME, TABLE_NAME, *(file.name for file in files.files)}
    extra = sorted(files.names() - known)
    if not extra:
        return []
    shown = ", ".join(ascii(name)[:80] for name in extra[:_MOST_NAMED])
    return [Damage("bundle.file.extra", f"{len(extra)} more names: {shown}")]


def misplaced(files: SealedFiles) -> list[Damage]:
    """Look at the names, kinds and sizes of all data files, which takes no time."""
    found = (_look(files.directory, file) for file in files.files)
    return [damage for damage in found if damage is not None]


def _look(directory: int, file: DataFile) -> Damage | None:
    try:
        state = os.stat(file.name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return Damage("bundle.file.missing", f"no {file.name}")
    except OSError as error:
        return Damage("bundle.file.unreadable", f"{file.name}: {reason_of(error)}")
    if not stat.S_ISREG(state.st_mode):
        return Damage("bundle.file.kind", f"{file.name}, which is no regular file")
    if state.st_size != file.size:
        return Damage("bundle.file.size", f"{file.name} of {state.st_size} bytes instead of {file.size}")
    return None
