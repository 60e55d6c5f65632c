"""A discrete-event simulation of the loader's pipeline for one rank.

Reader threads take a free cell and fill it; opener threads take a filled one, open it and hand it to the device; the
cell is free again when the device has it. Warm files on a CPU slot have no readers: openers map and open by
themselves. All runs are of one size, so cells and runs are counted, not told apart.

What goes on at the same time shares pools: cores, memory bandwidth, disk, link to the device, the device, and the
interpreter's lock. Between two events every step moves at a constant rate. Cores are shared as a fair scheduler does:
all get the same share of a core until one has what it can use, or a pool it needs is empty.

Ranks are alike, so one is simulated with its share of the machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum

POOLS = ("cores", "interpreter", "memory", "disk", "link", "device")

# A step that needs no core still has to be compared with those that do: a terabyte per core-second.
_FREE = 1e-12
# Runs that are simulated one by one; beyond them the pace of the second half goes on.
_WINDOW = 1024
# No step takes equally long twice; without that, threads of one kind would march in step, as they never do for long.
_SPREAD = 0.3
# A pool with less than this share in use is not what holds a load up.
_FULL = 0.95


class Delivery(Enum):
    """How a run reaches the device."""

    NONE = "the opener puts it in its place"
    ASYNC = "a copy that goes on while the opener opens the next"
    BLOCKING = "a copy that holds its thread, one at a time for the whole rank"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that is done to every byte of a run, by one thread or by the device's copy engine.

    Attributes:
        name: for people.
        core: seconds of a core per byte.
        interpreter: seconds under the interpreter's lock per byte; part of ``core``.
        memory: times the byte crosses the memory bus.
        disk: 1 when the byte comes from the disk.
        link: 1 when it crosses to the device.
        device: 1 when the device computes on it.
        alone: most bytes per second when nothing else goes on; without a bound, what one core does.
    """

    name: str
    core: float = 0.0
    interpreter: float = 0.0
    memory: float = 0.0
    disk: float = 0.0
    link: float = 0.0
    device: float = 0.0
    alone: float = math.inf

    @property
    def solo(self) -> float:
        """Bytes per second of one thread that has all to itself."""
        return min(self.alone, 1 / self.core if self.core else math.inf)

    def need(self, pool: str) -> float:
        """Units of a pool per byte."""
        return float(self.core if pool == "cores" else getattr(self, pool))


@dataclass(frozen=True, slots=True)
class Pools:
    """One rank's share of the machine.

    Attributes:
        cores: how many; fractions are allowed.
        memory: bytes per second over the memory bus.
        disk: bytes per second of the medium.
        link: bytes per second to the device.
        device: bytes per second that the device can compute on.
        interpreter: interpreters; a rank is one process.
    """

    cores: float
    memory: float = math.inf
    disk: float = math.inf
    link: float = math.inf
    device: float = math.inf
    interpreter: float = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank does.

    Attributes:
        nbytes: bytes to load.
        run_bytes: bytes of one run, which is also one cell and one copy.
        readers: reader threads; 0 when openers fetch by themselves.
        openers: opener threads.
        cells: cells of the ring.
        read: steps of a reader.
        open: steps of an opener.
        deliver: the copy to the device.
        delivery: how it goes.
        setup: seconds before the first run.
    """

    nbytes: float
    run_bytes: float
    readers: int
    openers: int
    cells: int
    read: tuple[Step, ...]
    open: tuple[Step, ...]
    deliver: Step | None = None
    delivery: Delivery = Delivery.NONE
    setup: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.

    Attributes:
        seconds: from start to the last byte on the device.
        busy: share of each pool, and of the time of ``readers`` and ``openers``, in use in the steady state.
    """

    seconds: float
    busy: dict[str, float]

    @property
    def limit(self) -> str:
        """Name what holds the load up: a pool that is used up, or else the threads that have no pause."""
        pools = {name: share for name, share in self.busy.items() if name in POOLS}
        name = max(pools, key=lambda name: pools[name])
        return name if pools[name] >= _FULL else max(self.busy, key=lambda name: self.busy[name])


@dataclass(slots=True)
class _Gate:
    """A counted thing to be taken, such as free cells."""

    count: int
    waiting: list[int] = field(default_factory=list)


_Take = tuple[str, _Gate]
_Thread = Generator["_Take | int", None, None]


def rates(steps: Sequence[Step], counts: Sequence[int], pools: Pools) -> list[float]:
    """Share the pools out.

    Args:
        steps: the kinds of steps.
        counts: how many of each kind go on now.
        pools: what there is.

    Returns:
        Bytes per second of one of each kind.
    """
    given = [0.0] * len(steps)
    active = {kind for kind, count in enumerate(counts) if count}
    left = {pool: getattr(pools, pool) for pool in POOLS}
    while active:
        weight = {kind: max(steps[kind].core, _FREE) for kind in active}
        level = min(steps[kind].solo * weight[kind] for kind in active)
        full: str | None = None
        for pool, rest in left.items():
            load = sum(counts[kind] * steps[kind].need(pool) / weight[kind] for kind in active)
            if load and rest / load < level:
                level, full = rest / load, pool
        done = {
            kind
            for kind in active
            if (steps[kind].need(full) if full else steps[kind].solo * weight[kind] <= level * (1 + 1e-9))
        }
        for kind in done:
            given[kind] = level / weight[kind]
            for pool in left:
                left[pool] = max(0.0, left[pool] - counts[kind] * steps[kind].need(pool) * given[kind])
        active -= done
    return given


