"""The tables of docs/scaling.md, made from the simulation: the program writes them, a test holds the page to them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.scaling.inputs import GB, INPUTS, MIB, value
from benchmarks.scaling.measured import Comparison, Measured
from benchmarks.scaling.pipeline import Outcome
from benchmarks.scaling.scenarios import Bridge, Scenario, Way, outcome, plan

# The public figure, of InstantTensor's own benchmark page.
PUBLIC_BYTES: Final = 688.6 * GB
PUBLIC_SECONDS: Final = 15.3

LIMITS: Final = {
    "cores": "cores",
    "openers": "opener threads",
    "readers": "reader threads",
    "memory": "memory bus",
    "disk": "medium",
    "link": "bridge",
    "device": "device",
    "interpreter": "interpreter",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """One of the two machines, with plain PCIe or in confidential mode.

    Attributes:
        name: for people.
        bridge: how bytes get to a device.
        link: bytes per second of it.
    """

    name: str
    bridge: Bridge
    link: float


PCIE: Final = Machine("8 x H200 or 8 x B200, PCIe", Bridge.PCIE, value("pcie5"))
HOPPER: Final = Machine("8 x H200, confidential", Bridge.CONFIDENTIAL, value("bridge_hopper"))
BLACKWELL: Final = Machine("8 x B200, confidential", Bridge.CONFIDENTIAL, value("bridge_blackwell"))
MACHINES: Final = (PCIE, HOPPER, BLACKWELL)

MEDIA: Final = {
    "one USB disk": value("usb"),
    "1 NVMe": value("nvme5"),
    "2 NVMe": 2 * value("nvme5"),
    "4 NVMe": 4 * value("nvme5"),
    "8 NVMe": 8 * value("nvme5"),
}
PROCESSORS: Final = {
    "Zen 3": (value("aes_zen3"), value("gmac_zen3")),
    "this machine": (value("aes_here"), value("gmac_avx512")),
    "Ice Lake": (value("aes_icelake"), value("gmac_avx512")),
    "Turin": (value("aes_turin"), value("aes_turin")),
}
CORES: Final = (8, 16, 24, 32, 64)


def scenario(machine: Machine, *, way: Way = Way.HOST, disk: float = MEDIA["4 NVMe"], cores: int = 32) -> Scenario:
    """Give the usual case: 700 GB, four NVMe drives, 32 cores of Ice Lake's speed."""
    aes, gmac = PROCESSORS["Ice Lake"]
    return Scenario(
        way=way,
        bridge=machine.bridge,
        link=machine.link,
        disk=disk,
        cores=cores,
        aes=aes,
        gmac=gmac,
        nbytes=value("model"),
    )


