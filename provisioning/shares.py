"""What one rank of several opens, and where in its tensors every byte of that goes. Pure; no tensors are made here.

A share is a function of the layout, the geometry, the rank and the number of ranks: whole sections of streams, and
for each stream its *slices*, which say of a run of bytes what part of a local tensor it fills. ``audit`` takes the
shares of all ranks and holds them against layout and geometry without using how they were made: every column segment is
read by one rank, every common segment by all, and every element of every tensor lands once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from provisioning.collector import resting
from provisioning.errors import BundleDamaged
from provisioning.geometry import COMMON_STREAM, FIRST_COLUMN, Geometry, Section, rank_streams
from provisioning.layout import Layout, TensorSpec


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of one tensor.

    Attributes:
        start: where it begins along the parallel dimension, in elements; 0 for a whole tensor.
        shape: of the rank's local tensor, in elements.
    """

    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Where one piece of a stream goes: ``local.narrow(dimension, first, last - first)``, in row order.

    Attributes:
        tensor: number of the tensor in the layout.
        start: its first byte in the stream.
        stop: behind its last byte.
        dimension: the parallel dimension; None where the piece fills the whole local tensor.
        first: first element of the local tensor along that dimension.
        last: behind the last one.
    """

    tensor: int
    start: int
    stop: int
    dimension: int | None
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What a rank opens, the catalog not counted.

    Attributes:
        rank: which.
        world: of how many.
        sections: all of whose segments it opens, in the order of the bundle.
        parts: number of a tensor to the rank's part of it; tensors of other ranks' experts are not there.
        slices: for each stream that it opens, by number, the slices in order of their bytes.
    """

    rank: int
    world: int
    sections: tuple[Section, ...]
    parts: Mapping[int, Part]
    slices: Mapping[int, tuple[Slice, ...]]

    @property
    def segments(self) -> int:
        """How many segments it opens."""
        return sum(section.segments for section in self.sections)


def share(layout: Layout, geometry: Geometry, *, rank: int, world: int) -> RankShare:
    """Plan a rank.

    Args:
        layout: of the sealed catalog.
        geometry: of the signed manifest, which ``Catalog.check_geometry`` has held against the layout.
        rank: which part of the model.
        world: of how many; a divisor of the number of tiles.

    Raises:
        ValueError: there is no such rank.
    """
    return RankShare(
        rank=rank,
        world=world,
        sections=sections(geometry, rank=rank, world=world),
        parts=parts(layout, rank=rank, world=world),
        slices=slices(layout, rank=rank, world=world),
    )


def sections(geometry: Geometry, *, rank: int, world: int) -> tuple[Section, ...]:
    """Give the sections that a rank opens, the catalog's not among them. They follow from the manifest alone.

    Raises:
        ValueError: there is no such rank.
    """
    streams = set(rank_streams(rank, world, tiles=geometry.tiles))
    return tuple(section for section in geometry.sections if section.stream in streams)


def part(spec: TensorSpec, *, tiles: int, rank: int, world: int) -> Part:
    """Give a rank's part of a tensor that it has a part of."""
    if spec.parallel is None:
        return Part(0, spec.shape)
    count = tiles // world
    start, stop = spec.edge(rank * count, tiles), spec.edge((rank + 1) * count, tiles)
    return Part(start, (*spec.shape[: spec.parallel], stop - start, *spec.shape[spec.parallel + 1 :]))


def parts(layout: Layout, *, rank: int, world: int) -> dict[int, Part]:
    """Give the rank's parts of all tensors that it has a part of, by the tensor's number and in order.

    Raises:
        ValueError: there is no such rank.
    """
    held = {index for stream in layout.rank_streams(rank, world) for index in layout.streams.tensors(stream)}
    return {index: part(layout.tensors[index], tiles=layout.tiles, rank=rank, world=world) for index in sorted(held)}


def slices(layout: Layout, *, rank: int, world: int) -> dict[int, tuple[Slice, ...]]:
    """Give the slices of every stream that a rank opens, by the stream's number.

    Raises:
        ValueError: there is no such rank.
    """
    made: dict[int, tuple[Slice, ...]] = {}
    begins: dict[int, int] = {}
    for number in layout.rank_streams(rank, world):
        listed: list[Slice] = []
        for piece in layout.streams[number].pieces:
            spec = layout.tensors[piece.tensor_index]
            begin = 0
            if spec.parallel is not None:
                # The rank's first column is planned first, so the first tile of a tensor that is met begins its part.
                begin = begins.setdefault(piece.tensor_index, piece.tile_start)
            listed.append(
                Slice(
                    piece.tensor_index,
                    piece.offset,
                    piece.offset + piece.length,
                    spec.parallel,
                    piece.tile_start - begin,
                    piece.tile_stop - begin,
                )
            )
        made[number] = tuple(listed)
    return made


