"""Attacks 1 to 6: two commands at once, a journal that fails, processes that hang, against a whole appliance."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.control import RemoteError, ask
from attestation.strictjson import b64
from tests.e2e.conftest import NODE, House, wait_until


def at_once(socket_path: Path, *commands: tuple[str, Mapping[str, Any]]) -> list[str]:
    """Give commands at the same moment; tells how each ended, by event or code."""
    together = threading.Barrier(len(commands))
    ends = [""] * len(commands)

    def one(index: int, command: str, members: Mapping[str, Any]) -> None:
        together.wait()
        try:
            *_, last = ask(socket_path, command, members)
            ends[index] = str(last["event"])
        except RemoteError as error:
            ends[index] = error.code

    threads = [threading.Thread(target=one, args=(index, *command)) for index, command in enumerate(commands)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends


def test_1_a_request_beside_a_grant_does_not_cost_the_session(house: House) -> None:
    # The late request was an unforeseen event in the middle of the grant, and that ends in zeroizing.
    with house.agent():
        challenge = {"envelope": b64(house.challenge().read_bytes())}
        grant = {"envelope": b64(house.grant().read_bytes())}
        request, granted = at_once(house.root / "run" / "control.sock", ("request", challenge), ("grant", grant))
        assert granted == "done"
        assert request in ("done", "agent.state")
        assert house.status()["state"] == "SERVING"


def test_2_two_grants_at_once_load_one_model(house: House) -> None:
    with house.agent():
        grant = {"envelope": b64(house.grant().read_bytes())}
        ends = at_once(house.root / "run" / "control.sock", ("grant", grant), ("grant", grant))
        assert sorted(ends) == ["agent.state", "done"]
        assert house.journal().count("key.released") == 1


def test_3_no_grant_is_opened_after_a_wipe_began(house: House) -> None:
    # The key was released to a new process after "zeroize.begin", and the record of the wipe was lost.
    with house.agent() as agent:
        grant = {"envelope": b64(house.grant().read_bytes())}
        confirm = {"confirm": f"ZEROIZE {NODE}"}
        _, wiped = at_once(house.root / "run" / "control.sock", ("grant", grant), ("zeroize", confirm))
        assert wiped == "done"
        assert agent.wait(60) == 0
    events = house.journal()
    after = events[events.index("zeroize.begin") :]
    assert "key.released" not in after
    assert "zeroize.done" in after


def test_4_the_end_of_the_grant_ends_the_service_without_a_journal(tmp_path: Path) -> None:
    # The record of the end could not be written, the task died of it, and the model was served for ever.
    house = House(tmp_path / "house", seconds=30)
    with house.agent() as agent:
        house.serve()
        journal = house.root / "state" / "journal.jsonl"
        journal.rename(journal.with_suffix(".old"))
        journal.touch()
        wait_until(lambda: agent.poll() is not None)
        assert agent.returncode == 74  # shown, but it could not be recorded


def test_5_an_api_that_hangs_makes_no_complete_record(house: House) -> None:
    # It holds prompts, had to be killed, and the record said that every process had ended by itself.
    with house.agent() as agent:
        os.kill(house.serve()["processes"]["api"], signal.SIGSTOP)
        assert house.zeroize().status == 9
        assert agent.wait(60) == 9
    assert house.journal()[-1] == "zeroize.incomplete"


def test_6_a_rank_that_is_killed_ends_in_exit_9(house: House) -> None:
    with house.agent() as agent:
        os.kill(house.serve()["processes"]["rank 0"], signal.SIGKILL)
        assert agent.wait(60) == 9
    assert house.journal()[-1] == "zeroize.incomplete"
