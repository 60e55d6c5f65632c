"""What an error of a load says: device, data file and segments."""

from __future__ import annotations

import pytest
import torch

from appliance.errors import DeviceFault
from appliance.faults import located
from appliance.stream import Run
from provisioning.errors import BundleDamaged

RUN = Run(file=3, offset=0, section=2, first=16, base=40, count=4, stream=2, start=0, length=4096)
PLACE = "(cuda:1, data file 3, segments 16 to 19 of section 2)"


def test_a_refusal_keeps_its_code_and_gains_its_place() -> None:
    error = located(BundleDamaged("segment.tag", found="a", expected="b", hint="c"), RUN, device="cuda:1")
    assert isinstance(error, BundleDamaged)
    assert (error.code, error.found, error.expected, error.hint) == ("segment.tag", f"a {PLACE}", "b", "c")


@pytest.mark.parametrize(
    ("raised", "code"),
    [(torch.OutOfMemoryError("CUDA out of memory"), "slot.memory"), (RuntimeError("CUDA error: 700"), "device.fault")],
)
def test_an_error_of_the_device_becomes_a_refusal_without_its_text(raised: Exception, code: str) -> None:
    error = located(raised, RUN, device="cuda:1")
    assert isinstance(error, DeviceFault)
    assert error.code == code
    assert PLACE in error.found
    assert "CUDA" not in error.found
    assert error.exit_status == 8


def test_an_error_of_neither_stays_what_it_is() -> None:
    error = KeyError("x")
    assert located(error, RUN, device="cpu") is error
