"""What a GPU makes of opening on the device: copies, the cipher, and the load, opened by the host or by the device.

``python -m benchmarks.device.load [--gb 4] [--directory DIR] [--rounds 3]``

Takes about two minutes with 4 GB, and is given five at most. It needs a CUDA device, the packages of
``requirements/node.txt``, torch with CUDA, and about twice the model's size on the medium. Without a CUDA device it
says so and ends with 69.

- copies from pinned memory to the device through a lane of the slot, by size of one copy
- AES-256-CTR on the device over 256 MiB: the Triton kernel, and the torch operations
- a sealed bundle, warm, opened by the host and by the device in turns; both must leave the same bytes

``--rehearse`` runs all of it in host memory, small, with stand-ins for the CUDA calls, which shows that the program
works; its numbers mean nothing, and it writes no results unless it is told where.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from appliance.config import Loading
from appliance.devicecipher.choice import FIRST_COUNTER, Counter, choose, self_test
from appliance.devicecipher.plain import PlainCounter, scratch_words
from appliance.devicecipher.schedule import PLANE_BYTES, PLANE_WORDS, write_planes
from appliance.probe import copying
from appliance.probe.throwaway import Throwaway
from appliance.slot import Slot
from appliance.slot_cuda import CudaSlot, TorchCuda
from attestation.errors import LetheError
from benchmarks.comparison.machine import describe

ROOT = Path(__file__).resolve().parents[2]
SEGMENT = 1 << 20
MIB = 1 << 20
# Seconds for all of it; what does not fit any more is left out, and the report says so.
BUDGET = 270.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured on.

    Attributes:
        make_slot: opens the device anew.
        synchronize: waits for it.
        cipher_bytes: worked on by the cipher at once.
        chunks: sizes of chunk of the torch form.
        copies: sizes of one copy.
        copied: bytes copied for each.
    """

    make_slot: Callable[[], Slot]
    synchronize: Callable[[], None]
    cipher_bytes: int
    chunks: tuple[int, ...]
    copies: tuple[int, ...]
    copied: int


def on_gpu() -> Setting:
    return Setting(
        make_slot=lambda: CudaSlot(TorchCuda(0)),
        synchronize=torch.cuda.synchronize,
        cipher_bytes=256 * MIB,
        chunks=(4 * MIB, 16 * MIB, 64 * MIB),
        copies=(MIB, 4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB),
        copied=2048 * MIB,
    )


