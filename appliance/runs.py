"""The order of work of a load: streams are cut into runs that are read, and mostly copied, as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from appliance.stream import Run
from provisioning.geometry import Geometry


def plan_runs(geometry: Geometry, streams: Iterable[int], most: Callable[[int], int]) -> Iterator[Run]:
    """Cut the segments of some streams into runs, in the order in which the files hold them.

    Where a segment lies follows from the geometry alone; a table that says otherwise was refused when it was opened.

    Args:
        geometry: of the signed manifest.
        streams: numbers of the streams.
        most: says of a data file, by its number, how many bytes a run of it may have; at least a segment.
    """
    wanted = set(streams)
    size = geometry.segment_size
    sections = geometry.sections
    for number, file in enumerate(geometry.files):
        section = sections[file.section]
        if section.stream not in wanted:
            continue
        step = max(1, most(number) // size)
        for index in range(0, file.size // size, step):
            count = min(step, file.size // size - index)
            first = file.base - section.base + index
            yield Run(
                file=number,
                offset=index * size,
                section=section.number,
                first=first,
                base=file.base + index,
                count=count,
                stream=section.stream,
                start=(section.first + first) * size,
                length=count * size,
            )
