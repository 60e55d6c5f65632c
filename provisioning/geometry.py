"""How streams become segments, sections and files. Pure arithmetic over four numbers that the manifest holds.

Nothing here is chosen by a writer segment by segment: sections, files and the place of every segment follow from the
four numbers, so a table that says otherwise is refused (provisioning/table.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CATALOG_STREAM: Final = 0
COMMON_STREAM: Final = 1
FIRST_COLUMN: Final = 2

MIN_SEGMENT: Final = 256 << 10
MAX_SEGMENT: Final = 4 << 20
MAX_TILES: Final = 64
MAX_FILES: Final = 65536
# A table of 128 MiB: 4 TiB of model at the usual 1 MiB.
MAX_SEGMENTS: Final = 1 << 22
# 2^32 AES blocks under one key: far inside what SP 800-38D allows.
MAX_SECTION_BYTES: Final = 64 << 30
# Below 4 GiB, so that a bundle can travel on a FAT32 stick, and whole digest blocks.
FILE_BYTES: Final = 63 * (64 << 20)


@dataclass(frozen=True, slots=True)
class Section:
    """A run of segments of one stream that share a key.

    Attributes:
        number: counted over the whole bundle; it enters the key.
        stream: which stream it is cut from.
        first: number of its first segment in the stream.
        segments: how many segments.
        base: number of its first segment in the bundle, which is its place in ``segments.idx``.
    """

    number: int
    stream: int
    first: int
    segments: int
    base: int


@dataclass(frozen=True, slots=True)
class DataFile:
    """One ciphertext file; it holds segments of one section only.

    Attributes:
        name: ``data-00000.seal`` and so on, counted over the bundle.
        size: bytes, whole segments.
        section: number of its section.
        base: number of its first segment in the bundle.
    """

    name: str
    size: int
    section: int
    base: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The four numbers.

    Attributes:
        segment_size: bytes of every segment: a power of two, 256 KiB to 4 MiB.
        section_bytes: most bytes of a section: whole segments, at most 64 GiB.
        file_bytes: most bytes of a data file: whole segments, at most 64 GiB.
        streams: segments of each stream: the catalog, the common stream, then one stream for each tile column.

    Raises:
        ValueError: numbers outside of their bounds.
    """

    segment_size: int
    section_bytes: int
    file_bytes: int
    streams: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the bounds."""
        if not is_power_of_two(self.segment_size, low=MIN_SEGMENT, high=MAX_SEGMENT):
            raise ValueError(f"segments of {self.segment_size} bytes")
        for size in (self.section_bytes, self.file_bytes):
            if not self.segment_size <= size <= MAX_SECTION_BYTES or size % self.segment_size:
                raise ValueError(f"sections or files of {size} bytes")
        if not is_power_of_two(len(self.streams) - FIRST_COLUMN, low=1, high=MAX_TILES):
            raise ValueError(f"{len(self.streams)} streams")
        if self.streams[CATALOG_STREAM] < 1 or min(self.streams) < 0 or sum(self.streams) > MAX_SEGMENTS:
            raise ValueError(f"{sum(self.streams)} segments")
        if (count := self._file_count()) > MAX_FILES:
            raise ValueError(f"{count} files")

    def _file_count(self) -> int:
        """Count the files without listing them, since the numbers are not yet known to be sane."""
        section = self.section_bytes // self.segment_size
        file = self.file_bytes // self.segment_size
        full = -(-section // file)
        return sum(count // section * full + -(-(count % section) // file) for count in self.streams)

    @property
    def tiles(self) -> int:
        """W, the number of tile columns."""
        return len(self.streams) - FIRST_COLUMN

    @property
    def segments(self) -> int:
        """How many segments the bundle has."""
        return sum(self.streams)

    @property
    def data_bytes(self) -> int:
        """Bytes of all data files together."""
        return self.segments * self.segment_size

    @property
    def sections(self) -> tuple[Section, ...]:
        """Cut the streams, one after the other, into sections; only a stream's last one may be shorter."""
        most = self.section_bytes // self.segment_size
        sections: list[Section] = []
        base = 0
        for stream, count in enumerate(self.streams):
            for first in range(0, count, most):
                segments = min(most, count - first)
                sections.append(Section(len(sections), stream, first, segments, base))
                base += segments
        return tuple(sections)

    @property
    def files(self) -> tuple[DataFile, ...]:
        """Cut the sections into files; every section begins a new file, so that streams can be written side by side."""
        most = self.file_bytes // self.segment_size
        files: list[DataFile] = []
        for section in self.sections:
            for first in range(0, section.segments, most):
                size = min(most, section.segments - first) * self.segment_size
                files.append(DataFile(f"data-{len(files):05d}.seal", size, section.number, section.base + first))
        return tuple(files)

    def sections_of(self, stream: int) -> tuple[Section, ...]:
        """Give the sections of one stream, in order."""
        return tuple(section for section in self.sections if section.stream == stream)


def is_power_of_two(number: int, *, low: int, high: int) -> bool:
    """Say whether ``number`` is a power of two in ``low..high``."""
    return low <= number <= high and number & (number - 1) == 0


def rank_streams(rank: int, world: int, *, tiles: int) -> tuple[int, ...]:
    """Give the streams that rank ``rank`` of ``world`` opens, without the catalog: the common one, then its columns.

    Raises:
        ValueError: ``world`` does not divide the number of tiles, or there is no such rank.
    """
    if world < 1 or tiles % world or not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world} over {tiles} tiles")
    share = tiles // world
    return (COMMON_STREAM, *range(FIRST_COLUMN + rank * share, FIRST_COLUMN + (rank + 1) * share))


def segment_count(length: int, segment_size: int) -> int:
    """Give how many segments a stream of ``length`` bytes takes."""
    return -(-length // segment_size)
