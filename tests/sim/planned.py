"""A tensor as the writer lays it out when nothing else belongs to it."""

from __future__ import annotations

from provisioning import tiling
from provisioning.layout import TensorSpec


def planned(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """Plan one tensor as a model of its own."""
    return tiling.plan([(name, dtype, shape)], tiles=1)[0]