class _Simulation:
    """One rank's threads, and the clock."""

    def __init__(self, plan: Plan, pools: Pools, runs: int, supply: float) -> None:
        self.plan, self.pools, self.runs = plan, pools, runs
        deliver = (plan.deliver,) if plan.deliver else ()
        self.steps = (*plan.read, *plan.open, *deliver)
        self.opening = len(plan.read) + len(plan.open)
        self.counts = [0] * len(self.steps)
        self.known: dict[tuple[int, ...], list[float]] = {}
        self.dice = random.Random(0)
        self.owed: dict[int, float] = {}
        self.threads: list[_Thread] = []
        self.work: dict[int, tuple[int, float]] = {}
        self.now = 0.0
        self.left = supply
        self.finished: list[float] = []
        self.used = dict.fromkeys((*POOLS, "readers", "openers"), 0.0)
        self.free = _Gate(max(plan.cells, 1))
        self.filled = _Gate(0)
        self.bridge = _Gate(1)
        self.marks: list[tuple[float, dict[str, float]]] = []

    def reader(self) -> _Thread:
        while True:
            yield "take", self.free
            if not self.left:
                self.give(self.free)
                return
            self.left -= 1
            yield from range(len(self.plan.read))
            self.give(self.filled)

    def opener(self) -> _Thread:
        first = len(self.plan.read)
        under_way = _Gate(2)
        while True:
            if self.plan.readers:
                yield "take", self.filled
            elif self.left:
                self.left -= 1
                yield from range(first)
            else:
                return
            yield from range(first, first + len(self.plan.open))
            if self.plan.delivery is Delivery.ASYNC:
                yield "take", under_way
                self.start(self.copy(under_way))
                continue
            if self.plan.delivery is Delivery.BLOCKING:
                yield "take", self.bridge
                yield len(self.steps) - 1
                self.give(self.bridge)
            self.finish()

    def copy(self, under_way: _Gate) -> _Thread:
        yield len(self.steps) - 1
        self.give(under_way)
        self.finish()

    def finish(self) -> None:
        self.finished.append(self.now)
        if len(self.finished) == self.runs // 2 or len(self.finished) == self.runs:
            self.marks.append((self.now, dict(self.used)))
        if self.plan.readers:
            self.give(self.free)

    def give(self, gate: _Gate) -> None:
        gate.count += 1
        if gate.waiting:
            gate.count -= 1
            self.resume(gate.waiting.pop(0))

    def start(self, thread: _Thread) -> None:
        self.threads.append(thread)
        self.resume(len(self.threads) - 1)

    def resume(self, number: int) -> None:
        for asked in self.threads[number]:
            if isinstance(asked, int):
                self.counts[asked] += 1
                self.work[number] = (asked, self.plan.run_bytes * self.size(asked))
                return
            gate = asked[1]
            if not gate.count:
                gate.waiting.append(number)
                return
            gate.count -= 1

    def size(self, kind: int) -> float:
        """Give the size of a step as a share of the usual; each second one makes up for the one before."""
        owed = self.owed.pop(kind, None)
        if owed is None:
            share = self.dice.uniform(1 - _SPREAD, 1 + _SPREAD)
            self.owed[kind] = 2 - share
            return share
        return owed

    def run(self) -> None:
        for _ in range(self.plan.readers):
            self.start(self.reader())
        for _ in range(self.plan.openers):
            self.start(self.opener())
        while len(self.finished) < self.runs:
            self.advance()

    def advance(self) -> None:
        """Go on to the next event."""
        key = tuple(self.counts)
        speed = self.known.get(key)
        if speed is None:
            speed = self.known[key] = rates(self.steps, key, self.pools)
        wait = min(rest / speed[kind] for kind, rest in self.work.values())
        self.now += wait
        for kind, count in enumerate(key):
            if count:
                moved = count * speed[kind] * wait
                for pool in POOLS:
                    self.used[pool] += moved * self.steps[kind].need(pool)
                if kind < len(self.plan.read):
                    self.used["readers"] += count * wait
                elif kind < self.opening or self.plan.delivery is Delivery.BLOCKING:
                    self.used["openers"] += count * wait
        done = []
        for number, (kind, rest) in self.work.items():
            rest -= speed[kind] * wait
            self.work[number] = (kind, rest)
            if rest <= 1e-6 * self.plan.run_bytes:
                done.append(number)
        for number in done:
            kind, _ = self.work.pop(number)
            self.counts[kind] -= 1
        for number in done:
            self.resume(number)


def simulate(plan: Plan, pools: Pools) -> Outcome:
    """Say how long one rank takes, and what is in use meanwhile."""
    whole = plan.nbytes / plan.run_bytes
    runs = max(2, min(_WINDOW, math.ceil(whole)))
    # A window of a longer load must not end with readers that have nothing left to do.
    simulation = _Simulation(plan, pools, runs, runs if whole <= runs else math.inf)
    simulation.run()
    (half, before), (end, after) = simulation.marks
    pace = (end - half) / (runs - runs // 2)
    most = {pool: getattr(pools, pool) for pool in POOLS} | {"readers": plan.readers, "openers": plan.openers}
    busy = {
        name: (after[name] - before[name]) / (end - half) / amount
        for name, amount in most.items()
        if amount and math.isfinite(amount)
    }
    return Outcome(plan.setup + end + pace * (whole - runs), busy)
