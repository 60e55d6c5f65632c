"""The measured load, put together from its measured steps: the model must get this right before it predicts.

What goes in: costs of the steps and the cores that busy threads got (``stages`` of the result, measured alone beside
our runs of each round), the raw direct read of the same round, how much of the model has to pass through a cell
(computed from the shapes), and the time before the first segment. What comes out is compared with the measured rate
of our loader, which goes in nowhere.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from appliance import pages
from appliance.budget import READ_BYTES, Budget, cell_bytes
from appliance.probe import model
from benchmarks.scaling.inputs import GB, MIB
from benchmarks.scaling.pipeline import Outcome, Plan, Pools, Step, simulate
from benchmarks.scaling.stages import Stages
from provisioning import tiling
from provisioning.layout import Layout, Piece

RESULTS: Final = Path(__file__).resolve().parents[1] / "results"
TOLERANCE: Final = 0.15
TILES: Final = 8
STATES: Final = ("warm", "cold")


class Unusable(Exception):
    """A result that the model cannot be held against; the text says why."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One result of ``benchmarks/sealed_load.py``.

    Attributes:
        name: of its file.
        cpu: name of the processor.
        nbytes: of the model.
        gigabytes: its size as it was asked for, from which its shapes follow.
        readers, openers, cells, run_bytes: of our loader.
        stages: costs of the steps, by round, and the cores that as many busy threads as there are openers got.
        disk: bytes per second of raw direct reads, by round.
        setup_s: seconds of our loader outside of its pipeline, by state; medians.
        ours: measured bytes per second of our loader by state, ``warm`` and ``cold``, and round.
    """

    name: str
    cpu: str
    nbytes: int
    gigabytes: float
    readers: int
    openers: int
    cells: int
    run_bytes: int
    stages: tuple[Stages, ...]
    disk: tuple[float, ...]
    setup_s: Mapping[str, float]
    ours: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured and what the model makes of it, bytes per second.

    Attributes:
        state: ``warm`` or ``cold``.
        measured: by the benchmark, by round.
        modelled: by the simulation, from what was measured in the same round.
        limit: what holds the simulated load up, in the last round.
    """

    state: str
    measured: tuple[float, ...]
    modelled: tuple[float, ...]
    limit: str

    @property
    def error(self) -> float:
        """How far the model is off, as a share of what was measured, median of the rounds; above 0 it is too fast."""
        return statistics.median(ours / true for ours, true in zip(self.modelled, self.measured, strict=True)) - 1

    @property
    def holds(self) -> bool:
        """Say whether that is within the tolerance."""
        return abs(self.error) <= TOLERANCE


def newest() -> Path:
    """Give the newest result.

    Raises:
        Unusable: there is none.
    """
    found = sorted(RESULTS.glob("sealed-load-*.json"))
    if not found:
        raise Unusable("no result of benchmarks/sealed_load.py is there")
    return found[-1]


def read(path: Path) -> Measured:
    """Take what the model needs from a result.

    Raises:
        Unusable: something is not there.
    """
    result = json.loads(path.read_text(encoding="utf-8"))
    try:
        return _read(path.name, result)
    except KeyError as missing:
        raise Unusable(f"{path.name} has no {missing}; run benchmarks/sealed_load.py again") from None


def _read(name: str, result: Mapping[str, Any]) -> Measured:
    settings = result["settings"]
    budget = Budget(settings["ring_bytes"], settings["readers"], settings["openers"])
    run_bytes = cell_bytes(budget, segment=MIB, copy_bytes=READ_BYTES)
    return Measured(
        name=name,
        cpu=result["machine"]["cpu"],
        nbytes=result["model"]["bytes"],
        gigabytes=settings["gb"],
        readers=budget.readers,
        openers=budget.openers,
        cells=max(1, budget.ring_bytes // (run_bytes + pages.PAGE)),
        run_bytes=run_bytes,
        stages=tuple(Stages(**costs) for costs in _costs(result)),
        disk=tuple(rate * GB for rate in result["cold"]["read_direct"]["gb_s"]["rounds"]),
        setup_s={state: result[state]["ours"]["detail"]["setup_s"] for state in STATES},
        ours={state: tuple(rate * GB for rate in result[state]["ours"]["gb_s"]["rounds"]) for state in STATES},
    )


def _costs(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Give the costs of the steps by round; where only their medians are there, these for every round."""
    stages = result["stages"]
    return stages["rounds"] if "rounds" in stages else [stages] * result["settings"]["rounds"]


@cache
def staged_share(gigabytes: float, segment: int = MIB) -> tuple[float, float]:
    """Say how much of the benchmark's model cannot be opened into its destination directly.

    Returns:
        The share that goes to destinations in rows, and the share of segments that end in more than one destination.
    """
    shapes = model.shapes(round(gigabytes * GB))
    specs = tiling.plan(((name, "BF16", shape) for name, shape in shapes.items()), tiles=TILES)
    layout = Layout(specs, tiles=TILES)
    rows = edges = total = 0
    for stream in layout.streams[1:]:
        pieces = list(stream.pieces)
        at = 0
        for start in range(0, stream.length, segment):
            stop = min(start + segment, stream.length)
            while pieces[at].offset + pieces[at].length <= start:
                at += 1
            total += stop - start
            if _in_rows(pieces[at], layout):
                rows += stop - start
            elif stop > pieces[at].offset + pieces[at].length or stop - start < segment:
                edges += stop - start
    return rows / total, edges / total


def _in_rows(piece: Piece, layout: Layout) -> bool:
    return layout.tensors[piece.tensor_index].outer > 1


def steps(cost: Stages, gigabytes: float) -> dict[str, tuple[tuple[Step, ...], tuple[Step, ...]]]:
    """Give the steps of a reader and of an opener, warm and cold."""
    rows, edges = staged_share(gigabytes)
    straight, staged = 1 - rows - edges, rows + edges
    placing = rows * cost.place_rows + edges * cost.copy
    python = cost.segment_s / MIB
    warm = straight * cost.open_mapped + staged * cost.open_staged
    cold = straight * cost.open_cell + staged * cost.open_in_place
    return {
        "warm": (
            (),
            (
                Step("map", core=cost.map / GB),
                Step("open", core=warm / GB + python, interpreter=python),
                Step("place", core=placing / GB),
            ),
        ),
        "cold": (
            (Step("read", core=cost.read_direct / GB, disk=1),),
            (
                Step("open", core=cold / GB + python, interpreter=python),
                Step("place", core=(placing + staged * cost.wipe) / GB),
            ),
        ),
    }


def compare(measured: Measured) -> list[Comparison]:
    """Hold the model against both measured states, round by round."""
    rounds = range(min(len(measured.stages), len(measured.disk), *(len(found) for found in measured.ours.values())))
    compared = []
    for state in STATES:
        outcomes = [_outcome(measured, state, number) for number in rounds]
        compared.append(
            Comparison(
                state,
                tuple(measured.ours[state][number] for number in rounds),
                tuple(measured.nbytes / outcome.seconds for outcome in outcomes),
                outcomes[-1].limit,
            )
        )
    return compared


def _outcome(measured: Measured, state: str, number: int) -> Outcome:
    stages = measured.stages[number]
    reading, opening = steps(stages, measured.gigabytes)[state]
    plan = Plan(
        nbytes=measured.nbytes,
        run_bytes=measured.run_bytes,
        readers=measured.readers if reading else 0,
        openers=measured.openers,
        cells=measured.cells,
        read=reading,
        open=opening,
        setup=measured.setup_s[state],
    )
    return simulate(plan, Pools(cores=stages.cores, disk=measured.disk[number] if reading else float("inf")))
