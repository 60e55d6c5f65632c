"""Opening on the device: weights arrive, plaintext is in its memory only, and nothing unauthenticated is decrypted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.devicecipher.plain import PlainCounter
from appliance.deviceopen import DeviceWay
from appliance.errors import ConfigError, DeviceFault
from appliance.residue import Needle, Searcher
from appliance.slot_cpu import CpuSlot
from appliance.slot_cuda import CudaSlot
from appliance.stream import Run
from appliance.zeroize import Overwritten
from provisioning.errors import BundleDamaged
from tests.sim.cuda import LazyCuda
from tests.sim.sealedmodel import Sealed, seal

Weights = dict[str, torch.Tensor]
ROOT = Path(__file__).resolve().parents[3]


def keep_all(name: str) -> bool:
    return False


def nothing(done: int, total: int) -> None:
    """Take no notice of progress."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sealed]:
    """A model of about 1 MB: the torch form of the cipher is slow."""
    made = seal(tmp_path_factory.mktemp("small"), hidden=96, layers=2)
    yield made
    made.signer.close()


@pytest.fixture
def slot() -> CudaSlot:
    return CudaSlot(LazyCuda())


def destinations(slot: CudaSlot, sealed: Sealed, dtype: torch.dtype | None = None) -> Weights:
    made = {name: slot.empty(tuple(tensor.shape), dtype or tensor.dtype) for name, tensor in sealed.weights().items()}
    for tensor in made.values():
        tensor.fill_(7)
    return made


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_every_tensor_arrives_as_the_checkpoint_has_it(
    small: Sealed, slot: CudaSlot, dtype: torch.dtype | None
) -> None:
    made = destinations(slot, small, dtype)
    with small.open() as bundle, small.loader(bundle, slot, open_on="device") as loader:
        done = loader.load(made, skip=keep_all, on_progress=nothing)
        assert done.segments == bundle.manifest.geometry.segments
    for name, tensor in small.weights().items():
        assert torch.equal(made[name], tensor.to(made[name].dtype)), name


