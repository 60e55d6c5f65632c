"""Windows of plaintext weights to search for, in the forms they take on disk and in memory."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from appliance.residue import Needle

WINDOW = 32


def weight_windows(path: Path, *, count: int) -> list[Needle]:
    """Take ``count`` windows of 32 bytes at random places of a bfloat16 safetensors file.

    Half are the file's own bytes, half the float32 values that a CPU computes with. A window must have many different
    bytes, so that it cannot turn up by chance.
    """
    chosen = random.Random(0)  # the same windows in every run
    needles: list[Needle] = []
    with safe_open(path, framework="pt") as tensors:
        names = sorted(tensors.keys())
        while len(needles) < count:
            values = tensors.get_tensor(chosen.choice(names)).flatten()
            for _ in range(32):
                start = chosen.randrange(max(1, len(values) - WINDOW))
                part = values[start : start + WINDOW // 2]
                wide = part[: WINDOW // 4].float().numpy().tobytes()
                raw = part.view(torch.int16).numpy().tobytes()
                needles += [
                    Needle(label, data)
                    for label, data in (("weights (bfloat16)", raw), ("weights (float32)", wide))
                    if len(data) == WINDOW and len(set(np.frombuffer(data, np.uint8).tolist())) >= WINDOW // 3
                ]
    return needles[:count]
