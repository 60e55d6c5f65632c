"""Counter mode as one Triton kernel for GPUs: the whole state stays in registers.

A thread has eight blocks as 32 words, one for each bit of each row (schedule.py), and goes through 14 rounds with them:
the circuit four times, ShiftRows as a rotation by whole bytes, MixColumns as XORs. Only round keys and data come from
memory. Blocks of a thread lie ``width`` apart, so that neighbours in a warp read neighbouring memory.

With ``TRITON_INTERPRET=1`` in the environment when this module is imported the kernel is interpreted on the CPU, for
tests. Importing it needs triton, which is optional (choice.py).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from appliance.devicecipher import circuit
from appliance.devicecipher.schedule import GRAIN, ROUNDS, signed

# Threads of a program, in four warps; each has 32 words of state and about as many on the way.
_WIDTH: Final = 128

# What Triton raises where it cannot compile or launch: without a C compiler, without room for what it compiled, on a
# device that it does not know.
UNUSABLE: Final[tuple[type[Exception], ...]] = (
    TritonError,
    ImportError,
    OSError,
    RuntimeError,
    subprocess.SubprocessError,
)
# Where what was compiled may lie until it is loaded: code, never a key.
_PLACES: Final = (Path("/dev/shm"), Path("/tmp"))  # noqa: S108  # a directory of its own is made there, or nothing

# The interpreter calls plain functions; the compiler only its own.
sbox = circuit.sbox if triton.knobs.runtime.interpret else triton.jit(circuit.sbox)


@triton.jit
def _swap(low: typing.Any, high: typing.Any, shift: tl.constexpr, mask: tl.constexpr) -> typing.Any:
    """Exchange the bits of ``high`` under the mask with those of ``low`` that lie ``shift`` further up."""
    moved = ((low >> shift) ^ high) & mask
    return low ^ (moved << shift), high ^ moved


@triton.jit
def _transpose(
    w0: typing.Any,
    w1: typing.Any,
    w2: typing.Any,
    w3: typing.Any,
    w4: typing.Any,
    w5: typing.Any,
    w6: typing.Any,
    w7: typing.Any,
) -> typing.Any:
    """Transpose bits: bit i of every byte of word j becomes bit j of the same byte of word i."""
    w0, w1 = _swap(w0, w1, 1, 0x55555555)
    w2, w3 = _swap(w2, w3, 1, 0x55555555)
    w4, w5 = _swap(w4, w5, 1, 0x55555555)
    w6, w7 = _swap(w6, w7, 1, 0x55555555)
    w0, w2 = _swap(w0, w2, 2, 0x33333333)
    w1, w3 = _swap(w1, w3, 2, 0x33333333)
    w4, w6 = _swap(w4, w6, 2, 0x33333333)
    w5, w7 = _swap(w5, w7, 2, 0x33333333)
    w0, w4 = _swap(w0, w4, 4, 0x0F0F0F0F)
    w1, w5 = _swap(w1, w5, 4, 0x0F0F0F0F)
    w2, w6 = _swap(w2, w6, 4, 0x0F0F0F0F)
    w3, w7 = _swap(w3, w7, 4, 0x0F0F0F0F)
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def _first_row(planes: typing.Any, number: typing.Any, c: typing.Any, row: tl.constexpr) -> typing.Any:
    """Give one row of the state after round key 0: counters in column 3, the segment's number in column 2."""
    return (
        _first(planes, number, c[0], row, 0),
        _first(planes, number, c[1], row, 1),
        _first(planes, number, c[2], row, 2),
        _first(planes, number, c[3], row, 3),
        _first(planes, number, c[4], row, 4),
        _first(planes, number, c[5], row, 5),
        _first(planes, number, c[6], row, 6),
        _first(planes, number, c[7], row, 7),
    )


@triton.jit
def _first(
    planes: typing.Any, number: typing.Any, counters: typing.Any, row: tl.constexpr, bit: tl.constexpr
) -> typing.Any:
    # Row 0 is the most significant byte of a big-endian number, which is the last byte of a word.
    key = tl.load(planes + bit * 4 + row) ^ (((number >> (24 - 8 * row + bit)) & 1) * 0x00FF0000)
    return ((counters << (8 * row)) & -0x01000000) ^ key


