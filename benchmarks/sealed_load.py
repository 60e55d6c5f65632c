"""How fast a sealed bundle becomes a model in memory, next to safetensors on the same weights in the same run.

``python -m benchmarks.sealed_load --model DIR [--synthetic-gb 1] [--rounds 5]``

All methods fill the same destination tensors, allocated and touched before the clock starts, as device memory would be.
Rounds are interleaved and rotated, and ratios are taken inside a round, so that a busy machine cancels out. Methods:

- ``sealed``: a grant and an open bundle to filled destinations, catalog and key derivation included
- ``safetensors``: ``load_file`` (a mapping), then one copy into the destinations
- ``read``: ``preadv`` of the plaintext file into memory, one thread, nothing else
- ``aes``: the same segments decrypted in place in warm memory, as many threads as the loader has openers

Warm means that all files are in the page cache; cold that they were evicted before every single run.

Results, ``benchmarks/results/sealed-load-DATE.json``, schema 2 (the keys that other programs may rely on; rates are 1e9 bytes
per second, ``*_bytes`` bytes, ``*_s`` seconds; a contender that could not run has ``unavailable`` and a reason, and nothing else)::

    {"schema": 2, "date": "2026-11-30",
     "machine": {"cpu": "...", "cores": 2, "memory_bytes": 0, "avx512_aes": true, "load_average": [0.1, 0.2], ...},
     "settings": {"gb": 4.0, "rounds": 5, "readers": 2, "openers": 2, "ring_bytes": 0, "segment_bytes": 1048576},
     "model": {"bytes": 0, "tensors": 0, "files": 0},
     "probes": {"raw_read_gb_s": [{"block_bytes": 4194304, "threads": 2, "gb_s": 1.4}, ...],
                "aes_gcm_gb_s": {"1": 4.1, "2": 8.0},
                "copy_gb_s": [{"copy_bytes": 1048576, "gb_s": 5.0}, ...]},
     "warm": {"ours": {"label": "...", "own": false, "encrypted": true, "threads": "...",
                       "gb_s": {"median": 0, "best": 0, "rounds": [0, 0]}, "gb_per_cpu_s": 0, "user_s": 0, "sys_s": 0,
                       "memory": {"anonymous_bytes": 0, "mapped_bytes": 0, "peak_growth_bytes": 0},
                       "ours_as_share": {"median": 1, "min": 1, "max": 1}},
              "read": {...}, "read_direct": {...}, "aes": {...}, "safetensors_load": {...}, "safetensors_open": {...},
              "tensorizer": {...}, "tensorizer_encrypted": {...}, "fastsafetensors": {...}, "runai": {...},
              "cryptotensors": {...}, "flashpack": {"unavailable": "reason"}},
     "cold": {the same contenders without "aes"}}

``ours_as_share`` is our speed divided by the contender's, taken inside each round: above 1 we are faster.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cryptography
import safetensors
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from safetensors.torch import load_file

from appliance import pages
from appliance.loader import Loaded, SealedLoader
from appliance.slot_cpu import CpuSlot
from attestation.clock import SystemClock
from attestation.policy import AppraisalPolicy
from benchmarks.sealed_load_report import as_markdown
from provisioning._seal import MINT
from provisioning.bundle import Bundle
from provisioning.grant import Grant
from provisioning.ownerkey import OwnerSigner
from provisioning.pack import pack
from tests.sim import tinymodel
from tests.sim.modelfiles import POLICY

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run: wall and CPU seconds."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Knobs:
    """The loader's settings."""

    ring_mib: int
    readers: int
    openers: int


