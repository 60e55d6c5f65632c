"""cryptotensors: safetensors with AES-256-GCM per chunk and a signed header; its tensors are the destination."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptotensors import SerializeCryptoConfig, register_direct_key_provider
from cryptotensors.torch import load_file, save_file
from safetensors.torch import load_file as load_plain

from benchmarks.loaders.contender import Contender


class CryptoTensors(Contender):
    """One encrypted file for each safetensors file."""

    label = "cryptotensors (AES-256-GCM, signed)"
    package = "cryptotensors"
    encrypted = True
    own = True
    given = False

    def files(self) -> list[Path]:
        """Give its files."""
        directory = self.job.place("cryptotensors")
        return [directory / path.name for path in sorted(self.job.model.glob("*.safetensors"))]

    def _keys(self) -> tuple[dict[str, Any], dict[str, Any]]:
        secret = bytes.fromhex(self.job.secret)
        signing = Ed25519PrivateKey.from_private_bytes(secret)
        encryption = {"kty": "oct", "alg": "aes256gcm", "k": _b64(secret), "kid": "bench-enc"}
        signature = {
            "kty": "okp",
            "alg": "ed25519",
            "d": _b64(secret),
            "x": _b64(signing.public_key().public_bytes_raw()),
            "kid": "bench-sign",
        }
        return encryption, signature

    def convert(self) -> None:
        """Encrypt the model."""
        encryption, signature = self._keys()
        config = SerializeCryptoConfig(enc_key=encryption, sign_key=signature).to_dict()
        for source, target in zip(sorted(self.job.model.glob("*.safetensors")), self.files(), strict=True):
            save_file(load_plain(source), target, config=config)

    def prepare(self, destinations: dict[str, torch.Tensor]) -> None:
        """Register the keys."""
        super().prepare(destinations)
        register_direct_key_provider(keys=list(self._keys()))

    def load(self) -> Mapping[str, torch.Tensor]:
        """Decrypt every tensor."""
        return {name: tensor for path in self.files() for name, tensor in load_file(path).items()}


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
