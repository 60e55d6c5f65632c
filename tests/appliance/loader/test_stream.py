"""The pipeline: what arrives, what is left in the ring, and how it stops."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from appliance.ring import Cell, Ring
from appliance.slot import Lane, Slot, Ticket
from appliance.slot_cpu import CpuSlot
from appliance.slot_cuda import CudaSlot
from appliance.stream import Pipeline, Run
from provisioning.errors import BundleDamaged
from tests.sim.cuda import LazyCuda

CELL = 4096
RUNS = 40


def runs(count: int = RUNS) -> list[Run]:
    return [
        Run(file=0, offset=n * CELL, section=0, first=n, base=n, count=1, stream=1, start=n * CELL, length=CELL)
        for n in range(count)
    ]


class Bench:
    """A pipeline over made-up ciphertext: run n is n+1 everywhere, and opening adds 100."""

    def __init__(self, slot: Slot, *, cells: int = 3, readers: int = 2, openers: int = 2) -> None:
        self.slot = slot
        self.ring = Ring(slot, ring_bytes=cells * (CELL + 4096), cell_bytes=CELL)
        self.arrived = torch.zeros(RUNS * CELL, dtype=torch.uint8)
        self.readers = readers
        self.openers = openers
        self.reports: list[tuple[int, int]] = []
        self.read: Callable[[Run, Cell], None] = self._read
        self.open_run: Callable[[Run, Cell], None] = self._open
        self.place: Callable[[Run, torch.Tensor], None] = self._place
        self.on_progress: Callable[[int, int], None] = lambda done, total: self.reports.append((done, total))

    def _read(self, run: Run, cell: Cell) -> None:
        cell.staged[: run.length] = run.first + 1

    def _open(self, run: Run, cell: Cell) -> None:
        cell.expose(0, run.length)
        cell.staged[: run.length] += 100

    def _place(self, run: Run, plain: torch.Tensor) -> None:
        self.arrived[run.start : run.start + run.length].copy_(plain)

    def _bring(self, run: Run, cell: Cell, lane: Lane) -> Ticket:
        self.open_run(run, cell)
        return lane.deliver(cell.staged[: run.length], lambda plain: self.place(run, plain))

    def go(self, work: list[Run] | None = None) -> None:
        Pipeline(
            ring=self.ring,
            slot=self.slot,
            read=lambda run, cell: self.read(run, cell),
            bring=self._bring,
            locate=lambda error, run: error,
            readers=self.readers,
            openers=self.openers,
            on_progress=lambda done, total: self.on_progress(done, total),
        ).run(runs() if work is None else work)

    def ring_is_clean(self) -> bool:
        return self.ring.alive_bytes == 0 and not any(bool(cell.staged.any()) for cell in self.ring.cells)


@pytest.fixture(params=["cpu", "lazy-cuda"])
def slot(request: pytest.FixtureRequest) -> Slot:
    return CpuSlot() if request.param == "cpu" else CudaSlot(LazyCuda())


EXPECTED = torch.arange(RUNS, dtype=torch.uint8).add(101).repeat_interleave(CELL)


@pytest.mark.parametrize(("cells", "readers", "openers"), [(1, 1, 1), (1, 3, 3), (2, 1, 4), (5, 4, 1), (16, 4, 4)])
def test_every_run_arrives_opened_whatever_the_number_of_threads_and_cells(
    slot: Slot, cells: int, readers: int, openers: int
) -> None:
    bench = Bench(slot, cells=cells, readers=readers, openers=openers)
    bench.go()
    assert torch.equal(bench.arrived, EXPECTED)


def test_plaintext_never_exceeds_the_ring_and_none_is_left(slot: Slot) -> None:
    bench = Bench(slot, cells=3)
    bench.go()
    assert 0 < bench.ring.peak_bytes <= 3 * CELL
    assert bench.ring_is_clean()


def test_reports_all_bytes_at_the_end(slot: Slot) -> None:
    bench = Bench(slot)
    bench.go()
    assert bench.reports[-1] == (RUNS * CELL, RUNS * CELL)
    assert [done for done, _ in bench.reports] == sorted(done for done, _ in bench.reports)


def test_nothing_to_do_is_done_at_once(slot: Slot) -> None:
    bench = Bench(slot)
    bench.go([])
    assert bench.reports == [(0, 0)]


def test_a_ring_can_be_used_again(slot: Slot) -> None:
    bench = Bench(slot)
    bench.go()
    bench.arrived.zero_()
    bench.go()
    assert torch.equal(bench.arrived, EXPECTED)


def _fail_at(number: int, inner: Callable[..., None], error: BaseException) -> Callable[..., None]:
    def step(run: Run, *rest: object) -> None:
        if run.first == number:
            raise error
        inner(run, *rest)

    return step


@pytest.mark.parametrize("step", ["read", "open_run", "place"])
@pytest.mark.parametrize("number", [0, RUNS // 2, RUNS - 1])
def test_an_error_in_any_step_is_raised_and_leaves_a_clean_ring(slot: Slot, step: str, number: int) -> None:
    bench = Bench(slot)
    error = BundleDamaged("segment.tag", found="a", expected="b", hint="c")
    setattr(bench, step, _fail_at(number, getattr(bench, step), error))
    with pytest.raises(BundleDamaged) as raised:
        bench.go()
    assert raised.value is error
    assert bench.ring_is_clean()


@pytest.mark.parametrize("started", range(4))
def test_no_thread_goes_on_when_another_cannot_be_started(
    slot: Slot, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, begun = threading.active_count(), iter(range(started))
    start = threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if next(begun, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    bench = Bench(slot)
    with pytest.raises(RuntimeError, match="start new thread"):
        bench.go()
    assert threading.active_count() == before
    assert bench.ring_is_clean()


def test_no_thread_is_left_after_success_or_failure(slot: Slot) -> None:
    before = threading.active_count()
    Bench(slot).go()
    failing = Bench(slot)
    failing.open_run = _fail_at(3, failing.open_run, ValueError("x"))
    with pytest.raises(ValueError, match="x"):
        failing.go()
    assert threading.active_count() == before


class StopError(Exception):
    """What the caller raises to stop."""


def test_the_caller_stops_a_pipeline_whose_medium_does_not_answer(slot: Slot) -> None:
    bench = Bench(slot)
    answer = threading.Event()
    hanging = threading.Event()

    def read(run: Run, cell: Cell) -> None:
        if run.first == 5:
            hanging.set()
            answer.wait()
        bench._read(run, cell)

    def on_progress(done: int, total: int) -> None:
        if hanging.is_set():
            raise StopError

    bench.read, bench.on_progress = read, on_progress
    try:
        with pytest.raises(StopError):
            bench.go()
        assert bench.ring_is_clean()
    finally:
        answer.set()


def test_nothing_is_opened_after_the_caller_stopped(slot: Slot) -> None:
    bench = Bench(slot)
    opened: list[int] = []
    begun, stopped = threading.Event(), threading.Event()

    def open_run(run: Run, cell: Cell) -> None:
        opened.append(run.first)
        begun.set()
        stopped.wait(10)
        bench._open(run, cell)

    def on_progress(done: int, total: int) -> None:
        if begun.is_set():
            stopped.set()
            raise StopError

    bench.openers = 1
    bench.open_run, bench.on_progress = open_run, on_progress
    with pytest.raises(StopError):
        bench.go()
    # The opener may have been between two runs at that moment, but not further.
    assert len(opened) <= 2


def test_an_error_that_the_device_reports_last_is_raised() -> None:
    bench = Bench(CudaSlot(LazyCuda()))
    bench.place = _fail_at(RUNS - 1, bench.place, RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        bench.go()
    assert bench.ring_is_clean()