@pytest.mark.parametrize("world", [2, 8])
def test_a_rank_opens_its_own_part(small: Sealed, slot: CudaSlot, world: int) -> None:
    with small.open() as bundle:
        loader = small.loader(bundle, slot, rank=world - 1, world=world, open_on="device")
        spec = max(loader.catalog().layout.tensors, key=lambda spec: spec.nbytes)
        layout = loader.catalog().layout
        made = {}
        for other in layout.tensors:
            shape = list(other.shape)
            if other.parallel is not None:
                start = other.edge((world - 1) * layout.tiles // world, layout.tiles)
                shape[other.parallel] -= start
            made[other.name] = slot.empty(tuple(shape), torch.bfloat16)
        loader.load(made, skip=keep_all, on_progress=nothing)
    assert spec.parallel is not None
    whole, length = small.weights()[spec.name], made[spec.name].shape[spec.parallel]
    assert torch.equal(made[spec.name], whole.narrow(spec.parallel, whole.shape[spec.parallel] - length, length))


def test_no_plaintext_is_counted_in_host_memory(small: Sealed, slot: CudaSlot) -> None:
    made = destinations(slot, small)
    alive = []
    with small.open() as bundle, small.loader(bundle, slot, open_on="device") as loader:
        loader.catalog()
        catalog_peak = loader.plaintext.peak
        done = loader.load(made, skip=keep_all, on_progress=lambda *_: alive.append(loader.plaintext.alive))
    assert set(alive) == {0}
    assert done.peak_plaintext_bytes == catalog_peak


CHILD = """
import json, math, os, sys
from pathlib import Path
import torch
from appliance.loader import SealedLoader
from appliance.slot_cuda import CudaSlot
from attestation.clock import SystemClock
from provisioning._seal import MINT
from provisioning.bundle import Bundle
from provisioning.grant import Grant
from provisioning.ownerkey import OwnerKey
from provisioning.secret import SecretBytes
from tests.sim.cuda import LazyCuda

class Lane:
    deliveries = 0
    def __init__(self, inner):
        self._inner = inner
    def deliver(self, staged, place):
        Lane.deliveries += 1
        if Lane.deliveries in (1, 3):
            stop()
        ticket = self._inner.deliver(staged, place)
        ticket.wait()
        return ticket
    def close(self):
        self._inner.close()

class Slot(CudaSlot):
    def lane(self, nbytes):
        return Lane(super().lane(nbytes))

def stop():
    print(json.dumps([[block.data_ptr(), block.data_ptr() + block.numel()] for block in slot._blocks]), flush=True)
    os.read(0, 1)

directory, owner, open_on = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
slot = Slot(LazyCuda())
with Bundle.open(directory, [OwnerKey.read(owner)]) as bundle:
    grant = Grant(MINT, key=SecretBytes.read(0, 32), bundle_id=bundle.manifest.bundle_id,
                  terms=bundle.manifest.policy.grant, deadline=math.inf, clock=SystemClock())
    with SealedLoader(grant, bundle, slot, ring_bytes=8 << 18, reader_threads=1, opener_threads=1, rank=0,
                      world=1, open_on=open_on) as loader:
        layout = loader.catalog().layout
        destinations = {spec.name: slot.empty(spec.shape, torch.bfloat16) for spec in layout.tensors}
        loader.load(destinations, skip=lambda name: False, on_progress=lambda opened, total: None)
    stop()
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """Windows of plaintext found at one stop of a load."""

    on_device: int
    elsewhere: int


def _writable(pid: int) -> list[tuple[int, int]]:
    """Give the memory that a process can have put something into."""
    ranges = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        if "w" in rights:
            start, stop = span.split("-")
            ranges.append((int(start, 16), int(stop, 16)))
    return ranges


def _watch(sealed: Sealed, open_on: str) -> list[Seen]:
    """Load in another process, and look through all memory that it can write to.

    It stops before the first delivery to the device, before the third, when the stand-in for the device has done what
    the first one enqueued, and at the end.
    """
    needles = []
    for name, tensor in sealed.weights().items():
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        windows = (data[at : at + 32] for at in range(0, len(data) - 32, 2048))
        # Norms are all ones, which is in other places too.
        needles += [Needle(name, window) for window in windows if len(set(window)) > 8]
    searcher = Searcher(needles)
    seen = []
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(sealed.bundle), sealed.owner_file().hex(), open_on],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        bufsize=0,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        with sealed.key() as key, key.expose() as view:
            child.stdin.write(view)
        for _ in range(3):
            device = [(low, high) for low, high in json.loads(child.stdout.readline())]
            with open(f"/proc/{child.pid}/mem", "rb", buffering=0) as memory:
                hits = searcher.search(memory.fileno(), "memory", _writable(child.pid)).hits
            inside = sum(any(low <= hit.offset < high for low, high in device) for hit in hits)
            seen.append(Seen(inside, len(hits) - inside))
            child.stdin.write(b"\n")
        child.stdin.close()
        assert child.wait(60) == 0
    return seen


def test_a_search_of_all_memory_finds_plaintext_in_device_memory_only(small: Sealed) -> None:
    first, second, last = _watch(small, "device")
    assert first == Seen(0, 0)
    assert second.on_device > 0
    assert last.on_device > second.on_device
    assert second.elsewhere == last.elsewhere == 0


def test_the_same_search_finds_plaintext_in_the_ring_when_the_host_opens(small: Sealed) -> None:
    first, second, _ = _watch(small, "host")
    assert first.elsewhere > 0
    assert second.elsewhere > 0


def _damage(sealed: Sealed, to: Path) -> tuple[Path, int]:
    """Flip a bit in the last segment of a copy; give the copy and the segment's number in the bundle."""
    copy = sealed.copy(to)
    with sealed.open(copy) as bundle:
        number = bundle.manifest.geometry.segments - 1
        record = bundle.table.segment(number)
    with (copy / f"data-{record.file:05d}.seal").open("r+b") as file:
        file.seek(record.offset + 100)
        octet = file.read(1)[0]
        file.seek(record.offset + 100)
        file.write(bytes([octet ^ 1]))
    return copy, number


def test_a_damaged_segment_is_never_decrypted_and_leaves_zeros(
    small: Sealed, slot: CudaSlot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, number = _damage(small, tmp_path / "copy")
    opened: list[tuple[int, int]] = []
    right = DeviceWay._open

    def noted(way: DeviceWay, run: Run, *rest: Any) -> None:
        opened.append((run.base, run.base + run.count))
        right(way, run, *rest)

    monkeypatch.setattr(DeviceWay, "_open", noted)
    made = destinations(slot, small)
    with small.open(copy) as bundle, pytest.raises(BundleDamaged) as caught:
        small.loader(bundle, slot, open_on="device").load(made, skip=keep_all, on_progress=nothing)
    assert caught.value.code == "segment.tag"
    assert "data file" in caught.value.found
    assert not any(low <= number < high for low, high in opened)
    assert not any(bool(tensor.any()) for tensor in made.values())
    assert not any(bool(block.any()) for block in slot._staging)


@pytest.mark.parametrize("ending", ["done", "damaged", "stopped"])
def test_keys_and_states_of_the_cipher_are_zeros_on_the_device_afterwards(
    ending: str, small: Sealed, slot: CudaSlot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[DeviceWay] = []
    before: list[int] = []
    right = DeviceWay.__enter__

    def noted(way: DeviceWay) -> DeviceWay:
        ways.append(way)
        before.append(int(torch.count_nonzero(way._secret[0])))
        return right(way)

    monkeypatch.setattr(DeviceWay, "__enter__", noted)
    path = _damage(small, tmp_path / "copy")[0] if ending == "damaged" else None

    def on_progress(done: int, total: int) -> None:
        if ending == "stopped" and done:
            raise KeyboardInterrupt

    made = destinations(slot, small)
    with small.open(path) as bundle:
        loader = small.loader(bundle, slot, open_on="device")
        if ending == "done":
            loader.load(made, skip=keep_all, on_progress=on_progress)
        else:
            with pytest.raises((BundleDamaged, KeyboardInterrupt)):
                loader.load(made, skip=keep_all, on_progress=on_progress)
    (way,) = ways
    assert before[0] > 1000
    blocks = way._secret + [block for counter in way._counters.values() for block in counter.secret_blocks()]
    assert len(blocks) > 1
    assert not any(bool(block.any()) for block in blocks)
    # Behind the ring, which may keep ciphertext, is the block through which the schedules went.
    assert slot._staging[-1].numel() == way._secret[0].numel()
    assert not bool(slot._staging[-1].any())
    assert all(authenticator._secret is None for authenticator in way._authenticators.values())


def test_all_memory_of_the_cipher_is_the_slots(small: Sealed, slot: CudaSlot, monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[DeviceWay] = []
    right = DeviceWay.__enter__
    monkeypatch.setattr(DeviceWay, "__enter__", lambda way: (ways.append(way), right(way))[1])
    with small.open() as bundle:
        loader = small.loader(bundle, slot, open_on="device")
        loader.load(destinations(slot, small), skip=keep_all, on_progress=nothing)
    (way,) = ways
    owned = [(block.data_ptr(), block.data_ptr() + block.numel()) for block in slot._blocks]
    blocks = way._secret + [block for counter in way._counters.values() for block in counter.secret_blocks()]
    for block in blocks:
        assert any(low <= block.data_ptr() and block.data_ptr() + block.numel() <= high for low, high in owned)


def test_keys_that_cannot_be_overwritten_are_told(
    small: Sealed, slot: CudaSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.deviceopen.overwrite", lambda blocks, fill: Overwritten(1920, 1920, 7))
    made = destinations(slot, small)
    with small.open() as bundle, pytest.raises(DeviceFault) as caught:
        small.loader(bundle, slot, open_on="device").load(made, skip=keep_all, on_progress=nothing)
    assert caught.value.code == "cipher.wipe"
    assert not any(bool(tensor.any()) for tensor in made.values())


def test_a_cipher_that_is_wrong_stops_the_load_before_anything_is_read(
    small: Sealed, slot: CudaSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainCounter, "apply", lambda *_, **__: None)
    monkeypatch.setattr(type(slot.lane(128)), "deliver", lambda *_: pytest.fail("something was delivered"))
    made = destinations(slot, small)
    with small.open() as bundle, pytest.raises(DeviceFault) as caught:
        small.loader(bundle, slot, open_on="device").load(made, skip=keep_all, on_progress=nothing)
    assert caught.value.code == "cipher.selftest"


@pytest.mark.parametrize(("open_on", "make"), [("device", CpuSlot), ("gpu", lambda: CudaSlot(LazyCuda()))])
def test_a_choice_that_cannot_be_is_refused(small: Sealed, open_on: str, make: Callable[[], Any]) -> None:
    with small.open() as bundle, pytest.raises(ConfigError) as caught:
        small.loader(bundle, make(), open_on=open_on)
    assert caught.value.code == "loading.open_on"
