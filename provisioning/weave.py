"""Deal the tensors of a model out to the streams of its layout: each byte is read once, and none is kept.

What is contiguous in the file goes straight into a segment buffer. The tiles of a row-parallel tensor are slices of
every row; whole rows are read in blocks and dealt out to all columns, so that the medium is read once and in order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from attestation.errors import reason_of
from provisioning.errors import ModelRefused
from provisioning.layout import Layout, Piece, TensorSpec
from provisioning.sealing import Sink
from provisioning.source import Source

# Rows are read in blocks of about this many bytes.
BLOCK_BYTES: Final = 8 << 20
# A row's share of at least this many bytes is read straight into its segment; so no block is longer than a few MiB.
DIRECT_BYTES: Final = 64 << 10


def weave(source: Source, layout: Layout, catalog: bytes, sinks: Sequence[Sink]) -> None:
    """Fill the sinks.

    Args:
        source: the open model; its tensors are those of ``layout``, in the same order.
        layout: where every tile goes.
        catalog: plaintext of stream 0.
        sinks: one for each stream.

    Raises:
        ModelRefused: ``source.read`` or ``source.changed``.
        OutputFailed: a worker could not write.
    """
    with memoryview(catalog) as view:
        sinks[0].write(view)
    block = bytearray(BLOCK_BYTES)
    queues = [list(reversed(stream.pieces)) for stream in layout.streams]
    for index, (item, spec) in enumerate(zip(source.tensors, layout.tensors, strict=True)):
        pieces = [queue.pop() for queue in queues if queue and queue[-1].tensor_index == index]
        for piece in pieces:
            sink = sinks[piece.stream]
            sink.align()
            if sink.position != piece.offset:
                raise ValueError(f"stream {piece.stream} is at {sink.position}, not at {piece.offset}")
        if not pieces:
            # A tensor without elements.
            continue
        shard = source.shards[item.shard]
        _Tensor(shard.descriptor, shard.name, item.info.start, spec, pieces).put(sinks, block)


class _Tensor:
    """One tensor on its way from its file to its pieces."""

    def __init__(self, descriptor: int, name: str, start: int, spec: TensorSpec, pieces: Sequence[Piece]) -> None:
        self._descriptor = descriptor
        self._name = name
        self._start = start
        self._pieces = pieces
        self._rows = spec.outer
        # Bytes of a piece's slice of one row, and of a whole row.
        self._widths = [piece.length // spec.outer for piece in pieces]
        self._stride = spec.nbytes // spec.outer

    def put(self, sinks: Sequence[Sink], block: bytearray) -> None:
        if self._rows == 1 or min(self._widths) >= DIRECT_BYTES or self._stride > len(block):
            self._put_directly(sinks)
        else:
            self._put_by_blocks(sinks, block)

    def _put_directly(self, sinks: Sequence[Sink]) -> None:
        first = 0
        for piece, width in zip(self._pieces, self._widths, strict=True):
            for row in range(self._rows):
                self._read_into(sinks[piece.stream], self._start + row * self._stride + first, width)
            first += width

    def _put_by_blocks(self, sinks: Sequence[Sink], block: bytearray) -> None:
        most = max(1, len(block) // self._stride)
        with memoryview(block) as view:
            for row in range(0, self._rows, most):
                rows = min(most, self._rows - row)
                data = view[: rows * self._stride]
                self._read(data, self._start + row * self._stride)
                first = 0
                for piece, width in zip(self._pieces, self._widths, strict=True):
                    sinks[piece.stream].put_rows(data, first=first, stride=self._stride, width=width, rows=rows)
                    first += width

    def _read_into(self, sink: Sink, offset: int, length: int) -> None:
        while length:
            room = sink.room()
            count = min(len(room), length)
            self._read(room[:count], offset)
            sink.advance(count)
            offset += count
            length -= count

    def _read(self, target: memoryview, offset: int) -> None:
        while target:
            try:
                count = os.preadv(self._descriptor, [target], offset)
            except OSError as error:
                raise ModelRefused(
                    "source.read",
                    found=f"{self._name} at byte {offset}: {reason_of(error)}",
                    expected="a readable file",
                    hint="check the medium that the model is on",
                ) from None
            if count == 0:
                raise ModelRefused(
                    "source.changed",
                    found=f"{self._name}, which ends at byte {offset} now",
                    expected="files that nobody writes to",
                    hint="pack again when the copy of the model is complete",
                )
            target = target[count:]
            offset += count
