"""Runs contenders, each timed run in a fresh process, and watches their memory from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from appliance.probe import cache
from benchmarks.comparison.child import status_bytes
from benchmarks.comparison.weights import Weights
from benchmarks.loaders.contender import Job
from benchmarks.loaders.ours import KEY_VARIABLE
from provisioning.secret import SecretBytes

ROOT = Path(__file__).resolve().parents[2]
# Often enough to see a buffer that lives for a tenth of a second, seldom enough to cost nothing that shows.
_SAMPLE_SECONDS = 0.02
# A loader that hangs must not take the whole comparison with it.
_LIMIT_SECONDS = 600.0
# Less than this share of a file in the page cache is cold: a handful of pages of its header.
COLD_SHARE = 0.01
# More than this is warm; a cache under pressure needs to be filled more than once to keep what was just read.
WARM_SHARE = 0.99
_FILLS = 5


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run.

    Attributes:
        wall_s, user_s, sys_s: wall and processor seconds.
        anonymous_bytes: peak of the process's own memory above what it had when the clock started, destinations of an
            ``own`` contender included.
        mapped_bytes: the same for pages of mapped files.
        peak_growth_bytes: peak of all resident memory above that at the start.
        cached_share: share of its files that was in the page cache when the clock started.
        about: label, version and kind of the loader.
        detail: what the loader told.
    """

    wall_s: float
    user_s: float
    sys_s: float
    anonymous_bytes: int
    mapped_bytes: int
    peak_growth_bytes: int
    cached_share: float
    about: dict[str, Any]
    detail: dict[str, Any]


class Unavailable(Exception):
    """A contender does not run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs share.

    Attributes:
        job: what contenders are told.
        model: what was written, and the digests to compare with.
        key: gives our bundle's key, once per call.
    """

    job: Job
    model: Weights
    key: Callable[[], SecretBytes]

    def convert(self, name: str) -> None:
        """Write a contender's own format.

        Raises:
            Unavailable: it cannot.
        """
        with self._child(name, "convert", {}) as (_, _, answers):
            _receive(answers)

    def run(self, name: str, *, state: str, compare: bool) -> Run:
        """Time one load.

        Args:
            name: of the contender.
            state: ``warm`` or ``cold``.
            compare: also compare every byte that was loaded, after the clock has stopped.

        Raises:
            Unavailable: it does not run, or what it loads is not the model.
        """
        members = {
            "shapes": {name: list(shape) for name, shape in self.model.shapes.items()},
            "digests": self.model.digests if compare else {},
        }
        with self._child(name, "run", members) as (process, requests, answers):
            ready = _receive(answers)
            files = [Path(path) for path in ready["files"]]
            share = _settle(files, state)
            with _watched(process.pid) as peak:
                requests.write("go\n")
                requests.flush()
                done = _receive(answers)
            differing = _receive(answers)["differing"]
        if differing:
            raise Unavailable(f"loaded other bytes than the model's, in {len(differing)} tensors: {differing[0]}")
        return Run(
            wall_s=done["wall_s"],
            user_s=done["user_s"],
            sys_s=done["sys_s"],
            anonymous_bytes=max(0, peak["anonymous"] - done["anonymous_before"]),
            mapped_bytes=max(0, peak["mapped"] - done["mapped_before"]),
            peak_growth_bytes=max(0, done["peak_growth_bytes"]),
            cached_share=share,
            about=ready["about"],
            detail=done["detail"],
        )

    @contextmanager
    def _child(
        self, name: str, do: str, members: dict[str, Any]
    ) -> Iterator[tuple[subprocess.Popen[bytes], TextIO, TextIO]]:
        ours_read, theirs_write = os.pipe()
        theirs_read, ours_write = os.pipe()
        key_read, key_write = os.pipe()
        with open(ours_write, "w", encoding="utf-8") as requests, open(ours_read, encoding="utf-8") as answers:
            if name == "ours" and do == "run":
                with self.key() as key, key.expose() as view:
                    os.writev(key_write, [view])
            os.close(key_write)
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.comparison.child", str(theirs_read), str(theirs_write)],
                cwd=ROOT,
                # Threads of torch that spin at a barrier take the cores that loaders' own threads need.
                env=os.environ | {KEY_VARIABLE: str(key_read), "OMP_WAIT_POLICY": "PASSIVE"},
                pass_fds=(theirs_read, theirs_write, key_read),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for descriptor in (theirs_read, theirs_write, key_read):
                os.close(descriptor)
            limit = threading.Timer(_LIMIT_SECONDS, process.kill)
            limit.start()
            try:
                message = {"do": do, "contender": name, "job": self.job.as_payload(), **members}
                requests.write(json.dumps(message) + "\n")
                requests.flush()
                yield process, requests, answers
            except BrokenPipeError:
                raise Unavailable(f"its process ended with status {process.wait()}") from None
            finally:
                limit.cancel()
                with suppress(BrokenPipeError):
                    requests.close()
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _receive(answers: TextIO) -> dict[str, Any]:
    line = answers.readline()
    if not line:
        raise Unavailable("its process ended without an answer")
    members: dict[str, Any] = json.loads(line)
    if "unavailable" in members:
        raise Unavailable(members["unavailable"])
    return members


def _settle(files: list[Path], state: str) -> float:
    """Bring the page cache into the wanted state and look that it is; gives the share that is cached."""
    if state == "warm":
        for _ in range(_FILLS):
            cache.fill(files)
            if (share := cache.share(files)) > WARM_SHARE:
                return share
        # Part of a file from the disk would be told as a slow loader.
        raise Unavailable(f"only {share:.2f} of its files would stay in the page cache; take a smaller --gb")
    for _ in range(3):  # a page that the kernel is just writing back or reading ahead stays once
        cache.evict(files)
        if (share := cache.share(files)) < COLD_SHARE:
            break
    return share


@contextmanager
def _watched(process: int) -> Iterator[dict[str, int]]:
    """Sample the memory of a process until the block is left; gives the peaks."""
    peak = {"anonymous": 0, "mapped": 0}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            with suppress(OSError):
                now = status_bytes(process)
                if "VmRSS" in now:
                    peak["anonymous"] = max(peak["anonymous"], now["RssAnon"] + now["RssShmem"])
                    peak["mapped"] = max(peak["mapped"], now["RssFile"])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()
