"""The cycle collector rests while it is asked to, and only then."""

from __future__ import annotations

import gc

import pytest

from provisioning.collector import resting


def test_rests_inside_and_wakes_after() -> None:
    assert gc.isenabled()
    with resting():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_wakes_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), resting():
        raise ValueError("inside")
    assert gc.isenabled()


def test_one_that_rests_already_is_not_woken() -> None:
    with resting():
        with resting():
            pass
        assert not gc.isenabled()
