"""Blocks are read and hashed in order on several threads, in bounded memory, and a stop is a stop."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from provisioning import blocks, table
from provisioning.blocks import Block, Plan, blocks_of, read_blocks
from provisioning.geometry import DataFile

UNIT = 64 << 10
BLOCK = 4 * UNIT


class Made:
    """Files of random bytes in the place of a bundle's."""

    def __init__(self, directory: Path, sizes: list[int]) -> None:
        self.content = [os.urandom(size) for size in sizes]
        self.files = [DataFile(f"{number}", size, 0, 0) for number, size in enumerate(sizes)]
        self.paths = [directory / file.name for file in self.files]
        for path, data in zip(self.paths, self.content, strict=True):
            path.write_bytes(data)
        self.opened: dict[int, int] = {}
        self.closed: list[int] = []
        self.most = 0
        self._lock = threading.Lock()

    def open_file(self, number: int) -> int:
        with self._lock:
            if number not in self.opened:
                self.opened[number] = os.open(self.paths[number], os.O_RDONLY)
            self.most = max(self.most, len(self.opened))
            return self.opened[number]

    def close_file(self, number: int) -> None:
        os.close(self.opened.pop(number))
        self.closed.append(number)

    def digest(self, block: Block) -> bytes:
        return hashlib.sha256(self.content[block.file][block.start : block.stop]).digest()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "DIGEST_BLOCK", BLOCK)
    monkeypatch.setattr(blocks, "PIECE", UNIT)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    made = Made(tmp_path, [3 * BLOCK + UNIT, UNIT, 2 * BLOCK, BLOCK - UNIT, 5 * BLOCK])
    yield made
    for descriptor in made.opened.values():
        os.close(descriptor)


PLANS: dict[str, Callable[[], Plan]] = {
    "in pieces": lambda: Plan(threads=3, window=UNIT),
    "whole": lambda: Plan.in_turns(3),
    "one thread": lambda: Plan(threads=1, window=UNIT),
}


@pytest.mark.parametrize("plan", PLANS)
def test_every_block_is_hashed_in_order(made: Made, plan: str) -> None:
    told: list[int] = []
    with contextlib.closing(read_blocks(made, blocks_of(made.files), PLANS[plan](), told.append)) as outcomes:
        seen = [(outcome.block, outcome.digest, outcome.fault) for outcome, _ in outcomes]
    assert seen == [(block, made.digest(block), None) for block in blocks_of(made.files)]
    assert told == sorted(told)
    assert told[-1] == sum(len(data) for data in made.content)


def test_blocks_are_cut_at_the_ends_of_files(made: Made) -> None:
    cut = blocks_of(made.files)
    assert [block.stop - block.start for block in cut if block.file == 0] == [BLOCK, BLOCK, BLOCK, UNIT]
    assert [(block.file, block.number) for block in cut][:6] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0)]


def test_whole_blocks_stay_in_memory_until_the_next_is_asked_for(made: Made) -> None:
    with contextlib.closing(read_blocks(made, blocks_of(made.files), Plan.in_turns(2), lambda _: None)) as outcomes:
        for outcome, memory in outcomes:
            block = outcome.block
            assert memory[: block.stop - block.start] == made.content[block.file][block.start : block.stop]


def test_files_are_closed_when_they_were_read(made: Made) -> None:
    with contextlib.closing(
        read_blocks(made, blocks_of(made.files), Plan(threads=1, window=UNIT), lambda _: None)
    ) as read:
        for _ in read:
            pass
    assert made.closed == [0, 1, 2, 3, 4]
    assert made.opened == {}


def test_memory_is_bounded_by_the_plan(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[int] = []
    real = blocks.map_pages
    monkeypatch.setattr(blocks, "map_pages", lambda size: (mapped.append(size), real(size))[1])
    with contextlib.closing(
        read_blocks(made, blocks_of(made.files), Plan(threads=2, window=UNIT), lambda _: None)
    ) as read:
        for _ in read:
            pass
    assert mapped == [UNIT] * 3


def test_a_fault_names_the_first_byte_that_did_not_come(made: Made) -> None:
    os.truncate(made.paths[4], 2 * BLOCK + UNIT + 5)
    with contextlib.closing(read_blocks(made, blocks_of(made.files), Plan.in_turns(2), lambda _: None)) as outcomes:
        faults = {outcome.block.number: outcome.fault for outcome, _ in outcomes if outcome.block.file == 4}
    assert faults[0] is None
    assert faults[1] is None
    assert faults[2] == blocks.Fault("bundle.file.size", 2 * BLOCK + UNIT + 5, "cut off")
    assert faults[3] == blocks.Fault("bundle.file.size", 3 * BLOCK, "cut off")


def test_a_closed_run_reads_no_further(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    running = blocks._Reading(made, Plan(threads=1, window=UNIT))
    running.close()
    monkeypatch.setattr(os, "preadv", None)
    block = blocks_of(made.files)[0]
    outcome = running.read(block, blocks.map_pages(UNIT))
    assert (outcome.digest, outcome.fault) == (b"", blocks.Fault("bundle.file.unreadable", 0, "stopped"))
    assert running._fill(None, 7, memoryview(b"x")) == blocks.Fault("bundle.file.unreadable", 7, "stopped")  # type: ignore[arg-type]


def test_closing_early_ends_all_threads(made: Made) -> None:
    before = threading.active_count()
    outcomes = read_blocks(made, blocks_of(made.files), Plan(threads=4, window=UNIT), lambda _: None)
    next(outcomes)
    outcomes.close()
    assert threading.active_count() == before


def test_a_file_that_cannot_be_opened_ends_the_run(made: Made) -> None:
    def refuse(_: int) -> int:
        raise ValueError("closed")

    made.open_file = refuse  # type: ignore[method-assign]
    with (
        contextlib.closing(read_blocks(made, blocks_of(made.files), Plan.in_turns(2), lambda _: None)) as outcomes,
        pytest.raises(ValueError, match="closed"),
    ):
        next(outcomes)


def test_plans_follow_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(200)))
    assert (Plan.streaming().threads, Plan.in_turns().threads) == (64, 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert (Plan.streaming().threads, Plan.in_turns().threads) == (2, 2)
