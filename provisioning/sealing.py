"""Seal all streams of a bundle side by side, in one pass over the model and in bounded memory.

The caller fills :class:`Sink` objects, one for each stream, in any order. A full segment goes to the worker thread of
its stream, which seals it in place, takes its part of the digests, writes it and gives the buffer back. A stream is one
worker's, so its segments are sealed and written in order with no lock; ciphers, digests and writes run outside of the
interpreter's lock, so workers and reader overlap.

Memory: the pool of segment buffers, whatever the model's size. After a segment is sealed no plaintext is left in it.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import threading
from collections.abc import Callable
from queue import Empty, LifoQueue, SimpleQueue
from typing import Final, NoReturn

from attestation.errors import LetheError, reason_of
from provisioning.errors import OutputFailed
from provisioning.geometry import DataFile, Geometry, Section
from provisioning.layout import ALIGNMENT
from provisioning.medium import write_all, write_past_cache
from provisioning.secret import SecretBytes
from provisioning.segment import TAG_BYTES, SectionSealer
from provisioning.table import DIGEST_BLOCK

_POOL_BYTES: Final = 64 << 20
# Twice the cores, since a worker that writes waits for the medium.
_MOST_WORKERS: Final = 8
_PATIENCE_SECONDS: Final = 1.0


def refuse_output(error: OSError, name: str) -> NoReturn:
    """Turn a failed write into a refusal.

    Raises:
        OutputFailed: ``pack.disk.full``, or ``pack.output`` for every other reason.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OutputFailed(
            "pack.disk.full",
            found=f"no room for {name} ({reason_of(error)})",
            expected="room for the whole bundle",
            hint="free space or name another --out; nothing was left behind",
        ) from None
    raise OutputFailed(
        "pack.output",
        found=f"{name}: {reason_of(error)}",
        expected="a directory that can be written",
        hint="check the disk and its permissions; nothing was left behind",
    ) from None


