"""Probes of the steps of a load: every step is measured, and the bundle stays as it was."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.scaling import bookkeeping, setup
from benchmarks.scaling.stages import Stages, measure, median


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files of random bytes, one of them without a whole segment behind its first."""
    directory = tmp_path_factory.mktemp("stages")
    made = [directory / "data-00000.seal", directory / "data-00001.seal"]
    for path, size in zip(made, (3 << 20, (1 << 20) + 4096), strict=True):
        path.write_bytes(os.urandom(size))
    return made


@pytest.fixture(scope="module")
def stages(files: list[Path]) -> Stages:
    """Costs measured once."""
    return measure(files, threads=2, rounds=1)


def test_every_step_costs_something_and_none_a_minute(stages: Stages) -> None:
    for name, cost in asdict(stages).items():
        assert 0 < cost < 60, name
    assert stages.threads == 2


def test_files_stay_as_they_were(files: list[Path]) -> None:
    before = [path.read_bytes() for path in files]
    measure(files, threads=1, rounds=1)
    assert [path.read_bytes() for path in files] == before


def test_median_is_taken_of_each_member() -> None:
    assert median([{"a": 1.0, "b": 9.0}, {"a": 3.0, "b": 8.0}, {"a": 2.0, "b": 7.0}]) == {"a": 2.0, "b": 8.0}


def test_bookkeeping_is_measured_on_segments_that_are_really_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    monkeypatch.setattr(bookkeeping, "SEGMENTS", 64)

    class Counted(bookkeeping.Account):
        __slots__ = ()

        def note(self, segment: int) -> None:
            opened.append(segment)
            super().note(segment)

    monkeypatch.setattr(bookkeeping, "Account", Counted)
    assert 0 < bookkeeping.per_segment() < 0.1
    assert opened == list(range(64))


def test_setup_is_measured_on_the_shapes_of_a_large_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "LAYERS", 1)
    setup.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("11 GB")
    assert lines[-1].startswith("together")
    assert len(lines) == 7
