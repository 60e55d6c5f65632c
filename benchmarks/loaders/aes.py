"""AES-256-GCM alone: genuine segments, from memory to memory, on as many threads as our loader has openers.

No file, no catalog, no plan: what these cores can open at most when the ciphertext is already there.
"""

from __future__ import annotations

from pathlib import Path

import torch

from appliance.probe.aead import Ciphertext
from benchmarks.loaders.contender import Contender


class Aes(Contender):
    """The cipher, and nothing else."""

    label = "AES-256-GCM alone, memory to memory"
    encrypted = True
    given = False  # its own memory, made before the clock

    def files(self) -> list[Path]:
        """Nothing is read."""
        return []

    def prepare(self, destinations: dict[str, torch.Tensor]) -> None:
        """Encrypt as many bytes as the model has."""
        super().prepare(destinations)
        self._ciphertext = Ciphertext(sum(path.stat().st_size for path in super().files()))

    def load(self) -> None:
        """Open every segment once."""
        self._ciphertext.open_all(threads=self.job.threads)