def rehearsal() -> Setting:
    from tests.sim.cuda import LazyCuda

    return Setting(
        make_slot=lambda: CudaSlot(LazyCuda()),
        synchronize=lambda: None,
        cipher_bytes=MIB,
        chunks=(MIB // 4,),
        copies=(MIB,),
        copied=4 * MIB,
    )


def ciphers(setting: Setting, deadline: float) -> dict[str, Any]:
    """Give GB/s of the forms of the cipher, over segments in device memory."""
    slot = setting.make_slot()
    planes = slot.empty((PLANE_WORDS,), torch.int32)
    host = bytearray(PLANE_BYTES)
    write_planes(memoryview(os.urandom(32)), memoryview(os.urandom(12)), memoryview(host))
    planes.copy_(torch.frombuffer(host, dtype=torch.int32))
    data = slot.empty((setting.cipher_bytes,), torch.uint8)
    data.zero_()
    chosen = choose(slot)
    found: dict[str, Any] = {"chosen": chosen.form}
    forms: dict[str, Counter] = {}
    if chosen.form == "triton":
        forms["triton"] = chosen.make(setting.cipher_bytes)
    for chunk in setting.chunks:
        scratch = slot.empty((scratch_words(chunk),), torch.int32)
        forms[f"torch, chunks of {chunk // 1024} KiB"] = PlainCounter(scratch, chunk_bytes=chunk)
    for name, form in forms.items():
        if time.monotonic() > deadline:
            found[name] = "left out: no time"
            continue
        if name != "triton":
            self_test(slot, form, "torch")
        rates = []
        for number in range(4):
            setting.synchronize()
            begin = time.perf_counter()
            form.apply(data, planes, first=0, segment_bytes=SEGMENT, counter=FIRST_COUNTER)
            setting.synchronize()
            if number:  # the first one warms up
                rates.append(setting.cipher_bytes / (time.perf_counter() - begin) / 1e9)
        found[name] = round(statistics.median(rates), 3)
    return found


def loads(setting: Setting, directory: Path, nbytes: int, rounds: int, deadline: float) -> dict[str, Any]:
    """Load the same bundle, opened by the host and by the device in turns, into tensors of their own."""
    found: dict[str, Any] = {}
    rates: dict[str, list[float]] = {"host": [], "device": []}
    cpu: dict[str, list[float]] = {"host": [], "device": []}
    with Throwaway(directory, nbytes) as bundle:
        bundle.seal(lambda *_: None)
        keep = setting.make_slot()
        made = {open_on: bundle.destinations(keep) for open_on in rates}
        bundle.warm()
        for number in range(rounds + 1):
            for open_on in rates:
                if time.monotonic() > deadline and all(rates.values()):
                    found["rounds_left_out"] = rounds + 1 - number
                    break
                before = time.process_time()
                done = bundle.load(setting.make_slot(), made[open_on], Loading(open_on=open_on), lambda *_: None)
                setting.synchronize()
                if number or rounds == 0:  # the first round warms up, and compiles
                    rates[open_on].append(done.nbytes / done.milliseconds / 1e6)
                    cpu[open_on].append((time.process_time() - before) / (done.nbytes / 1e9))
                found[f"{open_on}_ring_bytes"] = done.ring_bytes
                found[f"{open_on}_peak_plaintext_bytes"] = done.peak_plaintext_bytes
        found["bytes"] = done.nbytes
        # As bytes: random weights hold numbers that are not equal to themselves.
        found["same_bytes"] = all(
            torch.equal(*(made[open_on][name].view(-1).view(torch.uint8) for open_on in rates)) for name in made["host"]
        )
    for open_on in rates:
        found[f"{open_on}_gb_per_s"] = round(statistics.median(rates[open_on]), 3)
        found[f"{open_on}_cpu_s_per_gb"] = round(statistics.median(cpu[open_on]), 3)
    return found


def as_markdown(report: dict[str, Any]) -> str:
    """Write the report for people."""
    machine, load = report["machine"], report["load"]
    lines = [
        f"# Opening on the device, {report['date']}",
        "",
        f"{report['device']}; {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}. "
        f"{report['seconds']:.0f} seconds in all. Written by `python -m benchmarks.device.load`.",
        "",
        "| copy from pinned memory, one of | GB/s |",
        "|---|---|",
        *[f"| {int(size) // MIB} MiB | {rate} |" for size, rate in report["copies_gb_per_s"].items()],
        "",
        "| AES-256-CTR on the device | GB/s |",
        "|---|---|",
        *[f"| {name} | {rate} |" for name, rate in report["cipher_gb_per_s"].items() if name != "chosen"],
        "",
        f"| {load['bytes'] / 1e9:.2f} GB sealed, warm, opened by | GB/s | CPU-seconds per GB | plaintext in the ring |",
        "|---|---|---|---|",
        *[
            f"| the {name} | {load[f'{name}_gb_per_s']} | {load[f'{name}_cpu_s_per_gb']} "
            f"| {load[f'{name}_peak_plaintext_bytes']} bytes |"
            for name in ("host", "device")
        ],
        "",
        "The catalog is opened in the ring in both cases. "
        + ("Both loads left the same bytes." if load["same_bytes"] else "THE LOADS LEFT DIFFERENT BYTES."),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0, help="size of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=ROOT / "build", help="where the bundle is put; removed again")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, small, in host memory")
    given = parser.parse_args()
    if not given.rehearse and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured (--rehearse tries the program without one)", file=sys.stderr)
        return 69
    begin = time.monotonic()
    deadline = begin + BUDGET
    torch.set_num_threads(1)
    setting = rehearsal() if given.rehearse else on_gpu()
    out = given.out or (None if given.rehearse else ROOT / "benchmarks" / "results")
    given.directory.mkdir(parents=True, exist_ok=True)
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    try:
        copies = copying.by_size(setting.make_slot, sizes=setting.copies, nbytes=setting.copied)
        report: dict[str, Any] = {
            "date": date,
            "device": "stand-in in host memory" if given.rehearse else torch.cuda.get_device_name(0),
            "machine": describe(ROOT),
            "copies_gb_per_s": {str(size): round(rate.gb_s, 3) for size, rate in copies.items()},
            "cipher_gb_per_s": ciphers(setting, deadline),
            "load": loads(setting, given.directory, round(given.gb * 1e9), given.rounds, deadline),
        }
    except LetheError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    report["seconds"] = round(time.monotonic() - begin, 1)
    page = as_markdown(report)
    print(page)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"device-load-{date}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (out / f"device-load-{date}.md").write_text(page, encoding="utf-8")
    return 0 if report["load"]["same_bytes"] else 1


if __name__ == "__main__":
    sys.exit(main())
