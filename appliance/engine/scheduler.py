"""Who runs in a step: continuous batching with chunked prefill under one budget of tokens.

Requests that run come first, oldest first: one that decodes needs one token of the budget, one whose prompt is being
read takes what is left. Waiting requests follow in their order while there is budget, room and memory. When a running
request needs a block and none is free, the youngest is preempted: its blocks are zeroed and returned, and it is
computed again later. The oldest always advances, and every admitted request fits alone, so every request ends.
"""

from __future__ import annotations

from collections import deque

from appliance.engine.blocks import BlockPool
from appliance.engine.sequence import Sequence


class Scheduler:
    """Waiting and running requests.

    Attributes:
        waiting: requests without blocks, next first.
        running: requests with blocks, oldest first.
    """

    def __init__(self, pool: BlockPool, *, max_concurrent: int, step_tokens: int) -> None:
        self._pool = pool
        self._max_concurrent = max_concurrent
        # Every running request must be able to decode in every step.
        self._step_tokens = max(step_tokens, max_concurrent)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Let a request wait for its turn."""
        self.waiting.append(sequence)

    def plan(self) -> list[tuple[Sequence, int]]:
        """Choose the requests of the next step; their blocks are claimed.

        Returns:
            Requests and how many of their pending tokens the step computes; those with one token come first.
        """
        budget = self._step_tokens
        plan: list[tuple[Sequence, int]] = []
        waiting = len(self.waiting)
        # By index: whoever needs a block may preempt requests at the end of the list.
        at = 0
        while budget and at < len(self.running):
            sequence = self.running[at]
            count = min(sequence.pending, budget)
            if not self._claim(sequence, sequence.computed + count):
                break  # it was the youngest and is waiting now
            plan.append((sequence, count))
            budget -= count
            at += 1
        # A step that preempts admits nobody: the memory that it freed is what the older ones will need next.
        preempted = len(self.waiting) > waiting
        while budget and self.waiting and not preempted and len(self.running) < self._max_concurrent:
            sequence = self.waiting[0]
            # Room for the whole prompt at once: an admission never causes a preemption.
            if not self._pool.claim(sequence.table, len(sequence.tokens)):
                break
            self.running.append(self.waiting.popleft())
            count = min(sequence.pending, budget)
            plan.append((sequence, count))
            budget -= count
        plan.sort(key=lambda item: item[1] > 1)
        return plan

    def remove(self, sequence: Sequence) -> None:
        """Forget a request; its blocks are zeroed and returned."""
        self._pool.release(sequence.table)
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def _claim(self, sequence: Sequence, tokens: int) -> bool:
        while not self._pool.claim(sequence.table, tokens):
            youngest = self.running.pop()
            self._pool.release(youngest.table)
            youngest.computed = 0
            self.waiting.appendleft(youngest)
            if youngest is sequence:
                return False
        return True
