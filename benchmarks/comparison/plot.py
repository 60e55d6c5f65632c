"""The picture: GB/s of each loader, warm beside cold, the rounds as dots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_OURS = "#0b6e4f"
_SEALED = "#7a9e87"
_PLAIN = "#9aa5b1"
_LIMIT = "#d9a441"
_LIMITS = ("aes", "read", "read_direct")


def draw(report: Mapping[str, Any], path: Path) -> bool:
    """Draw the picture; says whether matplotlib was there to do it."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "sealed-load"  # the same numbers give the same file
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    states = [state for state in ("warm", "cold") if report.get(state)]
    figure, axes = plt.subplots(1, len(states), figsize=(6.2 * len(states), 5.2), squeeze=False)
    for axis, state in zip(axes[0], states, strict=True):
        shown = {name: result for name, result in report[state].items() if "gb_s" in result}
        order = sorted(shown, key=lambda name: shown[name]["gb_s"]["median"])
        for height, name in enumerate(order):
            result = shown[name]
            axis.barh(height, result["gb_s"]["median"], color=_colour(name, result), height=0.66, zorder=2)
            rounds = result["gb_s"]["rounds"]
            axis.plot(rounds, [height] * len(rounds), ".", color="black", markersize=3.5, alpha=0.6, zorder=3)
            axis.text(
                max([*rounds, result["gb_s"]["median"]]),
                height,
                f"  {result['gb_s']['median']:.2f}",
                va="center",
                size=8,
            )
        axis.set_yticks(range(len(order)), [_label(shown[name]) for name in order], size=8)
        axis.set_xlabel("GB/s, median of the rounds (dots)")
        axis.set_title({"warm": "Warm page cache", "cold": "Cold"}[state], loc="left", size=11)
        axis.margins(x=0.16)
        axis.set_xlim(left=0)
        axis.grid(axis="x", color="#e5e7eb", zorder=0)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    handles = [
        Patch(color=_OURS, label="ours, encrypted and signed"),
        Patch(color=_SEALED, label="others, encrypted"),
        Patch(color=_PLAIN, label="others, plaintext"),
        Patch(color=_LIMIT, label="limits: cipher alone, read alone"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=4, frameon=False, fontsize=8)
    machine = report["machine"]
    title = f"Loading {report['model']['bytes'] / 1e9:.1f} GB of weights; {machine['cpu']}, {machine['cores']} cores"
    figure.suptitle(title, x=0.01, ha="left", size=11)
    figure.tight_layout(rect=(0, 0.05, 1, 0.98))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return True


def _colour(name: str, result: Mapping[str, Any]) -> str:
    if name == "ours":
        return _OURS
    if name in _LIMITS:
        return _LIMIT
    return _SEALED if result["encrypted"] else _PLAIN


def _label(result: Mapping[str, Any]) -> str:
    label: str = result["label"].replace(", best size and threads", "").replace(" (AES-256-GCM, signed)", "")
    return label + (" (own)" if result["own"] else "")