class Subject:
    """One model, packed, with its destinations."""

    def __init__(self, source: Path, work: Path, dtype: torch.dtype | None) -> None:
        self.files = sorted(source.glob("*.safetensors"))
        self.signer = OwnerSigner.generate("benchmark", "lab")
        self.keys = work / "keys"
        self.keys.mkdir(mode=0o700, parents=True)
        begin = time.monotonic()
        policy = AppraisalPolicy.from_toml(POLICY)
        self.packed = pack(
            source, signer=self.signer, key_dir=self.keys, policy=policy, name="benchmark", out=work / "bundle"
        )
        self.pack_seconds = time.monotonic() - begin
        self.directory = work / "bundle"
        self.slot = CpuSlot()
        self.destinations = {}
        for path in self.files:
            for name, tensor in load_file(path).items():
                self.destinations[name] = self.slot.empty(tuple(tensor.shape), dtype or tensor.dtype)
        for tensor in self.destinations.values():
            tensor.zero_()
        self.nbytes = sum(path.stat().st_size for path in self.files)

    def sealed(self, knobs: Knobs) -> Loaded:
        """Load the bundle, from opening its directory to the last byte."""
        with Bundle.open(self.directory, [self.signer.owner]) as bundle:
            grant = Grant(
                MINT,
                key=self.signer.bundle_key(self.keys, bundle.manifest.bundle_id),
                bundle_id=bundle.manifest.bundle_id,
                terms=bundle.manifest.policy.grant,
                deadline=math.inf,
                clock=SystemClock(),
            )
            with SealedLoader(
                grant,
                bundle,
                CpuSlot(),
                ring_bytes=knobs.ring_mib << 20,
                reader_threads=knobs.readers,
                opener_threads=knobs.openers,
                rank=0,
                world=1,
            ) as loader:
                return loader.load(self.destinations, skip=lambda _: False, on_progress=lambda *_: None)

    def safetensors(self) -> None:
        """Load the plaintext files."""
        for path in self.files:
            for name, tensor in load_file(path).items():
                self.destinations[name].copy_(tensor)

    def read(self, memory: memoryview) -> None:
        """Read the plaintext files into memory and do nothing with them."""
        for path in self.files:
            descriptor = os.open(path, os.O_RDONLY)
            size = path.stat().st_size
            done = 0
            while done < size:
                done += os.preadv(descriptor, [memory[done : min(size, done + (8 << 20))]], done)
            os.close(descriptor)

    def all_files(self) -> list[Path]:
        """Give every file that a method reads."""
        return [*self.files, *sorted(self.directory.glob("data-*.seal"))]


