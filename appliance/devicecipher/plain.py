"""Counter mode in plain torch operations, on any device, in scratch memory of fixed size.

Eight blocks lie side by side in a 32-bit word (schedule.py says how), so a state is eight planes of four rows, and one
operation of torch works on a row of every word of a chunk. ShiftRows turns words by whole bytes, MixColumns is XORs of
rows. Every operation writes into scratch memory that was given: torch must allocate nothing, because what it allocates
the slot cannot wipe, and a state together with ciphertext is plaintext.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch

from appliance.devicecipher.circuit import sbox
from appliance.devicecipher.schedule import GRAIN, ROUNDS, signed
from appliance.devicecipher.trace import trace

_PROGRAM: Final = trace(sbox)
# Rows of words of the parts of the scratch memory: registers, rows repeated for MixColumns, their sums.
_REGISTERS: Final = _PROGRAM.registers * 4
_REPEATED: Final = 8 * 7
_SUMS: Final = 8 * 6
_RAMP: Final = 1
_ROWS: Final = _REGISTERS + _REPEATED + _SUMS + _RAMP
# Bits of a word for one column: bytes 3 and 2 in a little-endian word.
_COLUMN_3: Final = -0x01000000
_COLUMN_2: Final = 0x00FF0000
# ShiftRows: row r turns right by 8 * r bits. Right shifts of torch carry the sign, which the masks take off.
_RIGHT: Final = (0, 8, 16, 24)
_RIGHT_MASK: Final = (-1, 0x00FFFFFF, 0x0000FFFF, 0x000000FF)
_LEFT: Final = (0, 24, 16, 8)
# Bits that a carry out of the field's top bit comes back to (x^8 = x^4 + x^3 + x + 1).
_CARRIED: Final = (0, 1, 3, 4)


def scratch_words(chunk_bytes: int) -> int:
    """Give how many 32-bit words :class:`PlainCounter` needs to work on chunks of that size."""
    return _ROWS * (chunk_bytes // GRAIN) + 12


class PlainCounter:
    """XORs the key stream of AES-256 in counter mode over data, in place.

    Args:
        scratch: ``[scratch_words(chunk_bytes)] int32`` on the device; the caller owns and wipes it.
        chunk_bytes: most bytes that are worked on at once, a multiple of 128.
    """

    def __init__(self, scratch: torch.Tensor, *, chunk_bytes: int) -> None:
        if chunk_bytes % GRAIN or scratch.numel() != scratch_words(chunk_bytes):
            raise ValueError(f"scratch of {scratch.numel()} words for chunks of {chunk_bytes} bytes")
        self._scratch = scratch
        self._chunk = chunk_bytes
        shifts = torch.tensor([*_RIGHT, *_RIGHT_MASK, *_LEFT], dtype=torch.int32)
        self._shifts = scratch[-12:]
        self._shifts.copy_(shifts)

    def apply(self, data: torch.Tensor, planes: torch.Tensor, *, first: int, segment_bytes: int, counter: int) -> None:
        """Turn consecutive whole segments of ciphertext into plaintext, or back; only enqueues.

        Args:
            data: ``[bytes] uint8`` on the device, in whole segments.
            planes: ``[480] int32`` on the device, of the section's key and base nonce (schedule.py).
            first: number of the first segment; segment i has the nonce ``base XOR (first + i)``.
            segment_bytes: a multiple of 128.
            counter: of the first block of every segment, 0 to 2^32 - 1; it wraps.
        """
        if segment_bytes % GRAIN or data.numel() % segment_bytes:
            raise ValueError(f"{data.numel()} bytes in segments of {segment_bytes}")
        words = data.view(torch.int32)
        for start in range(0, data.numel(), self._chunk):
            stop = min(start + self._chunk, data.numel())
            blocks = segment_bytes // 16
            self._apply(
                words[start // 4 : stop // 4], planes.view(ROUNDS + 1, 8, 4, 1), start // 16, blocks, first, counter
            )

    def secret_blocks(self) -> tuple[torch.Tensor, ...]:
        """Give the scratch memory, which holds states of the cipher."""
        return (self._scratch.view(torch.uint8),)

    def _apply(
        self, words: torch.Tensor, planes: torch.Tensor, start: int, blocks: int, first: int, counter: int
    ) -> None:
        """Work on one chunk.

        Args:
            words: ``[words] int32`` of the data.
            planes: ``[round, bit, row, 1]``.
            start: number of the chunk's first block in the data.
            blocks: per segment.
            first: number of the data's first segment.
            counter: of the first block of a segment.
        """
        width = words.numel() * 4 // GRAIN
        registers, repeated, sums, ramp = self._parts(width)
        state = registers[:8]
        torch.arange(start, start + width, out=ramp)
        _first_state(state, registers[8:24], ramp, (blocks, signed(first), signed(counter)))
        torch.bitwise_xor(state, planes[0], out=state)
        gates = list(_gates(registers))
        for number in range(1, ROUNDS + 1):
            for gate, left, right, out in gates:
                gate(left, right, out=out)
            rows = repeated[:, :4]
            self._shift_rows(registers[8:16], rows, sums)
            if number < ROUNDS:
                _mix_columns(repeated, sums, state)
                torch.bitwise_xor(state, planes[number], out=state)
            else:
                torch.bitwise_xor(rows, planes[number], out=state)
        _to_blocks(state, sums)
        shaped = words.view(8, width, 4)
        torch.bitwise_xor(shaped, state.permute(0, 2, 1), out=shaped)

    def _parts(self, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cut the scratch memory for a chunk of ``width`` words per row."""
        sizes = [rows * width for rows in (_REGISTERS, _REPEATED, _SUMS, _RAMP)]
        registers, repeated, sums, ramp = self._scratch[: sum(sizes)].split(sizes)  # type: ignore[no-untyped-call]  # torch gives it no annotation
        return (
            registers.view(_PROGRAM.registers, 4, width),
            repeated.view(8, 7, width),
            sums.view(8, 6, width),
            ramp,
        )

    def _shift_rows(self, source: torch.Tensor, target: torch.Tensor, spare: torch.Tensor) -> None:
        right, mask, left = self._shifts.view(3, 4, 1)
        turned = spare[:, :4]
        torch.bitwise_right_shift(source, right, out=turned)
        torch.bitwise_and(turned, mask, out=turned)
        torch.bitwise_left_shift(source, left, out=target)
        torch.bitwise_or(target, turned, out=target)


