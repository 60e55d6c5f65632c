"""fastsafetensors on the CPU: whole files into one buffer each, tensors made from those; they outlive the loader."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from fastsafetensors import SafeTensorsFileLoader

from benchmarks.loaders.contender import Contender


class FastSafetensors(Contender):
    """Without GPUDirect Storage, which needs a GPU."""

    label = "fastsafetensors, CPU"
    package = "fastsafetensors"
    own = True
    given = False

    def load(self) -> Mapping[str, torch.Tensor]:
        """Copy all files to the "device" and take every tensor."""
        loader = SafeTensorsFileLoader(None, device="cpu", nogds=True)
        loader.add_filenames({0: [str(path) for path in self.files()]})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        buffers.close()
        loader.close()
        return tensors
