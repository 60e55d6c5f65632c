"""The ring: its cells, its count of living plaintext, and its refusals."""

from __future__ import annotations

import itertools
import mmap

import pytest

from appliance.errors import ConfigError
from appliance.ring import Ring
from appliance.slot_cpu import CpuSlot
from provisioning.segment import TAG_BYTES

CELL = 256 << 10


def make(cells: int) -> Ring:
    return Ring(CpuSlot(), ring_bytes=cells * (CELL + 4096), cell_bytes=CELL)


def test_cells_are_page_aligned_apart_and_have_room_for_a_tag() -> None:
    ring = make(3)
    starts = [cell.staged.data_ptr() for cell in ring.cells]
    assert len(starts) == 3
    assert all(start % mmap.PAGESIZE == 0 for start in starts)
    assert all(len(cell.view) >= CELL + TAG_BYTES for cell in ring.cells)
    assert all(after - before == len(ring.cells[0].view) for before, after in itertools.pairwise(starts))


def test_view_and_tensor_are_the_same_memory() -> None:
    cell = make(1).cells[0]
    cell.view[5] = 77
    assert int(cell.staged[5]) == 77


def test_refuses_a_ring_smaller_than_one_cell() -> None:
    with pytest.raises(ConfigError) as refused:
        Ring(CpuSlot(), ring_bytes=CELL + 4095, cell_bytes=CELL)
    assert refused.value.code == "ring.size"


def test_plaintext_capacity_is_never_above_the_ring_asked_for() -> None:
    ring = Ring(CpuSlot(), ring_bytes=4 * CELL, cell_bytes=CELL)
    assert ring.bytes <= 4 * CELL


def test_counts_living_plaintext_and_its_peak() -> None:
    ring = make(2)
    first, second = ring.cells
    first.expose(0, 1000)
    second.expose(0, 500)
    assert (ring.alive_bytes, ring.peak_bytes) == (1500, 1500)
    first.wipe()
    assert (ring.alive_bytes, ring.peak_bytes) == (500, 1500)
    second.wipe()
    assert (ring.alive_bytes, ring.peak_bytes) == (0, 1500)


def test_wiping_a_cell_twice_counts_once() -> None:
    ring = make(1)
    ring.cells[0].expose(0, 10)
    ring.cells[0].wipe()
    ring.cells[0].wipe()
    assert ring.alive_bytes == 0


def test_wipe_overwrites_every_byte_of_every_cell() -> None:
    ring = make(2)
    for cell in ring.cells:
        cell.staged.fill_(0xCC)
    ring.wipe()
    assert not any(bool(cell.staged.any()) for cell in ring.cells)


def test_staging_memory_belongs_to_the_slot_so_its_wipe_covers_the_ring() -> None:
    slot = CpuSlot()
    ring = Ring(slot, ring_bytes=CELL + 4096, cell_bytes=CELL)
    ring.cells[0].staged.fill_(1)
    result = slot.wipe_staging()
    assert result.overwritten_bytes == result.read_back_bytes == ring.bytes
    assert result.nonzero_bytes == 0
    assert not bool(ring.cells[0].staged.any())
