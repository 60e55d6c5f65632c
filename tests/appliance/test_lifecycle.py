from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.lifecycle import Event, State, after, diagram

MAIN_ROAD = [
    (Event.PROCESS_HARDENED, State.HARDENED),
    (Event.REQUEST_MADE, State.REQUESTED),
    (Event.GRANT_ARRIVED, State.ANSWERED),
    (Event.EVIDENCE_APPRAISED, State.APPRAISED),
    (Event.GRANT_OPENED, State.GRANTED),
    (Event.LOAD_STARTED, State.LOADING),
    (Event.MODEL_RESIDENT, State.SERVING),
    (Event.GRANT_EXPIRED, State.DRAINING),
    (Event.DRAINED, State.ZEROIZING),
    (Event.WIPED, State.ZEROIZED),
]


def test_the_main_road_leads_from_cold_to_zeroized() -> None:
    state = State.COLD
    for event, expected in MAIN_ROAD:
        state = after(state, event)
        assert state is expected


@pytest.mark.parametrize("state", [state for state in State if state is not State.ZEROIZED])
@pytest.mark.parametrize("event", [Event.ZEROIZE_ASKED, Event.FAULT])
def test_every_state_can_be_ended_at_once(state: State, event: Event) -> None:
    assert after(state, event) is State.ZEROIZING


@pytest.mark.parametrize("event", list(Event))
def test_zeroized_has_no_way_out(event: Event) -> None:
    assert after(State.ZEROIZED, event) is State.ZEROIZED


def test_serving_has_one_way_in() -> None:
    ways = [(state, event) for state, event in product(State, Event) if after(state, event) is State.SERVING]
    assert ways == [(State.LOADING, Event.MODEL_RESIDENT)]


@given(st.lists(st.sampled_from(Event)))
def test_whatever_happens_serving_is_preceded_by_appraised_granted_and_loading(events: list[Event]) -> None:
    state, history = State.COLD, [State.COLD]
    for event in events:
        state = after(state, event)
        history.append(state)
    if State.SERVING in history:
        until = history[: history.index(State.SERVING)]
        assert until[-3:] == [State.APPRAISED, State.GRANTED, State.LOADING]


def test_an_unforeseen_event_ends_in_forgetting() -> None:
    assert after(State.HARDENED, Event.MODEL_RESIDENT) is State.ZEROIZING


def test_the_diagram_names_every_state() -> None:
    assert all(state.value in diagram() for state in State)
