"""No weight is left in the process when weights, cache and library buffers are overwritten: all its memory is searched.

What libraries keep is packed: the numbers of a few rows lie interleaved, so that a search for pieces of rows finds
nothing. Searched are pairs of neighbours along a row and along a column.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

CHILD = Path(__file__).with_name("residue_child.py")
ROOT = Path(__file__).resolve().parents[3]

_BITS = 24

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/PID/mem")


def hashed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return (words * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - _BITS)


class Search:
    """Counts 8-byte words that are two neighbouring weights."""

    def __init__(self) -> None:
        spec = importlib.util.spec_from_file_location("residue_child", CHILD)
        assert spec is not None
        assert spec.loader is not None
        child = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(child)
        decoder, _ = child.decoder_with_random_weights()
        pairs = []
        for view in decoder.destinations().values():
            if view.ndim == 2:
                bits = view.numpy().view(np.uint32).astype(np.uint64)
                pairs.append((bits[:, :-1] | bits[:, 1:] << np.uint64(32)).ravel())
                pairs.append((bits[:-1] | bits[1:] << np.uint64(32)).ravel())
        self.pairs = np.sort(np.concatenate(pairs))
        self.sieve = np.zeros(1 << _BITS, dtype=np.bool_)
        self.sieve[hashed(self.pairs)] = True

    def count(self, pid: int) -> int:
        """Search all writable memory of a process."""
        found = 0
        with open(f"/proc/{pid}/maps", encoding="utf-8") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for line in maps:
                span, rights, *_ = line.split()
                if not rights.startswith("rw") or "[v" in line:
                    continue
                start, stop = (int(part, 16) for part in span.split("-"))
                memory.seek(start)
                data = memory.read(stop - start)
                if not data.strip(b"\0"):
                    continue
                for shift in (0, 4):
                    words = np.frombuffer(data, dtype="<u8", offset=shift, count=(len(data) - shift) // 8)
                    maybe = words[self.sieve[hashed(words)]]
                    nearest = np.minimum(np.searchsorted(self.pairs, maybe), self.pairs.size - 1)
                    found += int(np.count_nonzero(self.pairs[nearest] == maybe))
        return found


class Child:
    """The process under search."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def obey(self, order: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@contextmanager
def child(threads: int, **extra: str) -> Iterator[Child]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)} | extra
    if not extra:
        environment.pop("MKL_DISABLE_FAST_MM", None)
    with subprocess.Popen(
        [sys.executable, str(CHILD), str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield Child(process)


@pytest.fixture(scope="module")
def search() -> Search:
    return Search()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("order", [["zeroize", "wipe caches"], ["wipe caches", "zeroize"]], ids=" then ".join)
def test_nothing_of_the_weights_is_left_in_the_process(search: Search, threads: int, order: list[str]) -> None:
    with child(threads) as process:
        process.obey("serve")
        assert search.count(process.pid) > 1_000_000  # the search finds weights where they are
        process.obey(order[0])
        if order[0] == "zeroize" and torch.backends.mkl.is_available():
            assert search.count(process.pid) > 1000  # and the copies that this test is about
        process.obey(order[1])
        assert search.count(process.pid) == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_nothing_is_left_either_where_mkl_keeps_no_buffers(search: Search, threads: int) -> None:
    with child(threads, MKL_DISABLE_FAST_MM="1") as process:
        process.obey("serve")
        process.obey("zeroize")
        process.obey("wipe caches")
        assert search.count(process.pid) == 0
