"""The plan of runs: every segment of the wanted streams once, inside of one file, in the files' order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.runs import plan_runs
from provisioning.geometry import Geometry

S = 256 << 10


@given(
    streams=st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(lambda counts: counts[0] > 0),
    section=st.integers(1, 5),
    file=st.integers(1, 4),
    most=st.integers(1, 6),
    wanted=st.sets(st.integers(0, 2)),
)
def test_runs_hold_every_segment_of_the_wanted_streams_once(
    streams: list[int], section: int, file: int, most: int, wanted: set[int]
) -> None:
    geometry = Geometry(segment_size=S, section_bytes=section * S, file_bytes=file * S, streams=tuple(streams))
    runs = list(plan_runs(geometry, wanted, lambda _: most * S))
    seen: list[int] = []
    for run in runs:
        place, data = geometry.sections[run.section], geometry.files[run.file]
        assert run.stream == place.stream
        assert 0 < run.count <= most
        assert run.length == run.count * S
        assert run.base == place.base + run.first == data.base + run.offset // S
        assert run.start == (place.first + run.first) * S
        assert run.offset + run.length <= data.size
        seen += range(run.base, run.base + run.count)
    expected = [
        number
        for place in geometry.sections
        if place.stream in wanted
        for number in range(place.base, place.base + place.segments)
    ]
    assert seen == expected


def test_each_file_may_have_runs_of_its_own_length() -> None:
    geometry = Geometry(segment_size=S, section_bytes=4 * S, file_bytes=4 * S, streams=(4, 4, 4))
    runs = plan_runs(geometry, [0, 1, 2], lambda file: (file + 1) * S)
    assert [(run.file, run.count) for run in runs] == [(0, 1)] * 4 + [(1, 2)] * 2 + [(2, 3), (2, 1)]
