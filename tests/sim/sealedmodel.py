"""A small model, packed by the product's own packer, and opened grants for it without an exchange."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from appliance.loader import SealedLoader
from appliance.slot import Slot
from attestation.clock import SystemClock
from attestation.policy import AppraisalPolicy
from provisioning._seal import MINT
from provisioning.bundle import Bundle
from provisioning.grant import Grant
from provisioning.ownerkey import OwnerKey, OwnerSigner
from provisioning.pack import pack
from provisioning.secret import SecretBytes
from tests.sim import tinymodel
from tests.sim.modelfiles import POLICY

SEGMENT = 256 << 10


@dataclass(frozen=True, slots=True)
class Sealed:
    """A packed model and what opens it."""

    source: Path
    bundle: Path
    keys: Path
    signer: OwnerSigner
    owner: OwnerKey

    def open(self, path: Path | None = None) -> Bundle:
        return Bundle.open(path or self.bundle, [self.owner])

    def key(self) -> SecretBytes:
        with self.open() as bundle:
            return self.signer.bundle_key(self.keys, bundle.manifest.bundle_id)

    def grant(self, bundle: Bundle) -> Grant:
        """Give an opened grant, as a session would."""
        return Grant(
            MINT,
            key=self.key(),
            bundle_id=bundle.manifest.bundle_id,
            terms=bundle.manifest.policy.grant,
            deadline=math.inf,
            clock=SystemClock(),
        )

    def loader(
        self,
        bundle: Bundle,
        slot: Slot,
        *,
        ring_bytes: int = 8 * SEGMENT,
        rank: int = 0,
        world: int = 1,
        readers: int = 2,
        openers: int = 2,
        open_on: str = "host",
    ) -> SealedLoader:
        return SealedLoader(
            self.grant(bundle),
            bundle,
            slot,
            ring_bytes=ring_bytes,
            reader_threads=readers,
            opener_threads=openers,
            rank=rank,
            world=world,
            open_on=open_on,
        )

    def owner_file(self) -> bytes:
        """Give ``owner.pub.json``."""
        return self.signer._public_envelope()

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.source / "model.safetensors")

    def copy(self, to: Path) -> Path:
        """Copy the bundle to where it may be damaged."""
        return Path(shutil.copytree(self.bundle, to))


def seal(directory: Path, *, hidden: int = 384, layers: int = 4, tiles: int = 8) -> Sealed:
    """Write a model, by default of about 11 MB, and pack it in 256 KiB segments and several files."""
    source = tinymodel.write(directory / "model", hidden=hidden, layers=layers, heads=6, kv_heads=2)
    keys = directory / "keys"
    keys.mkdir(mode=0o700)
    signer = OwnerSigner.generate("laboratory", "lab")
    pack(
        source,
        signer=signer,
        key_dir=keys,
        policy=AppraisalPolicy.from_toml(POLICY),
        name="tiny",
        out=directory / "bundle",
        segment_size=SEGMENT,
        file_cap=4 * SEGMENT,
        tiles=tiles,
    )
    return Sealed(source, directory / "bundle", keys, signer, signer.owner)
