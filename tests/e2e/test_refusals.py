"""What an appliance must refuse, each with its own code and exit status; the right thing must still work afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import House


def test_a_grant_opens_nothing_after_a_restart(house: House) -> None:
    with house.agent():
        grant = house.grant()
    with house.agent():
        house.request()
        refused = house.lethe("grant", grant)
        assert (refused.status, refused.code) == (6, "grant.session")
        assert house.status()["state"] == "REQUESTED"
        house.serve()


def test_a_grant_loads_once(house: House) -> None:
    with house.agent():
        grant = house.grant()
        assert house.lethe("grant", grant).status == 0
        again = house.lethe("grant", grant)
        assert (again.status, again.code) == (6, "agent.state")
        assert house.status()["state"] == "SERVING"


def test_a_grant_needs_a_request(house: House) -> None:
    with house.agent():
        grant = house.grant()
    with house.agent():
        refused = house.lethe("grant", grant)
        assert (refused.status, refused.code) == (6, "agent.state")


def test_a_challenge_by_another_owner_is_refused(house: House) -> None:
    other = house.root / "other"
    house.make_owner(other)
    house.pack(house.media / "other-bundle", keys=other)
    challenge = house.challenge(keys=other, bundle=house.media / "other-bundle")
    with house.agent():
        refused = house.lethe("request", "--challenge", challenge, "--out", house.fresh("request"))
    assert (refused.status, refused.code) == (6, "signature.unknown")


def test_a_challenge_for_another_bundle_is_refused(house: House) -> None:
    house.pack(house.media / "second")
    challenge = house.challenge(bundle=house.media / "second")
    with house.agent():
        refused = house.lethe("request", "--challenge", challenge, "--out", house.fresh("request"))
    assert (refused.status, refused.code) == (6, "challenge.manifest")


@pytest.mark.parametrize("kind", ["challenge", "grant"])
def test_a_flipped_bit_in_an_envelope_is_refused(house: House, kind: str) -> None:
    with house.agent():
        path = house.challenge() if kind == "challenge" else house.grant()
        data = bytearray(path.read_bytes())
        data[data.index(b'"payload":"') + 40] ^= 1
        path.write_bytes(data)
        if kind == "challenge":
            refused = house.lethe("request", "--challenge", path, "--out", house.fresh("request"))
        else:
            refused = house.lethe("grant", path)
        assert refused.status == 6
        assert refused.code in ("signature.wrong", "json.base64")


def test_a_flipped_bit_in_a_segment_stops_the_load_and_everything_is_wiped(house: House) -> None:
    data = house.bundle / "data-00000.seal"
    with house.agent() as agent:
        grant = house.grant()
        with data.open("r+b") as file:
            file.seek(data.stat().st_size - 8192)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        refused = house.lethe("grant", grant)
        assert (refused.status, refused.code) == (7, "segment.tag")
        assert agent.wait(60) == 7
    assert house.journal()[-3:] == ["load.failed", "zeroize.begin", "zeroize.done"]


def test_a_bundle_of_another_owner_keeps_the_agent_from_starting(house: House, tmp_path: Path) -> None:
    other = house.root / "other"
    house.make_owner(other)
    shutil.copy(other / "owner.pub.json", house.media / "owner.pub.json")
    refused = house.lethe("agent")
    assert refused.status in (2, 6)
    refused = house.run("appliance.cli", "--config", house.config, "agent")
    assert refused.status == 6
    assert "signature.unknown" in refused.err


def test_a_ring_that_holds_no_segment_keeps_the_agent_from_starting(house: House) -> None:
    house.config.write_text(house.config.read_text().replace("ring_mib = 4", "ring_mib = 1"))
    refused = house.run("appliance.cli", "--config", house.config, "agent")
    assert refused.status == 78
    assert "ring.size" in refused.err


def test_a_second_agent_is_refused(house: House) -> None:
    with house.agent():
        second = house.run("appliance.cli", "--config", house.config, "agent")
        assert second.status == 74
        assert "journal.busy" in second.err
        assert house.status()["state"] == "HARDENED"