class _StreamOutput:
    """One stream on its way to the medium; used by one worker thread only."""

    def __init__(self, parent: Sealing, sections: tuple[Section, ...]) -> None:
        self._parent = parent
        self._sections = list(sections)
        self._sealer: SectionSealer | None = None
        self._files: list[tuple[int, DataFile]] = []
        self._descriptor: int | None = None
        self._digest = hashlib.sha256()
        self._written = 0
        self.segments = 0

    def take(self, buffer: memoryview) -> None:
        """Seal, digest and write the stream's next segment."""
        sealer = self._sealer or self._next_section()
        if self._descriptor is None:
            self._open_file()
        sealer.seal_into(buffer)
        number, file = self._files[0]
        size = len(buffer) - TAG_BYTES
        start = (file.base + self._written // size) * TAG_BYTES
        self._parent.tags[start : start + TAG_BYTES] = buffer[size:]
        self._write(file.name, buffer[:size], self._written)
        self._update_digest(number, buffer[:size])
        if self._written == file.size:
            self._finish_file(number)
        if sealer.sealed == sealer.section.segments:
            self._finish_section(sealer)
        self.segments += 1

    def _next_section(self) -> SectionSealer:
        section = self._sections.pop(0)
        self._files = self._parent.files_of(section)
        self._sealer = self._parent.sealer(section)
        return self._sealer

    def _finish_section(self, sealer: SectionSealer) -> None:
        sealer.close()
        self._sealer = None

    def _open_file(self) -> None:
        name = self._files[0][1].name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._descriptor = os.open(name, flags, 0o644, dir_fd=self._parent.directory)
        except OSError as error:
            refuse_output(error, name)
        write_past_cache(self._descriptor)
        self._written = 0

    def _write(self, name: str, data: memoryview, offset: int) -> None:
        descriptor = self._descriptor
        if descriptor is None:
            raise ValueError("no file is open")
        try:
            write_all(descriptor, data, offset)
        except OSError as error:
            refuse_output(error, name)

    def _update_digest(self, number: int, data: memoryview) -> None:
        # Segments divide a digest block, so a block's edge is always a segment's edge.
        self._digest.update(data)
        self._written += len(data)
        if self._written % DIGEST_BLOCK == 0:
            self._end_block(number)

    def _end_block(self, number: int) -> None:
        self._parent.digests[number].append(self._digest.digest())
        self._digest = hashlib.sha256()

    def _finish_file(self, number: int) -> None:
        if self._written % DIGEST_BLOCK:
            self._end_block(number)
        _, file = self._files.pop(0)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            raise ValueError("no file is open")
        try:
            os.fsync(descriptor)
        except OSError as error:
            refuse_output(error, file.name)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Drop what is open, after success or in the middle."""
        if self._sealer is not None:
            self._sealer.close()
            self._sealer = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Sink:
    """Where the caller puts one stream's plaintext, byte after byte."""

    def __init__(self, sealing: Sealing, stream: int) -> None:
        self._sealing = sealing
        self._stream = stream
        self._size = sealing.geometry.segment_size
        self._buffer: memoryview | None = None
        self._filled = 0
        self._done = 0

    @property
    def position(self) -> int:
        """Bytes put so far."""
        return self._done + self._filled

    def room(self) -> memoryview:
        """Give the rest of the current segment, at least one byte; ``advance`` says how much of it was filled."""
        if self._buffer is None:
            self._buffer = self._sealing.acquire()
            self._filled = 0
        return self._buffer[self._filled : self._size]

    def advance(self, count: int) -> None:
        """Count ``count`` bytes as put; a full segment goes on its way."""
        self._filled += count
        if self._filled == self._size and self._buffer is not None:
            self._sealing.submit(self._stream, self._buffer)
            self._buffer = None
            self._done += self._filled
            self._filled = 0

    def write(self, data: memoryview) -> None:
        """Put bytes."""
        while data:
            room = self.room()
            count = min(len(room), len(data))
            room[:count] = data[:count]
            self.advance(count)
            data = data[count:]

    def put_rows(self, data: memoryview, *, first: int, stride: int, width: int, rows: int) -> None:
        """Put ``rows`` slices of ``width`` bytes, ``stride`` apart: a tile's part of a block of whole rows.

        Args:
            data: whole rows, one after the other.
            first: where the first slice begins.
            stride: bytes of a whole row.
            width: bytes of a slice.
            rows: how many.
        """
        while rows:
            room = self.room()
            fitting = min(rows, len(room) // width)
            if fitting == 0:
                # This row crosses the edge of a segment.
                self.write(data[first : first + width])
                first += stride
                rows -= 1
                continue
            # The one loop of the packer that runs once per row; 0.2 microseconds a turn and a copy.
            source = first
            for target in range(0, fitting * width, width):
                room[target : target + width] = data[source : source + width]
                source += stride
            self.advance(fitting * width)
            first = source
            rows -= fitting

    def align(self) -> None:
        """Put zeros up to the next tile boundary."""
        self.write(memoryview(bytes(-self.position % ALIGNMENT)))

    def finish(self) -> None:
        """Put zeros up to the end of the segment."""
        if self._buffer is not None:
            self.write(memoryview(bytes(self._size - self._filled)))


class Sealing:
    """The pool, the workers and the results of one pack run; a context manager that stops the workers.

    Args:
        directory: descriptor of the directory that takes the data files.
        geometry: of the bundle.
        key: the fresh bundle key; it stays the caller's to wipe.
        bundle_id: 16 bytes.
        descriptor: gives the descriptor digest of a section.
        progress: told bytes written; called by the thread that fills the sinks.

    Attributes:
        tags: 16 bytes for each segment, complete after :meth:`finish`.
        digests: SHA-256 of each block of each file, complete after :meth:`finish`.
    """

    def __init__(
        self,
        directory: int,
        *,
        geometry: Geometry,
        key: SecretBytes,
        bundle_id: bytes,
        descriptor: Callable[[Section], bytes],
        progress: Callable[[int], None],
    ) -> None:
        self.directory = directory
        self.geometry = geometry
        self.tags = bytearray(geometry.segments * TAG_BYTES)
        self.digests: list[list[bytes]] = [[] for _ in geometry.files]
        self._key = key
        self._bundle_id = bundle_id
        self._descriptor = descriptor
        self._progress = progress
        self._files = geometry.files
        sections = geometry.sections
        self._outputs = [
            _StreamOutput(self, tuple(section for section in sections if section.stream == stream))
            for stream in range(len(geometry.streams))
        ]
        self.sinks = [Sink(self, stream) for stream in range(len(geometry.streams))]
        # Last in, first out: a buffer that was just written is still in the processor's cache.
        self._free: LifoQueue[memoryview] = LifoQueue()
        self._error: BaseException | None = None
        self._stopping = False
        workers = min(_MOST_WORKERS, 2 * len(os.sched_getaffinity(0)), len(geometry.streams))
        self._queues: list[SimpleQueue[tuple[int, memoryview] | None]] = [SimpleQueue() for _ in range(workers)]
        self._threads = [threading.Thread(target=self._work, args=(queue,), daemon=True) for queue in self._queues]
        # Each sink may hold one buffer, and each worker needs one to work on.
        buffers = max(_POOL_BYTES // geometry.segment_size, len(self.sinks) + 2 * workers)
        for _ in range(buffers):
            self._free.put(_buffer(geometry.segment_size + TAG_BYTES))

    def files_of(self, section: Section) -> list[tuple[int, DataFile]]:
        """Give the (number, file) pairs of a section, in order."""
        return [(number, file) for number, file in enumerate(self._files) if file.section == section.number]

    def sealer(self, section: Section) -> SectionSealer:
        """Open the sealer of a section; its output closes it."""
        with self._key.expose() as key:
            return SectionSealer(
                key,
                bundle_id=self._bundle_id,
                section=section,
                segment_size=self.geometry.segment_size,
                descriptor=self._descriptor(section),
            )

    def acquire(self) -> memoryview:
        """Wait for a free buffer.

        Raises:
            OutputFailed: a worker could not write.
        """
        while True:
            try:
                buffer = self._free.get(timeout=_PATIENCE_SECONDS)
                break
            except Empty:
                self._raise_error()
                if not all(thread.is_alive() for thread in self._threads):
                    raise RuntimeError("a sealing thread died") from None
        self._raise_error()
        self._report()
        return buffer

    def submit(self, stream: int, buffer: memoryview) -> None:
        """Give a full segment to the worker of its stream."""
        self._queues[stream % len(self._queues)].put((stream, buffer))

    def finish(self) -> None:
        """Fill the last segments with zeros and wait until all is written and synced.

        Raises:
            OutputFailed: a worker could not write.
        """
        for sink in self.sinks:
            sink.finish()
        self._join()
        self._raise_error()
        self._report()
        written = tuple(output.segments for output in self._outputs)
        if written != self.geometry.streams:
            raise ValueError(f"{written} segments were put, {self.geometry.streams} were planned")

    def _report(self) -> None:
        self._progress(sum(output.segments for output in self._outputs) * self.geometry.segment_size)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self, queue: SimpleQueue[tuple[int, memoryview] | None]) -> None:
        while (item := queue.get()) is not None:
            stream, buffer = item
            # After an error buffers still go back, so that the caller wakes up and sees it.
            if self._error is None and not self._stopping:
                try:
                    self._outputs[stream].take(buffer)
                except (LetheError, OSError, ValueError) as error:
                    self._error = error
            self._free.put(buffer)

    def _join(self) -> None:
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def __enter__(self) -> Sealing:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._join()
        for output in self._outputs:
            output.close()
        # The parts refer to each other; without this the pool would stay until the collector's next full run.
        self._outputs = []
        self.sinks = []
        self._free = LifoQueue()


def _buffer(size: int) -> memoryview:
    # Private, since mmap's default is shared memory, which would count and outlive as such.
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
