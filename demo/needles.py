"""What to search for: windows of the plaintext weights in the forms they take, and the bundle key."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from safetensors import safe_open

from appliance.residue import Needle
from demo.rooms import Rooms
from provisioning.manifest import SignedManifest
from provisioning.ownerkey import OwnerKey, OwnerSigner
from provisioning.secret import SecretBytes

WINDOW = 32
_DISTINCT = 10


def weight_windows(path: Path, *, count: int) -> list[Needle]:
    """Take windows of 32 bytes at random places of a bfloat16 safetensors file.

    Half are the file's own bytes, half the float32 values that a CPU computes with. A window must have many different
    bytes, so that it cannot turn up by chance. The places are the same in every run.
    """
    chosen = random.Random(0)
    needles: list[Needle] = []
    with safe_open(path, framework="pt") as tensors:
        names = sorted(tensors.keys())
        while len(needles) < count:
            values = tensors.get_tensor(chosen.choice(names)).flatten()
            for _ in range(32):
                part = values[chosen.randrange(len(values)) :][: WINDOW // 2]
                forms = {
                    "weights (bfloat16)": part.view(torch.uint8).numpy().tobytes(),
                    "weights (float32)": part[: WINDOW // 4].float().view(torch.uint8).numpy().tobytes(),
                }
                needles += [Needle(label, data) for label, data in forms.items() if _telling(data)]
    return needles[:count]


def _telling(data: bytes) -> bool:
    return len(data) == WINDOW and len(set(data)) >= _DISTINCT


def bundle_key(rooms: Rooms) -> bytes:
    """Read the bundle key in the owner's room, to search for it everywhere else."""
    owner = OwnerKey.read((rooms.media / "owner.pub.json").read_bytes())
    manifest = SignedManifest.read((rooms.bundle / "manifest.dsse.json").read_bytes(), [owner])
    with (
        SecretBytes.take(bytearray(rooms.passphrase.read_bytes())) as passphrase,
        OwnerSigner.load(rooms.owner, passphrase) as signer,
        signer.bundle_key(rooms.owner, manifest.bundle_id) as key,
        key.expose() as view,
    ):
        return bytes(view)
