"""One owner, one policy and one small packed bundle for the tests of the sealed bundle."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from attestation.policy import AppraisalPolicy
from provisioning.bundle import Bundle
from provisioning.ownerkey import OwnerKey, OwnerSigner
from provisioning.pack import pack
from provisioning.secret import SecretBytes
from tests.sim import modelfiles

SEGMENT = 256 << 10


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed model."""

    source: Path
    path: Path
    keys: Path
    signer: OwnerSigner
    tensors: modelfiles.Tensors

    @property
    def owner(self) -> OwnerKey:
        return self.signer.owner

    def open(self, path: Path | None = None) -> Bundle:
        return Bundle.open(path or self.path, [self.owner])

    def key(self) -> SecretBytes:
        with self.open() as bundle:
            return self.signer.bundle_key(self.keys, bundle.manifest.bundle_id)


@pytest.fixture(scope="session")
def lab_signer() -> Iterator[OwnerSigner]:
    with OwnerSigner.generate("laboratory", "lab") as signer:
        yield signer


@pytest.fixture(scope="session")
def lab_policy() -> AppraisalPolicy:
    return AppraisalPolicy.from_toml(modelfiles.POLICY)


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory, lab_signer: OwnerSigner, lab_policy: AppraisalPolicy) -> Packed:
    """A model of about 5 MB in 256 KiB segments, at most two to a section and one to a file."""
    directory = tmp_path_factory.mktemp("packed")
    tensors = modelfiles.llama(hidden=192, inter=768, layers=4, vocab=2048)
    source = modelfiles.write_model(directory / "model", tensors, shards=2)
    keys = directory / "keys"
    pack(
        source,
        signer=lab_signer,
        key_dir=keys,
        policy=lab_policy,
        name="small",
        out=directory / "bundle",
        segment_size=SEGMENT,
        section_bytes=2 * SEGMENT,
        file_cap=SEGMENT,
    )
    return Packed(source, directory / "bundle", keys, lab_signer, tensors)


@pytest.fixture
def damaged(packed: Packed, tmp_path: Path) -> Callable[[], Path]:
    """Give a copy of the bundle to damage."""

    def copy() -> Path:
        return Path(shutil.copytree(packed.path, tmp_path / "damaged"))

    return copy
