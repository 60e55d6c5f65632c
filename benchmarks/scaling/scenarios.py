"""From a machine and a way of opening to the plan of one rank, and to the time that its load takes.

Formulas, for one of ``ranks`` alike ranks (docs/scaling.md explains them):

- a read costs a core ``read`` and the memory bus one pass; in a confidential guest the disk cannot reach the guest's
  memory, so every byte is copied once more by a core, two passes;
- opening on the host costs ``1/aes + stall``, two passes, and one more with ``wipe`` for overwriting the cell;
- authenticating for a device that opens by itself costs ``1/gmac``, one pass; the cell held ciphertext, no wipe;
- a copy to the device costs one pass and the link; in confidential mode it costs the link's time, the toll, a core that
  encrypts meanwhile, and two passes more through the bounce buffer, and one copy goes on at a time;
- every segment costs the interpreter ``python``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

from appliance import pages
from appliance.budget import Budget, Machine, cell_bytes, decide
from benchmarks.scaling.inputs import MIB, value
from benchmarks.scaling.pipeline import Delivery, Outcome, Plan, Pools, Step, simulate

_COPY = 32 * MIB  # what one copy to a GPU should bring (appliance/slot_cuda.py)


class Way(Enum):
    """Who turns ciphertext into weights."""

    PLAIN = "plain"
    HOST = "host"
    DEVICE = "device"


class Bridge(Enum):
    """How bytes get to the device."""

    PCIE = "pcie"
    CONFIDENTIAL = "confidential"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A machine, a medium and a way.

    Attributes:
        way: who opens.
        bridge: plain PCIe or confidential mode.
        link: bytes per second of one device's bridge.
        disk: bytes per second of the medium.
        cores: cores given to all ranks together.
        aes: bytes per second of AES-256-GCM on one core, in its cache.
        gmac: bytes per second of authentication alone on one core.
        nbytes: of the model.
        copy_bytes: of a cell and of one copy; 0 leaves it to the loader.
        ranks: devices.
        tensors: of the model.
        memory: bytes per second of the whole memory bus.
    """

    way: Way
    bridge: Bridge
    link: float
    disk: float
    cores: int
    aes: float
    gmac: float
    nbytes: float
    copy_bytes: int = 0
    ranks: int = 8
    tensors: float = value("tensors")
    memory: float = value("memory")


def _read(scenario: Scenario) -> tuple[Step, ...]:
    confidential = scenario.bridge is Bridge.CONFIDENTIAL
    alone = min(value("reader"), scenario.disk)
    read = Step("read", core=value("read"), memory=1, disk=1, alone=alone)
    return (read, Step("bounce", core=value("copy"), memory=2)) if confidential else (read,)


def _open(scenario: Scenario) -> tuple[Step, ...]:
    python = value("python") / MIB
    if scenario.way is Way.PLAIN:
        return ()
    if scenario.way is Way.DEVICE:
        return (Step("authenticate", core=1 / scenario.gmac + python, interpreter=python, memory=1),)
    core = 1 / scenario.aes + value("stall") + python
    return (
        Step("open", core=core, interpreter=python, memory=2),
        Step("wipe", core=value("wipe"), memory=1),
    )


def _deliver(scenario: Scenario, run_bytes: int) -> Step:
    device = float(scenario.way is Way.DEVICE)
    if scenario.bridge is Bridge.PCIE:
        return Step("copy", memory=1, link=1, device=device, alone=scenario.link)
    seconds = 1 / scenario.link + value("toll") / run_bytes
    return Step("copy", core=seconds, memory=3, link=1, device=device, alone=1 / seconds)


def _setup(scenario: Scenario) -> float:
    """Give the seconds before the first segment; the plaintext loader is not charged for reading its headers."""
    segments = scenario.nbytes / MIB
    return (
        value("setup")
        + scenario.tensors * value("setup_tensor")
        + segments * value("setup_segment")
        + segments / scenario.ranks * value("setup_own")
    )


def _budget(scenario: Scenario) -> tuple[Budget, int]:
    """Choose threads, ring and cells as the loader does."""
    machine = Machine(cores=scenario.cores, ranks=scenario.ranks, lockable=None)
    chosen = decide(Budget(0, 0, 0), machine, copy_bytes=_COPY, in_host_memory=False)
    threads = chosen.readers + 2 * chosen.openers
    if scenario.copy_bytes:
        return replace(chosen, ring_bytes=threads * (scenario.copy_bytes + pages.PAGE)), scenario.copy_bytes
    return chosen, cell_bytes(chosen, segment=MIB, copy_bytes=_COPY)


def plan(scenario: Scenario) -> tuple[Plan, Pools]:
    """Give what one rank does and what it has."""
    budget, run_bytes = _budget(scenario)
    deliver = _deliver(scenario, run_bytes)
    blocking = scenario.bridge is Bridge.CONFIDENTIAL
    return Plan(
        nbytes=scenario.nbytes / scenario.ranks,
        run_bytes=run_bytes,
        readers=budget.readers,
        openers=budget.openers,
        cells=budget.ring_bytes // (run_bytes + pages.PAGE),
        read=_read(scenario),
        open=_open(scenario),
        deliver=deliver,
        delivery=Delivery.BLOCKING if blocking else Delivery.ASYNC,
        setup=0.0 if scenario.way is Way.PLAIN else _setup(scenario),
    ), Pools(
        cores=scenario.cores / scenario.ranks,
        memory=scenario.memory / scenario.ranks,
        disk=scenario.disk / scenario.ranks,
        link=deliver.alone,
        device=value("device"),
    )


@cache
def outcome(scenario: Scenario) -> Outcome:
    """Say how long the load takes and what holds it up."""
    return simulate(*plan(scenario))
