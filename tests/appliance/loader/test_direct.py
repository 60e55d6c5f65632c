"""Stretches of a segment: which bytes go straight to a tensor, and which are staged."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from appliance.direct import HostTargets
from appliance.placement import Target

BF16 = torch.bfloat16


def flat(start: int, elements: int) -> Target:
    return Target(start, start + 2 * elements, BF16, torch.zeros(1, elements, dtype=BF16))


def spans(targets: list[Target], start: int, stop: int) -> list[tuple[int, int, bool]]:
    return [(item.start, item.stop, item.memory is not None) for item in HostTargets(targets).stretches(start, stop)]


def test_a_segment_inside_of_one_tensor_is_one_stretch_of_its_memory() -> None:
    target = flat(0, 1000)
    (item,) = HostTargets([target]).stretches(200, 600)
    assert item.memory is not None
    item.memory[:] = b"\x01" * 400
    assert target.block.view(torch.uint8).flatten().nonzero().flatten().tolist() == list(range(200, 600))


def test_a_segment_over_two_tensors_goes_to_both_and_the_padding_is_staged() -> None:
    assert spans([flat(0, 30), flat(64, 100)], 0, 200) == [(0, 60, True), (60, 64, False), (64, 200, True)]


def test_converted_and_strided_pieces_are_staged_together_with_what_lies_between() -> None:
    converted = Target(0, 128, BF16, torch.zeros(1, 64))
    strided = Target(128, 256, BF16, torch.zeros(4, 32, dtype=BF16)[:, :16])
    assert spans([converted, strided, flat(256, 32)], 0, 320) == [(0, 256, False), (256, 320, True)]


def test_bytes_of_no_tensor_are_staged() -> None:
    assert spans([], 0, 100) == [(0, 100, False)]
    assert spans([flat(0, 32)], 64, 100) == [(0, 36, False)]
    assert spans([flat(640, 32)], 0, 100) == [(0, 100, False)]


@given(st.lists(st.tuples(st.integers(1, 90), st.sampled_from(["flat", "float", "skip"])), max_size=12), st.data())
def test_stretches_cover_a_segment_once_and_in_order(pieces: list[tuple[int, str]], data: st.DataObject) -> None:
    targets: list[Target] = []
    position = 0
    for elements, kind in pieces:
        if kind != "skip":
            block = torch.zeros(1, elements, dtype=BF16 if kind == "flat" else torch.float32)
            targets.append(Target(position, position + 2 * elements, BF16, block))
        position = -(-(position + 2 * elements) // 64) * 64
    start = data.draw(st.integers(0, position))
    stop = data.draw(st.integers(start + 1, position + 64))
    found = HostTargets(targets).stretches(start, stop)
    assert found[0].start == 0
    assert found[-1].stop == stop - start
    assert all(before.stop == after.start for before, after in itertools.pairwise(found))
    assert all(item.stop > item.start for item in found)
    assert all(len(item.memory) == item.stop - item.start for item in found if item.memory is not None)
    straight = sum(item.stop - item.start for item in found if item.memory is not None)
    assert straight == sum(
        max(0, min(stop, target.stop) - max(start, target.start)) for target in targets if target.block.dtype == BF16
    )
