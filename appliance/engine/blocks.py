"""The KV cache: one tensor, cut into blocks of tokens that requests claim and give back overwritten with zeros.

A freed block is zeroed at once, so a request can never read what an earlier one left, and a stopped request leaves
nothing of its prompt here.

Blocks of one request are kept side by side where possible: attention then reads them in place, without gathering. A
first block is placed where it has room to grow, the next ones right behind the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import torch

from appliance.errors import DeviceFault

BLOCK_TOKENS: Final = 16

_HOLE: Final = re.compile(rb"\x00+")


class BlockTable:
    """The blocks of one request, in the order of its tokens.

    Attributes:
        blocks: block numbers.
        contiguous: every block but the first is the successor of the one before.
    """

    __slots__ = ("blocks", "contiguous")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.contiguous = True

    def append(self, block: int) -> None:
        """Add a block at the end."""
        if self.blocks and block != self.blocks[-1] + 1:
            self.contiguous = False
        self.blocks.append(block)

    def slots(self, start: int, stop: int) -> list[int]:
        """Give the cache rows of tokens ``start`` to ``stop``."""
        blocks = self.blocks
        return [blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for at in range(start, stop)]


class BlockPool:
    """All blocks, for all layers.

    Attributes:
        kv: ``[layers, blocks * BLOCK_TOKENS, 2 * kv_heads, head_dim]``; the keys' heads first, then the values'.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        budget: int,
        empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    ) -> None:
        """Take as many blocks as ``budget`` bytes hold.

        Raises:
            DeviceFault: ``engine.kv.small`` when not even one fits.
        """
        row = 2 * kv_heads * head_dim * layers * dtype.itemsize
        count = budget // (row * BLOCK_TOKENS)
        if count < 1:
            raise DeviceFault(
                "engine.kv.small",
                found=f"{budget} bytes for the KV cache",
                expected=f"at least {row * BLOCK_TOKENS}, room for {BLOCK_TOKENS} tokens",
                hint="give the engine more KV cache",
            )
        self.kv = empty((layers, count * BLOCK_TOKENS, 2 * kv_heads, head_dim), dtype)
        self.kv.zero_()
        self._taken = bytearray(count)
        self._free = count

    @property
    def total(self) -> int:
        """Number of blocks."""
        return len(self._taken)

    @property
    def used(self) -> int:
        """Number of blocks that requests hold."""
        return len(self._taken) - self._free

    def fits(self, tokens: int) -> bool:
        """Say whether a request of so many tokens fits when it is alone."""
        return _blocks_for(tokens) <= self.total

    def claim(self, table: BlockTable, tokens: int) -> bool:
        """Give a request the blocks for its first ``tokens`` tokens; False, and none given, when too few are free."""
        missing = _blocks_for(tokens) - len(table.blocks)
        if missing > self._free:
            return False
        for _ in range(missing):
            block = self._next(table)
            self._taken[block] = 1
            self._free -= 1
            table.append(block)
        return True

    def release(self, table: BlockTable) -> None:
        """Overwrite a request's blocks with zeros and take them back."""
        blocks = sorted(table.blocks)
        first = 0
        for at in range(1, len(blocks) + 1):
            if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
                self.kv[:, blocks[first] * BLOCK_TOKENS : (blocks[at - 1] + 1) * BLOCK_TOKENS].zero_()
                first = at
        for block in blocks:
            self._taken[block] = 0
        self._free += len(blocks)
        table.blocks = []
        table.contiguous = True

    def _next(self, table: BlockTable) -> int:
        if table.blocks:
            after = table.blocks[-1] + 1
            if after < self.total and not self._taken[after]:
                return after
        holes = [hole.span() for hole in _HOLE.finditer(self._taken)]
        start, stop = max(holes, key=lambda span: span[1] - span[0])
        # In the middle of the largest hole, so that whoever lies before it can go on growing.
        return start if start == 0 or stop - start < 2 else (start + stop) // 2


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
