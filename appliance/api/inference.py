"""One inference request, from its body to its answer: whole as JSON, or streamed as server-sent events.

Order of a request: a place (503, 429), the body (413), its fields (400, 404), the prompt (400), then the engine. The
status line is sent only after the engine's first word, so that its refusal still has one. An error after that is an
event of the stream, after which the stream ends without ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from appliance.api.dialects import Asked, Dialect
from appliance.api.engineclient import EngineClient, Generation, submits_for
from appliance.api.errors import ApiRefused, invalid, no_model, not_serving
from appliance.api.limits import Admission, ClientGone, Place, read_body, until_hang_up
from appliance.api.schema import MAX_CHOICES
from appliance.api.servedmodel import ServedModel
from appliance.api.text import Answer
from appliance.protocol import ApiSettings, Submit

# Seconds of silence after which a comment line keeps proxies and clients from giving up on a long prefill.
_PATIENCE = 5.0
_EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]


class Service:
    """What all requests share."""

    def __init__(self, settings: ApiSettings, engine: EngineClient) -> None:
        self.settings = settings
        self.engine = engine
        self.admission = Admission(settings.max_queue)
        self.model: ServedModel | None = None

    def begin(self, model: ServedModel) -> None:
        """Take over the model that became resident."""
        self.model = model
        self.admission.model_ready()

    def stop(self) -> None:
        """End running requests with an error; the state says why."""
        self.engine.end_all(lambda: not_serving(self.admission.state))

    def resident_model(self) -> ServedModel:
        """Give the model.

        Raises:
            ApiRefused: 503 ``not_serving``.
        """
        self.admission.require_serving()
        if self.model is None:
            raise not_serving("loading")
        return self.model


class Inference:
    """An ASGI endpoint that speaks one dialect."""

    def __init__(self, service: Service, dialect: Dialect) -> None:
        self._service = service
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request.

        Raises:
            ApiRefused: before the response has begun.
        """
        with self._service.admission.enter() as place:
            try:
                asked = await self._read(scope, receive)
                reply = await until_hang_up(receive, self._start(asked, place))
                with reply.generation:
                    # The client's words are not needed any more: from here on there are only tokens.
                    del asked
                    answer = reply.stream(send) if reply.streamed else reply.whole(scope, receive, send)
                    await until_hang_up(receive, answer)
            except ClientGone:
                return
        self._service.admission.served += reply.complete

    async def _read(self, scope: Scope, receive: Receive) -> Asked:
        body = await read_body(scope, receive, limit=self._service.settings.max_body_bytes)
        # Beside the event loop, so that other streams flow on while a long body is read.
        return await asyncio.to_thread(self._dialect.read, body)

    async def _start(self, asked: Asked, place: Place) -> Reply:
        options = asked.options
        model = self._service.resident_model()
        if options.model != model.name:
            raise no_model(model.name)
        prompts = await asyncio.to_thread(asked.prompts, model)
        if len(prompts) * options.n > MAX_CHOICES:
            raise invalid("n", found=f"{len(prompts) * options.n} answers", expected=f"at most {MAX_CHOICES}")
        place.widen(len(prompts) * options.n)
        submits = submits_for([_submit(prompt, asked, model) for prompt in prompts], answers=options.n)
        # The appliance may have stopped serving while the prompt was encoded.
        self._service.admission.require_serving()
        generation = self._service.engine.generate(submits, seconds=self._service.settings.request_seconds)
        return Reply(
            self._dialect, asked, model, generation, answers=len(submits), prompt_tokens=sum(map(len, prompts))
        )


def _submit(prompt: list[int], asked: Asked, model: ServedModel) -> Submit:
    options = asked.options
    return Submit(
        request="",
        prompt=prompt,
        max_tokens=model.answer_tokens(options, len(prompt)),
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        # Minus one means a random one to the engine, so a client's negative seed is moved up.
        seed=-1 if options.seed is None else options.seed % 2**63,
        stop_ids=list(model.end_ids),
    )


class Reply:
    """The answer to one request while it grows."""

    def __init__(
        self,
        dialect: Dialect,
        asked: Asked,
        model: ServedModel,
        generation: Generation,
        *,
        answers: int,
        prompt_tokens: int,
    ) -> None:
        self._dialect = dialect
        self._options = asked.options
        self._model = model
        self.generation = generation
        decode = model.tokenizer.decode
        self._answers = [Answer(decode, stops=asked.options.stop, end_ids=model.end_ids) for _ in range(answers)]
        self._prompt_tokens = prompt_tokens
        self._id = dialect.prefix + secrets.token_hex(16)
        self._created = int(time.time())

    @property
    def streamed(self) -> bool:
        """Say whether the client asked for a stream."""
        return self._options.stream

    @property
    def complete(self) -> bool:
        """Say whether every answer has come to its end."""
        return all(answer.finish for answer in self._answers)

    async def whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Collect the answers and send them as one JSON object."""
        texts = [""] * len(self._answers)
        async for piece in self._pieces():
            if piece is not None:
                index, text, _ = piece
                texts[index] += text
        choices = [
            self._dialect.choice(index, text, answer.finish)
            for index, (text, answer) in enumerate(zip(texts, self._answers, strict=True))
        ]
        body = self._envelope(self._dialect.whole, choices) | {"usage": self._usage()}
        await JSONResponse(body)(scope, receive, send)

    async def stream(self, send: Send) -> None:
        """Send the answers as events while they grow."""
        frames = self._frames()
        first = await anext(frames)
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        await _send_frame(send, first)
        try:
            async for frame in frames:
                await _send_frame(send, frame)
        except ApiRefused as refused:
            await _send_frame(send, _event(refused.as_body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self) -> AsyncIterator[tuple[int, str, str] | None]:
        """Give index, text and finish of each advance; None when the engine was silent for a while."""
        while not self.complete:
            event = await self.generation.receive(_PATIENCE)
            if event is None:
                yield None
                continue
            index, tokens = event
            if self._answers[index].finish:
                continue
            text, finish = self._answers[index].feed(tokens.tokens, tokens.finish)
            if finish:
                # After a stop string the engine would go on.
                self.generation.cancel(index)
            yield index, text, finish

    async def _frames(self) -> AsyncIterator[bytes]:
        opened = False
        async for piece in self._pieces():
            if not opened:
                opened = True
                for index in range(len(self._answers)):
                    if (choice := self._dialect.opening(index)) is not None:
                        yield self._chunk([choice])
            if piece is None:
                yield b": waiting for the engine\n\n"
                continue
            index, text, finish = piece
            if text:
                yield self._chunk([self._dialect.delta(index, text, "")])
            if finish:
                yield self._chunk([self._dialect.delta(index, "", finish)])
        if self._options.include_usage:
            yield _event(self._envelope(self._dialect.chunk, []) | {"usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _chunk(self, choices: Sequence[dict[str, Any]]) -> bytes:
        usage = {"usage": None} if self._options.include_usage else {}
        return _event(self._envelope(self._dialect.chunk, choices) | usage)

    def _envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": list(choices),
        }

    def _usage(self) -> dict[str, int]:
        answer_tokens = sum(answer.tokens for answer in self._answers)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": answer_tokens,
            "total_tokens": self._prompt_tokens + answer_tokens,
        }


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _send_frame(send: Send, frame: bytes) -> None:
    await send({"type": "http.response.body", "body": frame, "more_body": True})
