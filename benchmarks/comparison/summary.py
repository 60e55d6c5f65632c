"""From runs to the numbers of the report; a ratio is taken inside each round, so that a busy machine cancels out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.comparison.runner import Run


def summarise(runs: Sequence[Run], ours: Sequence[Run], *, nbytes: int) -> dict[str, Any]:
    """Sum up one contender in one state of the cache.

    Args:
        runs: its runs by round.
        ours: our runs by round; empty when we did not run.
        nbytes: of the model.
    """
    rates = [nbytes / run.wall_s / 1e9 for run in runs]
    shares = [other.wall_s / run.wall_s for run, other in zip(ours, runs, strict=bool(ours))]
    last = runs[-1]
    made = nbytes if last.about["own"] else 0
    return {
        **last.about,
        "gb_s": {
            "median": round(statistics.median(rates), 3),
            "best": round(max(rates), 3),
            "rounds": [round(rate, 3) for rate in rates],
        },
        "gb_per_cpu_s": round(statistics.median(nbytes / max(run.user_s + run.sys_s, 1e-9) / 1e9 for run in runs), 3),
        "user_s": round(statistics.median(run.user_s for run in runs), 3),
        "sys_s": round(statistics.median(run.sys_s for run in runs), 3),
        "memory": {
            "anonymous_bytes": max(0, max(run.anonymous_bytes for run in runs) - made),
            "mapped_bytes": max(run.mapped_bytes for run in runs),
            "peak_growth_bytes": max(0, max(run.peak_growth_bytes for run in runs) - made),
        },
        "cached_share": {
            "min": round(min(run.cached_share for run in runs), 4),
            "max": round(max(run.cached_share for run in runs), 4),
        },
        "ours_as_share": {
            "median": round(statistics.median(shares), 3),
            "min": round(min(shares), 3),
            "max": round(max(shares), 3),
            "rounds": [round(share, 3) for share in shares],
        }
        if shares
        else None,
        "detail": _detail(runs),
    }


def _detail(runs: Sequence[Run]) -> dict[str, Any]:
    """Give what the loader told in the last round; of its times, the median of all rounds."""
    times = {
        name: round(statistics.median(run.detail[name] for run in runs), 4)
        for name in runs[-1].detail
        if name.endswith("_s")
    }
    return {**runs[-1].detail, **times}


def aims(warm: Mapping[str, Any], cold: Mapping[str, Any], ring_bytes: int) -> list[dict[str, Any]]:
    """Compare what was measured with what the project aims at; an aim that nothing was measured for is not there."""
    wanted = [
        ("cold, share of the raw direct read", cold.get("read_direct"), 0.95),
        ("warm, share of AES-256-GCM alone", warm.get("aes"), 0.92),
        ("warm, times tensorizer encrypted", warm.get("tensorizer_encrypted"), 5.0),
        ("cold, times tensorizer encrypted", cold.get("tensorizer_encrypted"), 5.0),
    ]
    found = [
        {"aim": text, "wanted": least, "measured": share["median"], "met": share["median"] >= least}
        for text, result, least in wanted
        if result and (share := result.get("ours_as_share"))
    ]
    ours = [results["ours"]["memory"] for results in (warm, cold) if "memory" in results.get("ours", {})]
    if ours:
        extra = max(memory["anonymous_bytes"] for memory in ours)
        most = ring_bytes + (64 << 20)
        found.append(
            {"aim": "own memory beyond the weights, bytes", "wanted": most, "measured": extra, "met": extra <= most}
        )
    return found
