"""Attacks by number: each broke the product once, or is a strong one that must go on failing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import House


@pytest.fixture
def house(tmp_path: Path) -> House:
    """A house with a tiny model."""
    return House(tmp_path / "house")
