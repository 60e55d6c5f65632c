"""One contender, one run, in a process of its own.

``python -m benchmarks.comparison.child READ WRITE`` takes messages, one JSON object to a line, from descriptor READ and
answers on WRITE, since loaders may print. ``convert`` writes a contender's own format. ``run`` imports the loader,
allocates and touches destinations, answers with the files to be read, and waits for ``go``: meanwhile the harness fills
or empties the page cache. Only then do the clocks run.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import torch

from appliance.slot_cpu import CpuSlot
from benchmarks import loaders
from benchmarks.loaders.contender import Contender, Job


def main(arguments: list[str]) -> None:
    """Serve one message, and then leave."""
    with open(int(arguments[0]), encoding="utf-8") as requests, open(int(arguments[1]), "w", encoding="utf-8") as out:
        message = json.loads(requests.readline())
        job = Job.from_payload(message["job"])
        torch.set_num_threads(job.threads)
        try:
            contender = loaders.find(message["contender"])(job)
            if message["do"] == "convert":
                contender.convert()
                _answer(out, {"converted": True})
            else:
                _run(contender, message, requests, out)
        except Exception as error:  # noqa: BLE001 - whatever keeps a loader from working is what the report says
            _answer(out, {"unavailable": f"{type(error).__name__}: {error}"[:300]})


def _answer(out: TextIO, members: Mapping[str, Any]) -> None:
    out.write(json.dumps(members) + "\n")
    out.flush()


def _run(contender: Contender, message: dict[str, Any], requests: TextIO, out: TextIO) -> None:
    destinations: dict[str, torch.Tensor] = {}
    if contender.given:
        slot = CpuSlot()
        for name, shape in message["shapes"].items():
            destinations[name] = slot.empty(tuple(shape), torch.bfloat16)
            destinations[name].zero_()
    contender.prepare(destinations)
    _answer(
        out,
        {
            "files": [str(path) for path in contender.files()],
            "about": {
                "label": contender.label,
                "own": contender.own,
                "encrypted": contender.encrypted,
                "version": importlib.metadata.version(contender.package) if contender.package else "",
            },
        },
    )
    if not requests.readline():
        return
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak of VmHWM begins here (proc(5))
    resident = status_bytes(os.getpid())
    before = resource.getrusage(resource.RUSAGE_SELF)
    begin = time.perf_counter()
    tensors = contender.load()
    wall = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_SELF)
    peak = status_bytes(os.getpid())
    _answer(
        out,
        {
            "wall_s": wall,
            "user_s": after.ru_utime - before.ru_utime,
            "sys_s": after.ru_stime - before.ru_stime,
            "anonymous_before": resident["RssAnon"] + resident["RssShmem"],
            "mapped_before": resident["RssFile"],
            "peak_growth_bytes": peak["VmHWM"] - resident["VmRSS"],
            "detail": contender.detail,
        },
    )
    digests = message["digests"]
    differing = _differing(tensors, digests) if digests and tensors is not None else []
    _answer(out, {"differing": differing})


def status_bytes(process: int) -> dict[str, int]:
    """Give the sizes of a process from ``/proc/PID/status``, in bytes."""
    found = {}
    for line in Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value.split()[0]) << 10
    return found


def _differing(tensors: Mapping[str, torch.Tensor], digests: Mapping[str, str]) -> list[str]:
    """Give the names of tensors that are not, to the byte, what was written."""

    def check(name: str) -> bool:
        tensor = tensors.get(name)
        if tensor is None:
            return False
        flat = tensor.detach().contiguous().view(torch.uint8) if math.prod(tensor.shape) else tensor
        return hashlib.sha256(flat.reshape(-1).numpy().data).hexdigest() == digests[name]

    with ThreadPoolExecutor(2) as pool:
        return [name for name, same in zip(digests, pool.map(check, digests), strict=True) if not same]


if __name__ == "__main__":
    main(sys.argv[1:])
