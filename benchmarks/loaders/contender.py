"""What every loader of the comparison is to the harness."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch


@dataclass(frozen=True, slots=True)
class Job:
    """What a contender is told about the run; crosses to its process as JSON.

    Attributes:
        work: directory of the run, with ``model/`` (safetensors), ``bundle/``, ``keys/`` and one directory per format.
        threads: openers of our loader; all others may use as many threads where they let that be said.
        readers: reader threads of our loader.
        ring_bytes: bound on our loader's staging memory.
        block_bytes: bytes per raw direct read, found by the probe.
        read_threads: raw direct reads at once, found by the probe.
        secret: 32 bytes as hex for other encrypted formats; made for this run.
    """

    work: str
    threads: int
    readers: int
    ring_bytes: int
    block_bytes: int
    read_threads: int
    secret: str

    @property
    def model(self) -> Path:
        """The directory of the safetensors files."""
        return Path(self.work) / "model"

    def place(self, name: str) -> Path:
        """Give the directory of another format; made if absent."""
        directory = Path(self.work) / name
        directory.mkdir(exist_ok=True)
        return directory

    def as_payload(self) -> dict[str, Any]:
        """Give the job as JSON members."""
        return asdict(self)

    @classmethod
    def from_payload(cls, members: Mapping[str, Any]) -> Job:
        """Take the job from JSON members."""
        return cls(**{field.name: members[field.name] for field in fields(cls)})


class Contender(ABC):
    """One loader.

    Attributes:
        label: what it is, for people.
        package: distribution whose version is reported; empty for our own code.
        encrypted: it decrypts what it reads.
        own: the tensors that it makes in the clock are the destination.
        given: it fills destinations that are made before the clock starts; the one copy into them is in the time.
    """

    label: ClassVar[str]
    package: ClassVar[str] = ""
    encrypted: ClassVar[bool] = False
    own: ClassVar[bool] = False
    given: ClassVar[bool] = True

    def __init__(self, job: Job) -> None:
        self.job = job
        self.detail: dict[str, Any] = {}  # what a loader knows about its run, for the report

    def convert(self) -> None:  # noqa: B027 - most read the safetensors files as they are
        """Write the model in this loader's format; runs once, in a process of its own, outside every clock."""

    def files(self) -> list[Path]:
        """Give the files that a timed run reads: these are put into the page cache, or taken out of it."""
        return sorted(self.job.model.glob("*.safetensors"))

    def prepare(self, destinations: dict[str, torch.Tensor]) -> None:
        """Do what belongs before the clock: keys at hand, memory allocated and touched."""
        self.destinations = destinations

    @abstractmethod
    def load(self) -> Mapping[str, torch.Tensor] | None:
        """Load the model, in the clock.

        Returns:
            The tensors that hold the weights now; None when there is nothing to compare.
        """
