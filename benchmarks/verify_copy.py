"""How fast ``verify`` and ``copy`` are, next to what bounds them and to what people would type instead.

``python -m benchmarks.verify_copy [--gb 1] [--rounds 5]``

Rounds are interleaved and rotated, and ratios are taken inside a round, so that a busy machine cancels out. Files are
evicted from the page cache before every single run. Methods, on a disk and on a file system in memory:

- ``verify``: every block read past the page cache and compared with the table, as the command does
- ``hash``: SHA-256 alone over blocks that lie in memory, on as many threads as ``verify`` has cores
- ``read``: the same files read past the page cache on the same threads, and nothing done with them
- ``sha256sum``: the coreutils program over the same files, one process; and one process for each core
- ``openssl``: OpenSSL's program over the same files, one process, where it is installed
- ``copy``: the whole command: read, compare, write, sync, read back, compare
- ``cp``: ``cp -r`` and ``sync``, which compares nothing and reads nothing back
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from appliance.probe import cache
from attestation.policy import AppraisalPolicy
from benchmarks.comparison.machine import describe
from provisioning.blocks import Plan, usable_cores
from provisioning.bundle import Bundle
from provisioning.copying import copy
from provisioning.medium import PIECE, MediumFile
from provisioning.ownerkey import OwnerSigner
from provisioning.pack import pack
from provisioning.table import DIGEST_BLOCK
from provisioning.verify import verify
from tests.sim import tinymodel
from tests.sim.modelfiles import POLICY

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run: wall and CPU seconds, those of child processes included."""

    wall: float
    cpu: float


class Place:
    """One bundle on one file system, and all methods over it."""

    def __init__(self, bundle: Path, signer: OwnerSigner) -> None:
        self.bundle = bundle
        self.signer = signer
        self.files = sorted(bundle.glob("data-*.seal"))
        self.nbytes = sum(path.stat().st_size for path in self.files)
        self.copied = bundle.with_name("copied")
        self._memory = mmap.mmap(-1, DIGEST_BLOCK)
        self._memory.write(os.urandom(1 << 20) * (DIGEST_BLOCK >> 20))

    def verify(self) -> None:
        """Read and compare every block, as the command does."""
        with Bundle.open(self.bundle, [self.signer.owner]) as opened:
            verify(opened)

    def hash(self) -> None:
        """Hash as many blocks, out of memory."""
        with memoryview(self._memory) as view, ThreadPoolExecutor(usable_cores()) as pool:

            def block(size: int) -> bytes:
                digest = hashlib.sha256()
                for start in range(0, size, PIECE):
                    digest.update(view[start : min(start + PIECE, size)])
                return digest.digest()

            sizes = [min(DIGEST_BLOCK, self.nbytes - start) for start in range(0, self.nbytes, DIGEST_BLOCK)]
            list(pool.map(block, sizes))

    def read(self) -> None:
        """Read the files as verify does, and do nothing with them."""

        def block(work: tuple[Path, int]) -> None:
            path, start = work
            descriptor = os.open(path, os.O_RDONLY)
            pages = memoryview(mmap.mmap(-1, PIECE))
            with MediumFile(descriptor, start, start + DIGEST_BLOCK) as file:
                for position in range(start, min(start + DIGEST_BLOCK, path.stat().st_size), PIECE):
                    file.read_into(pages, position)
            os.close(descriptor)

        work = [(path, start) for path in self.files for start in range(0, path.stat().st_size, DIGEST_BLOCK)]
        with ThreadPoolExecutor(Plan.streaming().threads) as pool:
            list(pool.map(block, work))

    def sha256sum(self) -> None:
        """Run the coreutils program once."""
        subprocess.run(["sha256sum", *map(str, self.files)], check=True, stdout=subprocess.DEVNULL)

    def openssl(self) -> None:
        """Run OpenSSL's program once, which has the processor's own instructions for SHA-256."""
        subprocess.run(["openssl", "dgst", "-sha256", *map(str, self.files)], check=True, stdout=subprocess.DEVNULL)

    def sha256sum_on_all_cores(self) -> None:
        """Run the coreutils program for each file, as many at once as there are cores."""
        listed = "\0".join(map(str, self.files))
        command = ["xargs", "-0", "-n1", f"-P{usable_cores()}", "sha256sum"]
        subprocess.run(command, input=listed, text=True, check=True, stdout=subprocess.DEVNULL)

    def copy(self) -> None:
        """Copy as the command does."""
        with Bundle.open(self.bundle, [self.signer.owner]) as opened:
            copy(opened, self.copied)

    def cp(self) -> None:
        """Copy as people would."""
        subprocess.run(["cp", "-r", str(self.bundle), str(self.copied)], check=True)
        subprocess.run(["sync", "-f", str(self.copied)], check=True)

    def evict(self) -> None:
        """Remove the last copy, and drop the files from the page cache."""
        shutil.rmtree(self.copied, ignore_errors=True)
        cache.evict(self.files)


def timed(work: Callable[[], object]) -> Run:
    before, wall = os.times(), time.perf_counter()
    work()
    after = os.times()
    return Run(time.perf_counter() - wall, sum(after[:4]) - sum(before[:4]))