def check_all(layout: Layout, geometry: Geometry) -> None:
    """Audit every number of ranks that the tiles allow.

    Raises:
        BundleDamaged: ``share.*``.
    """
    with resting():
        world = 1
        while world <= layout.tiles:
            audit(layout, geometry, [share(layout, geometry, rank=rank, world=world) for rank in range(world)])
            world *= 2


def audit(layout: Layout, geometry: Geometry, ranks: Sequence[RankShare]) -> None:
    """Check the shares of all ranks of one load together.

    Args:
        layout: of the bundle.
        geometry: of the bundle.
        ranks: the share of every rank, in any order.

    Raises:
        BundleDamaged: ``share.unread`` for a segment that no rank opens, or a common one that a rank leaves out;
            ``share.twice`` for a column segment of two ranks, or any segment that a rank opens twice;
            ``share.tensor`` for elements of a tensor that land nowhere, twice or out of place.
    """
    for stream, (begin, end) in _stream_ranges(geometry).items():
        opened = [
            [
                (section.base, section.base + section.segments, own.rank)
                for section in own.sections
                if section.stream == stream
            ]
            for own in ranks
        ]
        # The common stream is every rank's, a column one rank's.
        for spans in opened if stream == COMMON_STREAM else [[span for own in opened for span in own]]:
            _check_segments(spans, stream=stream, begin=begin, end=end)
    _check_tensors(layout, geometry, ranks)


def _stream_ranges(geometry: Geometry) -> dict[int, tuple[int, int]]:
    """Give the segments of every stream but the catalog, as numbers in the bundle."""
    ranges: dict[int, tuple[int, int]] = {}
    base = geometry.streams[0]
    for stream in range(COMMON_STREAM, len(geometry.streams)):
        ranges[stream] = (base, base + geometry.streams[stream])
        base += geometry.streams[stream]
    return ranges


def _check_segments(spans: list[tuple[int, int, int]], *, stream: int, begin: int, end: int) -> None:
    position = begin
    for start, stop, rank in sorted(spans):
        if start < position:
            _refuse("share.twice", f"segment {start} of stream {stream} opened again by rank {rank}", "once")
        if start > position:
            break
        position = stop
    if position < end:
        _refuse("share.unread", f"segment {position} of stream {stream}, which a rank leaves out", "every segment")
    if position > end:
        _refuse("share.twice", f"segment {end} opened as one of stream {stream}", f"segments below {end}")


def _check_tensors(layout: Layout, geometry: Geometry, ranks: Sequence[RankShare]) -> None:
    # What must be covered once: elements along the parallel dimension, or a place for each rank that needs it whole.
    landed: list[list[tuple[int, int]]] = [[] for _ in layout.tensors]
    for place, own in enumerate(ranks):
        for stream, listed in own.slices.items():
            end, room = 0, geometry.streams[stream] * geometry.segment_size
            for item in listed:
                spec, local = layout.tensors[item.tensor], own.parts.get(item.tensor)
                if local is None or not end <= item.start < item.stop <= room or not _fits(item, spec, local, stream):
                    _refuse("share.tensor", f"tensor {item.tensor} out of place in stream {stream}", "its own place")
                end = item.stop
                if spec.parallel is not None:
                    landed[item.tensor].append((item.first + local.start, item.last + local.start))
                else:
                    landed[item.tensor].append((0, 1) if spec.column is not None else (place, place + 1))
    for index, (spec, spans) in enumerate(zip(layout.tensors, landed, strict=True)):
        size = 1 if spec.column is not None else len(ranks)
        if spec.parallel is not None:
            size = spec.shape[spec.parallel]
        if spec.nbytes and not _covers_once(spans, size):
            _refuse("share.tensor", f"tensor {index} ({spec.dtype} {list(spec.shape)}) not whole", "every element once")


def _fits(item: Slice, spec: TensorSpec, local: Part, stream: int) -> bool:
    if spec.parallel is None:
        home = COMMON_STREAM if spec.column is None else FIRST_COLUMN + spec.column
        return stream == home and item.dimension is None and item.stop - item.start == spec.nbytes
    inside = 0 <= item.first < item.last <= local.shape[spec.parallel]
    nbytes = spec.outer * spec.row_bytes(item.first, item.last)
    return inside and item.dimension == spec.parallel and item.stop - item.start == nbytes


def _covers_once(spans: list[tuple[int, int]], size: int) -> bool:
    position = 0
    for first, last in sorted(spans):
        if first != position:
            return False
        position = last
    return position == size


def _refuse(code: str, found: str, expected: str) -> NoReturn:
    raise BundleDamaged(
        code, found=found, expected=expected, hint="this is a fault of the plan; report it, and do not use the bundle"
    )
