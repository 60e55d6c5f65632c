"""Every vector of the sealed bundle that opens, through the loader itself: its refusal is that of the index."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from appliance.loader import SealedLoader
from appliance.slot_cpu import CpuSlot
from attestation.clock import SystemClock
from attestation.errors import LetheError
from provisioning._seal import MINT
from provisioning.bundle import Bundle
from provisioning.grant import Grant, require_key
from provisioning.ownerkey import OwnerKey
from provisioning.secret import SecretBytes
from tests.vectors import make_bundle
from tests.vectors.good import CATALOG, contents
from tests.vectors.make_bundle import PLACE
from tests.vectors.sealed import BUNDLE_KEY, SEGMENT

ENTRIES = {entry["name"]: entry for entry in json.loads((PLACE / "index.json").read_text())["vectors"]}
MADE = make_bundle.read()
TYPES = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32, "U8": torch.uint8}


def load(path: Path) -> dict[str, torch.Tensor]:
    """Load a vector as a rank does that is alone; gives all tensors of the sound vector."""
    slot = CpuSlot()
    made = {spec.name: slot.empty(spec.shape, TYPES[spec.dtype]) for spec in CATALOG.tensors}
    with Bundle.open(path, [OwnerKey.read_file(PLACE / "owner-lab.pub.json")]) as bundle:
        key = SecretBytes.take(bytearray(BUNDLE_KEY))
        # As every maker of an opened grant does.
        require_key(key, bundle.manifest)
        grant = Grant(
            MINT,
            key=key,
            bundle_id=bundle.manifest.bundle_id,
            terms=bundle.manifest.policy.grant,
            deadline=math.inf,
            clock=SystemClock(),
        )
        with SealedLoader(
            grant, bundle, slot, ring_bytes=8 * SEGMENT, reader_threads=1, opener_threads=1, rank=0, world=1
        ) as loader:
            loader.catalog().file("config.json")
            loader.load(made, skip=lambda _: False, on_progress=lambda done, total: None)
    return made


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if not entry["opened"]])
def test_the_loader_refuses_what_the_index_says(name: str, tmp_path: Path) -> None:
    (vector,) = [vector for vector in MADE.vectors if vector.name == name]
    MADE.expand(vector, tmp_path / "bundle")
    expected = ENTRIES[name]["loaded"]
    if expected is None:
        made = load(tmp_path / "bundle")
        assert [tensor.view(torch.uint8).numpy().tobytes() for tensor in made.values()] == contents()
        return
    with pytest.raises(LetheError) as refused:
        load(tmp_path / "bundle")
    assert {"code": refused.value.code, "exit": refused.value.exit_status} == expected
