"""Open the segments of a rank's streams, to where somebody says.

Tags lie apart from the ciphertext, so that a file can be read straight into aligned memory. The library is fastest with
the tag right behind the ciphertext. So inside a cell the tag of a segment takes, for the time of one call, the place of
the first 16 bytes of the next segment, which are put back afterwards. In a mapping that would copy a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from appliance.account import Account
from appliance.stream import Run
from provisioning.geometry import Section
from provisioning.manifest import SignedManifest
from provisioning.segment import TAG_BYTES, SectionOpener
from provisioning.table import Table


class Unsealer:
    """Holds the keys of sections for the length of a ``with`` block.

    Args:
        key: the bundle key; it is read here and not kept.
        manifest: of the bundle.
        table: of the bundle.
        descriptors: for each section to be opened, the digest of what lies in it.
        account: where opened segments are noted.
    """

    def __init__(
        self,
        key: memoryview,
        *,
        manifest: SignedManifest,
        table: Table,
        descriptors: Mapping[Section, bytes],
        account: Account,
    ) -> None:
        self._table = table
        self._size = manifest.segment_size
        self._account = account
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

    def open(self, run: Run, index: int, sealed: memoryview, parts: Sequence[memoryview]) -> None:
        """Open one segment of a run.

        Args:
            run: which.
            index: number of the segment in the run.
            sealed: ciphertext of the run, and room behind it. Where it may be written to, it is left as it was, but
                for the parts.
            parts: where the plaintext goes, in order, a segment together: each the very place of its ciphertext in
                ``sealed``, or apart from it.

        Raises:
            BundleDamaged: ``segment.tag``; the parts are all zeros then.
        """
        start, stop = index * self._size, (index + 1) * self._size
        tag = self._table.segment(run.base + index).tag
        opener = self._openers[run.section]
        if sealed.readonly or len(parts) > 1:
            opener.open_parts(run.first + index, sealed[start:stop], tag, parts)
        else:
            after = sealed[stop : stop + TAG_BYTES]
            kept = bytes(after)
            after[:] = tag
            try:
                opener.open_to(run.first + index, sealed[start : stop + TAG_BYTES], parts[0])
            finally:
                after[:] = kept
        self._account.note(run.base + index)

    def close(self) -> None:
        """Wipe the sections' keys."""
        self._openers.clear()
        self._stack.close()

    def __enter__(self) -> Unsealer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