def compare(place: Place, rounds: int) -> dict[str, Any]:
    """Time all methods in interleaved rounds."""
    methods: dict[str, Callable[[], object]] = {
        "verify": place.verify,
        "hash": place.hash,
        "read": place.read,
        "sha256sum": place.sha256sum,
        "sha256sum on all cores": place.sha256sum_on_all_cores,
        "copy": place.copy,
        "cp": place.cp,
    }
    if shutil.which("openssl"):
        methods["openssl"] = place.openssl
    runs: dict[str, list[Run]] = {name: [] for name in methods}
    names = list(methods)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            place.evict()
            runs[name].append(timed(methods[name]))
    place.evict()

    def shares(ours: str, other: str, of: Callable[[Run], float]) -> dict[str, Any]:
        ratios = [of(that) / max(of(this), 1e-9) for this, that in zip(runs[ours], runs[other], strict=True)]
        return {"median": round(statistics.median(ratios), 3), "rounds": [round(ratio, 3) for ratio in ratios]}

    return {
        "bytes": place.nbytes,
        "file_system": describe(place.bundle)["file_system"],
        "gb_per_s": {
            name: round(statistics.median(place.nbytes / run.wall for run in runs[name]) / 1e9, 3) for name in names
        },
        "gb_per_cpu_s": {
            name: round(statistics.median(place.nbytes / max(run.cpu, 1e-9) for run in runs[name]) / 1e9, 3)
            for name in names
        },
        "verify_speed_as_share_of": {
            name: shares("verify", name, lambda run: run.wall) for name in names if name not in ("verify", "copy", "cp")
        },
        "verify_per_cpu_second_as_share_of": {"hash": shares("verify", "hash", lambda run: run.cpu)},
        "copy_speed_as_share_of": {"cp": shares("copy", "cp", lambda run: run.wall)},
    }


TITLES = {
    "verify": "verify",
    "hash": "SHA-256 alone, in memory",
    "read": "the same reads, nothing done with them",
    "sha256sum": "`sha256sum`, one process",
    "sha256sum on all cores": "`sha256sum`, a process for each core",
    "openssl": "`openssl dgst -sha256`, one process",
    "copy": "copy: read, compare, write, sync, read back",
    "cp": "`cp -r` and `sync`",
}


def as_markdown(report: dict[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        f"# Verify and copy, {report['date']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}. "
        f"Load average {report['load_before']} before, {report['load_after']} after: above the number of cores, trust "
        "ratios and CPU-seconds, not GB/s.",
        "",
        f"{report['rounds']} interleaved rounds, medians; nothing in the page cache before each run. A share is the "
        "other method's time divided by ours in the same round: 1 is equally fast, above 1 ours is faster.",
        "",
        "Written by `python -m benchmarks.verify_copy`.",
    ]
    for name, result in report["places"].items():
        verified, copied = result["verify_speed_as_share_of"], result["copy_speed_as_share_of"]
        lines += [
            "",
            f"## {name}: {result['file_system']}, {result['bytes'] / 1e6:.0f} MB",
            "",
            "| method | GB/s | GB per CPU-second | verify as share of it | copy as share of it |",
            "|---|---|---|---|---|",
        ]
        for method, title in TITLES.items():
            if method not in result["gb_per_s"]:
                continue
            cells = [_share(verified.get(method)), _share(copied.get(method))]
            rates = f"{result['gb_per_s'][method]:.2f} | {result['gb_per_cpu_s'][method]:.2f}"
            lines.append(f"| {title} | {rates} | {' | '.join(cells)} |")
        by_cpu = _share(result["verify_per_cpu_second_as_share_of"]["hash"])
        lines += ["", f"By CPU-seconds verify reaches {by_cpu} of SHA-256 alone."]
    return "\n".join(lines) + "\n"


def _share(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return f"{found['median']:.2f} ({min(found['rounds']):.2f} to {max(found['rounds']):.2f})"


@contextlib.contextmanager
def emptied(*directories: Path) -> Iterator[None]:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    try:
        yield
    finally:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0, help="about the size of the synthetic model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bench-copy", help="on a disk; emptied")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm/lethe-bench-copy"), help="in memory; emptied")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    load_before = round(os.getloadavg()[0], 1)
    with emptied(given.work, given.memory), OwnerSigner.generate("benchmark", "lab") as signer:
        layers = max(1, round(given.gb * 1e9 / 71.3e6))
        print("writing and packing a synthetic model", file=sys.stderr)
        source = tinymodel.write(given.work / "model", hidden=2048, layers=layers, heads=16, kv_heads=4)
        policy = AppraisalPolicy.from_toml(POLICY)
        pack(source, signer=signer, key_dir=given.work / "keys", policy=policy, name="b", out=given.work / "bundle")
        shutil.rmtree(source)
        places = {"disk": compare(Place(given.work / "bundle", signer), given.rounds)}
        shutil.move(given.work / "bundle", given.memory / "bundle")
        places["in memory"] = compare(Place(given.memory / "bundle", signer), given.rounds)
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    report = {
        "date": date,
        "machine": describe(ROOT),
        "rounds": given.rounds,
        "load_before": load_before,
        "load_after": round(os.getloadavg()[0], 1),
        "places": places,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"verify-copy-{date}.json").write_text(json.dumps(report, indent=1) + "\n")
    (given.out / f"verify-copy-{date}.md").write_text(as_markdown(report))
    print(as_markdown(report))


if __name__ == "__main__":
    main()
