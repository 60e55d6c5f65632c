"""The engine: takes requests, and gives their next tokens one step at a time.

It has no thread and no loop of its own: whoever owns it calls :meth:`Engine.step` while it is not idle, so between two
steps everything is at rest, and a cancellation or a wipe needs no lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from appliance.engine.batch import build
from appliance.engine.blocks import BlockPool
from appliance.engine.buffers import overwrite_buffers
from appliance.engine.sampler import sample
from appliance.engine.scheduler import Scheduler
from appliance.engine.sequence import Sequence, accept, refuse
from appliance.errors import ModelUnsupported
from appliance.protocol import RankStats, Rejected, Submit, Tokens

if TYPE_CHECKING:
    from appliance.resident import ResidentModel

STEP_TOKENS: Final = 512
_MAX_WAITING: Final = 4096


class Engine:
    """Continuous batching over one resident model."""

    def __init__(
        self,
        resident: ResidentModel,
        *,
        kv_cache_bytes: int,
        max_context: int,
        max_concurrent: int,
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        """Take the memory for the KV cache.

        Args:
            resident: the loaded model; the cache comes from its slot, so the slot's wipe covers it.
            kv_cache_bytes: memory for the cache, bytes.
            max_context: longest prompt plus answer, tokens.
            max_concurrent: requests computed together.
            step_tokens: tokens computed in one step; a long prompt is read in pieces of this size.

        Raises:
            ModelUnsupported: ``model.config.max_position_embeddings`` when the model was not made for ``max_context``.
            DeviceFault: ``engine.kv.small``, or the slot's own when it has no room.
        """
        self._model = resident.model
        config = self._model.config
        if max_context > config.max_context:
            raise ModelUnsupported(
                "model.config.max_position_embeddings",
                found=f"a longest context of {max_context} tokens asked for",
                expected=f"at most {config.max_context}, which the model was made for",
                hint="lower max_context",
            )
        self._max_context = max_context
        self._pool = BlockPool(
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=self._model.dtype,
            budget=kv_cache_bytes,
            empty=resident.slot.empty,
        )
        self._scheduler = Scheduler(self._pool, max_concurrent=max_concurrent, step_tokens=step_tokens)
        self._sequences: dict[str, Sequence] = {}
        self._ended: list[Tokens | Rejected] = []
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._wiped = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute and nothing to tell."""
        return not self._sequences and not self._ended

    def submit(self, submit: Submit) -> None:
        """Take a request; its tokens come from later steps.

        Raises:
            RequestRefused: ``request.id``, ``request.queue``, ``request.memory``, or as
                :func:`appliance.engine.sequence.accept` says. The engine is as it was before.
            RuntimeError: the engine was wiped.
        """
        if self._wiped:
            raise RuntimeError("the engine was wiped; it cannot serve")
        if submit.request in self._sequences:
            refuse("id", "an id that is in use", "an id of its own")
        if len(self._sequences) >= _MAX_WAITING:
            refuse("queue", f"{len(self._sequences)} requests", f"fewer than {_MAX_WAITING}")
        sequence = accept(submit, vocabulary=self._model.config.vocabulary, max_context=self._max_context)
        longest = sequence.prompt_length + sequence.max_tokens
        if not self._pool.fits(longest):
            refuse("memory", f"a request of up to {longest} tokens", "one that fits the KV cache when alone")
        self._sequences[sequence.request] = sequence
        self._scheduler.add(sequence)

    def cancel(self, request: str) -> None:
        """Forget a request at once: its blocks are overwritten. Its last message comes from the next step."""
        sequence = self._sequences.get(request)
        if sequence is not None:
            self._end(sequence, Tokens(request, [], "cancelled"))

    @torch.inference_mode()
    def step(self) -> list[Tokens | Rejected]:
        """Compute one step.

        Returns:
            New tokens, and how requests ended. ``stop`` means that a stop id was chosen; it is not among the tokens.
            Rejected ends a request whose arithmetic failed.
        """
        plan = self._scheduler.plan()
        if plan:
            device = self._model.device
            ready = [sequence for sequence, count in plan if count == sequence.pending]
            logits = self._model.forward(build(plan, device, rectangle=device.type != "cpu"), self._pool.kv)
            for sequence, count in plan:
                sequence.computed += count
            chosen = sample(logits, [(sequence.sampling, sequence.answered) for sequence in ready])
            for sequence, token in zip(ready, chosen, strict=True):
                self._append(sequence, token)
        messages, self._ended = self._ended, []
        return messages

    def wipe_caches(self) -> None:
        """Forget every request without a word, overwrite the KV cache and what libraries keep of the weights.

        For the end of serving, before or after the slot overwrites everything that it gave out; part of the weights is
        overwritten here, so the engine cannot be used again. See appliance/engine/buffers.py.
        """
        self._wiped = True
        self._scheduler = Scheduler(self._pool, max_concurrent=1, step_tokens=1)
        self._sequences.clear()
        self._ended.clear()
        self._pool.kv.zero_()
        if self._model.device.type == "cpu":
            overwrite_buffers(self._model.one_of_each_shape())

    def stats(self) -> RankStats:
        """Give the counters."""
        return RankStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_blocks_used=self._pool.used,
            kv_blocks_total=self._pool.total,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
        )

    def _append(self, sequence: Sequence, token: int | None) -> None:
        if token is None:
            message = "the model gave no usable number for this request"
            self._end(sequence, Rejected(sequence.request, "request.arithmetic", message))
            return
        if sequence.answered == 0:
            self._prompt_tokens += sequence.prompt_length
        if token in sequence.stop_ids:
            self._end(sequence, Tokens(sequence.request, [], "stop"))
            return
        sequence.tokens.append(token)
        self._generated_tokens += 1
        if sequence.answered == sequence.max_tokens:
            self._end(sequence, Tokens(sequence.request, [token], "length"))
        else:
            self._ended.append(Tokens(sequence.request, [token], ""))

    def _end(self, sequence: Sequence, message: Tokens | Rejected) -> None:
        self._scheduler.remove(sequence)
        del self._sequences[sequence.request]
        self._ended.append(message)