_Gate = tuple[Callable[..., torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]


def _gates(registers: torch.Tensor) -> Iterator[_Gate]:
    kinds = {"and": torch.bitwise_and, "xor": torch.bitwise_xor}
    rows = registers.unbind()
    for gate in _PROGRAM.gates:
        yield kinds[gate.kind], rows[gate.left], rows[gate.right], rows[gate.out]


def _first_state(state: torch.Tensor, spare: torch.Tensor, ramp: torch.Tensor, place: tuple[int, int, int]) -> None:
    """Write the counter blocks as planes, with zeros where the nonce is, which round key 0 holds.

    Args:
        state: ``[8, 4, width]``, to be written.
        spare: ``[16, 4, width]``.
        ramp: ``[width]``, the number of the first of eight blocks in the data.
        place: blocks per segment, number of the first segment, counter of a segment's first block.
    """
    blocks, first, counter = place
    width = ramp.numel()
    flat = spare.view(64, width)
    numbers, counters, work, moved = flat[:8], flat[8:16], flat[16:24], flat[24:32]
    for lane in range(8):
        torch.add(ramp, lane * width, out=work[lane])
    torch.floor_divide(work, blocks, out=numbers)
    torch.remainder(work, blocks, out=counters)
    numbers.add_(first)
    counters.add_(counter)
    _transpose(numbers, work)
    _transpose(counters, work)
    for row in range(4):
        # Row 0 is the most significant byte of a big-endian number, which is the last byte of a word.
        torch.bitwise_left_shift(counters, 8 * row, out=state[:, row])
        state[:, row].bitwise_and_(_COLUMN_3)
        if row:
            torch.bitwise_left_shift(numbers, 8 * (row - 1), out=moved)
        else:
            torch.bitwise_right_shift(numbers, 8, out=moved)
        moved.bitwise_and_(_COLUMN_2)
        state[:, row].bitwise_or_(moved)


def _swap(low: torch.Tensor, high: torch.Tensor, shift: int, mask: int, spare: torch.Tensor) -> None:
    """Exchange the bits of ``high`` under the mask with those of ``low`` that lie ``shift`` further up."""
    torch.bitwise_right_shift(low, shift, out=spare)
    torch.bitwise_xor(spare, high, out=spare)
    spare.bitwise_and_(mask)
    torch.bitwise_xor(high, spare, out=high)
    spare.bitwise_left_shift_(shift)
    torch.bitwise_xor(low, spare, out=low)


def _transpose(words: torch.Tensor, spare: torch.Tensor) -> None:
    """Transpose bits: bit i of every byte of word j becomes bit j of the same byte of word i; 8 along dimension 0."""
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F)):
        pairs = words.view(4 // shift, 2, shift, *words.shape[1:])
        room = spare.reshape(-1)[: words.numel() // 2].view(pairs[:, 0].shape)
        _swap(pairs[:, 0], pairs[:, 1], shift, mask, room)


def _mix_columns(repeated: torch.Tensor, sums: torch.Tensor, state: torch.Tensor) -> None:
    """Mix the rows of ``repeated[:, :4]`` into ``state``.

    With s(r) the sum of rows r and r + 1, row r becomes ``row(r + 1) + s(r + 2) + 2 * s(r)``.
    """
    repeated[:, 4:].copy_(repeated[:, :3])
    torch.bitwise_xor(repeated[:, :6], repeated[:, 1:], out=sums)
    torch.bitwise_xor(repeated[:, 1:5], sums[:, 2:], out=state)
    torch.bitwise_xor(state[1:], sums[:7, :4], out=state[1:])
    for bit in _CARRIED:
        state[bit].bitwise_xor_(sums[7, :4])


def _to_blocks(state: torch.Tensor, spare: torch.Tensor) -> None:
    """Turn planes ``[bit, row, width]`` into words ``[block, column, width]``, byte r of a word being row r."""
    room = spare.reshape(-1)
    _transpose(state, room)
    half = room[: state.numel() // 2]
    pairs = state.view(8, 2, 2, -1)
    shape = pairs[:, :, 0].shape
    _swap(pairs[:, :, 0], pairs[:, :, 1], 8, 0x00FF00FF, half.view(shape))
    _swap(pairs[:, 0], pairs[:, 1], 16, 0x0000FFFF, half.view(shape))
