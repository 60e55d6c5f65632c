"""Quantized models from their directory through pack and the sealed loader to the tensors of every rank."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.placement import TORCH_DTYPES
from appliance.slot_cpu import CpuSlot
from attestation.policy import AppraisalPolicy
from provisioning import shares
from provisioning.geometry import COMMON_STREAM
from provisioning.ownerkey import OwnerSigner
from provisioning.pack import pack
from tests.sim import quantized
from tests.sim.modelfiles import POLICY, write_model
from tests.sim.quantized import Bits, Model
from tests.sim.sealedmodel import SEGMENT, Sealed


@pytest.fixture(scope="module")
def signer() -> Iterator[OwnerSigner]:
    with OwnerSigner.generate("laboratory", "lab") as made:
        yield made


def bits(tensor: torch.Tensor, dtype: str) -> Bits:
    """Give a tensor as its shape in elements of the checkpoint and the bits of each."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    shape = tuple(tensor.shape)
    return quantized.bits_of(dtype, (*shape[:-1], shape[-1] * 2) if dtype == "F4" else shape, data)


def sized(tiles: int) -> st.SearchStrategy[Model]:
    """Give models large enough for columns of several segments."""
    return quantized.models(layers=2, scale=600 * tiles)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cut=st.sampled_from([1, 2, 4, 8]).flatmap(lambda tiles: st.tuples(st.just(tiles), sized(tiles))),
    world=st.sampled_from([1, 2, 4, 8]),
    section=st.integers(1, 3),
)
def test_ranks_load_just_what_is_theirs_and_together_the_whole_model(
    signer: OwnerSigner, cut: tuple[int, Model], world: int, section: int
) -> None:
    tiles, model = cut
    world = min(world, tiles)
    tensors = quantized.filled(model)
    with tempfile.TemporaryDirectory(prefix="lethe-test-") as name:
        directory = Path(name)
        (directory / "keys").mkdir(mode=0o700)
        source = write_model(directory / "model", tensors)
        pack(
            source,
            signer=signer,
            key_dir=directory / "keys",
            policy=AppraisalPolicy.from_toml(POLICY),
            name="quantized",
            out=directory / "bundle",
            tiles=tiles,
            segment_size=SEGMENT,
            section_bytes=section * SEGMENT,
            file_cap=SEGMENT,
        )
        sealed = Sealed(source, directory / "bundle", directory / "keys", signer, signer.owner)
        held: dict[str, list[Bits]] = {spec: [] for spec in model}
        opened = 0
        with sealed.open() as bundle:
            streams = bundle.manifest.geometry.streams
            for rank in range(world):
                with sealed.loader(bundle, CpuSlot(), rank=rank, world=world) as loader:
                    layout = loader.catalog().layout
                    own: dict[str, torch.Tensor] = {}
                    for index, part in shares.parts(layout, rank=rank, world=world).items():
                        spec = layout.tensors[index]
                        shape = (*part.shape[:-1], part.shape[-1] // 2) if spec.dtype == "F4" else part.shape
                        own[spec.name] = torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype])
                    done = loader.load(own, skip=lambda _: False, on_progress=lambda *_: None)
                opened += done.opened_bytes
                for tensor, array in own.items():
                    held[tensor].append(bits(array, model[tensor].dtype))
        assert opened == (sum(streams[2:]) + world * streams[COMMON_STREAM]) * SEGMENT
    for spec in layout.tensors:
        whole = quantized.bits_of(*tensors[spec.name])
        parts = held[spec.name]
        if spec.parallel is not None:
            assert np.array_equal(np.concatenate(parts, axis=spec.parallel), whole), spec.name
        else:
            assert len(parts) == (world if spec.column is None else 1)
            assert all(np.array_equal(part, whole) for part in parts), spec.name
