"""Errors of a load name the device, the data file and the segments that were under way."""

from __future__ import annotations

import torch

from appliance.errors import DeviceFault
from appliance.stream import Run
from attestation.errors import LetheError


def located(error: Exception, run: Run, *, device: str) -> Exception:
    """Give an error that says where it happened; errors that are no refusals and not of a device stay as they are.

    Args:
        error: of a reader, an opener or the device.
        run: what was under way.
        device: ``cpu`` or ``cuda:N``.
    """
    last = run.first + run.count - 1
    place = f"{device}, data file {run.file}, segments {run.first} to {last} of section {run.section}"
    if isinstance(error, LetheError):
        return type(error)(error.code, found=f"{error.found} ({place})", expected=error.expected, hint=error.hint)
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceFault(
            "slot.memory",
            found=f"no room left on the device in the middle of a load ({place})",
            expected="enough free memory for the model, its cache and the scratch blocks",
            hint="stop other programs on the device, or lower engine.kv_cache_mib or loading.ring_mib",
        )
    if isinstance(error, RuntimeError):
        # torch says no more of a failed device; its text may quote anything and is left out.
        return DeviceFault(
            "device.fault",
            found=f"{type(error).__name__} ({place})",
            expected="a device that takes every copy",
            hint="look at the device, then start again with a new grant",
        )
    return error