def _table(heads: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _seconds(found: Outcome) -> str:
    return f"{found.seconds:.0f}" if found.seconds >= 20 else f"{found.seconds:.1f}"


def _with_limit(found: Outcome) -> str:
    return f"{_seconds(found)} ({LIMITS[found.limit]})"


def short() -> str:
    """The answer in a few lines."""
    delivered = PUBLIC_BYTES / PUBLIC_SECONDS
    beside = outcome(replace(scenario(PCIE, disk=delivered), nbytes=PUBLIC_BYTES))
    ready = plan(replace(scenario(PCIE, disk=delivered), nbytes=PUBLIC_BYTES))[0].setup

    def pair(machine: Machine, medium: str) -> str:
        plain, host = (outcome(scenario(machine, way=way, disk=MEDIA[medium])) for way in (Way.PLAIN, Way.HOST))
        return f"{_seconds(host)} s against {_seconds(plain)} s in plaintext ({LIMITS[host.limit]})"

    return "\n".join(
        [
            f"- Beside the public figure ({PUBLIC_SECONDS} s for 688.6 GB, plaintext, measured): {_seconds(beside)} s "
            f"predicted when the storage gives as much. {ready:.1f} s of that pass before the first segment.",
            f"- 700 GB from four NVMe drives, PCIe: {pair(PCIE, '4 NVMe')}. From eight: {pair(PCIE, '8 NVMe')}.",
            f"- In confidential mode, four drives, 8 x H200: {pair(HOPPER, '4 NVMe')}.",
            f"- From one USB disk, whatever the machine: {pair(PCIE, 'one USB disk')}.",
        ]
    )


def inputs() -> str:
    """Every input with its source."""
    rows = ([f"`{name}`", one.what, one.shown, one.source, one.sure] for name, one in INPUTS.items())
    return _table(["name", "what", "value", "source", "kind"], rows)


def public() -> str:
    """Beside the best public plaintext loader, on storage that gives what it got."""
    delivered = PUBLIC_BYTES / PUBLIC_SECONDS

    def rows() -> Iterator[Sequence[str]]:
        yield "InstantTensor, plaintext, **measured**", f"{PUBLIC_SECONDS}", "1.00", "its storage"
        for name, way in (
            ("plaintext, modelled", Way.PLAIN),
            ("sealed, opened on the host", Way.HOST),
            ("sealed, opened on the device", Way.DEVICE),
        ):
            found = outcome(replace(scenario(PCIE, way=way, disk=delivered), nbytes=PUBLIC_BYTES))
            yield name, _seconds(found), f"{found.seconds / PUBLIC_SECONDS:.2f}", LIMITS[found.limit]

    return _table(["688.6 GB, 8 x H200, storage at 45 GB/s, 32 cores", "s", "times the public figure", "limit"], rows())


def media() -> str:
    """By medium, for each machine: plaintext, opened on the host, opened on the device."""

    def rows() -> Iterator[Sequence[str]]:
        for machine in MACHINES:
            for name, disk in MEDIA.items():
                plain, host, device = (outcome(scenario(machine, way=way, disk=disk)) for way in Way)
                yield (
                    machine.name,
                    name,
                    _with_limit(plain),
                    _with_limit(host),
                    f"{host.seconds / plain.seconds:.2f}",
                    _with_limit(device),
                )

    heads = [
        "machine",
        "medium",
        "plaintext, s",
        "opened on the host, s",
        "host / plaintext",
        "opened on the device, s",
    ]
    return _table(heads, rows())


def cores() -> str:
    """By cores and processor, four NVMe drives, plain PCIe."""

    def rows() -> Iterator[Sequence[str]]:
        for way, text in ((Way.HOST, "host"), (Way.DEVICE, "device")):
            for name, (aes, gmac) in PROCESSORS.items():
                found = (outcome(replace(scenario(PCIE, way=way, cores=count), aes=aes, gmac=gmac)) for count in CORES)
                yield (text, f"{name}, {aes / GB:.1f} GB/s", *map(_with_limit, found))

    return _table(["opened on", "AES per core", *(f"{count} cores" for count in CORES)], rows())


def confidential() -> str:
    """By cores in confidential mode, four NVMe drives."""

    def rows() -> Iterator[Sequence[str]]:
        for machine in (HOPPER, BLACKWELL):
            for way, text in ((Way.PLAIN, "plaintext"), (Way.HOST, "host"), (Way.DEVICE, "device")):
                found = (outcome(scenario(machine, way=way, cores=count)) for count in CORES)
                yield (machine.name, text, *map(_with_limit, found))

    return _table(["machine", "opened on", *(f"{count} cores" for count in CORES)], rows())


def copies() -> str:
    """By the size of a copy in confidential mode: what the toll costs."""
    sizes = (1, 4, 8, 16, 32, 64)

    def rows() -> Iterator[Sequence[str]]:
        for machine in (HOPPER, BLACKWELL):
            found = (
                outcome(replace(scenario(machine, disk=MEDIA["8 NVMe"], cores=64), copy_bytes=size * MIB))
                for size in sizes
            )
            yield (machine.name, *map(_with_limit, found))

    return _table(["8 NVMe, 64 cores, opened on the host", *(f"{size} MiB" for size in sizes)], rows())


def ranks() -> str:
    """By number of devices: a model of 70 GB, four NVMe drives, four cores to each device."""
    counts = (1, 2, 4, 8)

    def rows() -> Iterator[Sequence[str]]:
        for machine in MACHINES:
            found = (
                outcome(replace(scenario(machine, cores=4 * count), nbytes=70 * GB, tensors=1000, ranks=count))
                for count in counts
            )
            yield (machine.name.replace("8 x ", ""), *map(_with_limit, found))

    return _table(["70 GB, 4 NVMe, 4 cores a device", *(f"{count}" for count in counts)], rows())


def sensitivity() -> str:
    """What the usual case and the fast one become when one input is half or twice as large."""
    usual = scenario(PCIE)
    fast = scenario(PCIE, disk=MEDIA["8 NVMe"])
    secret = scenario(HOPPER)

    def times(name: str, factor: float) -> Callable[[Scenario], Scenario]:
        return lambda one: replace(one, **{name: getattr(one, name) * factor})

    changes: dict[str, Callable[[Scenario], Scenario]] = {
        "as above": lambda one: one,
        "medium half as fast": times("disk", 0.5),
        "AES half as fast": times("aes", 0.5),
        "AES twice as fast": times("aes", 2),
        "memory bus half as fast": times("memory", 0.5),
        "memory bus twice as fast": times("memory", 2),
        "bridge half as fast": times("link", 0.5),
        "bridge twice as fast": times("link", 2),
        "half the cores": lambda one: replace(one, cores=one.cores // 2),
    }

    def rows() -> Iterator[Sequence[str]]:
        for name, change in changes.items():
            yield (name, *(_with_limit(outcome(change(one))) for one in (usual, fast, secret)))

    heads = ["opened on the host, 32 cores", "PCIe, 4 NVMe", "PCIe, 8 NVMe", "H200 confidential, 4 NVMe"]
    return _table(heads, rows())


def comparison(measured: Measured, found: Sequence[Comparison]) -> str:
    """The model against what was measured."""
    rows = (
        [
            {"warm": "warm page cache", "cold": "cold, past the cache"}[one.state],
            f"{statistics.median(one.measured) / GB:.2f}",
            f"{statistics.median(one.modelled) / GB:.2f}",
            f"{one.error:+.0%}",
            LIMITS[one.limit],
        ]
        for one in found
    )
    heads = ["state", "measured, GB/s", "modelled, GB/s", "error", "limit"]
    rounds = len(found[0].measured)
    source = f"`{measured.name}` ({measured.cpu}, {measured.openers} openers), medians of {rounds} rounds"
    return f"From {source}:\n\n" + _table(heads, rows)


PREDICTIONS: Final[dict[str, Callable[[], str]]] = {
    "short": short,
    "inputs": inputs,
    "public": public,
    "media": media,
    "cores": cores,
    "confidential": confidential,
    "copies": copies,
    "ranks": ranks,
    "sensitivity": sensitivity,
}
