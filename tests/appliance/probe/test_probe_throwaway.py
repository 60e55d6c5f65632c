"""The throw-away bundle: it loads, and nothing of it is left, however its process ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from appliance.config import Loading
from appliance.probe import model, throwaway
from appliance.probe.throwaway import Throwaway
from appliance.slot_cpu import CpuSlot
from provisioning.errors import OutputFailed

SMALL = 1 << 20
LOADING = Loading(ring_mib=6, readers=1, openers=1)


def _quiet(*_: object) -> None:
    return


def test_model_is_about_as_large_as_was_asked() -> None:
    for wanted in (1_000_000, 300_000_000, 1_000_000_000, 4_000_000_000, 70_000_000_000):
        assert 0.6 * wanted < model.size(model.shapes(wanted)) < 1.4 * wanted


def test_large_model_has_the_shapes_of_llama_8b() -> None:
    shapes = model.shapes(4_000_000_000)
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (14336, 4096)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (1024, 4096)


def test_model_is_written_as_safetensors_reads_it(tmp_path: Path) -> None:
    plan = model.shapes(SMALL)
    shown: dict[str, bytes] = {}

    def seen(name: str, chunk: bytes) -> None:
        shown[name] = shown.get(name, b"") + chunk

    written = model.write(tmp_path / "model", plan, seen=seen)
    found: dict[str, torch.Tensor] = {}
    for path in sorted((tmp_path / "model").glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == plan
    assert all(bytes(found[name].view(torch.uint8).numpy().data) == shown[name] for name in plan)
    assert written.nbytes == sum(len(data) for data in shown.values())


def test_model_is_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_SHARD", 300_000)
    written = model.write(tmp_path / "model", model.shapes(SMALL))
    assert written.files == len(list((tmp_path / "model").glob("*.safetensors"))) > 1


def test_bundle_is_loaded_and_removed(tmp_path: Path) -> None:
    with Throwaway(tmp_path, SMALL) as bundle:
        bundle.seal(_quiet)
        assert [path.name for work in tmp_path.iterdir() for path in work.glob("*/*.safetensors")] == []
        bundle.warm()
        slot = CpuSlot()
        destinations = bundle.destinations(slot)
        first = bundle.load(slot, destinations, LOADING, _quiet)
        once = {name: tensor.clone() for name, tensor in destinations.items()}
        for tensor in destinations.values():
            tensor.zero_()
        second = bundle.load(slot, destinations, LOADING, _quiet)
    assert first.nbytes == second.nbytes > 0
    for name, tensor in once.items():
        assert torch.count_nonzero(tensor.view(torch.uint8)), name
        assert torch.equal(tensor.view(torch.uint8), destinations[name].view(torch.uint8)), name
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_when_packing_fails(tmp_path: Path) -> None:
    def stop(label: str, *_: object) -> None:
        if label == "packing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Throwaway(tmp_path, SMALL) as bundle:
        bundle.seal(stop)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / ".lethe-bench-0123456789abcdef"
    left.mkdir()
    (left / "data").write_bytes(b"x")
    with Throwaway(tmp_path, SMALL):
        assert not left.exists()


def test_what_a_running_measurement_uses_stays(tmp_path: Path) -> None:
    # flock is by open file, so another process is not needed to hold it.
    with Throwaway(tmp_path, SMALL) as first, Throwaway(tmp_path, SMALL):
        assert first._work.exists()


def test_other_files_of_the_directory_stay(tmp_path: Path) -> None:
    (tmp_path / "model.sealed").mkdir()
    (tmp_path / ".lethe-bench-link").symlink_to("model.sealed")
    with Throwaway(tmp_path, SMALL):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lethe-bench-link", "model.sealed"]


def test_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(throwaway.os, "statvfs", lambda _: os.statvfs_result((*real[:4], 10, *real[5:])))
    with pytest.raises(OutputFailed) as caught:
        Throwaway(tmp_path, SMALL)
    assert caught.value.code == "bench.disk.full"
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fills_up_while_writing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(throwaway.model, "write", full)
    with pytest.raises(OutputFailed) as caught, Throwaway(tmp_path, SMALL) as bundle:
        bundle.seal(_quiet)
    assert caught.value.code == "bench.directory"
    assert "no space left on device" in caught.value.found
    assert list(tmp_path.iterdir()) == []


def test_absent_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputFailed) as caught:
        Throwaway(tmp_path / "absent", SMALL)
    assert caught.value.code == "bench.directory"


def test_no_child_sees_the_pipe_with_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []
    real = os.pipe2

    def noted(given: int) -> tuple[int, int]:
        flags.append(given)
        return real(given)

    monkeypatch.setattr(throwaway.os, "pipe2", noted)
    with Throwaway(tmp_path, SMALL) as bundle:
        bundle.seal(_quiet)
        slot = CpuSlot()
        bundle.load(slot, bundle.destinations(slot), LOADING, _quiet)
    assert flags == [os.O_CLOEXEC]
