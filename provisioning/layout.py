"""The plan of a sealed bundle: which byte of which tensor lies where. Pure; it reads and writes nothing.

Words: a *tile* is one tensor's share along its parallel dimension; a *column* is all tiles of one number; a *stream* is
a continuous byte string: stream 0 the catalog, stream 1 what every rank needs, stream 2 + c column c. A *piece* is one
tile in its stream. A stream is filled with zeros to whole segments and then cut into segments of one size, whatever the
edges of tensors, so that lengths on the medium tell nothing of shapes (docs/adr/0003-continuous-streams.md). A
*section* is a run of segments of one stream under one key.

Rank r of R opens columns [rW/R, (r+1)W/R) and the common stream, so R = 1, 2, 4, 8 each read just their own bytes of
every parallel tensor.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
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

# Scales of 8-bit floats and smaller cover blocks of this many elements; a tile's edge must not cut a block.
QUANTIZATION_BLOCK: Final = 128

_ROWS: Final = frozenset(
    {
        "q_proj",
        "k_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
        "w1",
        "w3",
        "q_b_proj",
        "kv_b_proj",
        "embed_tokens",
        "lm_head",
    }
)
_COLUMNS: Final = frozenset({"o_proj", "down_proj", "w2"})
_EXPERT_STACKS: Final = frozenset({"gate_up_proj", "gate_proj", "up_proj", "down_proj"})
# Parameters of one expert stack that checkpoints name without a dot.
_STACK_SUFFIXES: Final = ("_blocks", "_scales", "_bias")
_PARAMETERS: Final = frozenset(
    {"weight", "bias", "weight_scale", "weight_scale_inv", "weight_packed", "weight_zero_point"}
)


def parallel_dimension(name: str, shape: Sequence[int]) -> int | None:
    """Give the dimension that tensor parallelism cuts, by the names of Hugging Face checkpoints.

    Column-parallel matrices and their biases are cut along dimension 0, row-parallel matrices along dimension 1,
    experts stacked in one tensor along dimension 0, so that a tile is whole experts. What is not recognised is common:
    every rank then opens it, which costs time but is never wrong.
    """
    parts = name.split(".")
    if parts[-1] in _PARAMETERS and len(parts) > 1:
        parts.pop()
    module = parts[-1]
    for suffix in _STACK_SUFFIXES:
        module = module.removesuffix(suffix)
    in_stack = len(parts) > 1 and parts[-2] == "experts" and module in _EXPERT_STACKS
    dimension: int | None = None
    if in_stack or parts[-1] in _ROWS:
        dimension = 0 if shape else None
    elif parts[-1] in _COLUMNS:
        dimension = 1 if len(shape) > 1 else None
    if dimension is None or shape[dimension] < 2:
        return None
    return dimension


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as the catalog lists it.

    Attributes:
        name: its name in the checkpoint.
        dtype: a key of ``stheader.DTYPE_BITS``.
        shape: sizes in elements.
        parallel: the dimension along which it is cut into tiles, or None for a common tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parallel: int | None

    @classmethod
    def plan(cls, name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
        """Choose how a tensor is cut; one whose rows are no whole bytes (4 or 6 bits) is left whole."""
        parallel = parallel_dimension(name, shape)
        if parallel is not None and not _cuts_at_bytes(dtype, shape, parallel):
            parallel = None
        return cls(name, dtype, shape, parallel)

    def check(self) -> str | None:
        """Say what makes a layout of this tensor impossible, or None."""
        if self.dtype not in DTYPE_BITS:
            return "its dtype is unknown"
        if tensor_bytes(self.dtype, self.shape) is None:
            return "its size is no whole number of bytes"
        if self.parallel is None:
            return None
        if not 0 <= self.parallel < len(self.shape) or self.shape[self.parallel] < 2:
            return "it cannot be cut along that dimension"
        if not _cuts_at_bytes(self.dtype, self.shape, self.parallel):
            return "its tiles would cut a byte"
        return None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def outer(self) -> int:
        """How many rows a tile has: the product of the sizes before the parallel dimension; 1 for a common tensor."""
        return 1 if self.parallel is None else math.prod(self.shape[: self.parallel])

    def edge(self, tile: int, tiles: int) -> int:
        """Give where a tile begins along the parallel dimension, in elements; tile ``tiles`` begins at the end.

        Edges lie at equal shares of the quantization blocks (one element is a block where nothing is quantized), so
        that a matrix and its block scales, which have one element for each block, are cut alike.
        """
        if self.parallel is None:
            raise ValueError("a common tensor has no tiles")
        size = self.shape[self.parallel]
        block = _block(self.dtype)
        return min(size, block * (-(-size // block) * tile // tiles))

    def is_even(self, tiles: int) -> bool:
        """Say whether all tiles have one size; a common tensor has no tiles and is even."""
        if self.parallel is None:
            return True
        size = self.shape[self.parallel]
        return size % (_block(self.dtype) * tiles) == 0

    def row_bytes(self, start: int, stop: int) -> int:
        """Give the bytes of one row of the tile ``[start, stop)`` of the parallel dimension."""
        if self.parallel is None:
            return self.nbytes
        return (stop - start) * math.prod(self.shape[self.parallel + 1 :]) * DTYPE_BITS[self.dtype] // 8


def _block(dtype: str) -> int:
    return QUANTIZATION_BLOCK if dtype.startswith("F") and DTYPE_BITS[dtype] <= 8 else 1


def _cuts_at_bytes(dtype: str, shape: Sequence[int], parallel: int) -> bool:
    inner = math.prod(shape[parallel + 1 :]) * DTYPE_BITS[dtype]
    # The last tile's edge need not be on a block, so both a row and a block must be whole bytes.
    return inner * shape[parallel] % 8 == 0 and inner * _block(dtype) % 8 == 0


@dataclass(frozen=True, slots=True)
class Piece:
    """One tile in its stream, contiguous and in row order.

    Attributes:
        tensor_index: which tensor of the layout.
        tile_start: first element along the parallel dimension; 0 for a common tensor.
        tile_stop: behind its last element; the size of dimension 0 for a common tensor, 1 for a scalar.
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

    __slots__ = ("_planned", "_tensors", "_tiles")

    def __init__(self, tensors: Sequence[TensorSpec], tiles: int) -> None:
        self._tensors = tensors
        self._tiles = tiles
        self._planned: dict[int, Stream] = {}

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

    def _plan(self, number: int) -> Stream:
        pieces: list[Piece] = []
        end = 0
        for index, spec in enumerate(self._tensors):
            start, stop, length = _tile(spec, number, self._tiles)
            if length:
                offset = -(-end // ALIGNMENT) * ALIGNMENT
                pieces.append(Piece(index, start, stop, number, offset, length))
                end = offset + length
        return Stream(number, end, tuple(pieces))


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
            if (trouble := spec.check()) is not None:
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
        columns = [self.streams[FIRST_COLUMN].length] * self.tiles if even else None
        columns = columns or [stream.length for stream in self.streams[FIRST_COLUMN:]]
        lengths = (catalog_bytes, self.streams[COMMON_STREAM].length, *columns)
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


def _tile(spec: TensorSpec, stream: int, tiles: int) -> tuple[int, int, int]:
    """Give (tile start, tile stop, bytes) of a tensor's part of a stream; no bytes where it has none."""
    if spec.parallel is None:
        return 0, spec.shape[0] if spec.shape else 1, spec.nbytes if stream == COMMON_STREAM else 0
    if stream < FIRST_COLUMN:
        return 0, 0, 0
    start = spec.edge(stream - FIRST_COLUMN, tiles)
    stop = spec.edge(stream - FIRST_COLUMN + 1, tiles)
    return start, stop, spec.outer * spec.row_bytes(start, stop)


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
