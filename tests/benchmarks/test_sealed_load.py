"""The harness of the comparison, at a size where its figures mean nothing: who runs, what is written, what is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import loaders, sealed_load
from benchmarks.comparison import report, session
from benchmarks.comparison.runner import Bench, Run, Unavailable
from benchmarks.comparison.session import Session, Settings
from benchmarks.comparison.summary import aims, summarise
from benchmarks.comparison.weights import Weights

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = {"label", "own", "encrypted", "version", "gb_s", "gb_per_cpu_s", "user_s", "sys_s", "memory", "ours_as_share"}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """One whole comparison; gives its directory, its JSON and what it printed."""
    base = tmp_path_factory.mktemp("bench")
    words = ["--gb", "0.004", "--rounds", "1", "--only", "ours", "safetensors_load", "read"]
    command = [sys.executable, "-m", "benchmarks.sealed_load", *words]
    done = subprocess.run(
        [*command, "--work", str(base / "work"), "--out", str(base / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (written,) = (base / "out").glob("sealed-load-*.json")
    return base, json.loads(written.read_text(encoding="utf-8")), done.stdout


def test_every_contender_has_its_figures_in_each_state(compared: tuple[Path, dict[str, Any], str]) -> None:
    result = compared[1]
    assert result["schema"] == 2
    for state in ("warm", "cold"):
        assert result[state].keys() == {"ours", "safetensors_load", "read"}
        for name, figures in result[state].items():
            assert figures.keys() >= MEMBERS, name
            assert len(figures["gb_s"]["rounds"]) == 1
            assert figures["gb_s"]["median"] > 0
    assert result["warm"]["ours"]["ours_as_share"]["median"] == 1


def test_files_are_where_the_state_wants_them(compared: tuple[Path, dict[str, Any], str]) -> None:
    for figures in compared[1]["warm"].values():
        assert figures["cached_share"]["min"] > 0.99
    for figures in compared[1]["cold"].values():
        assert figures["cached_share"]["max"] < 0.01


def test_probes_are_part_of_the_result(compared: tuple[Path, dict[str, Any], str]) -> None:
    probes = compared[1]["probes"]
    assert {"block_bytes", "threads", "gb_s"} == probes["raw_read_gb_s"][0].keys()
    assert probes["aes_gcm_gb_s"]["1"] > 0
    assert {"copy_bytes", "gb_s"} == probes["copy_gb_s"][0].keys()


def test_own_memory_of_our_loader_is_about_its_ring(compared: tuple[Path, dict[str, Any], str]) -> None:
    result = compared[1]
    (aim,) = [entry for entry in result["aims"] if entry["aim"].startswith("own memory")]
    assert aim["wanted"] == result["settings"]["ring_bytes"] + (64 << 20)
    assert aim["measured"] > 0


def test_only_the_results_are_left(compared: tuple[Path, dict[str, Any], str]) -> None:
    assert [path.name for path in compared[0].iterdir()] == ["out"]


def test_page_and_terminal_show_every_contender(compared: tuple[Path, dict[str, Any], str]) -> None:
    base, result, printed = compared
    (page,) = (base / "out").glob("*.md")
    for figures in result["warm"].values():
        assert figures["label"] in page.read_text(encoding="utf-8")
        assert figures["label"] in printed


def _settings(*names: str) -> Settings:
    return Settings(gb=0.004, rounds=2, names=names, states=("warm",), readers=1, openers=1, ring_bytes=6 << 20)


def _run(*, wall: float = 1.0, own: bool = False, anonymous: int = 5) -> Run:
    about = {"label": "x", "own": own, "encrypted": False, "version": "1"}
    return Run(wall, 0.5, 0.5, anonymous, 7, 9, 1.0, about, {})


def test_ratio_is_taken_inside_each_round() -> None:
    ours = [_run(wall=1.0), _run(wall=10.0)]
    theirs = [_run(wall=2.0), _run(wall=30.0)]
    share = summarise(theirs, ours, nbytes=10**9)["ours_as_share"]
    assert share == {"median": 2.5, "min": 2.0, "max": 3.0, "rounds": [2.0, 3.0]}


def test_weights_that_are_the_destination_are_no_extra_memory() -> None:
    assert summarise([_run(own=True, anonymous=1_100)], [], nbytes=1_000)["memory"]["anonymous_bytes"] == 100
    assert summarise([_run(anonymous=1_100)], [], nbytes=1_000)["memory"]["anonymous_bytes"] == 1_100


def test_aim_that_is_missed_is_said_to_be() -> None:
    share = {"ours_as_share": {"median": 0.5}}
    memory = {"memory": {"anonymous_bytes": 1}}
    found = {aim["aim"]: aim["met"] for aim in aims({"ours": memory, "aes": share}, {"read_direct": share}, 1)}
    assert found == {
        "cold, share of the raw direct read": False,
        "warm, share of AES-256-GCM alone": False,
        "own memory beyond the weights, bytes": True,
    }


class _Bench:
    """Stands for the runner: one contender works, one fails in a later round, one never runs."""

    model = Weights(nbytes=10**9, shapes={}, digests={}, files=1)

    def __init__(self) -> None:
        self.order: list[str] = []

    def run(self, name: str, *, state: str, compare: bool) -> Run:
        self.order.append(name)
        if name == "runai" or (name == "flashpack" and not compare):
            raise Unavailable("planted")
        return _run()


def _rounds(*names: str) -> tuple[_Bench, Session]:
    bench = _Bench()
    made = Session(Path(), _settings(*names), secret="", tell=lambda _: None)
    made._rounds(bench, ["warm"])  # type: ignore[arg-type]  # as much of a Bench as is used
    return bench, made


def test_contender_that_does_not_run_is_reported_with_the_reason() -> None:
    _, made = _rounds("ours", "runai", "flashpack")
    result = made._result(_Bench.model, {"raw_read_gb_s": [], "aes_gcm_gb_s": {}, "copy_gb_s": []}, 0.0, 2)
    assert result["warm"]["runai"] == {"unavailable": "planted"}
    assert result["warm"]["flashpack"] == {"unavailable": "planted"}
    assert report.missing(result) == {"runai": "planted", "flashpack": "planted"}
    assert "- runai: planted" in report.as_markdown({"date": "2000-01-01", **result}, plot="")


def test_rounds_begin_with_another_contender_each() -> None:
    bench, _ = _rounds("ours", "read")
    assert bench.order == ["ours", "read", "read", "ours"]


def test_interrupted_comparison_keeps_its_whole_rounds() -> None:
    class Interrupted(_Bench):
        def run(self, name: str, *, state: str, compare: bool) -> Run:
            if len(self.order) == 3:
                raise KeyboardInterrupt
            return super().run(name, state=state, compare=compare)

    made = Session(Path(), _settings("ours", "read"), secret="", tell=lambda _: None)
    assert made._rounds(Interrupted(), ["warm"]) == 1  # type: ignore[arg-type]  # as above
    assert {name: len(runs) for name, runs in made._runs["warm"].items()} == {"ours": 1, "read": 1}


def test_loader_whose_package_is_absent_is_unavailable(
    tmp_path: Path,
) -> None:
    job = session.Job(str(tmp_path), 1, 1, 6 << 20, 1 << 20, 1, "00" * 32)
    bench = Bench(job, _Bench.model, lambda: pytest.fail("no key is asked for"))
    with pytest.raises(Unavailable, match="ModuleNotFoundError"):
        bench.run("runai", state="warm", compare=False)


def test_loader_that_brings_other_bytes_is_unavailable(tmp_path: Path) -> None:
    made = session.weights.write(tmp_path / "model", 0.0003)
    first = next(iter(made.digests))
    wrong = Weights(made.nbytes, made.shapes, made.digests | {first: "00" * 32}, made.files)
    job = session.Job(str(tmp_path), 1, 1, 6 << 20, 1 << 20, 1, "00" * 32)
    bench = Bench(job, wrong, lambda: pytest.fail("no key is asked for"))
    with pytest.raises(Unavailable, match=first):
        bench.run("read", state="warm", compare=True)


def test_full_disk_is_said_before_anything_is_written(tmp_path: Path) -> None:
    settings = Settings(1e9, 1, loaders.NAMES, ("warm",), 1, 1, 1)
    with pytest.raises(SystemExit, match="GB needed in"):
        sealed_load._require_room(tmp_path / "work", settings)
    assert list(tmp_path.iterdir()) == []


def test_every_contender_is_a_module_of_its_own() -> None:
    for name, (module, attribute) in loaders._CLASSES.items():
        text = (ROOT / f"benchmarks/loaders/{module}.py").read_text(encoding="utf-8")
        assert f"class {attribute}(" in text, name
    assert set(loaders.CONVERTED) | loaders.ONE_STATE.keys() <= set(loaders.NAMES)
