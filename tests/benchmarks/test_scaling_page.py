"""docs/scaling.md shows what the simulation gives, and the simulation agrees with the formula that the page states."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from appliance.budget import Budget, Machine, decide
from benchmarks import load_model
from benchmarks.scaling import measured, plot, tables
from benchmarks.scaling.inputs import INPUTS, value
from benchmarks.scaling.scenarios import Bridge, Way, outcome, plan

AGAIN = "run: python benchmarks/load_model.py --write"


@pytest.fixture(scope="module")
def page() -> str:
    """The text of docs/scaling.md."""
    return load_model.PAGE.read_text(encoding="utf-8")


def shown(page: str, name: str) -> str:
    found = load_model.block(name).findall(page)
    assert len(found) == 1
    return str(found[0][1]).strip()


@pytest.mark.parametrize("name", tables.PREDICTIONS)
def test_table_of_the_page_is_what_the_simulation_gives(name: str, page: str) -> None:
    assert shown(page, name) == tables.PREDICTIONS[name](), AGAIN


def test_comparison_of_the_page_is_that_with_the_newest_result(page: str) -> None:
    path = measured.newest()
    if "schema" not in json.loads(path.read_text(encoding="utf-8")):
        pytest.skip("the newest result is older than what the model reads; make bench writes a new one")
    subject = measured.read(path)
    assert shown(page, "comparison") == tables.comparison(subject, measured.compare(subject)), AGAIN


def test_picture_is_what_the_simulation_gives() -> None:
    assert load_model.PICTURE.read_text(encoding="utf-8") == plot.draw(), AGAIN


def test_every_input_says_where_it_comes_from() -> None:
    for name, one in INPUTS.items():
        assert one.source, name
        assert one.sure in {"given", "sheet", "measured", "ours", "assumed"}, name


def test_every_input_that_the_formulas_name_is_in_the_table(page: str) -> None:
    named = {"read", "copy", "stall", "wipe", "python", "toll", "setup", "setup_tensor", "setup_segment", "setup_own"}
    assert named <= INPUTS.keys()
    for name in named:
        assert f"`{name}`" in shown(page, "inputs")


@pytest.mark.parametrize(
    ("machine", "medium", "cores", "way"),
    list(itertools.product(tables.MACHINES, tables.MEDIA, (8, 16, 64), Way)),
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_simulated_load_is_never_faster_than_the_slowest_pool_and_seldom_much_slower(
    machine: tables.Machine, medium: str, cores: int, way: Way
) -> None:
    scenario = tables.scenario(machine, way=way, disk=tables.MEDIA[medium], cores=cores)
    work, pools = plan(scenario)
    assert work.deliver is not None
    steps = (*work.read, *work.open, work.deliver)
    least = work.nbytes * max(
        sum(step.need(pool) for step in steps) / getattr(pools, pool)
        for pool in ("cores", "memory", "disk", "link", "device", "interpreter")
    )
    seconds = outcome(scenario).seconds - work.setup
    assert seconds >= least * 0.995
    # One opener to a device has nobody to open while it copies, or for the other side to wait for.
    assert seconds <= least * 1.35


def test_toll_of_small_copies_is_as_worked_out_by_hand() -> None:
    scenario = tables.scenario(tables.HOPPER)
    work, _ = plan(scenario)
    assert scenario.bridge is Bridge.CONFIDENTIAL
    assert work.deliver is not None
    seconds = work.run_bytes / value("bridge_hopper") + value("toll")
    assert work.deliver.alone == pytest.approx(work.run_bytes / seconds)


def test_threads_ring_and_cells_are_those_that_the_loader_chooses() -> None:
    work, _ = plan(tables.scenario(tables.PCIE, cores=64))
    chosen = decide(
        Budget(0, 0, 0), Machine(cores=64, ranks=8, lockable=None), copy_bytes=32 << 20, in_host_memory=False
    )
    assert (work.readers, work.openers) == (chosen.readers, chosen.openers)
    assert work.cells * work.run_bytes <= chosen.ring_bytes
    assert work.cells >= work.readers + 2 * work.openers


def test_page_is_written_in_place_and_only_between_the_marks() -> None:
    text = "before\n<!-- table: one -->\n\nold\n\n<!-- end -->\nafter\n"
    assert load_model.fill(text, {"one": "new"}) == "before\n<!-- table: one -->\n\nnew\n\n<!-- end -->\nafter\n"
    with pytest.raises(ValueError, match="'two'"):
        load_model.fill(text, {"two": "new"})


def test_page_names_the_program_that_writes_it(page: str) -> None:
    assert "benchmarks/load_model.py" in page
    assert (Path(load_model.ROOT) / "benchmarks/load_model.py").exists()
