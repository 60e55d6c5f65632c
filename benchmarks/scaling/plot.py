"""The picture of docs/scaling.md: load time by number of NVMe drives, three machines side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from benchmarks.scaling.inputs import value
from benchmarks.scaling.scenarios import Way, outcome
from benchmarks.scaling.tables import MACHINES, PUBLIC_SECONDS, Machine, scenario

WIDTH: Final = 300
HEIGHT: Final = 260
LEFT: Final = 54
TOP: Final = 64
GAP: Final = 26
DRIVES: Final = (1, 2, 4, 8)
SECONDS: Final = (5, 10, 20, 40, 80)
WAYS: Final = {
    Way.PLAIN: ("plaintext", "#8a94a0", "5 4"),
    Way.HOST: ("sealed, opened on the host", "#0b6e4f", ""),
    Way.DEVICE: ("sealed, opened on the device", "#c26a1b", ""),
}


def _height(seconds: float) -> float:
    low, high = math.log(SECONDS[0]), math.log(SECONDS[-1])
    return TOP + HEIGHT * (high - math.log(seconds)) / (high - low)


def _text(left: float, top: float, text: str, *, size: int = 11, anchor: str = "start") -> str:
    place = f'x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" font-family="sans-serif" fill="#222">{text}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, *, colour: str, dash: str = "", width: float = 1) -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line {place} stroke="{colour}" stroke-width="{width}"{dashes}/>'


def _panel(machine: Machine, left: float) -> Iterator[str]:
    def across(index: int) -> float:
        return left + 24 + index * (WIDTH - 48) / (len(DRIVES) - 1)

    yield _text(left, TOP - 12, machine.name, size=12)
    for seconds in SECONDS:
        yield _line(left, _height(seconds), left + WIDTH, _height(seconds), colour="#dde2e7")
    for index, count in enumerate(DRIVES):
        yield _text(across(index), TOP + HEIGHT + 18, str(count), anchor="middle")
    public = _height(PUBLIC_SECONDS)
    yield _line(left, public, left + WIDTH, public, colour="#b0323a", dash="2 3")
    for way, (_, colour, dash) in WAYS.items():
        found = [outcome(scenario(machine, way=way, disk=count * value("nvme5"))).seconds for count in DRIVES]
        points = [(across(index), _height(seconds)) for index, seconds in enumerate(found)]
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)


def _legend(top: float) -> Iterator[str]:
    left = float(LEFT)
    entries: list[tuple[str, str, str]] = [*WAYS.values()]
    entries.append(("public plaintext figure, 15.3 s (688.6 GB, 50 GB/s storage)", "#b0323a", "2 3"))
    for text, colour, dash in entries:
        yield _line(left, top - 4, left + 26, top - 4, colour=colour, dash=dash, width=2)
        yield _text(left + 32, top, text)
        left += 48 + 6.2 * len(text)


def draw() -> str:
    """Give the picture as SVG."""
    width = LEFT + len(MACHINES) * (WIDTH + GAP)
    bottom = TOP + HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 72}" '
        f'viewBox="0 0 {width} {bottom + 72}">',
        f'<rect width="{width}" height="{bottom + 72}" fill="white"/>',
        _text(
            LEFT, 24, "Predicted seconds to load 700 GB into eight devices, by NVMe drives (Gen5), 32 cores", size=14
        ),
        *(_text(LEFT - 8, _height(seconds) + 4, str(seconds), anchor="end") for seconds in SECONDS),
        _text(LEFT - 8, TOP - 12, "s", anchor="end"),
    ]
    for number, machine in enumerate(MACHINES):
        parts += _panel(machine, LEFT + number * (WIDTH + GAP))
    parts += [_text(LEFT + 12, bottom + 36, "number of drives"), *_legend(bottom + 60), "</svg>"]
    return "\n".join(parts) + "\n"
