"""The count of plaintext on the host, held against a search of the loading process's whole memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from appliance import rank as rank_module
from tests.sim.plaintext_child import LINE, MASK, Words
from tests.sim.sealedmodel import SEGMENT, Sealed, seal

ROOT = Path(rank_module.__file__).parents[1]


@pytest.fixture(scope="module")
def marks(sealed: Sealed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the lines of the shared model."""
    path: Path = tmp_path_factory.mktemp("marks") / "lines.npy"
    np.save(path, lines(sealed))
    return path


def lines(sealed: Sealed) -> Words:
    """Give the first eight bytes, masked, of every line of the weights that occurs once."""
    found: list[Words] = []
    for name, tensor in sealed.weights().items():
        columns = "o_proj" in name or "down_proj" in name
        # The tiles of a matrix that is cut by columns lie one behind the other in the sealed stream.
        for tile in tensor.chunk(8, dim=1) if columns else [tensor]:
            flat = tile.contiguous().view(-1).view(torch.uint8).numpy()
            found.append(flat[: len(flat) // LINE * LINE].view(np.uint64)[:: LINE // 8] ^ MASK)
    values, counts = np.unique(np.concatenate(found), return_counts=True)
    found_once: Words = values[(counts == 1) & (values != MASK)]
    return found_once


def run(sealed: Sealed, marks: Path, *arguments: str) -> dict[str, int]:
    with sealed.key() as key, key.expose() as view:
        ours, theirs = os.pipe()
        os.writev(theirs, [view])
        os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        output = subprocess.run(
            [
                *(sys.executable, "-m", "tests.sim.plaintext_child"),
                *(str(sealed.bundle), sealed.owner_file().hex(), str(marks), *arguments),
            ],
            check=True,
            stdin=pipe,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            # What the search read and freed again is overwritten, so that it does not find its own copies.
            env=dict(os.environ) | {"OMP_NUM_THREADS": "1", "MALLOC_PERTURB_": "165"},
        ).stdout
    result: dict[str, int] = json.loads(output)
    assert result["left"] == 0
    assert result["after"] == 0
    return result


@pytest.mark.parametrize("road", ["mapped", "cached"])
def test_a_staged_run_is_all_that_is_found(sealed: Sealed, marks: Path, road: str) -> None:
    seen = run(sealed, marks, "cuda", "bfloat16", road, "run")
    assert seen["counted"] >= SEGMENT
    # Zeros between pieces, and lines that occur twice, are counted and not found.
    assert seen["counted"] * 0.7 < seen["found"] <= seen["counted"]


@pytest.mark.parametrize("road", ["mapped", "cached"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_staged_parts_for_a_host_device_are_all_that_is_found(
    sealed: Sealed, marks: Path, dtype: str, road: str
) -> None:
    seen = run(sealed, marks, "cpu", dtype, road, "part")
    assert 0 < seen["found"] <= seen["counted"]
    if dtype == "float32":
        assert seen["counted"] * 0.7 < seen["found"]


@pytest.mark.parametrize("road", ["mapped", "cached"])
def test_what_goes_straight_to_host_tensors_is_found_nowhere_else(tmp_path: Path, road: str) -> None:
    sealed = seal(tmp_path, tiles=1)
    np.save(tmp_path / "lines.npy", lines(sealed))
    seen = run(sealed, tmp_path / "lines.npy", "cpu", "bfloat16", road, "straight")
    assert (seen["found"], seen["counted"]) == (0, 0)
