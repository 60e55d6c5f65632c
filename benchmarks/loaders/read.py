"""Plain reads of the safetensors files into memory that is there already: what no loader of these bytes can pass."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import ClassVar

import torch

from appliance import pages
from appliance.probe import medium
from benchmarks.loaders.contender import Contender


class Buffered(Contender):
    """One reader through the page cache."""

    label = "read into memory, through the cache, 1 thread"
    given = False  # its own memory, made before the clock
    direct: ClassVar[bool] = False

    def prepare(self, destinations: dict[str, torch.Tensor]) -> None:
        """Map and touch the memory."""
        super().prepare(destinations)
        mapping = pages.map_private(medium.room(self.files()))
        self._memory = memoryview(mapping)
        torch.frombuffer(mapping, dtype=torch.uint8).zero_()

    def load(self) -> Mapping[str, torch.Tensor]:
        """Read; the tensors are views of what was read."""
        block, threads = (self.job.block_bytes, self.job.read_threads) if self.direct else (8 << 20, 1)
        medium.read_whole(self.files(), self._memory, block_bytes=block, threads=threads, direct=self.direct)
        self.detail = {"block_bytes": block, "threads": threads}
        return {
            name: tensor
            for start in medium.places(self.files())
            for name, tensor in _views(self._memory[start:]).items()
        }


class Direct(Buffered):
    """Readers past the page cache, with the block size and the number of threads that the probe found best."""

    label = "read into memory, O_DIRECT, best size and threads"
    direct = True


def _views(memory: memoryview) -> dict[str, torch.Tensor]:
    (length,) = struct.unpack("<Q", memory[:8])
    header = json.loads(bytes(memory[8 : 8 + length]))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        raw = torch.frombuffer(memory[8 + length + first : 8 + length + last], dtype=torch.uint8)
        found[name] = raw
    return found
