"""One comparison: write the model in every format, probe the machine, run all contenders round by round."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from appliance.probe import aead, cache, copying, medium
from appliance.slot_cpu import CpuSlot
from attestation.policy import AppraisalPolicy
from benchmarks import loaders
from benchmarks.comparison import machine, weights
from benchmarks.comparison.runner import COLD_SHARE, Bench, Run, Unavailable
from benchmarks.comparison.summary import aims, summarise
from benchmarks.comparison.weights import Weights
from benchmarks.loaders.contender import Job
from benchmarks.scaling import stages
from provisioning.ownerkey import OwnerSigner
from provisioning.pack import DEFAULT_SEGMENT, pack
from provisioning.secret import SecretBytes
from tests.sim.modelfiles import POLICY

Tell = Callable[[str], None]
_PROBE_SECONDS = 1.0
_PROBE_BYTES = 512 << 20
# The steps of the simulator are measured in windows; a smaller bundle has too few of them.
_STAGES_GB = 0.1


@dataclass(frozen=True, slots=True)
class Settings:
    """What the caller wants.

    Attributes:
        gb: size of the model, 1e9 bytes.
        rounds: runs of each contender in each state.
        names: contenders.
        states: ``cold`` and ``warm``, in the order in which a contender's turns come.
        readers, openers, ring_bytes: of our loader.
    """

    gb: float
    rounds: int
    names: tuple[str, ...]
    states: tuple[str, ...]
    readers: int
    openers: int
    ring_bytes: int


class Session:
    """One comparison in one directory.

    Args:
        work: an empty directory; the caller removes it.
        settings: what to run.
        secret: 32 bytes as hex, for formats with a key of their own.
        tell: told what is being done.
    """

    def __init__(self, work: Path, settings: Settings, *, secret: str, tell: Tell) -> None:
        self._work = work
        self._settings = settings
        self._secret = secret
        self._tell = tell
        self._absent: dict[str, str] = {}
        self._runs: dict[str, dict[str, list[Run]]] = {state: {} for state in settings.states}
        self._stages: list[dict[str, Any]] = []

    def compare(self) -> dict[str, Any]:
        """Do everything; gives the result's members."""
        settings = self._settings
        load_before = os.getloadavg()[0]
        self._tell(f"writing a model of about {settings.gb:g} GB")
        model = weights.write(self._work / "model", settings.gb)
        files = sorted((self._work / "model").glob("*.safetensors"))
        cache.evict(files)
        states = [state for state in settings.states if state != "cold" or cache.share(files) < COLD_SHARE]
        if len(states) < len(settings.states):
            self._tell("no cold runs: this file system keeps its files in memory")
        with OwnerSigner.generate("benchmark", "lab") as signer:
            bundle_id = self._pack(signer)
            probes, best = self._probe(files)
            job = Job(
                work=str(self._work),
                threads=settings.openers,
                readers=settings.readers,
                ring_bytes=settings.ring_bytes,
                block_bytes=best.block_bytes,
                read_threads=best.threads,
                secret=self._secret,
            )

            def key() -> SecretBytes:
                return signer.bundle_key(self._work / "keys", bundle_id)

            bench = Bench(job, model, key)
            self._convert(bench)
            # What was just written must not be on its way to the disk while the first loader reads from it.
            os.sync()
            rounds = self._rounds(bench, states)
        return self._result(model, probes, load_before, rounds)

    def _rounds(self, bench: Bench, states: list[str]) -> int:
        """Run all rounds, or until somebody interrupts; gives how many are whole, of which there must be one."""
        whole = 0
        try:
            while whole < self._settings.rounds:
                self._round(bench, whole, states)
                whole += 1
        except KeyboardInterrupt:
            if not whole:
                raise
            self._tell(f"interrupted; results are of {whole} rounds")
        for runs in self._runs.values():
            for name in list(runs):
                del runs[name][whole:]
        return whole

    def _pack(self, signer: OwnerSigner) -> bytes:
        self._tell("packing our bundle")
        keys = self._work / "keys"
        with SecretBytes.random(32) as passphrase:
            signer.save(keys, passphrase)
        report = pack(
            self._work / "model",
            signer=signer,
            key_dir=keys,
            policy=AppraisalPolicy.from_toml(POLICY),
            name="benchmark",
            out=self._work / "bundle",
        )
        return bytes.fromhex(report.bundle_id)

    def _probe(self, files: list[Path]) -> tuple[dict[str, Any], medium.MediumRate]:
        self._tell("probing medium, cipher and copies")
        torch.set_num_threads(1)
        reads = medium.sweep(files, seconds=_PROBE_SECONDS)
        counts = sorted({1, *range(2, self._settings.openers + 1), len(os.sched_getaffinity(0))})
        nbytes = min(_PROBE_BYTES, round(self._settings.gb * 1e9))
        ciphers = aead.scaling(nbytes=nbytes, threads=counts)
        copies = copying.by_size(CpuSlot, nbytes=nbytes)
        probes = {
            "raw_read_gb_s": [
                {"block_bytes": one.block_bytes, "threads": one.threads, "gb_s": round(one.rate.gb_s, 3)}
                for one in reads
            ],
            "aes_gcm_gb_s": {str(count): round(rate.gb_s, 3) for count, rate in ciphers.items()},
            "copy_gb_s": [{"copy_bytes": size, "gb_s": round(rate.gb_s, 3)} for size, rate in copies.items()],
        }
        return probes, medium.best(reads)

    def _convert(self, bench: Bench) -> None:
        for name in self._settings.names:
            if name in loaders.CONVERTED and name != "ours":
                self._tell(f"writing the format of {name}")
                try:
                    bench.convert(name)
                except Unavailable as reason:
                    self._drop(name, str(reason))

    def _round(self, bench: Bench, number: int, states: list[str]) -> None:
        """Run every contender once in each state; each round begins with another one."""
        names = self._settings.names
        first = number * max(1, len(names) // self._settings.rounds) % len(names)
        begin = time.monotonic()
        for name in names[first:] + names[:first]:
            for state in states:
                if name in self._absent or loaders.ONE_STATE.get(name, state) != state:
                    continue
                try:
                    run = bench.run(name, state=state, compare=number == 0)
                except Unavailable as reason:
                    self._drop(name, str(reason))
                    continue
                self._runs[state].setdefault(name, []).append(run)
                self._tell(f"  {name} {state}: {bench.model.nbytes / run.wall_s / 1e9:.2f} GB/s")
            if name == "ours" and name not in self._absent and len(states) > 1 and self._settings.gb >= _STAGES_GB:
                # Beside our runs, so that what else the machine does is the same for both.
                self._stages.append(stages.measure_apart(self._work / "bundle", threads=self._settings.openers))
        self._tell(f"round {number + 1} of {self._settings.rounds}: {time.monotonic() - begin:.0f} s")

    def _drop(self, name: str, reason: str) -> None:
        """Leave a contender out from now on, and say so in the result: half a set of rounds compares nothing."""
        self._tell(f"  {name} does not run: {reason}")
        self._absent[name] = reason
        for runs in self._runs.values():
            runs.pop(name, None)

    def _result(self, model: Weights, probes: dict[str, Any], load_before: float, rounds: int) -> dict[str, Any]:
        settings = self._settings
        tables: dict[str, dict[str, Any]] = {}
        for state, runs in self._runs.items():
            tables[state] = {
                name: {"unavailable": self._absent[name]}
                if name in self._absent
                else summarise(runs[name], runs.get("ours", []), nbytes=model.nbytes)
                for name in settings.names
                if (name in self._absent and loaders.ONE_STATE.get(name, state) == state) or name in runs
            }
        return {
            "machine": machine.describe(self._work)
            | {"load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)]},
            "settings": {
                "gb": settings.gb,
                "rounds": rounds,
                "readers": settings.readers,
                "openers": settings.openers,
                "ring_bytes": settings.ring_bytes,
                "segment_bytes": DEFAULT_SEGMENT,
            },
            "model": {"bytes": model.nbytes, "tensors": len(model.shapes), "files": model.files},
            "probes": probes,
            **({"stages": {"median": stages.median(self._stages), "rounds": self._stages}} if self._stages else {}),
            **tables,
            "aims": aims(tables.get("warm", {}), tables.get("cold", {}), settings.ring_bytes),
        }
