"""The front door and the routes behind it.

Every request passes the door: it gets an id, every response carries it and the platform's banner, and every path but
``/health`` needs a key. A path that is not listed here does not exist.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.api.access import AccessList
from appliance.api.dialects import Chat, Completion
from appliance.api.errors import ApiRefused, internal, no_model, no_route, two_lengths
from appliance.api.inference import Inference, Service
from appliance.api.servedmodel import ServedModel

_OPEN_PATH = "/health"


class FrontDoor:
    """The outermost ASGI application."""

    def __init__(self, service: Service, access: AccessList) -> None:
        self._service = service
        self._access = access
        self._app = _routes(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request in, or refuse it."""
        marks = response_marks(self._service.settings.platform_banner)

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(marks)
                if message["status"] >= 400 and scope["path"] != _OPEN_PATH:
                    self._service.admission.refused += 1
            await send(message)

        app: ASGIApp = self._app
        try:
            _require_one_length(scope["headers"])
            if scope["path"] != _OPEN_PATH:
                self._access.check(scope["headers"])
        except ApiRefused as refused:
            app = _answer(refused)
        await app(scope, receive, send_marked)


def _require_one_length(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Refuse a body whose length is said in two ways (RFC 9112, section 6.3).

    A proxy in front may take the other way, and then bytes of one client's body are a request of the next client's.
    """
    names = {name for name, _ in headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        raise two_lengths()


def response_marks(banner: str) -> dict[str, str]:
    """Give the headers that every response carries, also one to bytes that are no HTTP request."""
    marks = {"x-request-id": "req_" + secrets.token_hex(12), "cache-control": "no-store"}
    return marks | ({"x-lethe-platform": banner} if banner else {})


def _routes(service: Service) -> ASGIApp:
    endpoints = _Endpoints(service)
    app = Starlette(
        routes=[
            Route(_OPEN_PATH, endpoints.health, methods=["GET"]),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
            Route("/v1/chat/completions", Inference(service, Chat()), methods=["POST"]),
            Route("/v1/completions", Inference(service, Completion()), methods=["POST"]),
        ],
        exception_handlers={ApiRefused: _on_refused, HTTPException: _on_no_route, Exception: _on_fault},
    )
    # A path with a slash too many is another path; a redirect would make clients send their key twice.
    app.router.redirect_slashes = False
    return app


class _Endpoints:
    """The routes that only tell."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, _: Request) -> Response:
        """Say whether requests are served now. Needs no key, so it tells nothing about the model."""
        state = self._service.admission.state
        serving = state == "serving"
        body = {
            "status": "ok" if serving else "unavailable",
            "state": state,
            "platform": self._service.settings.platform_banner,
        }
        return JSONResponse(body, 200 if serving else 503, headers=None if serving else {"retry-after": "5"})

    async def models(self, _: Request) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [_describe(self._service.resident_model())]})

    async def model(self, request: Request) -> Response:
        """Describe the model, if it is the one asked for."""
        model = self._service.resident_model()
        if request.path_params["name"] != model.name:
            raise no_model(model.name)
        return JSONResponse(_describe(model))


def _describe(model: ServedModel) -> dict[str, str | int]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "lethe",
        "max_model_len": model.max_context,
    }


def _answer(refused: ApiRefused) -> Response:
    return JSONResponse(refused.as_body(), refused.status, headers=refused.headers)


async def _on_refused(_: Request, error: Exception) -> Response:
    return _answer(error) if isinstance(error, ApiRefused) else _answer(internal())


async def _on_no_route(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    answer = _answer(no_route(status))
    if isinstance(error, HTTPException) and error.headers:
        answer.headers.update(error.headers)
    return answer


async def _on_fault(_: Request, error: Exception) -> Response:
    del error  # the server logs its type and place (quiet.py); its text may hold a prompt
    return _answer(internal())