@triton.jit
def _sub_and_shift(s: typing.Any, row: tl.constexpr) -> typing.Any:
    """Put one row through the S-box and turn it by ``row`` columns."""
    y = sbox(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7])
    return (
        _turn(y[0], row),
        _turn(y[1], row),
        _turn(y[2], row),
        _turn(y[3], row),
        _turn(y[4], row),
        _turn(y[5], row),
        _turn(y[6], row),
        _turn(y[7], row),
    )


@triton.jit
def _turn(word: typing.Any, row: tl.constexpr) -> typing.Any:
    # A right shift carries the sign, which the mask takes off.
    return word if row == 0 else ((word >> 8 * row) & ((1 << 32 - 8 * row) - 1)) | (word << 32 - 8 * row)


@triton.jit
def _add_key(s: typing.Any, keys: typing.Any, row: tl.constexpr) -> typing.Any:
    return (
        s[0] ^ tl.load(keys + row),
        s[1] ^ tl.load(keys + 4 + row),
        s[2] ^ tl.load(keys + 8 + row),
        s[3] ^ tl.load(keys + 12 + row),
        s[4] ^ tl.load(keys + 16 + row),
        s[5] ^ tl.load(keys + 20 + row),
        s[6] ^ tl.load(keys + 24 + row),
        s[7] ^ tl.load(keys + 28 + row),
    )


@triton.jit
def _mix(a: typing.Any, b: typing.Any, c: typing.Any, d: typing.Any) -> typing.Any:
    """Mix one row, with the rows below it in order: ``b + (c + d) + 2 * (a + b)``."""
    top = a[7] ^ b[7]
    return (
        b[0] ^ c[0] ^ d[0] ^ top,
        b[1] ^ c[1] ^ d[1] ^ a[0] ^ b[0] ^ top,
        b[2] ^ c[2] ^ d[2] ^ a[1] ^ b[1],
        b[3] ^ c[3] ^ d[3] ^ a[2] ^ b[2] ^ top,
        b[4] ^ c[4] ^ d[4] ^ a[3] ^ b[3] ^ top,
        b[5] ^ c[5] ^ d[5] ^ a[4] ^ b[4],
        b[6] ^ c[6] ^ d[6] ^ a[5] ^ b[5],
        b[7] ^ c[7] ^ d[7] ^ a[6] ^ b[6],
    )


@triton.jit
def _xor_block(
    data: typing.Any,
    a: typing.Any,
    b: typing.Any,
    c: typing.Any,
    d: typing.Any,
    inside: typing.Any,
    width: tl.constexpr,
) -> typing.Any:
    """XOR one block, given as four rows of its columns, over the data."""
    a, b = _swap(a, b, 8, 0x00FF00FF)
    c, d = _swap(c, d, 8, 0x00FF00FF)
    a, c = _swap(a, c, 16, 0x0000FFFF)
    b, d = _swap(b, d, 16, 0x0000FFFF)
    # Four neighbouring words in one access of 16 bytes; Triton's compiler also takes long over many accesses.
    stream = tl.join(tl.join(a, c), tl.join(b, d)).reshape(width, 4)
    at = data[:, None] + tl.arange(0, 4)[None, :]
    tl.store(at, tl.load(at, mask=inside[:, None]) ^ stream, mask=inside[:, None])


