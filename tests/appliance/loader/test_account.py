"""The account of a load: what was opened is what was wanted, segment by segment."""

from __future__ import annotations

import pytest

from appliance.account import Account
from provisioning.errors import BundleDamaged
from provisioning.geometry import Section

WANTED = [Section(1, 2, 0, 3, 4), Section(2, 3, 0, 2, 7)]


def test_settles_when_every_segment_was_opened_once() -> None:
    account = Account(10)
    for number in (8, 4, 5, 7, 6):
        account.note(number)
    assert account.settle(WANTED) == 5


@pytest.mark.parametrize(
    ("noted", "found", "expected"),
    [
        ([4, 5, 7, 8], "segment 6 opened never", "once"),
        ([4, 5, 6, 6, 7, 8], "segment 6 opened more than once", "once"),
        ([4, 5, 6, 7, 8, 9], "segment 9 opened once", "not at all"),
        ([6] * 300, "segment 4 opened never", "once"),
    ],
)
def test_refuses_any_other_set_of_segments(noted: list[int], found: str, expected: str) -> None:
    account = Account(10)
    for number in noted:
        account.note(number)
    with pytest.raises(BundleDamaged) as refused:
        account.settle(WANTED)
    assert refused.value.code == "load.account"
    assert (refused.value.found, refused.value.expected) == (found, expected)
