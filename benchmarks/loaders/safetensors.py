"""safetensors, which maps its files, with one copy into the destinations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks.loaders.contender import Contender


class LoadFile(Contender):
    """A file at a time."""

    label = "safetensors load_file, copy"
    package = "safetensors"

    def load(self) -> Mapping[str, torch.Tensor]:
        """Map each file and copy every tensor."""
        for path in self.files():
            for name, tensor in load_file(path).items():
                self.destinations[name].copy_(tensor)
        return self.destinations


class SafeOpen(Contender):
    """A tensor at a time."""

    label = "safetensors safe_open, copy"
    package = "safetensors"

    def load(self) -> Mapping[str, torch.Tensor]:
        """Get and copy one tensor after the other."""
        for path in self.files():
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    self.destinations[name].copy_(opened.get_tensor(name))
        return self.destinations
