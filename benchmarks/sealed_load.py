"""How fast a sealed bundle becomes a model in memory, beside other loaders and the limits, in one interleaved run.

``python -m benchmarks.sealed_load [--gb 4] [--rounds 5] [--only NAME ...]``; ``make bench`` runs it with all of them.

All contenders get the same weights into memory that was allocated and touched before the clock starts, as device
memory would be; a loader whose own tensors are the destination is marked ``own``. Each timed run is a fresh process.
Rounds are interleaved and rotated, and ratios are taken inside a round, so that a busy machine cancels out. Warm means
that a run's files were read just before, outside the clock; cold that they were evicted and that every page was looked
for in the page cache. The contenders are in ``benchmarks/loaders/``, the probes are those of ``lethe bench load``.

Everything is written under ``build/bench``, which is removed at the end. Results go to ``benchmarks/results`` as
``sealed-load-DATE.json``, ``.md`` and ``.svg``. Of the JSON, schema 2, other programs may rely on these keys (rates are
1e9 bytes per second; a contender that could not run has the one key ``unavailable``, with the reason)::

    {"schema": 2, "date": "2026-11-30",
     "machine": {"cpu": "...", "cores": 2, "memory_bytes": 0, "avx512_aes": true, "load_average": [0.1, 0.2], ...},
     "settings": {"gb": 4.0, "rounds": 5, "readers": 2, "openers": 2, "ring_bytes": 0, "segment_bytes": 1048576},
     "model": {"bytes": 0, "tensors": 0, "files": 0},
     "probes": {"raw_read_gb_s": [{"block_bytes": 4194304, "threads": 2, "gb_s": 1.4}, ...],
                "aes_gcm_gb_s": {"1": 4.1, "2": 8.0},
                "copy_gb_s": [{"copy_bytes": 1048576, "gb_s": 5.0}, ...]},
     "stages": {"median": {...}, "rounds": [{...}]}, members of benchmarks.scaling.stages.Stages,
     "warm": {"ours": {"label": "...", "own": false, "encrypted": true, "version": "",
                       "gb_s": {"median": 0, "best": 0, "rounds": [0, 0]}, "gb_per_cpu_s": 0, "user_s": 0, "sys_s": 0,
                       "memory": {"anonymous_bytes": 0, "mapped_bytes": 0, "peak_growth_bytes": 0},
                       "cached_share": {"min": 1, "max": 1}, "detail": {},
                       "ours_as_share": {"median": 1, "min": 1, "max": 1, "rounds": [1, 1]}},
              "aes": {...}, "read": {...}, "read_direct": {...}, "safetensors_load": {...}, "safetensors_open": {...},
              "runai": {...}, "fastsafetensors": {...}, "flashpack": {...}, "tensorizer": {...},
              "tensorizer_encrypted": {...}, "cryptotensors": {"unavailable": "..."}},
     "cold": {the same contenders without "aes"},
     "aims": [{"aim": "...", "wanted": 0.95, "measured": 0.97, "met": true}, ...]}

``ours_as_share`` is our speed divided by the contender's, taken inside each round: above 1 we are faster.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from appliance.budget import Budget, for_slot
from appliance.slot_cpu import CpuSlot
from benchmarks import loaders
from benchmarks.comparison import plot, report
from benchmarks.comparison.session import Session, Settings

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run the comparison and write its results."""
    given = _arguments()
    signal.signal(signal.SIGTERM, _stop)
    asked = Budget((given.ring_mib or 0) << 20, given.readers or 0, given.openers or 0)
    budget = for_slot(asked, CpuSlot(), ranks=1)
    settings = Settings(
        gb=given.gb,
        rounds=given.rounds,
        names=tuple(given.only or loaders.NAMES),
        states=("warm",) if given.no_cold else ("cold", "warm"),
        readers=budget.readers,
        openers=budget.openers,
        ring_bytes=budget.ring_bytes,
    )
    _require_room(given.work, settings)
    shutil.rmtree(given.work, ignore_errors=True)
    given.work.mkdir(parents=True)
    try:
        result = Session(given.work, settings, secret=secrets.token_hex(32), tell=_tell).compare()
    finally:
        shutil.rmtree(given.work, ignore_errors=True)
    result = {"schema": 2, "date": datetime.now(UTC).strftime("%Y-%m-%d"), **result}
    write(result, given.out)
    for state in settings.states[::-1]:
        print(f"\n{state}")
        print("\n".join(report.table(result[state], markdown=False)))
    for name, reason in report.missing(result).items():
        print(f"did not run: {name}: {reason}")


def write(result: dict[str, Any], out: Path) -> None:
    """Write JSON, picture and page into a directory."""
    out.mkdir(parents=True, exist_ok=True)
    name = f"sealed-load-{result['date']}"
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    drawn = plot.draw(result, out / f"{name}.svg")
    page = report.as_markdown(result, plot=f"{name}.svg" if drawn else "")
    (out / f"{name}.md").write_text(page, encoding="utf-8")
    _tell(f"written to {out / name}.json, .md" + (", .svg" if drawn else "; no picture, matplotlib is not installed"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0, help="size of the model, 1e9 bytes (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each contender (default 5)")
    parser.add_argument("--only", nargs="+", choices=loaders.NAMES, metavar="NAME", help=", ".join(loaders.NAMES))
    parser.add_argument("--no-cold", action="store_true", help="warm runs only")
    parser.add_argument("--ring-mib", type=int, help="our ring; chosen as a rank does when not given")
    parser.add_argument("--readers", type=int, help="our reader threads; likewise")
    parser.add_argument("--openers", type=int, help="our opener threads, and everybody's; likewise")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bench", help="made, used, and removed")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="for the results")
    return parser.parse_args()


def _require_room(work: Path, settings: Settings) -> None:
    """Leave with a clear message before anything is written when the disk cannot hold it all."""
    formats = 1 + sum(name in loaders.CONVERTED for name in settings.names)
    needed = round(settings.gb * 1e9 * formats * 1.03) + (256 << 20)
    place = next(parent for parent in [work, *work.parents] if parent.exists())
    state = os.statvfs(place)
    free = state.f_bavail * state.f_frsize
    if free < needed:
        sys.exit(
            f"sealed_load: {needed / 1e9:.1f} GB needed in {place} for the model in {formats} formats, "
            f"{free / 1e9:.1f} GB free; use --gb, --only or --work"
        )


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
