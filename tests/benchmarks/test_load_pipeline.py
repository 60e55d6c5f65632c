"""The simulation of the pipeline gives what can be worked out by hand, and never more than there is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling.pipeline import POOLS, Delivery, Plan, Pools, Step, rates, simulate

MB = 1e6
READ = Step("read", disk=1, alone=50 * MB)
OPEN = Step("open", core=1 / (20 * MB))
COPY = Step("copy", link=1, alone=30 * MB)


def plan(**changes: object) -> Plan:
    base = Plan(nbytes=500 * MB, run_bytes=MB, readers=2, openers=2, cells=8, read=(READ,), open=(OPEN,))
    return replace(base, **changes)  # type: ignore[arg-type]  # any field


def test_openers_alone_take_their_cores_time() -> None:
    outcome = simulate(plan(readers=0, read=(), openers=2), Pools(cores=2))
    assert outcome.seconds == pytest.approx(500 / 40, rel=0.01)
    assert outcome.limit == "cores"


def test_one_core_is_shared_by_two_openers() -> None:
    outcome = simulate(plan(readers=0, read=(), openers=2), Pools(cores=1))
    assert outcome.seconds == pytest.approx(500 / 20, rel=0.01)


def test_more_cores_than_threads_help_nobody() -> None:
    outcome = simulate(plan(readers=0, read=(), openers=1), Pools(cores=8))
    assert outcome.seconds == pytest.approx(500 / 20, rel=0.01)
    assert outcome.limit == "openers"


def test_slow_medium_hides_the_opening() -> None:
    outcome = simulate(plan(), Pools(cores=2, disk=10 * MB))
    assert outcome.seconds == pytest.approx(500 / 10, rel=0.01)
    assert outcome.limit == "disk"


def test_one_reader_is_as_fast_as_its_own_reads() -> None:
    outcome = simulate(plan(readers=1, openers=8), Pools(cores=8, disk=400 * MB))
    assert outcome.seconds == pytest.approx(500 / 50, rel=0.02)
    assert outcome.limit == "readers"


def test_one_cell_makes_reading_and_opening_take_turns() -> None:
    outcome = simulate(plan(readers=1, openers=1, cells=1), Pools(cores=1))
    assert outcome.seconds == pytest.approx(500 / 50 + 500 / 20, rel=0.01)


def test_copy_goes_on_while_the_opener_opens() -> None:
    pools = Pools(cores=2, link=30 * MB)
    outcome = simulate(plan(deliver=COPY, delivery=Delivery.ASYNC), pools)
    assert outcome.seconds == pytest.approx(500 / 30, rel=0.02)
    assert outcome.limit == "link"


def test_blocking_copies_go_one_at_a_time() -> None:
    slow = Step("copy", core=1 / (5 * MB), link=1, alone=5 * MB)
    outcome = simulate(plan(openers=4, deliver=slow, delivery=Delivery.BLOCKING), Pools(cores=4, link=5 * MB))
    assert outcome.seconds == pytest.approx(500 / 5, rel=0.01)


def test_blocking_copy_of_the_only_opener_adds_to_its_opening() -> None:
    slow = Step("copy", core=1 / (5 * MB), link=1, alone=5 * MB)
    outcome = simulate(plan(openers=1, deliver=slow, delivery=Delivery.BLOCKING), Pools(cores=2, link=5 * MB))
    assert outcome.seconds == pytest.approx(500 / 5 + 500 / 20, rel=0.02)


def test_interpreter_lets_one_thread_in_at_a_time() -> None:
    locked = Step("open", core=1 / (20 * MB), interpreter=1 / (20 * MB))
    outcome = simulate(plan(readers=0, read=(), openers=4, open=(locked,)), Pools(cores=4))
    assert outcome.seconds == pytest.approx(500 / 20, rel=0.01)
    assert outcome.limit == "interpreter"


def test_setup_comes_before_everything() -> None:
    quick, slow = (simulate(plan(setup=setup), Pools(cores=2)).seconds for setup in (0.0, 7.0))
    assert slow - quick == pytest.approx(7.0)


def test_a_long_load_goes_on_at_the_pace_of_its_beginning() -> None:
    short, long = (simulate(plan(nbytes=count * MB), Pools(cores=2, disk=60 * MB)).seconds for count in (1_000, 10_000))
    assert long == pytest.approx(10 * short, rel=0.02)


def test_a_light_thread_gets_what_it_can_use_and_a_heavy_one_the_rest() -> None:
    light = Step("light", core=0.1 / MB, alone=MB)
    heavy = Step("heavy", core=1 / MB)
    found = rates((light, heavy), (1, 2), Pools(cores=1))
    assert found == pytest.approx([MB, 0.45 * MB])


costs = st.floats(0, 1e-6, allow_subnormal=False)
step = st.builds(
    Step,
    name=st.just("any"),
    core=costs,
    interpreter=costs,
    memory=st.sampled_from((0.0, 1.0, 2.0)),
    disk=st.sampled_from((0.0, 1.0)),
    link=st.sampled_from((0.0, 1.0)),
    alone=st.floats(1e3, 1e9),
)


@given(
    st.lists(st.tuples(step, st.integers(0, 5)), min_size=1, max_size=5),
    st.floats(0.1, 16),
    st.tuples(*[st.floats(1e4, 1e9)] * 3),
)
def test_no_pool_gives_more_than_it_has_and_nothing_waits_without_a_reason(
    kinds: list[tuple[Step, int]], cores: float, others: tuple[float, float, float]
) -> None:
    steps, counts = tuple(kind for kind, _ in kinds), tuple(count for _, count in kinds)
    memory, disk, link = others
    pools = Pools(cores=cores, memory=memory, disk=disk, link=link)
    found = rates(steps, counts, pools)
    full = set()
    for pool in POOLS:
        used = sum(count * kind.need(pool) * rate for kind, count, rate in zip(steps, counts, found, strict=True))
        have = getattr(pools, pool)
        assert used <= have * (1 + 1e-6)
        if math.isfinite(have) and used >= have * (1 - 1e-6):
            full.add(pool)
    for kind, count, rate in zip(steps, counts, found, strict=True):
        assert rate <= kind.solo * (1 + 1e-6)
        if count and rate < kind.solo * (1 - 1e-6):
            assert any(kind.need(pool) for pool in full)
