"""tensorizer, plain and encrypted (XSalsa20-Poly1305); its tensors are the destination."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer

from benchmarks.loaders.contender import Contender


class Tensorizer(Contender):
    """Plain; as many reader threads as it chooses."""

    label = "tensorizer, plain"
    package = "tensorizer"
    own = True
    given = False
    name: ClassVar[str] = "tensorizer"

    def files(self) -> list[Path]:
        """Give its one file."""
        return [self.job.place(self.name) / "model.tensors"]

    def convert(self) -> None:
        """Serialize the model."""
        key = EncryptionParams(key=bytes.fromhex(self.job.secret)) if self.encrypted else None
        serializer = TensorSerializer(str(self.files()[0]), encryption=key)
        paths = sorted(self.job.model.glob("*.safetensors"))
        serializer.write_state_dict({name: tensor for path in paths for name, tensor in load_file(path).items()})
        serializer.close()

    def load(self) -> Mapping[str, torch.Tensor]:
        """Deserialize everything."""
        key = DecryptionParams.from_key(bytes.fromhex(self.job.secret)) if self.encrypted else None
        with TensorDeserializer(str(self.files()[0]), device="cpu", encryption=key) as deserializer:
            return dict(deserializer.items())


class TensorizerEncrypted(Tensorizer):
    """Encrypted; as many decrypting threads as it chooses."""

    label = "tensorizer, encrypted"
    encrypted = True
    name = "tensorizer_encrypted"
