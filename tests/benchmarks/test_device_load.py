"""The benchmark of opening on a device: it runs, and says so where there is nothing to measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from benchmarks.device.chacha import TorchChaCha20

ROOT = Path(__file__).resolve().parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.device.load", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_rehearsal_loads_the_same_bytes_both_ways(tmp_path: Path) -> None:
    done = _run(
        "--rehearse", "--gb", "0.002", "--rounds", "1", "--directory", str(tmp_path / "work"), "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    (result,) = tmp_path.glob("device-load-*.json")
    report = json.loads(result.read_text(encoding="utf-8"))
    load = report["load"]
    assert load["same_bytes"] is True
    # One segment of the catalog is opened in the ring, whoever opens the weights.
    assert load["device_peak_plaintext_bytes"] == 1 << 20 < load["host_peak_plaintext_bytes"]
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is something to measure")
def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    done = _run("--out", str(tmp_path))
    assert done.returncode == 69
    assert "no CUDA device here" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("counter", [0, 1, 4000])
def test_the_other_cipher_of_the_comparison_is_chacha20(counter: int) -> None:
    """RFC 8439, as the cryptography library has it."""
    key, nonce, data = os.urandom(32), os.urandom(12), os.urandom(4096)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    TorchChaCha20(key, chunk_bytes=1024, device=torch.device("cpu")).apply(tensor, nonce=nonce, counter=counter)
    stream = Cipher(algorithms.ChaCha20(key, counter.to_bytes(4, "little") + nonce), None).encryptor()
    assert bytes(tensor.numpy().data) == stream.update(data)
