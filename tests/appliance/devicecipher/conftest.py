"""Both forms of counter mode, on the CPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from appliance.devicecipher.choice import Counter
from appliance.devicecipher.plain import PlainCounter, scratch_words
from appliance.devicecipher.schedule import PLANE_BYTES, write_planes

_KERNEL = "appliance.devicecipher.kernel"


@pytest.fixture(scope="session")
def kernel() -> Iterator[ModuleType]:
    """The Triton form under Triton's interpreter."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delitem(sys.modules, _KERNEL, raising=False)
        module = importlib.import_module(_KERNEL)
        yield module
        del sys.modules[_KERNEL]


@pytest.fixture(params=["torch", "triton"])
def counter(request: pytest.FixtureRequest) -> Counter:
    """One of the two forms."""
    if request.param == "torch":
        chunk = 4096
        return PlainCounter(torch.full((scratch_words(chunk),), 0x5A5A5A5A, dtype=torch.int32), chunk_bytes=chunk)
    form: Counter = request.getfixturevalue("kernel").KernelCounter()
    return form


Crypt = Callable[..., bytes]


@pytest.fixture
def crypt(counter: Counter) -> Crypt:
    """Encrypt or decrypt bytes in whole segments with the form under test."""

    def run(key: bytes, nonce: bytes, data: bytes, *, first: int, segment_bytes: int, start: int) -> bytes:
        planes = bytearray(PLANE_BYTES)
        write_planes(memoryview(key), memoryview(nonce), memoryview(planes))
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        counter.apply(
            tensor,
            torch.frombuffer(planes, dtype=torch.int32),
            first=first,
            segment_bytes=segment_bytes,
            counter=start,
        )
        return bytes(tensor.numpy().data)

    return run


def reference(key: bytes, nonce: bytes, data: bytes, *, first: int, segment_bytes: int, start: int) -> bytes:
    """The same with the cryptography library, block by block where the counter wraps."""
    out = []
    for index in range(len(data) // segment_bytes):
        own = (int.from_bytes(nonce, "big") ^ (first + index)).to_bytes(12, "big")
        segment = data[index * segment_bytes : (index + 1) * segment_bytes]
        split = min(len(segment), ((1 << 32) - start) * 16)
        for part, begin in ((segment[:split], start), (segment[split:], 0)):
            cipher = Cipher(algorithms.AES(key), modes.CTR(own + begin.to_bytes(4, "big")))
            out.append(cipher.encryptor().update(part))
    return b"".join(out)