def aes_floor(memory: memoryview, nbytes: int, threads: int) -> None:
    """Decrypt ``nbytes`` in place, in segments of 1 MiB, on several threads; tags are wrong, which costs the same."""
    size = 1 << 20
    aead = AESGCM(AESGCM.generate_key(256))
    work = iter(range(nbytes // size))
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                number = next(work, None)
            if number is None:
                return
            start = number * size
            try:
                aead.decrypt_into(
                    number.to_bytes(12, "big"), memory[start : start + size], b"", memory[start : start + size - 16]
                )
            except InvalidTag:
                continue

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def timed(work: Callable[[], object]) -> Run:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Run(time.perf_counter() - wall, time.process_time() - cpu)


def evict(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def compare(subject: Subject, knobs: Knobs, rounds: int, *, cold: bool) -> dict[str, Any]:
    """Time all methods in interleaved rounds."""
    memory = memoryview(pages.map_private(max(subject.nbytes, 1 << 20)))
    memory[:] = bytes(len(memory))
    loaded: list[Loaded] = []
    methods: dict[str, Callable[[], object]] = {
        "sealed": lambda: loaded.append(subject.sealed(knobs)),
        "safetensors": subject.safetensors,
        "read": lambda: subject.read(memory),
        "aes": lambda: aes_floor(memory, subject.nbytes, knobs.openers),
    }
    runs: dict[str, list[Run]] = {name: [] for name in methods}
    names = list(methods)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if cold:
                evict(subject.all_files())
            run = timed(methods[name])
            if number:  # the first round only warms up
                runs[name].append(run)
    return {
        "gb_per_s": {
            name: round(statistics.median(subject.nbytes / run.wall for run in runs[name]) / 1e9, 3) for name in names
        },
        "gb_per_cpu_s": {
            name: round(statistics.median(subject.nbytes / max(run.cpu, 1e-9) for run in runs[name]) / 1e9, 3)
            for name in names
        },
        "sealed_speed_as_share_of": {
            name: {
                "median": round(statistics.median(ratios), 3),
                "rounds": [round(ratio, 3) for ratio in ratios],
            }
            for name in names[1:]
            if (ratios := [other.wall / ours.wall for ours, other in zip(runs["sealed"], runs[name], strict=True)])
        },
        "peak_plaintext_bytes": max(result.peak_plaintext_bytes for result in loaded),
        "ring_bytes": loaded[-1].ring_bytes,
        "direct_files": loaded[-1].direct_files,
    }


MEMORY_CHILD = "import sys; from benchmarks.sealed_load import memory_child; memory_child(sys.argv[1:])"


def memory_child(arguments: list[str]) -> None:
    """Load once in a fresh process and print, as JSON, by how much its memory grew at most."""
    source, work, method, knobs = Path(arguments[0]), Path(arguments[1]), arguments[2], json.loads(arguments[3])
    subject = Subject(source, work, None)
    over = threading.Event()
    anonymous: list[int] = []

    def sample() -> None:
        while not over.wait(0.002):
            anonymous.append(status_bytes("RssAnon"))

    sampler = threading.Thread(target=sample)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of VmHWM begins here (proc(5))
    before, before_all = status_bytes("RssAnon"), status_bytes("VmRSS")
    sampler.start()
    if method == "sealed":
        subject.sealed(Knobs(**knobs))
    else:
        subject.safetensors()
    over.set()
    sampler.join()
    print(json.dumps({"own": max(anonymous) - before, "with_mapped_files": status_bytes("VmHWM") - before_all}))


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    return 0


def measure_memory(source: Path, work: Path, knobs: Knobs) -> dict[str, dict[str, int]]:
    """Give host memory beyond the destinations, at the peak of a load, per method."""
    beyond = {}
    for method in ("sealed", "safetensors"):
        output = subprocess.run(
            [sys.executable, "-c", MEMORY_CHILD, str(source), str(work / method), method, json.dumps(asdict(knobs))],
            check=True,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        ).stdout
        beyond[method] = json.loads(output)
        shutil.rmtree(work / method)
    return beyond


def machine() -> dict[str, Any]:
    """Describe the machine, without its name."""
    cores = os.cpu_count() or 1
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    return {
        "cpu": cpu,
        "cores": cores,
        "avx512_aes": all(flag in flags.split() for flag in ("avx512f", "vaes", "vpclmulqdq")),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cryptography": cryptography.__version__,
        "safetensors": safetensors.__version__,
        "load_average": round(os.getloadavg()[0], 1),
        "load_average_means": "trust ratios and CPU-seconds, not GB/s."
        if os.getloadavg()[0] > cores
        else "quiet enough.",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, action="append", default=[], help="a model directory; may be repeated")
    parser.add_argument("--synthetic-gb", type=float, default=0.0, help="also make a model of about this size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ring-mib", type=int, default=16)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--openers", type=int, default=2)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bench", help="for bundles; emptied at the end")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--no-cold", action="store_true")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--float32", action="store_true", help="destinations in float32, so that every copy converts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    knobs = Knobs(given.ring_mib, given.readers, given.openers)
    shutil.rmtree(given.work, ignore_errors=True)
    given.work.mkdir(parents=True)
    try:
        models = list(given.model)
        if given.synthetic_gb:
            models.append(synthetic(given.work / "model", given.synthetic_gb))
        results = {}
        for source in models:
            name = "synthetic" if source == given.work / "model" else source.name
            print(f"{name}: packing", file=sys.stderr)
            subject = Subject(source, given.work / name, torch.float32 if given.float32 else None)
            result: dict[str, Any] = {
                "bytes": subject.nbytes,
                "pack_gb_per_s": round(subject.nbytes / subject.pack_seconds / 1e9, 3),
                "warm": compare(subject, knobs, given.rounds, cold=False),
            }
            if not given.no_cold:
                result["cold"] = compare(subject, knobs, given.rounds, cold=True)
            if not given.no_memory:
                result["host_bytes_beyond_destinations"] = measure_memory(source, given.work / "memory", knobs)
            results[name] = result
            del subject
            shutil.rmtree(given.work / name)
            print(json.dumps(result, indent=1), file=sys.stderr)
    finally:
        shutil.rmtree(given.work, ignore_errors=True)
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    report = {
        "date": date,
        "machine": machine(),
        "settings": asdict(knobs) | {"rounds": given.rounds, "float32": given.float32},
        "models": results,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"sealed-load-{date}.json").write_text(json.dumps(report, indent=1) + "\n")
    (given.out / f"sealed-load-{date}.md").write_text(as_markdown(report))


def synthetic(directory: Path, gigabytes: float) -> Path:
    """Write a model of about that size, 72 MB to a layer."""
    print("writing the synthetic model", file=sys.stderr)
    return tinymodel.write(directory, hidden=2048, layers=max(1, round(gigabytes * 1e9 / 71.3e6)), heads=16, kv_heads=4)


if __name__ == "__main__":
    main()
