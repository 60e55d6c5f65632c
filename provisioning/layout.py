"""The plan of a sealed bundle: which byte of which tensor lies where. Pure; it reads and writes nothing.

Words: a *tile* is one tensor's share along its parallel dimension; a *column* is all tiles of one number; a *stream* is
a continuous byte string: stream 0 the catalog, stream 1 what every rank needs, stream 2 + c column c. A *piece* is one
tile in its stream. A tensor is cut into tiles, or lies in one column as a whole because it belongs to one expert, or
is common. A stream is filled with zeros to whole segments and then cut into segments of one size, whatever the edges of
tensors, so that lengths on the medium tell nothing of shapes (docs/adr/0003-continuous-streams.md). A *section* is a
run of segments of one stream under one key.

Rank r of R opens columns [rW/R, (r+1)W/R) and the common stream, so R = 1, 2, 4, 8 each read just their own bytes of
every parallel tensor.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, overload

from provisioning.geometry import (
    COMMON_STREAM,
    FIRST_COLUMN,
    MAX_TILES,
    Section,
    is_power_of_two,
    rank_streams,
    segment_count,
)
from provisioning.stheader import DTYPE_BITS, tensor_bytes

# Tiles begin on this; it is a multiple of every element size, and segments are multiples of it, so that no element is
# split between two segments (6-bit elements, four in three bytes, are the exception and are viewed as bytes).
ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as the catalog lists it.

    Attributes:
        name: its name in the checkpoint.
        dtype: a key of ``stheader.DTYPE_BITS``.
        shape: sizes in elements.
        parallel: the dimension along which it is cut into tiles, or None.
        block: elements along that dimension that stay together; 1 for a tensor that is not cut.
        column: the column that holds a tensor of one expert as a whole, or None.

    A tensor with neither ``parallel`` nor ``column`` is common.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parallel: int | None
    block: int = 1
    column: int | None = None

    def check(self) -> str | None:
        """Say what makes a layout of this tensor impossible, or None."""
        if self.dtype not in DTYPE_BITS:
            return "its dtype is unknown"
        if tensor_bytes(self.dtype, self.shape) is None:
            return "its size is no whole number of bytes"
        if self.column is not None and (self.parallel is not None or self.column < 0):
            return "it cannot lie in one column"
        if self.parallel is None:
            return None if self.block == 1 else "it has blocks and is not cut"
        if not 0 <= self.parallel < len(self.shape) or self.block < 1 or self.blocks < 2:
            return "it cannot be cut along that dimension"
        row_bits = math.prod(self.shape[self.parallel :]) * DTYPE_BITS[self.dtype]
        if row_bits % 8 or self.block % byte_block(self.dtype, self.shape, self.parallel):
            return "its tiles would cut a byte"
        return None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def outer(self) -> int:
        """How many rows a tile has: the product of the sizes before the parallel dimension; 1 for a whole tensor."""
        return 1 if self.parallel is None else math.prod(self.shape[: self.parallel])

    @property
    def blocks(self) -> int:
        """How many blocks lie along the parallel dimension; the last one may be shorter."""
        if self.parallel is None:
            raise ValueError("a whole tensor has no blocks")
        return -(-self.shape[self.parallel] // self.block)

    def edge(self, tile: int, tiles: int) -> int:
        """Give where a tile begins along the parallel dimension, in elements; tile ``tiles`` begins at the end.

        Edges lie at equal shares of the blocks, so that all tensors of as many blocks are cut alike: a matrix by its
        quantization blocks, and its scales, which have one element for each.
        """
        if self.parallel is None:
            raise ValueError("a whole tensor has no tiles")
        return min(self.shape[self.parallel], self.block * (self.blocks * tile // tiles))

    def is_even(self, tiles: int) -> bool:
        """Say whether all columns hold as much of it; they hold nothing of a common tensor."""
        if self.parallel is None:
            return self.column is None or tiles == 1
        return self.shape[self.parallel] % (self.block * tiles) == 0

    def row_bytes(self, start: int, stop: int) -> int:
        """Give the bytes of one row of the tile ``[start, stop)`` of the parallel dimension."""
        if self.parallel is None:
            raise ValueError("a whole tensor has no rows")
        return (stop - start) * math.prod(self.shape[self.parallel + 1 :]) * DTYPE_BITS[self.dtype] // 8


def byte_block(dtype: str, shape: Sequence[int], parallel: int) -> int:
    """Give how many elements along a dimension make whole bytes; more than one only below 8 bits."""
    return 8 // math.gcd(8, math.prod(shape[parallel + 1 :]) * DTYPE_BITS[dtype])


@dataclass(frozen=True, slots=True)
class Piece:
    """One tile in its stream, contiguous and in row order.

    Attributes:
        tensor_index: which tensor of the layout.
        tile_start: first element along the parallel dimension; 0 for a whole tensor.
        tile_stop: behind its last element; the size of dimension 0 for a whole tensor, 1 for a scalar.
        stream: in which stream it lies.
        offset: its first byte in the stream, a multiple of ``ALIGNMENT``.
        length: its bytes, at least one.
    """

    tensor_index: int
    tile_start: int
    tile_stop: int
    stream: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Stream:
    """One continuous plaintext byte string.

    Attributes:
        number: 0 catalog, 1 common, 2.. columns.
        length: bytes up to the end of the last piece, before zeros fill the last segment.
        pieces: what lies in it, by offset.
    """

    number: int
    length: int
    pieces: tuple[Piece, ...]


class Streams(Sequence[Stream]):
    """The streams of a layout, each planned when it is first asked for: a rank pays for its own columns only."""

    __slots__ = ("_cut", "_planned", "_tensors", "_tiles", "_whole")

    def __init__(self, tensors: Sequence[TensorSpec], tiles: int) -> None:
        self._tensors = tensors
        self._tiles = tiles
        self._planned: dict[int, Stream] = {}
        # Which tensors have a piece in every column, and which lie in one stream; so no plan looks at all tensors.
        self._cut: list[int] = []
        self._whole: list[list[int]] = [[] for _ in range(len(self))]
        for index, spec in enumerate(tensors):
            if spec.parallel is not None:
                self._cut.append(index)
            else:
                self._whole[COMMON_STREAM if spec.column is None else FIRST_COLUMN + spec.column].append(index)

    def __len__(self) -> int:
        return FIRST_COLUMN + self._tiles

    @overload
    def __getitem__(self, index: int) -> Stream: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Stream, ...]: ...

    def __getitem__(self, index: int | slice) -> Stream | tuple[Stream, ...]:
        """Plan a stream, or give it again."""
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        number = range(len(self))[index]
        if number not in self._planned:
            self._planned[number] = self._plan(number)
        return self._planned[number]

    def tensors(self, number: int) -> Iterator[int]:
        """Give the numbers of the tensors that belong to a stream, in order, also of those without bytes in it."""
        return heapq.merge(self._cut if number >= FIRST_COLUMN else (), self._whole[number])

    def length(self, number: int) -> int:
        """Give the length of a stream in bytes; no pieces are made for it."""
        if number in self._planned:
            return self._planned[number].length
        end = 0
        for _, _, _, length in self._tiles_in(number):
            end = -(-end // ALIGNMENT) * ALIGNMENT + length
        return end

    def _plan(self, number: int) -> Stream:
        pieces: list[Piece] = []
        end = 0
        for index, start, stop, length in self._tiles_in(number):
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            pieces.append(Piece(index, start, stop, number, offset, length))
            end = offset + length
        return Stream(number, end, tuple(pieces))

    def _tiles_in(self, number: int) -> Iterator[tuple[int, int, int, int]]:
        """Give (tensor, tile start, tile stop, bytes) of every tile that has bytes in a stream, in order."""
        column = number - FIRST_COLUMN
        for index in self.tensors(number):
            spec = self._tensors[index]
            if spec.parallel is None:
                start, stop, length = 0, spec.shape[0] if spec.shape else 1, spec.nbytes
            else:
                start, stop = spec.edge(column, self._tiles), spec.edge(column + 1, self._tiles)
                length = spec.outer * spec.row_bytes(start, stop)
            if length:
                yield index, start, stop, length


class Layout:
    """Where every byte of every tensor lies.

    Args:
        tensors: in the order in which they are laid out.
        tiles: W, into how many tiles each parallel tensor is cut: a power of two, 1 to 64.

    Attributes:
        streams: all streams by number; stream 0 is empty here, since the catalog holds the layout itself.

    Raises:
        ValueError: a tensor that cannot be laid out (``TensorSpec.check``), or a wrong number of tiles.
    """

    def __init__(self, tensors: Sequence[TensorSpec], tiles: int) -> None:
        if not is_power_of_two(tiles, low=1, high=MAX_TILES):
            raise ValueError(f"{tiles} tiles")
        self.tensors = tuple(tensors)
        self.tiles = tiles
        for index, spec in enumerate(self.tensors):
            trouble = spec.check()
            if trouble is None and spec.column is not None and spec.column >= tiles:
                trouble = "its column is none of these"
            if trouble is not None:
                raise ValueError(f"tensor {index}: {trouble}")
        self.streams = Streams(self.tensors, tiles)

    def rank_streams(self, rank: int, world: int) -> tuple[int, ...]:
        """Give the streams that rank ``rank`` of ``world`` opens, without the catalog: common, then its columns.

        Raises:
            ValueError: ``world`` does not divide the number of tiles, or there is no such rank.
        """
        return rank_streams(rank, world, tiles=self.tiles)

    def stream_segments(self, catalog_bytes: int, segment_size: int) -> tuple[int, ...]:
        """Give the segments of each stream, as the manifest must state them."""
        # Where all tiles are even, all columns are planned alike, and one of them tells the length of all.
        even = all(spec.is_even(self.tiles) for spec in self.tensors)
        columns = [self.streams.length(FIRST_COLUMN + tile) for tile in range(1 if even else self.tiles)]
        lengths = (catalog_bytes, self.streams.length(COMMON_STREAM), *columns * (self.tiles if even else 1))
        return tuple(segment_count(length, segment_size) for length in lengths)

    def descriptor_digest(self, section: Section, segment_size: int) -> bytes:
        """Give the digest of what lies in a section, 48 bytes; it is bound into every segment of that section.

        The digest of a section without pieces (the catalog's) is that of the empty list.
        """
        pieces = self.pieces_in(section, segment_size)
        return descriptor_digest((self.tensors[piece.tensor_index], piece) for piece in pieces)

    def pieces_in(self, section: Section, segment_size: int) -> tuple[Piece, ...]:
        """Give the pieces of which at least one byte lies in a section."""
        pieces = self.streams[section.stream].pieces
        begin = section.first * segment_size
        end = begin + section.segments * segment_size
        # Pieces are in order, so the first one that matters is the first whose end is behind the section's begin.
        low = bisect.bisect_right(pieces, begin, key=lambda piece: piece.offset + piece.length)
        high = bisect.bisect_left(pieces, end, key=lambda piece: piece.offset)
        return pieces[low:high]


_DESCRIPTOR_LABEL: Final = b"lethe/bundle/v1/tiles\0"


def descriptor_digest(items: Iterable[tuple[TensorSpec, Piece]]) -> bytes:
    """Give SHA-384 over the canonical list of pieces (docs/spec/bundle.md, "Tile descriptor")."""
    digest = hashlib.sha384(_DESCRIPTOR_LABEL)
    for spec, piece in items:
        name = spec.name.encode()
        dtype = spec.dtype.encode()
        digest.update(
            struct.pack(
                "<HBBB", len(name), len(dtype), len(spec.shape), 0xFF if spec.parallel is None else spec.parallel
            )
        )
        digest.update(name + dtype)
        digest.update(
            struct.pack(
                f"<{len(spec.shape) + 4}Q", *spec.shape, piece.tile_start, piece.tile_stop, piece.offset, piece.length
            )
        )
    return digest.digest()
