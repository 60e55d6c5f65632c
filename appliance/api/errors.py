"""Refusals of one HTTP request, in the shape that OpenAI's clients read.

The codes follow OpenAI's where it has one, because clients match on them. A message may name a field and repeat a
number; it never repeats text that the client sent, so it could be logged without showing a prompt.
"""

from __future__ import annotations

from appliance.errors import RequestRefused

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class ApiRefused(RequestRefused):
    """One request gets an error answer; the process and the other requests go on.

    Attributes:
        status: HTTP status.
        param: the field at fault, such as ``messages[2].content``, or None.
        headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        code: str,
        *,
        found: str,
        expected: str,
        hint: str = "",
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(code, found=found, expected=expected, hint=hint)
        self.status = status
        self.param = param
        self.headers = headers or {}

    def as_body(self) -> dict[str, dict[str, str | None]]:
        """Give the JSON body: ``{"error": {message, type, param, code}}``."""
        message = f"found {self.found}, expected {self.expected}"
        if self.param:
            message = f"{self.param}: {message}"
        if self.hint:
            message = f"{message}; {self.hint}"
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str | None, *, found: str, expected: str) -> ApiRefused:
    """A field has a value that it cannot have."""
    return ApiRefused(400, "invalid_value", param=param, found=found, expected=expected)


def missing(param: str) -> ApiRefused:
    """A required field is absent or null."""
    return ApiRefused(400, "missing_required_parameter", param=param, found="nothing", expected="a value")


def unknown(param: str) -> ApiRefused:
    """A field that no version of the API known here has; a misspelt one must not be silently without effect."""
    return ApiRefused(400, "unknown_parameter", param=param, found="an unknown field", expected="a documented one")


def unsupported(param: str) -> ApiRefused:
    """A field that would change the answer, in a way that this server does not do."""
    return ApiRefused(
        400,
        "unsupported_parameter",
        param=param,
        found="a value that changes the answer",
        expected="the field to be left out",
        hint="this server does not do it and will not pretend to",
    )


def too_long(*, prompt_tokens: int, answer_tokens: int, limit: int) -> ApiRefused:
    """Prompt plus asked answer do not fit the context."""
    return ApiRefused(
        400,
        "context_length_exceeded",
        found=f"{prompt_tokens} tokens of prompt and {answer_tokens} of answer",
        expected=f"at most {limit} together",
    )


def key_refused(found: str) -> ApiRefused:
    """No key, or not a key of this appliance."""
    return ApiRefused(
        401,
        "invalid_api_key",
        found=found,
        expected="authorization: Bearer KEY",
        hint="the operator of the appliance issues keys",
        headers={"www-authenticate": "Bearer"},
    )


def no_route(status: int) -> ApiRefused:
    """A path that does not exist (404), or not with this method (405)."""
    code, found = ("method_not_allowed", "this method") if status == 405 else ("not_found", "this path")
    return ApiRefused(status, code, found=found, expected="a route of docs/api.md")


def no_model(served: str) -> ApiRefused:
    """A model of another name was asked for."""
    return ApiRefused(404, "model_not_found", param="model", found="another name", expected=served)


def body_too_large(limit: int) -> ApiRefused:
    """The body exceeds the configured size."""
    return ApiRefused(413, "request_too_large", found="a larger body", expected=f"at most {limit} bytes")


def two_lengths() -> ApiRefused:
    """A body with both a length and a transfer coding: where it ends would be a matter of opinion."""
    return ApiRefused(
        400,
        "invalid_http",
        found="content-length and transfer-encoding",
        expected="one of them",
        headers={"connection": "close"},
    )


def encoding_refused() -> ApiRefused:
    """A compressed body: its real size would be unknown until it is unpacked."""
    return ApiRefused(415, "unsupported_encoding", found="a content-encoding", expected="a plain body")


def queue_full(limit: int) -> ApiRefused:
    """As many answers are under way as the configuration admits."""
    return ApiRefused(
        429,
        "queue_full",
        found=f"{limit} answers under way",
        expected="fewer",
        hint="try again shortly",
        headers={"retry-after": "1"},
    )


def not_serving(state: str) -> ApiRefused:
    """The appliance is up but serves no model now."""
    return ApiRefused(
        503,
        "not_serving",
        found=f"state {state}",
        expected="state serving",
        hint="try again when /health answers 200",
        headers={"retry-after": "5"},
    )


def engine_refused(code: str) -> ApiRefused:
    """The engine refuses this one request; its code says why."""
    return ApiRefused(400, code, found="a request that the engine refuses", expected="one within its limits")


def out_of_time(seconds: int) -> ApiRefused:
    """The answer took longer than the configuration allows; asking again would take as long."""
    return ApiRefused(
        504,
        "request_timeout",
        found="no complete answer in time",
        expected=f"at most {seconds} seconds",
        hint="ask for fewer tokens",
        headers={"x-should-retry": "false"},
    )


def internal() -> ApiRefused:
    """A fault of this program. What it was stays in the process; the log has its type and place."""
    return ApiRefused(500, "internal_error", found="a fault of the server", expected="none")
