"""The life of one appliance as a table: (state, event) -> state. No I/O, no clock, no conditions.

Every state has an edge to ZEROIZING, and a pair that is not in the table leads there too: what nobody foresaw must end
in forgetting. ZEROIZED has no way out but the end of the process. The diagram in docs/lifecycle.md is made from it.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Where the appliance is."""

    COLD = "COLD"
    HARDENED = "HARDENED"
    REQUESTED = "REQUESTED"
    ANSWERED = "ANSWERED"
    APPRAISED = "APPRAISED"
    GRANTED = "GRANTED"
    LOADING = "LOADING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    ZEROIZING = "ZEROIZING"
    ZEROIZED = "ZEROIZED"


class Event(Enum):
    """What happened; the agent reports it after the fact."""

    PROCESS_HARDENED = "process hardened"
    REQUEST_MADE = "key request made"
    GRANT_ARRIVED = "signed grant arrived"
    GRANT_REFUSED = "grant refused"
    EVIDENCE_APPRAISED = "own evidence appraised"
    GRANT_OPENED = "grant opened"
    LOAD_STARTED = "load started"
    MODEL_RESIDENT = "model resident"
    GRANT_EXPIRED = "grant expired"
    DRAINED = "last answer finished"
    ZEROIZE_ASKED = "zeroize asked"
    FAULT = "fault"
    WIPED = "wipe finished"


_TABLE: dict[tuple[State, Event], State] = {
    (State.COLD, Event.PROCESS_HARDENED): State.HARDENED,
    (State.HARDENED, Event.REQUEST_MADE): State.REQUESTED,
    # A request may be lost on the way; another answers a fresh challenge with the same session.
    (State.REQUESTED, Event.REQUEST_MADE): State.REQUESTED,
    (State.REQUESTED, Event.GRANT_ARRIVED): State.ANSWERED,
    (State.ANSWERED, Event.EVIDENCE_APPRAISED): State.APPRAISED,
    # A wrong file on the stick must not cost the session: the right grant may still come.
    (State.ANSWERED, Event.GRANT_REFUSED): State.REQUESTED,
    (State.APPRAISED, Event.GRANT_REFUSED): State.REQUESTED,
    (State.APPRAISED, Event.GRANT_OPENED): State.GRANTED,
    (State.GRANTED, Event.LOAD_STARTED): State.LOADING,
    (State.LOADING, Event.MODEL_RESIDENT): State.SERVING,
    (State.SERVING, Event.GRANT_EXPIRED): State.DRAINING,
    (State.DRAINING, Event.DRAINED): State.ZEROIZING,
    (State.ZEROIZING, Event.WIPED): State.ZEROIZED,
}
_TABLE |= {(state, Event.ZEROIZE_ASKED): State.ZEROIZING for state in State if state is not State.ZEROIZED}
_TABLE |= {(state, Event.FAULT): State.ZEROIZING for state in State if state is not State.ZEROIZED}


def after(state: State, event: Event) -> State:
    """Give the state that follows; an unforeseen pair gives ZEROIZING, and ZEROIZED stays."""
    if state is State.ZEROIZED:
        return State.ZEROIZED
    return _TABLE.get((state, event), State.ZEROIZING)


def diagram() -> str:
    """Give the table as a Mermaid state diagram; the edges to ZEROIZING are drawn once, from all."""
    common = {Event.ZEROIZE_ASKED, Event.FAULT}
    lines = ["stateDiagram-v2", "    [*] --> COLD"]
    lines += [
        f"    {state.value} --> {target.value}: {event.value}"
        for (state, event), target in _TABLE.items()
        if event not in common
    ]
    lines += ['    state "any state" as ANY', "    ANY --> ZEROIZING: zeroize asked, fault, or anything unforeseen"]
    lines += ["    ZEROIZED --> [*]"]
    return "\n".join(lines) + "\n"
