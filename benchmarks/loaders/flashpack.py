"""flashpack: one contiguous pack, read by threads, past the cache when it is cold; tensors are views of the pack."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

# Its eager reader; by default a CPU load only maps the file, which loads nothing. Read when a load begins.
os.environ["FLASHPACK_CPU_PARALLEL_READ"] = "1"

from flashpack import pack_to_file
from flashpack.deserialization import iterate_from_flash_tensor, read_flashpack_file
from safetensors.torch import load_file

from benchmarks.loaders.contender import Contender


class FlashPack(Contender):
    """Its eager reader."""

    label = "flashpack, eager"
    package = "flashpack"
    own = True
    given = False

    def files(self) -> list[Path]:
        """Give the pack."""
        return [self.job.place("flashpack") / "model.flashpack"]

    def convert(self) -> None:
        """Write the pack."""
        tensors = {
            name: tensor
            for path in sorted(self.job.model.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        pack_to_file(tensors, str(self.files()[0]), target_dtype=None)

    def load(self) -> Mapping[str, torch.Tensor]:
        """Read the pack and take every tensor."""
        storage, metadata = read_flashpack_file(str(self.files()[0]), device="cpu")
        return dict(iterate_from_flash_tensor(storage, metadata))
