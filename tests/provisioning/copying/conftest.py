"""A bundle whose files have several digest blocks each, in blocks of one segment so that it stays small."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from attestation.policy import AppraisalPolicy
from provisioning import sealing, table
from provisioning.bundle import Bundle
from provisioning.copying import CopyReport, Progress, copy
from provisioning.ownerkey import OwnerKey, OwnerSigner
from provisioning.pack import pack
from provisioning.verify import verify
from tests.provisioning.conftest import SEGMENT
from tests.sim import modelfiles

BLOCK = SEGMENT


@dataclass(frozen=True, slots=True)
class Room:
    """A bundle and a place for copies of it."""

    bundle: Path
    owner: OwnerKey
    place: Path

    @property
    def copy(self) -> Path:
        return self.place / "copy"

    @property
    def partial(self) -> Path:
        return self.place / "copy.partial"

    def run(self, destination: Path | None = None, progress: Progress | None = None) -> CopyReport:
        with Bundle.open(self.bundle, [self.owner]) as source:
            return copy(source, destination or self.copy, progress=progress)

    def check(self, path: Path | None = None) -> None:
        """The copy verifies, and no byte or name of it is another."""
        with Bundle.open(path or self.copy, [self.owner]) as opened:
            verify(opened)
        assert content(path or self.copy) == content(self.bundle)

    def files(self) -> list[tuple[str, int]]:
        with Bundle.open(self.bundle, [self.owner]) as opened:
            return [(file.name, file.size) for file in opened.files]

    def own_source(self) -> Room:
        """The same with a source that may be damaged."""
        source = self.place / "source"
        shutil.copytree(self.bundle, source)
        return Room(source, self.owner, self.place)


def content(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


def descriptors() -> set[int]:
    """What this process has open, but the directory that is listed."""
    return {int(name.name) for name in Path("/proc/self/fd").iterdir() if name.exists()}


def name_of(descriptor: int) -> str:
    return Path(f"/proc/self/fd/{descriptor}").readlink().name


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (table, sealing):
        monkeypatch.setattr(module, "DIGEST_BLOCK", BLOCK)


@pytest.fixture(scope="session")
def blocky(tmp_path_factory: pytest.TempPathFactory, lab_signer: OwnerSigner, lab_policy: AppraisalPolicy) -> Path:
    """The packed bundle; copied and never changed."""
    directory = tmp_path_factory.mktemp("blocky")
    tensors = modelfiles.llama(hidden=192, inter=768, layers=4, vocab=2048)
    with pytest.MonkeyPatch.context() as patch:
        for module in (table, sealing):
            patch.setattr(module, "DIGEST_BLOCK", BLOCK)
        pack(
            modelfiles.write_model(directory / "model", tensors),
            signer=lab_signer,
            key_dir=directory / "keys",
            policy=lab_policy,
            name="blocky",
            out=directory / "bundle",
            tiles=2,
            segment_size=SEGMENT,
            file_cap=5 * SEGMENT,
        )
    return directory / "bundle"


@pytest.fixture
def copies(blocky: Path, lab_signer: OwnerSigner, tmp_path: Path) -> Room:
    return Room(blocky, lab_signer.owner, tmp_path)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount small file systems, or skip with the reason; unmounts them at the end."""
    points: list[Path] = []

    def mount(kind: str, *options: str, size: int) -> Path:
        if os.geteuid() != 0:
            pytest.skip("mounting needs root")
        point = tmp_path / f"mount-{len(points)}"
        point.mkdir()
        if kind == "tmpfs":
            what = ["-t", "tmpfs", "-o", f"size={size}", "none"]
        else:
            make = shutil.which(f"mkfs.{kind}")
            if make is None:
                pytest.skip(f"mkfs.{kind} is not installed")
            image = tmp_path / f"image-{len(points)}"
            with image.open("wb") as file:
                file.truncate(size)
            subprocess.run([make, *options, str(image)], check=True, capture_output=True)
            what = ["-o", "loop", str(image)]
        done = subprocess.run(["mount", *what, str(point)], check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{kind} cannot be mounted here: {done.stderr.strip()}")
        points.append(point)
        return point

    yield mount
    for point in points:
        subprocess.run(["umount", str(point)], check=True)
