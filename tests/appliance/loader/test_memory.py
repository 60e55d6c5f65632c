"""Peak memory of a load: the model, the ring, and a constant that does not grow with the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance import rank as rank_module
from tests.sim.sealedmodel import Sealed, seal

ROOT = Path(rank_module.__file__).parents[1]
RING = 4 << 20
# Thread stacks and arenas of the C library, the catalog, the plan: measured 6 to 10 MB.
CONSTANT = 24 << 20

CHILD = """
import json, math, os, sys
from pathlib import Path
import torch
from appliance.loader import SealedLoader
from appliance.slot_cpu import CpuSlot
from attestation.clock import SystemClock
from provisioning._seal import MINT
from provisioning.bundle import Bundle
from provisioning.grant import Grant
from provisioning.ownerkey import OwnerKey
from provisioning.secret import SecretBytes

def status(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    return 0

directory, owner, ring = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
with Bundle.open(directory, [OwnerKey.read(owner)]) as bundle:
    grant = Grant(MINT, key=SecretBytes.read(0, 32), bundle_id=bundle.manifest.bundle_id,
                  terms=bundle.manifest.policy.grant, deadline=math.inf, clock=SystemClock())
    slot = CpuSlot()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here (proc(5))
    before = status("RssAnon") + status("RssFile")
    with SealedLoader(grant, bundle, slot, ring_bytes=ring, reader_threads=2, opener_threads=2, rank=0,
                      world=1) as loader:
        layout = loader.catalog().layout
        destinations = {spec.name: slot.empty(spec.shape, torch.bfloat16) for spec in layout.tensors}
        locked = []
        done = loader.load(destinations, skip=lambda name: False,
                           on_progress=lambda opened, total: locked.append(status("VmLck")))
    print(json.dumps({"grown": status("VmHWM") - before, "model": done.weight_bytes, "ring": done.ring_bytes,
                      "plaintext": done.peak_plaintext_bytes, "locked": max(locked)}))
"""


def measure(sealed: Sealed) -> dict[str, int]:
    with sealed.key() as key, key.expose() as view:
        ours, theirs = os.pipe()
        os.writev(theirs, [view])
        os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        output = subprocess.run(
            [sys.executable, "-c", CHILD, str(sealed.bundle), sealed.owner_file().hex(), str(RING)],
            check=True,
            stdin=pipe,
            stdout=subprocess.PIPE,
            env=dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        ).stdout
    result: dict[str, int] = json.loads(output)
    return result


@pytest.mark.parametrize("layers", [4, 16])
def test_a_load_takes_the_model_the_ring_and_a_constant(tmp_path: Path, layers: int) -> None:
    sealed = seal(tmp_path, hidden=768, layers=layers)
    seen = measure(sealed)
    assert seen["model"] > layers * (8 << 20)
    assert seen["grown"] <= seen["model"] + seen["ring"] + CONSTANT
    assert seen["plaintext"] <= seen["ring"] <= RING
    # Nothing is locked but the ring and the keys of sections.
    assert seen["ring"] <= seen["locked"] <= seen["ring"] + (1 << 20)
    sealed.signer.close()
