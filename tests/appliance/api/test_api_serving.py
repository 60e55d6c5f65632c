"""When requests are served: states, the queue, time limits, and clients or engines that go away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from appliance.protocol import Admit, Drain, Tokens
from tests.sim import chat_model
from tests.sim.api_process import MODEL, ApiProcess
from tests.sim.chat_model import end_id, ids
from tests.sim.engine_peer import PATIENCE, begins, says

Start = Callable[..., ApiProcess]
HELLO: Any = [{"role": "user", "content": "hello"}]
BODY = b'{"model": "tiny-chat", "messages": [{"role": "user", "content": "hello"}]}'


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **fields})


def refusal(client: openai.OpenAI, **fields: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, **fields)
    return caught.value


def request_bytes(api: ApiProcess, body: bytes = BODY) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {api.key}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def test_health_needs_no_key_and_says_what_the_platform_is(api: ApiProcess) -> None:
    answer = api.get("/health")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "state": "serving", "platform": "SIMULATED"}


def test_says_nothing_of_a_platform_without_a_banner(start: Start) -> None:
    api = start(platform_banner="")
    answer = api.get("/health")
    assert answer.json()["platform"] == ""
    assert "x-lethe-platform" not in answer.headers


def test_lists_the_model(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.owned_by) == (MODEL, "lethe")
    assert client.models.retrieve(MODEL).id == MODEL


def test_knows_no_other_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("admitted", [True, False], ids=["without a model", "before admission"])
def test_loading_answers_503_with_a_hint_when_to_retry(start: Start, admitted: bool) -> None:
    api = start()
    if admitted:
        api.tell(Admit(open=True))
    else:
        api.engine.ready(chat_model.ready())
    assert (api.get("/health").status_code, api.get("/health").json()["state"]) == (503, "loading")
    with api.client() as client:
        error = refusal(client)
        assert (error.status_code, error.code, error.response.headers["retry-after"]) == (503, "not_serving", "5")
        with pytest.raises(openai.InternalServerError):
            client.models.list()


def test_closing_admission_ends_a_running_answer_with_an_error(start: Start) -> None:
    api = start()
    api.serve()
    api.engine.script = begins(ids("hello"))
    with api.client() as client:
        chunks = ask(client, stream=True)
        assert [next(chunks).choices[0].delta.content for _ in range(2)] == ["", "hello"]
        api.tell(Admit(open=False))
        with pytest.raises(openai.APIError) as caught:
            list(chunks)
        assert caught.value.code == "not_serving"
        assert api.engine.next_cancel() == api.engine.next_submit().request
        api.wait_for_state("draining")
        assert refusal(client).status_code == 503


def test_draining_lets_running_answers_finish_and_refuses_new_ones(start: Start) -> None:
    api = start()
    api.serve()
    api.engine.script = begins(ids("hello"))
    with api.client() as client:
        chunks = ask(client, stream=True)
        assert next(chunks).choices[0].delta.role == "assistant"
        api.tell(Drain())
        api.wait_for_state("draining")
        assert refusal(client).status_code == 503
        api.engine.send(Tokens(api.engine.next_submit().request, ids(" world"), "length"))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello world"


def test_idle_process_says_so_as_soon_as_it_is_told_to_drain(start: Start) -> None:
    api = start()
    api.tell(Drain())
    assert api.stats.get(timeout=PATIENCE).active == 0


def test_admission_can_open_again(start: Start) -> None:
    api = start()
    api.serve()
    api.tell(Admit(open=False))
    api.wait_for_state("draining")
    api.tell(Admit(open=True))
    api.wait_for_state("serving")


def test_loss_of_the_engine_ends_running_and_new_answers_with_503(start: Start) -> None:
    api = start()
    api.serve()
    api.engine.script = begins(ids("hello"))
    with api.client() as client:
        chunks = ask(client, stream=True)
        next(chunks)
        api.engine.close()
        with pytest.raises(openai.APIError) as caught:
            list(chunks)
        assert caught.value.code == "not_serving"
        api.wait_for_state("engine_lost")
        assert refusal(client).status_code == 503


def test_engine_that_breaks_off_an_answer_is_an_error_not_an_end(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = lambda submit: (Tokens(submit.request, [], "cancelled"),)
    assert refusal(client).status_code == 503


def test_full_queue_answers_429_and_frees_its_places(start: Start) -> None:
    api = start(max_queue=2)
    api.serve()
    api.engine.script = begins(ids("hello"))
    with api.client() as client, ask(client, stream=True, n=2) as chunks:
        next(chunks)
        error = refusal(client)
        assert (error.status_code, error.code, error.response.headers["retry-after"]) == (429, "queue_full", "1")
        for _ in range(2):
            api.engine.send(Tokens(api.engine.next_submit().request, [], "length"))
        assert len(list(chunks)) > 0
        api.engine.script = says(ids("free"), end=end_id())
        assert ask(client, n=2).choices[1].message.content == "free"


def test_more_answers_than_places_can_never_be_served(start: Start) -> None:
    api = start(max_queue=2)
    api.serve()
    with api.client() as client:
        error = refusal(client, n=3)
    assert (error.status_code, error.param) == (400, "n")


def test_refused_requests_give_their_place_back(start: Start) -> None:
    api = start(max_queue=1)
    api.serve()
    api.engine.script = says(ids("hello"), end=end_id())
    with api.client() as client:
        for _ in range(3):
            assert refusal(client, model="other").status_code == 404
        assert ask(client).choices[0].message.content == "hello"


def test_client_that_hangs_up_on_a_stream_frees_its_slot(api: ApiProcess, client: openai.OpenAI) -> None:
    api.engine.script = begins(ids("hello"))
    chunks = ask(client, stream=True)
    next(chunks)
    chunks.close()
    assert api.engine.next_cancel() == api.engine.next_submit().request


def test_client_that_hangs_up_on_a_whole_answer_frees_its_slot(api: ApiProcess) -> None:
    with api.connect() as connection:
        connection.sendall(request_bytes(api))
        request = api.engine.next_submit().request
    assert api.engine.next_cancel() == request


def test_client_that_hangs_up_before_the_engine_says_anything_frees_its_slot(api: ApiProcess) -> None:
    body = BODY[:-1] + b', "stream": true}'
    with api.connect() as connection:
        connection.sendall(request_bytes(api, body))
        request = api.engine.next_submit().request
    assert api.engine.next_cancel() == request


def test_client_that_hangs_up_in_its_body_reaches_no_engine(start: Start) -> None:
    api = start(max_queue=1)
    api.serve()
    with api.connect() as connection:
        connection.sendall(request_bytes(api)[:-5])
    api.engine.script = says(ids("hello"), end=end_id())
    with api.client() as client:
        # The only place is free again, and no half request went to the engine.
        while True:
            try:
                answer = ask(client)
                break
            except openai.RateLimitError:
                continue
    assert answer.choices[0].message.content == "hello"
    assert api.engine.next_submit().prompt
    assert api.engine.submits.empty()


def test_request_beyond_its_time_ends_with_504_that_is_not_retried(start: Start) -> None:
    api = start(request_seconds=0)
    api.serve()
    with api.client() as client:
        error = refusal(client)
    assert (error.status_code, error.code, error.response.headers["x-should-retry"]) == (
        504,
        "request_timeout",
        "false",
    )
    assert api.engine.next_cancel() == api.engine.next_submit().request


def test_stream_beyond_its_time_ends_with_an_error_event(start: Start) -> None:
    api = start(request_seconds=1)
    api.serve()
    api.engine.script = begins(ids("hello"))
    with api.client() as client:
        chunks = ask(client, stream=True)
        assert next(chunks).choices[0].delta.role == "assistant"
        with pytest.raises(openai.APIError) as caught:
            list(chunks)
    assert caught.value.code == "request_timeout"


def test_body_above_the_cap_is_refused_with_413(client: openai.OpenAI) -> None:
    error = refusal(client, messages=[{"role": "user", "content": "x" * (65 << 10)}])
    assert (error.status_code, error.code) == (413, "request_too_large")


def test_counts_for_the_agent(start: Start) -> None:
    api = start()
    api.serve()
    api.engine.script = says(ids("hello"), end=end_id())
    with api.client() as client:
        ask(client)
        refusal(client, model="other")
    while (stats := api.stats.get(timeout=PATIENCE)).served == 0:
        pass
    assert (stats.active, stats.served, stats.refused) == (0, 1, 1)
