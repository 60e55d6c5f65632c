"""Sections, files and places follow from four numbers, cover every segment once, and stay in their bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioning.geometry import FILE_BYTES, MAX_FILES, MAX_SECTION_BYTES, MAX_SEGMENTS, Geometry

SEGMENT = 256 << 10


def geometry(*streams: int, section: int = 3, file: int = 2, size: int = SEGMENT) -> Geometry:
    return Geometry(segment_size=size, section_bytes=section * size, file_bytes=file * size, streams=streams)


COUNTS = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(lambda counts: counts[0] > 0)


@given(COUNTS, st.integers(1, 5), st.integers(1, 5))
def test_sections_cover_every_segment_of_every_stream_once(counts: list[int], section: int, file: int) -> None:
    made = geometry(*counts, section=section, file=file)
    covered = [
        (part.stream, part.first + index, part.base + index) for part in made.sections for index in range(part.segments)
    ]
    expected = [(stream, index) for stream, count in enumerate(counts) for index in range(count)]
    assert [(stream, index) for stream, index, _ in covered] == expected
    assert [base for _, _, base in covered] == list(range(made.segments))
    assert [part.number for part in made.sections] == list(range(len(made.sections)))
    assert all(1 <= part.segments <= section for part in made.sections)


@given(COUNTS, st.integers(1, 5), st.integers(1, 5))
def test_files_cover_every_segment_once_and_never_two_sections(counts: list[int], section: int, file: int) -> None:
    made = geometry(*counts, section=section, file=file)
    base = 0
    for part in made.files:
        owner = made.sections[part.section]
        segments = part.size // SEGMENT
        assert part.base == base
        assert owner.base <= part.base
        assert part.base + segments <= owner.base + owner.segments
        assert 1 <= segments <= file
        base += segments
    assert base == made.segments
    assert sum(part.size for part in made.files) == made.data_bytes


def test_files_are_named_in_order() -> None:
    assert [file.name for file in geometry(1, 3, 0).files] == ["data-00000.seal", "data-00001.seal", "data-00002.seal"]


def test_the_usual_file_fits_on_a_fat32_medium_and_holds_whole_digest_blocks() -> None:
    assert FILE_BYTES < 1 << 32
    assert FILE_BYTES % (64 << 20) == 0


BAD = [
    {"size": 128 << 10},
    {"size": 8 << 20},
    {"size": (256 << 10) + 4096},
]


@pytest.mark.parametrize("change", BAD, ids=str)
def test_refuses_other_sizes_of_segments(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="segments of"):
        geometry(1, 1, 1, **change)


@pytest.mark.parametrize("size", [0, SEGMENT - 1, SEGMENT + 1, MAX_SECTION_BYTES + SEGMENT])
@pytest.mark.parametrize("which", ["section_bytes", "file_bytes"])
def test_refuses_sections_and_files_out_of_bounds(which: str, size: int) -> None:
    sizes = {"section_bytes": SEGMENT, "file_bytes": SEGMENT, which: size}
    with pytest.raises(ValueError, match="sections or files"):
        Geometry(segment_size=SEGMENT, streams=(1, 0, 0), **sizes)


@pytest.mark.parametrize("count", [0, 2, 5, 67])
def test_refuses_other_numbers_of_streams(count: int) -> None:
    with pytest.raises(ValueError, match="streams"):
        geometry(*([1] * count))


@pytest.mark.parametrize("streams", [(0, 1, 1), (1, -1, 3), (1, 0, MAX_SEGMENTS)])
def test_refuses_impossible_counts_of_segments(streams: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="segments"):
        geometry(*streams)


def test_refuses_too_many_files_before_it_lists_them() -> None:
    with pytest.raises(ValueError, match=f"{MAX_FILES + 2} files"):
        geometry(1, MAX_FILES + 1, 0, section=1, file=1)
