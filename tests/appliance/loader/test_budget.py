"""Threads and ring: what is chosen for which machine."""

from __future__ import annotations

import os
import resource

import pytest

from appliance import budget, pages
from appliance.budget import Budget, Machine, decide
from appliance.slot_cpu import CpuSlot

OPEN = Budget(0, 0, 0)
MIB = 1 << 20


def cpu(asked: Budget, machine: Machine) -> Budget:
    return decide(asked, machine, copy_bytes=MIB, in_host_memory=True)


def gpu(asked: Budget, machine: Machine) -> Budget:
    return decide(asked, machine, copy_bytes=32 * MIB, in_host_memory=False)


@pytest.mark.parametrize(
    ("cores", "ranks", "openers"), [(1, 1, 1), (2, 1, 2), (4, 1, 4), (64, 1, 8), (2, 8, 1), (96, 16, 6)]
)
def test_openers_follow_from_cores_and_ranks(cores: int, ranks: int, openers: int) -> None:
    assert cpu(OPEN, Machine(cores, ranks, None)).openers == openers


def test_a_gpu_is_fed_by_few_openers() -> None:
    assert gpu(OPEN, Machine(64, 1, None)).openers == 4


def test_the_ring_holds_a_read_for_every_thread() -> None:
    chosen = cpu(OPEN, Machine(2, 1, None))
    assert chosen == Budget(12 * (4 * MIB + pages.PAGE), 8, 2)


def test_the_ring_of_a_gpu_is_a_power_of_two_with_large_copies() -> None:
    chosen = gpu(OPEN, Machine(64, 1, 8 * MIB))
    assert chosen == Budget(512 * MIB, 4, 4)
    assert budget.cell_bytes(chosen, segment=MIB, copy_bytes=32 * MIB) == 32 * MIB


def test_the_ring_of_a_cpu_is_what_may_be_locked() -> None:
    assert cpu(OPEN, Machine(64, 1, 8 * MIB)).ring_bytes == 6 * MIB
    assert cpu(OPEN, Machine(64, 1, 64 << 10)).ring_bytes == 4 * MIB  # refused with ring.memlock when it is taken


def test_what_is_asked_for_is_taken() -> None:
    asked = Budget(12 * MIB, 1, 3)
    assert cpu(asked, Machine(64, 1, 8 * MIB)) == asked
    assert gpu(asked, Machine(64, 1, None)) == asked


def test_a_ring_beyond_the_bundle_is_not_taken() -> None:
    assert budget.useful_ring(20_000 * MIB, data_bytes=280 * MIB) == 512 * MIB
    assert budget.useful_ring(20_000 * MIB, data_bytes=700_000 * MIB) == 20_000 * MIB
    assert budget.useful_ring(6 * MIB, data_bytes=280 * MIB) == 6 * MIB
    assert budget.useful_ring(0, data_bytes=280 * MIB) == 0


def test_cores_are_those_that_the_process_may_use() -> None:
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        assert budget.for_slot(OPEN, CpuSlot(), ranks=1).openers == 1
    finally:
        os.sched_setaffinity(0, usable)


def test_a_process_that_may_lock_beyond_the_limit_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * MIB, 8 * MIB))
    monkeypatch.setattr(pages, "_capabilities", lambda: 1 << 14)
    assert pages.lockable() is None
    monkeypatch.setattr(pages, "_capabilities", lambda: 0)
    assert pages.lockable() == 8 * MIB


@pytest.mark.parametrize(
    ("asked", "copy", "cell"),
    [
        (Budget(12 * (4 * MIB + pages.PAGE), 8, 2), MIB, 4 * MIB),
        (Budget(6 * MIB, 8, 2), MIB, MIB),
        (Budget(512 * MIB, 4, 4), 32 * MIB, 32 * MIB),
        (Budget(64 * MIB, 2, 3), 32 * MIB, 7 * MIB),
    ],
)
def test_a_cell_is_whole_segments_and_there_is_one_for_every_thread(asked: Budget, copy: int, cell: int) -> None:
    assert budget.cell_bytes(asked, segment=MIB, copy_bytes=copy) == cell


def test_a_ring_for_less_than_all_threads_has_cells_of_one_segment() -> None:
    assert budget.cell_bytes(Budget(9 * MIB, 8, 2), segment=4 * MIB, copy_bytes=MIB) == 4 * MIB
