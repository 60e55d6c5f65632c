"""The Run:ai model streamer: native threads read into a bounded ring; each tensor is copied as it comes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from runai_model_streamer import SafetensorsStreamer

from benchmarks.loaders.contender import Contender


class RunAi(Contender):
    """Its own threads and memory limit, as it chooses them; tensors borrowed, which spares it a copy."""

    label = "Run:ai model streamer, copy"
    package = "runai-model-streamer"

    def load(self) -> Mapping[str, torch.Tensor]:
        """Stream all files."""
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path) for path in self.files()], device="cpu", owned=False)
            for name, tensor in streamer.get_tensors():
                self.destinations[name].copy_(tensor)
        return self.destinations
