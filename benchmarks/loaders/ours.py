"""Our loader: from opening the bundle's directory to the last byte in its tensor; opened on the host."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from appliance.loader import SealedLoader
from appliance.slot_cpu import CpuSlot
from benchmarks.loaders.contender import Contender
from provisioning.bundle import Bundle
from provisioning.grant import Grant
from provisioning.ownerkey import OwnerKey

# The harness writes the bundle key into a pipe, as the agent does for a rank, and names its end in this variable.
KEY_VARIABLE = "LETHE_BENCH_KEY"


class Ours(Contender):
    """A sealed bundle."""

    label = "lethe, sealed bundle (AES-256-GCM, signed)"
    encrypted = True

    def files(self) -> list[Path]:
        """Give everything in the bundle."""
        return sorted((Path(self.job.work) / "bundle").iterdir())

    def prepare(self, destinations: dict[str, torch.Tensor]) -> None:
        """Read the owner's public key, which an appliance has read long before."""
        super().prepare(destinations)
        torch.set_num_threads(1)  # as a rank does while it loads: arithmetic would take cores from the openers
        self._owner = OwnerKey.load(Path(self.job.work) / "keys")
        self._key = int(os.environ[KEY_VARIABLE])

    def load(self) -> Mapping[str, torch.Tensor]:
        """Check the signatures, open the catalog, derive keys, open every segment."""
        begin = time.perf_counter()
        with Bundle.open(Path(self.job.work) / "bundle", [self._owner]) as bundle:
            grant = Grant.inherit(self._key, bundle.manifest)
            with SealedLoader(
                grant,
                bundle,
                CpuSlot(),
                ring_bytes=self.job.ring_bytes,
                reader_threads=self.job.readers,
                opener_threads=self.job.threads,
                rank=0,
                world=1,
            ) as loader:
                done = loader.load(self.destinations, skip=lambda _: False, on_progress=lambda *_: None)
        self.detail = {
            "setup_s": round(time.perf_counter() - begin - done.seconds, 4),
            "ring_bytes": done.ring_bytes,
            "peak_plaintext_bytes": done.peak_plaintext_bytes,
            "direct_files": done.direct_files,
            "segments": done.segments,
        }
        return self.destinations
