"""Which stage bounds a load, and what would help; decided from measured rates alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from appliance.probe.findings import Findings

Stage = Literal["medium", "cipher", "copy", "loader"]

# Below this share of its slowest stage a load is not bound by that stage: something else took the time.
_LOST = 0.7


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which stage bounds a load.

    Attributes:
        stage: ``medium``, ``cipher``, ``copy``; ``loader`` when none of them explains the time.
        sentence: the same for people, with what would help.
    """

    stage: Stage
    sentence: str


def judge(findings: Findings) -> Verdict:
    """Say what bounds a cold load, or a warm one where there is no cold one."""
    rates = _rates(findings)
    (slowest, rate), *faster = sorted(rates.items(), key=lambda one: one[1])
    state, load = ("cold", findings.cold) if findings.cold else ("warm", findings.warm)
    reached = load.bytes_per_second
    if reached < _LOST * rate:
        return Verdict(
            "loader",
            f"no stage alone: the {state} load reached {_gb(reached)} where the slowest stage, {_NAMES[slowest]}, "
            f"gives {_gb(rate)}; other work on this machine, a model too small to tell (--gb), too few threads "
            f"(loading.readers = {findings.readers}, loading.openers = {findings.openers}) or too small a ring "
            "(loading.ring_mib) would explain it",
        )
    until = f" until {_NAMES[faster[0][0]]} at {_gb(faster[0][1])}" if faster else ""
    return Verdict(
        slowest,
        f"{_NAMES[slowest]}: {_gb(rate)}, and the {state} load reached {_gb(reached)}; "
        f"{_advice(slowest, findings)} would help{until}",
    )


_NAMES: dict[Stage, str] = {"medium": "the medium", "cipher": "AES-256-GCM", "copy": "the copy to the device"}


def _rates(findings: Findings) -> dict[Stage, int]:
    rates: dict[Stage, int] = {"cipher": findings.cipher.bytes_per_second}
    if findings.cold and (medium := findings.medium) is not None:
        rates["medium"] = medium.bytes_per_second
    # A CPU slot decrypts into the weights' own memory, so there is no copy that could bound it.
    if findings.device != "cpu":
        rates["copy"] = findings.copy.bytes_per_second
    return rates


def _advice(stage: Stage, findings: Findings) -> str:
    if stage == "medium":
        return "faster media"
    if stage == "copy":
        return "more devices, or a platform whose confidential mode copies faster,"
    if findings.openers < findings.cores:
        return f"more openers (loading.openers = {findings.openers} of {findings.cores} cores)"
    return "more cores, or cores with AVX-512 AES,"


def _gb(rate: int) -> str:
    return f"{rate / 1e9:.2f} GB/s"
