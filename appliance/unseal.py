"""Open the runs of a rank's streams in place, and keep account: every segment of them once, and no other.

Tags lie apart from the ciphertext, so that a file can be read straight into aligned memory. The library wants the tag
right behind the ciphertext; so inside a cell the tag of a segment takes, for the time of one call, the place of the
first 16 bytes of the next segment, which are put back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

from appliance.ring import Cell
from appliance.stream import Run
from provisioning.errors import BundleDamaged
from provisioning.geometry import Section
from provisioning.manifest import SignedManifest
from provisioning.segment import TAG_BYTES, SectionOpener
from provisioning.table import Table


def plan_runs(manifest: SignedManifest, table: Table, streams: Iterable[int], cell_bytes: int) -> Iterator[Run]:
    """Cut the segments of some streams into runs that fit a cell, in the order in which the files hold them."""
    wanted = set(streams)
    size = manifest.segment_size
    for section in manifest.sections:
        if section.stream not in wanted:
            continue
        number = 0
        while number < section.segments:
            record = table.segment(section.base + number)
            count = 1
            while (count + 1) * size <= cell_bytes and number + count < section.segments:
                following = table.segment(section.base + number + count)
                if (following.file, following.offset) != (record.file, record.offset + count * size):
                    break
                count += 1
            yield Run(
                file=record.file,
                offset=record.offset,
                section=section.number,
                first=number,
                base=section.base + number,
                count=count,
                stream=section.stream,
                start=(section.first + number) * size,
                length=count * size,
            )
            number += count


class Unsealer:
    """Holds the keys of sections for the length of a ``with`` block.

    Args:
        key: the bundle key; it is read here and not kept.
        manifest: of the bundle.
        table: of the bundle.
        descriptors: for each section to be opened, the digest of what lies in it.
    """

    def __init__(
        self, key: memoryview, *, manifest: SignedManifest, table: Table, descriptors: Mapping[Section, bytes]
    ) -> None:
        self._table = table
        self._size = manifest.segment_size
        self._account = bytearray(manifest.geometry.segments)
        self._openers: dict[int, SectionOpener] = {}
        self._stack = ExitStack()
        with self._stack:
            for section, descriptor in descriptors.items():
                opener = SectionOpener(
                    key,
                    bundle_id=manifest.bundle_id,
                    section=section,
                    segment_size=self._size,
                    descriptor=descriptor,
                )
                self._openers[section.number] = self._stack.enter_context(opener)
            self._stack = self._stack.pop_all()

    def open_run(self, run: Run, cell: Cell) -> None:
        """Open all segments of a run in place.

        Raises:
            BundleDamaged: ``segment.tag``; the cell is all zeros then.
        """
        opener = self._openers[run.section]
        cell.opening(run.length)
        try:
            for index in range(run.count):
                stop = (index + 1) * self._size
                after = cell.view[stop : stop + TAG_BYTES]
                kept = bytes(after)
                after[:] = self._table.segment(run.base + index).tag
                opener.open_into(run.first + index, cell.view[stop - self._size : stop + TAG_BYTES])
                after[:] = kept
                self._account[run.base + index] += 1
        except BundleDamaged:
            # Segments of the run that were opened before are as worthless now as the damaged one.
            cell.wipe()
            raise

    def settle(self, sections: Sequence[Section]) -> int:
        """Give the number of segments opened, if it was every one of these sections once and no other.

        Raises:
            BundleDamaged: ``load.account``.
        """
        planned = bytearray(len(self._account))
        for section in sections:
            planned[section.base : section.base + section.segments] = b"\x01" * section.segments
        if self._account != planned:
            wrong = next(number for number, count in enumerate(self._account) if count != planned[number])
            raise BundleDamaged(
                "load.account",
                found=f"segment {wrong} opened {self._account[wrong]} times",
                expected=f"{planned[wrong]} times",
                hint="this is a fault of the loader; report it, and do not serve",
            )
        return planned.count(1)

    def close(self) -> None:
        """Wipe the sections' keys."""
        self._openers.clear()
        self._stack.close()

    def __enter__(self) -> Unsealer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
