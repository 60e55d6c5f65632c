"""The model of a comparison: that of ``lethe bench load``, and the digest of every tensor to compare with later."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from appliance.probe import model


@dataclass(frozen=True, slots=True)
class Weights:
    """What was written.

    Attributes:
        nbytes: of all tensors.
        shapes: of each tensor; all are bfloat16.
        digests: SHA-256 of each tensor's bytes, as hex.
        files: safetensors files.
    """

    nbytes: int
    shapes: dict[str, tuple[int, ...]]
    digests: dict[str, str]
    files: int


def write(directory: Path, gigabytes: float) -> Weights:
    """Write a model directory of about that size."""
    hashes: dict[str, hashlib._Hash] = {}

    def seen(name: str, chunk: bytes) -> None:
        hashes.setdefault(name, hashlib.sha256()).update(chunk)

    written = model.write(directory, model.shapes(round(gigabytes * 1e9)), seen=seen)
    digests = {name: digest.hexdigest() for name, digest in hashes.items()}
    return Weights(written.nbytes, written.shapes, digests, written.files)
