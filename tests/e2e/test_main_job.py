"""The main job through the two programs, on a tiny model, and the ways it must end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.e2e.conftest import NODE, House, wait_until

PROMPT = [{"role": "user", "content": "lethe-prompt-canary-90f3e1"}]


def test_from_challenge_to_wipe(house: House) -> None:
    with house.agent() as agent:
        assert house.status()["state"] == "HARDENED"
        request = house.request()
        verdict = house.lethe_owner("appraise", request, "--bundle", house.bundle)
        assert verdict.status == 2  # appraise takes no passphrase
        verdict = house.run(
            "provisioning.cli", "appraise", request, "--bundle", house.bundle, "--keys", house.owner, "--json"
        )
        assert verdict.json["result"]["assurance"] == "lab"

        granted = house.lethe("grant", house.grant(request))
        assert granted.status == 0, granted.err
        status = granted.json
        assert (status["state"], status["simulated"], status["assurance"]) == ("SERVING", True, "lab")
        (device,) = status["devices"]
        assert device["opened_bytes"] == device["total_bytes"] > 0
        assert 0 < device["resident"]["peak_plaintext_bytes"] <= device["resident"]["ring_bytes"]

        with house.client(status) as client:
            plain = client.chat.completions.create(model="tiny", messages=PROMPT, max_tokens=8, temperature=0)  # type: ignore[arg-type]
            chunks = list(
                client.chat.completions.create(  # type: ignore[call-overload]
                    model="tiny", messages=PROMPT, max_tokens=8, temperature=0, stream=True
                )
            )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert plain.choices[0].message.content == streamed
        assert house.lethe("status").status == 0

        wiped = house.zeroize()
        assert wiped.status == 0, wiped.err
        (device,) = wiped.json["devices"]
        assert device["wiped"]["overwritten_bytes"] >= device["resident"]["weight_bytes"]
        assert device["wiped"]["read_back_bytes"] == device["wiped"]["overwritten_bytes"]
        assert device["wiped"]["nonzero_bytes"] == 0
        assert agent.wait(60) == 0

    (record,) = (house.root / "state").glob("wipe-*")
    checked = house.run("provisioning.cli", "check-wipe", record, "--request", request, "--json")
    assert checked.status == 0, checked.err
    assert checked.json["wipe"]["complete"] is True
    assert house.searcher("lethe-prompt-canary-90f3e1").search_tree(house.root).hits == []
    assert house.searcher().search_tree(house.model).hits  # the same search finds the plaintext where it is


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_wipes_and_ends_with_zero(house: House, number: signal.Signals) -> None:
    with house.agent() as agent:
        house.serve()
        agent.send_signal(number)
        assert agent.wait(60) == 0
    assert house.journal()[-2:] == ["zeroize.begin", "zeroize.done"]
    assert house.lethe("status").status == 69


def test_an_agent_that_loaded_nothing_wipes_its_keys_and_ends_with_zero(house: House) -> None:
    with house.agent() as agent:
        assert house.zeroize().status == 0
        assert agent.wait(60) == 0
    assert house.journal()[-1] == "zeroize.done"


def test_the_end_of_the_grant_ends_the_service(tmp_path: Path) -> None:
    house = House(tmp_path / "house", seconds=30)
    with house.agent() as agent:
        house.serve()
        assert agent.wait(90) == 0
    assert [event for event in house.journal() if event.startswith(("grant.e", "zeroize"))] == [
        "grant.expired",
        "zeroize.begin",
        "zeroize.done",
    ]


def test_a_wrong_phrase_wipes_nothing(house: House) -> None:
    with house.agent():
        refused = house.lethe("zeroize", "--confirm", "ZEROIZE other")
        assert (refused.status, refused.code) == (6, "zeroize.confirm")
        assert house.status()["state"] == "HARDENED"


def test_zeroize_without_a_terminal_or_a_phrase_says_what_to_give(house: House) -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "appliance.cli", "--config", str(house.config), "zeroize"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert asked.returncode == 2
    assert f"--confirm 'ZEROIZE {NODE}'" in asked.stderr


def test_the_api_answers_503_until_the_model_is_resident(house: House) -> None:
    with house.agent(), house.client(house.status()) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(model="tiny", messages=PROMPT)  # type: ignore[call-overload]
        assert refused.value.status_code == 503


def test_a_client_that_hangs_up_frees_its_slot(house: House) -> None:
    with house.agent():
        status = house.serve()
        with house.client(status) as client:
            stream = client.chat.completions.create(  # type: ignore[call-overload]
                model="tiny", messages=PROMPT, max_tokens=128, stream=True
            )
            next(iter(stream))
            stream.close()
        wait_until(lambda: house.status()["devices"][0].get("engine", {}).get("kv_blocks_used", 1) == 0)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        pytest.param("{", 400, None, id="malformed JSON"),
        pytest.param(
            json.dumps({"model": "tiny", "messages": PROMPT, "pad": "x" * (65 << 10)}), 413, None, id="too large"
        ),
        pytest.param(
            json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 400}]}),
            400,
            "context_length_exceeded",
            id="longer than the context",
        ),
        pytest.param(json.dumps({"model": "other", "messages": PROMPT}), 404, "model_not_found", id="another model"),
    ],
)
def test_bad_requests_are_refused_and_the_next_one_served(
    serving: tuple[House, dict[str, object]], body: str, status: int, code: str | None
) -> None:
    house, state = serving
    with house.client(state) as client:
        answer = client._client.post(
            f"{client.base_url}chat/completions",
            content=body,
            headers={"authorization": f"Bearer {client.api_key}", "content-type": "application/json"},
        )
        assert answer.status_code == status
        assert answer.headers["x-lethe-platform"] == "SIMULATED"
        assert answer.json()["error"]["code"] == code or code is None
        good = client.chat.completions.create(model="tiny", messages=PROMPT, max_tokens=2)  # type: ignore[call-overload]
        assert good.usage.completion_tokens >= 1


@pytest.fixture(scope="module")
def serving(tiny_house: House, tmp_path_factory: pytest.TempPathFactory) -> object:
    house = tiny_house.copy(tmp_path_factory.mktemp("serving") / "house")
    with house.agent():
        yield house, house.serve()
