"""What the loader spends on a segment besides the cipher, measured on segments so small that the cipher costs nothing.

The loader's own code opens genuine segments of one page from memory to memory, on one thread: where it puts them, which
tag, nonce and associated data they have, and that they were opened once. Between any two segments a whole one is
decrypted beside it, off the clock: what the interpreter needs is then as cold in the caches as it is in a load.
"""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any, Final

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from appliance.account import Account
from appliance.hostopen import MemoryWay
from appliance.placement import Target
from appliance.stream import Run
from appliance.unseal import Unsealer
from provisioning.geometry import FIRST_COLUMN, Section
from provisioning.secret import SecretBytes
from provisioning.segment import DESCRIPTOR_BYTES, TAG_BYTES, SectionSealer

SEGMENT: Final = 4096
SEGMENTS: Final = 512
PER_RUN: Final = 16
PER_TARGET: Final = 32
_LARGE: Final = 1 << 20
_ID: Final = bytes(16)


def _sealed(key: memoryview, section: Section) -> tuple[bytes, list[bytes]]:
    """Give the ciphertext of a section of zeros, and its tags."""
    ciphertext, tags = bytearray(), []
    descriptor = bytes(DESCRIPTOR_BYTES)
    with SectionSealer(key, bundle_id=_ID, section=section, segment_size=SEGMENT, descriptor=descriptor) as sealer:
        for _ in range(section.segments):
            buffer = bytearray(SEGMENT + TAG_BYTES)
            sealer.seal_into(memoryview(buffer))
            ciphertext += buffer[:SEGMENT]
            tags.append(bytes(buffer[SEGMENT:]))
    return bytes(ciphertext), tags


class _Table:
    """Stands in for the table of tags, which is asked once per segment; takes the caches away when it is."""

    def __init__(self, tags: list[bytes]) -> None:
        self._tags = tags
        self._aead = AESGCM(AESGCM.generate_key(256))
        self._source, self._target = memoryview(bytes(_LARGE)), memoryview(bytearray(_LARGE - TAG_BYTES))
        self.aside = 0.0

    def segment(self, number: int) -> SimpleNamespace:
        begin = time.thread_time()
        with contextlib.suppress(InvalidTag):
            self._aead.decrypt_into(number.to_bytes(12, "big"), self._source, b"", self._target)
        self.aside += time.thread_time() - begin
        return SimpleNamespace(tag=self._tags[number])


def per_segment() -> float:
    """Give seconds of a core per segment."""
    section = Section(number=0, stream=FIRST_COLUMN, first=0, segments=SEGMENTS, base=0)
    target = torch.empty(SEGMENTS * SEGMENT, dtype=torch.uint8)
    size = PER_TARGET * SEGMENT
    targets = [
        Target(start, start + size, torch.uint8, target[start : start + size].view(1, size))
        for start in range(0, SEGMENTS * SEGMENT, size)
    ]
    with SecretBytes.random(32) as key, key.expose() as view:
        ciphertext, tags = _sealed(view, section)
        # Stand-ins for what would be read from a bundle; the loader asks no more of them.
        manifest: Any = SimpleNamespace(segment_size=SEGMENT, bundle_id=_ID)
        stand_in = _Table(tags)
        table: Any = stand_in
        unsealer = Unsealer(
            view,
            manifest=manifest,
            table=table,
            descriptors={section: bytes(DESCRIPTOR_BYTES)},
            account=Account(SEGMENTS),
        )
    whole = memoryview(ciphertext)
    reader: Any = SimpleNamespace(
        show=lambda run, _: whole[run.offset : run.offset + run.length],
        is_mapped=lambda _: True,
        drop=lambda _: None,
    )
    unused: Any = None
    with MemoryWay(unsealer, reader=reader, targets={FIRST_COLUMN: targets}) as way:
        begin = time.thread_time()
        for first in range(0, SEGMENTS, PER_RUN):
            way.bring(_run(first), unused, unused)
        return (time.thread_time() - begin - stand_in.aside) / SEGMENTS


def _run(first: int) -> Run:
    start, length = first * SEGMENT, PER_RUN * SEGMENT
    return Run(
        file=0,
        offset=start,
        section=0,
        first=first,
        base=first,
        count=PER_RUN,
        stream=FIRST_COLUMN,
        start=start,
        length=length,
    )
