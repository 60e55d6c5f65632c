"""One request inside the engine, and the checks that it passes on its way in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NoReturn

from appliance.engine.blocks import BlockTable
from appliance.engine.sampler import MAX_SEED, Sampling, random_seed
from appliance.errors import RequestRefused
from appliance.protocol import Submit

_MAX_TEMPERATURE: Final = 100.0
_MAX_STOP_IDS: Final = 1024


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request that waits or runs.

    Attributes:
        request: the id that the API chose.
        tokens: the prompt, then the answer so far.
        prompt_length: how many of them are the prompt's.
        max_tokens: longest answer.
        sampling: how the next token is chosen.
        stop_ids: ids that end the answer and do not belong to it.
        table: its blocks of the KV cache.
        computed: how many of ``tokens`` the cache holds.
    """

    request: str
    tokens: list[int]
    prompt_length: int
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0

    @property
    def pending(self) -> int:
        """Tokens that the next steps must compute before one can be chosen."""
        return len(self.tokens) - self.computed

    @property
    def answered(self) -> int:
        """Length of the answer so far."""
        return len(self.tokens) - self.prompt_length


def accept(submit: Submit, *, vocabulary: int, max_context: int) -> Sequence:
    """Check one request and give its sequence.

    Raises:
        RequestRefused: ``request.prompt.empty``, ``request.prompt.token``, ``request.max_tokens``, ``request.context``,
            ``request.temperature``, ``request.top_p``, ``request.top_k``, ``request.seed`` or ``request.stop_ids``.
    """
    prompt = submit.prompt
    if not prompt:
        refuse("prompt.empty", "an empty prompt", "at least one token")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        refuse("prompt.token", "a token id that the model does not have", f"ids from 0 to {vocabulary - 1}")
    if submit.max_tokens < 1:
        refuse("max_tokens", str(submit.max_tokens), "at least 1")
    if len(prompt) + submit.max_tokens > max_context:
        refuse(
            "context",
            f"a prompt of {len(prompt)} tokens and an answer of up to {submit.max_tokens}",
            f"at most {max_context} tokens together",
        )
    # Written so that NaN, which fails every comparison, is refused.
    if not 0 <= submit.temperature <= _MAX_TEMPERATURE:
        refuse("temperature", str(submit.temperature), f"0 to {_MAX_TEMPERATURE:g}")
    if not 0 < submit.top_p <= 1:
        refuse("top_p", str(submit.top_p), "above 0, at most 1")
    if submit.top_k < 0:
        refuse("top_k", str(submit.top_k), "0 for no limit, or more")
    if not -1 <= submit.seed <= MAX_SEED:
        refuse("seed", str(submit.seed), f"-1 for a random one, or 0 to {MAX_SEED}")
    if len(submit.stop_ids) > _MAX_STOP_IDS or any(not 0 <= token < vocabulary for token in submit.stop_ids):
        refuse("stop_ids", f"{len(submit.stop_ids)} ids", f"at most {_MAX_STOP_IDS} ids from 0 to {vocabulary - 1}")
    return Sequence(
        request=submit.request,
        tokens=list(prompt),
        prompt_length=len(prompt),
        max_tokens=submit.max_tokens,
        sampling=Sampling(
            temperature=submit.temperature,
            top_p=submit.top_p,
            top_k=submit.top_k,
            seed=random_seed() if submit.seed == -1 else submit.seed,
        ),
        stop_ids=frozenset(submit.stop_ids),
    )


def refuse(what: str, found: str, expected: str) -> NoReturn:
    """Raise RequestRefused with the code ``request.WHAT``."""
    raise RequestRefused(f"request.{what}", found=found, expected=expected, hint="change the request")