# One compiled form serves all loads: without this, numbers that are 1 or divide by 16 would each have one of their own.
@triton.jit(do_not_specialize=["first", "counter", "blocks", "programs"])
def counter_mode(
    data: typing.Any,
    planes: typing.Any,
    first: typing.Any,
    counter: typing.Any,
    blocks: typing.Any,
    programs: typing.Any,
    width: tl.constexpr,
    rounds: tl.constexpr,
) -> typing.Any:
    """XOR the key stream over consecutive segments.

    Args:
        data: the segments, as int32.
        planes: ``[480] int32`` of the section's key and base nonce.
        first: number of the first segment.
        counter: of a segment's first block, as int32.
        blocks: of a segment.
        programs: how many programs share a segment.
        width: threads of a program.
        rounds: 14.
    """
    program = tl.program_id(0)
    segment = program // programs
    thread = (program % programs) * (8 * width) + tl.arange(0, width)
    at = counter + thread
    counters = _transpose(
        at,
        at + width,
        at + 2 * width,
        at + 3 * width,
        at + 4 * width,
        at + 5 * width,
        at + 6 * width,
        at + 7 * width,
    )
    number = first + segment
    a = _first_row(planes, number, counters, 0)
    b = _first_row(planes, number, counters, 1)
    c = _first_row(planes, number, counters, 2)
    d = _first_row(planes, number, counters, 3)
    keys = planes + 32
    for _ in range(rounds - 1):
        a = _sub_and_shift(a, 0)
        b = _sub_and_shift(b, 1)
        c = _sub_and_shift(c, 2)
        d = _sub_and_shift(d, 3)
        e = _mix(a, b, c, d)
        f = _mix(b, c, d, a)
        g = _mix(c, d, a, b)
        h = _mix(d, a, b, c)
        a = _add_key(e, keys, 0)
        b = _add_key(f, keys, 1)
        c = _add_key(g, keys, 2)
        d = _add_key(h, keys, 3)
        keys += 32
    a = _add_key(_sub_and_shift(a, 0), keys, 0)
    b = _add_key(_sub_and_shift(b, 1), keys, 1)
    c = _add_key(_sub_and_shift(c, 2), keys, 2)
    d = _add_key(_sub_and_shift(d, 3), keys, 3)
    a = _transpose(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7])
    b = _transpose(b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7])
    c = _transpose(c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7])
    d = _transpose(d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7])
    block = data + (segment * blocks + thread) * 4
    for lane in tl.static_range(8):
        inside = thread + lane * width < blocks
        _xor_block(block + lane * width * 4, a[lane], b[lane], c[lane], d[lane], inside, width)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Let Triton compile into a new directory that only this user can reach, and remove it at the end.

    Triton would take what it finds in its usual directory for a kernel that it compiled before. Whoever can write
    there, now or while the machine was off, could so put a kernel of his own between keys and weights.

    Raises:
        OSError: there is no place that code can be loaded from.
    """
    parent = next((place for place in _PLACES if place.is_dir() and not os.statvfs(place).f_flag & os.ST_NOEXEC), None)
    if parent is None:
        raise OSError("no place for compiled code")
    place = parent / f"lethe-kernel-{secrets.token_hex(8)}"
    place.mkdir(mode=0o700)
    try:
        with triton.knobs.cache.scope():
            triton.knobs.cache.dir = str(place)
            yield
    finally:
        shutil.rmtree(place, ignore_errors=True)


class KernelCounter:
    """XORs the key stream of AES-256 in counter mode over data on a GPU, in place. It needs no scratch memory."""

    def apply(self, data: torch.Tensor, planes: torch.Tensor, *, first: int, segment_bytes: int, counter: int) -> None:
        """Turn whole segments of ciphertext into plaintext; see :class:`appliance.devicecipher.plain.PlainCounter`."""
        if segment_bytes % GRAIN or data.numel() % segment_bytes:
            raise ValueError(f"{data.numel()} bytes in segments of {segment_bytes}")
        blocks = segment_bytes // 16
        programs = triton.cdiv(blocks, 8 * _WIDTH)
        # Triton launches on the thread's own device, which need not be that of the data.
        with torch.cuda.device_of(data):  # type: ignore[no-untyped-call]  # torch gives it no annotation
            counter_mode[(data.numel() // segment_bytes * programs,)](
                data.view(torch.int32),
                planes,
                signed(first),
                signed(counter),
                blocks,
                programs,
                width=_WIDTH,
                rounds=ROUNDS,
                num_warps=_WIDTH // 32,
            )

    def secret_blocks(self) -> tuple[torch.Tensor, ...]:
        """Give nothing: the state is in registers."""
        return ()
