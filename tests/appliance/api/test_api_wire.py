"""Bytes that no client library sends, and the marks that every response carries."""

from __future__ import annotations

import json

import pytest

from appliance.api.server import MAX_HEADER_BYTES
from tests.sim.api_process import MODEL, ApiProcess
from tests.sim.chat_model import end_id, ids
from tests.sim.engine_peer import says

CHAT = "/v1/chat/completions"


def exchange(api: ApiProcess, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes and read one response, up to the end of the connection or of its declared length."""
    with api.connect() as connection:
        connection.sendall(sent)
        received = b""
        while b"\r\n\r\n" not in received and (part := connection.recv(65536)):
            received += part
        head, _, body = received.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = 0 if sent.startswith(b"HEAD") else int(headers.get("content-length", "0"))
        while len(body) < length and (part := connection.recv(65536)):
            body += part
    return int(status.split()[1]), headers, body


def request(api: ApiProcess, method: str, path: str, *headers: str, body: bytes = b"", key: str | None = None) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: x",
        f"authorization: Bearer {api.key if key is None else key}",
        *headers,
    ]
    if body:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def error_of(body: bytes) -> dict[str, str | None]:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return dict(error)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/completions/", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("POST", "/invocations", 404, "not_found"),
        ("GET", "/metrics", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/V1/MODELS", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/tiny-chat", 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_what_is_no_route_is_refused_in_openais_shape(
    api: ApiProcess, method: str, path: str, status: int, code: str
) -> None:
    seen, _, body = exchange(api, request(api, method, path))
    assert (seen, error_of(body)["code"]) == (status, code)


@pytest.mark.parametrize("path", ["/", "/v1/models", CHAT, "/docs", "/health/", "//health", "/health%00", "/HEALTH"])
def test_every_path_but_health_needs_a_key(api: ApiProcess, path: str) -> None:
    status, headers, body = exchange(api, request(api, "GET", path, key="nonsense"))
    assert (status, error_of(body)["code"]) == (401, "invalid_api_key")
    assert headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nbig: " + b"x" * MAX_HEADER_BYTES,
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    ],
    ids=["words", "tls in tls", "no host", "bad header", "big header", "two lengths", "negative length"],
)
def test_bytes_that_are_no_request_are_refused_in_openais_shape(api: ApiProcess, sent: bytes) -> None:
    status, headers, body = exchange(api, sent)
    assert (status, error_of(body)["code"]) == (400, "invalid_http")
    assert headers["x-lethe-platform"] == "SIMULATED"
    assert headers["x-request-id"].startswith("req_")


def test_response_is_not_split_by_a_malformed_chunk(api: ApiProcess) -> None:
    head = request(api, "POST", CHAT, "transfer-encoding: chunked")
    status, _, body = exchange(api, head + b"zz\r\nno chunk\r\n")
    assert (status, error_of(body)["code"]) == (400, "invalid_http")


def test_chunked_body_is_read(api: ApiProcess) -> None:
    api.engine.script = says(ids("hello"), end=end_id())
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:], b""))
    status, _, answer = exchange(api, request(api, "POST", CHAT, "transfer-encoding: chunked") + chunks)
    assert status == 200
    assert json.loads(answer)["choices"][0]["message"]["content"] == "hello"


def test_chunked_body_above_the_cap_is_refused(api: ApiProcess) -> None:
    chunk = b"%x\r\n%s\r\n" % (60_000, b"x" * 60_000)
    status, _, body = exchange(api, request(api, "POST", CHAT, "transfer-encoding: chunked") + chunk * 2)
    assert (status, error_of(body)["code"]) == (413, "request_too_large")


def test_body_above_the_cap_is_refused_before_it_is_sent(api: ApiProcess) -> None:
    status, _, body = exchange(api, request(api, "POST", CHAT, "content-length: 999999999"))
    assert (status, error_of(body)["code"]) == (413, "request_too_large")


def test_compressed_body_is_refused(api: ApiProcess) -> None:
    status, _, body = exchange(api, request(api, "POST", CHAT, "content-encoding: gzip", body=b"x"))
    assert (status, error_of(body)["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize(
    "sent", [b"", b"{", b"null", b"[]", b'{"model": "tiny-chat", "model": "tiny-chat"}', b"\x80", b"[" * 60_000]
)
def test_malformed_json_is_refused_with_400(api: ApiProcess, sent: bytes) -> None:
    status, _, body = exchange(api, request(api, "POST", CHAT, "content-length: 0" if not sent else "x: y", body=sent))
    assert status == 400
    assert error_of(body)["type"] == "invalid_request_error"


@pytest.mark.parametrize(("method", "path", "key"), [
    ("GET", "/health", ""),
    ("HEAD", "/health", ""),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models", "nonsense"),
    ("GET", "/nowhere", None),
    ("POST", CHAT, None),
])  # fmt: skip
def test_every_response_is_marked(api: ApiProcess, method: str, path: str, key: str | None) -> None:
    _, headers, _ = exchange(api, request(api, method, path, "content-length: 0", key=key))
    assert headers["x-lethe-platform"] == "SIMULATED"
    assert headers["cache-control"] == "no-store"
    assert len(headers["x-request-id"]) > 20
    assert "server" not in headers


def test_stream_is_marked(api: ApiProcess) -> None:
    api.engine.script = says(ids("hello"), end=end_id())
    body = b'{"model": "tiny-chat", "prompt": "x", "stream": true}'
    status, headers, _ = exchange(api, request(api, "POST", "/v1/completions", body=body))
    assert (status, headers["x-lethe-platform"]) == (200, "SIMULATED")


def test_request_ids_differ_and_are_not_taken_from_the_client(api: ApiProcess) -> None:
    ids_seen = {
        exchange(api, request(api, "GET", "/health", "x-request-id: mine"))[1]["x-request-id"] for _ in range(2)
    }
    assert len(ids_seen) == 2
    assert "mine" not in ids_seen


def test_connection_serves_one_request_after_another(api: ApiProcess) -> None:
    one = request(api, "GET", "/health")
    with api.connect() as connection:
        received = b""
        connection.sendall(one + one)
        while received.count(b'"serving"') < 2:
            part = connection.recv(65536)
            assert part
            received += part
    assert received.count(b"HTTP/1.1 200") == 2


def test_websocket_upgrade_is_refused(api: ApiProcess) -> None:
    sent = request(api, "GET", "/v1/realtime", "connection: upgrade", "upgrade: websocket")
    status, _, body = exchange(api, sent)
    assert (status, error_of(body)["code"]) == (404, "not_found")
