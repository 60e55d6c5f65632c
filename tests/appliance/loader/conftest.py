"""Shared fixtures of the loader's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sim.sealedmodel import Sealed, seal


@pytest.fixture(scope="session")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sealed]:
    """Give one packed model for all tests; whoever damages it takes a copy."""
    made = seal(tmp_path_factory.mktemp("sealed"))
    yield made
    made.signer.close()
