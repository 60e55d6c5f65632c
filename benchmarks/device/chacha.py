"""ChaCha20 in torch operations, for comparison only: the other cipher that needs no table (RFC 8439).

Words of a state lie apart, ``[16, blocks] int32``, so that one operation does one step of four quarter rounds. It works
in scratch memory that is made once.
"""

from __future__ import annotations

import torch

from appliance.devicecipher.schedule import signed

_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)


class TorchChaCha20:
    """XORs the key stream over data, in place.

    Args:
        key: 32 bytes.
        chunk_bytes: worked on at once, a multiple of 64.
        device: where.
    """

    def __init__(self, key: bytes, *, chunk_bytes: int, device: torch.device) -> None:
        self._blocks = chunk_bytes // 64
        self._key = [signed(int.from_bytes(key[at : at + 4], "little")) for at in range(0, 32, 4)]
        self._state = torch.empty((16, self._blocks), dtype=torch.int32, device=device)
        self._start = torch.empty_like(self._state)
        self._turned = torch.empty((4, self._blocks), dtype=torch.int32, device=device)
        self._diagonals = torch.empty((16, self._blocks), dtype=torch.int32, device=device)

    def apply(self, data: torch.Tensor, *, nonce: bytes, counter: int) -> None:
        """Encrypt or decrypt ``[bytes] uint8``, a multiple of the chunk."""
        words = data.view(torch.int32)
        size = self._blocks * 16
        for index in range(words.numel() // size):
            self._fill(nonce, counter + index * self._blocks)
            self._state.copy_(self._start)
            for _ in range(10):
                self._double_round()
            self._state.add_(self._start)
            part = words[index * size : (index + 1) * size].view(self._blocks, 16)
            torch.bitwise_xor(part, self._state.T, out=part)

    def _fill(self, nonce: bytes, counter: int) -> None:
        for row, word in enumerate([*map(signed, _CONSTANTS), *self._key]):
            self._start[row].fill_(word)
        torch.arange(counter, counter + self._blocks, out=self._start[12])
        for row in range(3):
            self._start[13 + row].fill_(signed(int.from_bytes(nonce[4 * row : 4 * row + 4], "little")))

    def _double_round(self) -> None:
        self._quarter_rounds(self._state)
        rows = self._state.view(4, 4, -1)
        diagonals = self._diagonals.view(4, 4, -1)
        for row in range(4):
            diagonals[row, : 4 - row].copy_(rows[row, row:])
            if row:
                diagonals[row, 4 - row :].copy_(rows[row, :row])
        self._quarter_rounds(self._diagonals)
        for row in range(4):
            rows[row, row:].copy_(diagonals[row, : 4 - row])
            if row:
                rows[row, :row].copy_(diagonals[row, 4 - row :])

    def _quarter_rounds(self, state: torch.Tensor) -> None:
        a, b, c, d = state.view(4, 4, -1)
        for first, second, third, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            first.add_(second)
            third.bitwise_xor_(first)
            torch.bitwise_right_shift(third, 32 - turn, out=self._turned)
            self._turned.bitwise_and_((1 << turn) - 1)
            third.bitwise_left_shift_(turn).bitwise_or_(self._turned)
