"""The model reproduces what was measured here, or predicts nothing."""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from appliance.probe import model
from benchmarks import load_model
from benchmarks.scaling import measured
from benchmarks.scaling.inputs import GB, INPUTS, MIB
from benchmarks.scaling.stages import Stages, median

COSTS = {
    "map": 0.02,
    "open_mapped": 0.2,
    "open_staged": 0.15,
    "read_direct": 0.02,
    "open_cell": 0.2,
    "open_in_place": 0.18,
    "authenticate": 0.12,
    "open_cached": 0.13,
    "copy": 0.17,
    "place_rows": 0.2,
    "wipe": 0.03,
    "segment_s": 20e-6,
    "cores": 2.0,
    "threads": 2,
}


def result(*, warm: float, cold: float) -> dict[str, Any]:
    """Give a result of benchmarks/sealed_load.py in which our loader has the given rates, GB/s."""

    def ours(rate: float) -> dict[str, Any]:
        return {"gb_s": {"rounds": [rate, rate * 0.8, rate * 2]}, "detail": {"setup_s": 0.05}}

    return {
        "machine": {"cpu": "a processor", "cores": 2},
        "settings": {"gb": 1.0, "readers": 2, "openers": 2, "ring_bytes": 32 << 20, "segment_bytes": 1 << 20},
        "model": {"bytes": 1_000_000_000},
        "stages": {"rounds": [COSTS] * 3},
        "warm": {"ours": ours(warm)},
        "cold": {"ours": ours(cold), "read_direct": {"gb_s": {"rounds": [1.0] * 3}}},
    }


def newest() -> measured.Measured:
    """Read the newest result; a file from before schema 2 has nothing to hold the model against."""
    path = measured.newest()
    if "schema" not in json.loads(path.read_text(encoding="utf-8")):
        pytest.skip("the newest result is older than what the model reads; make bench writes a new one")
    return measured.read(path)


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["load_model.py", *arguments])
    return load_model.main()


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_reproduces_the_newest_measured_load_within_15_percent() -> None:
    found = measured.compare(newest())
    assert [one.state for one in found] == ["warm", "cold"]
    for one in found:
        paired = [model / true for model, true in zip(one.modelled, one.measured, strict=True)]
        assert abs(statistics.median(paired) - 1) <= 0.15, f"{one}: {one.error:+.1%}"


def test_costs_that_the_predictions_use_are_of_the_order_of_the_newest_measured_ones() -> None:
    stages = Stages(**median([asdict(costs) for costs in newest().stages]))
    # The difference of two noisy costs, which is what `stall` is, is left out.
    for name, cost in {"read": stages.read_direct, "wipe": stages.wipe, "copy": stages.copy}.items():
        assert 0.5 < INPUTS[name].value * GB / cost < 2, name


def test_modelled_load_follows_from_the_costs_of_its_steps(tmp_path: Path) -> None:
    subject = measured.read(write(tmp_path / "result.json", result(warm=1, cold=1)))
    warm, cold = measured.compare(subject)
    rows, edges = measured.staged_share(1.0)
    core = 0.02 + 20e-6 / MIB * GB + (1 - rows - edges) * 0.2 + rows * (0.15 + 0.2) + edges * (0.15 + 0.17)
    assert warm.modelled[0] / GB == pytest.approx(1 / (0.05 + core / 2), rel=0.02)
    assert cold.modelled[0] / GB == pytest.approx(1 / (0.05 + 1 / 1.0), rel=0.03)
    assert cold.limit == "disk"


def test_share_that_passes_through_a_cell_is_that_of_the_matrices_cut_by_columns() -> None:
    sizes = {name: math.prod(shape) for name, shape in model.shapes(4_000_000_000).items()}
    cut = sum(size for name, size in sizes.items() if "o_proj" in name or "down_proj" in name)
    rows, edges = measured.staged_share(4.0)
    assert rows == pytest.approx(cut / sum(sizes.values()), rel=0.01)
    assert edges < 0.01


def test_predicts_when_both_states_are_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = {one.state: one.modelled[0] / GB for one in measured.compare(_read(tmp_path, warm=1, cold=1))}
    path = write(tmp_path / "right.json", result(**right))
    assert run(["--result", str(path)], monkeypatch) == 0
    shown = capsys.readouterr().out
    assert "+0%" in shown
    assert "8 NVMe" in shown


@pytest.mark.parametrize("state", ["warm", "cold"])
def test_predicts_nothing_when_one_state_is_missed(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = {one.state: one.modelled[0] / GB for one in measured.compare(_read(tmp_path, warm=1, cold=1))}
    path = write(tmp_path / "wrong.json", result(**(right | {state: right[state] * 1.2})))
    assert run(["--result", str(path)], monkeypatch) == 1
    shown = capsys.readouterr()
    assert "measured, GB/s" in shown.out
    assert "NVMe" not in shown.out
    assert "predicts nothing" in shown.err


def _read(directory: Path, *, warm: float, cold: float) -> measured.Measured:
    return measured.read(write(directory / "any.json", result(warm=warm, cold=cold)))


def test_predicts_nothing_from_a_result_without_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = result(warm=1, cold=1)
    del old["stages"]
    assert run(["--result", str(write(tmp_path / "old.json", old))], monkeypatch) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "old.json has no 'stages'" in shown.err


def test_newest_result_is_taken_by_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    with pytest.raises(measured.Unusable):
        measured.newest()
    for date in ("2026-11-30", "2027-01-02", "2026-12-31"):
        (tmp_path / f"sealed-load-{date}.json").touch()
    assert measured.newest().name == "sealed-load-2027-01-02.json"
