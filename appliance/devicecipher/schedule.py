"""The key schedule of AES-256, written as bit planes for a device.

A plane is a 32-bit word for one bit of one row of the state, as FIPS 197 draws it: byte c of the word belongs to
column c, and its eight bits to eight blocks that are encrypted side by side. A round key is the same for all blocks, so
each byte of its planes is 00 or ff. The S-box constant that the circuit leaves out is in the planes of rounds 1 to 14
(ShiftRows and MixColumns carry a state of equal bytes to itself), and the nonce, which fills columns 0 to 2 of
every counter block, in those of round 0.

Theory of operation: the schedule is computed byte by byte in secret memory. All values on the way are below 256, which
Python keeps as shared objects, so no object of its own holds a piece of the key. No table is used here either.
"""

from __future__ import annotations

from typing import Final

from appliance.devicecipher.circuit import AFFINE, sbox
from provisioning.secret import SecretBytes

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
ROUNDS: Final = 14
# Bytes of the eight blocks that lie side by side: data comes in multiples of it.
GRAIN: Final = 128
# Words of one section's planes: rounds, bits of a byte, rows; word (round * 8 + bit) * 4 + row.
PLANE_WORDS: Final = (ROUNDS + 1) * 8 * 4
PLANE_BYTES: Final = PLANE_WORDS * 4

_ROUND_KEY_BYTES: Final = (ROUNDS + 1) * 16


def write_planes(key: memoryview, nonce: memoryview, planes: memoryview) -> None:
    """Expand a key and write its planes.

    Args:
        key: 32 bytes.
        nonce: 12 bytes, the counter block without its counter.
        planes: writable locked memory, 1920 bytes, little-endian words. The caller owns and wipes it.
    """
    if (len(key), len(nonce), len(planes)) != (KEY_BYTES, NONCE_BYTES, PLANE_BYTES):
        raise ValueError(f"a key of {len(key)} bytes, a nonce of {len(nonce)} and planes of {len(planes)}")
    with SecretBytes(_ROUND_KEY_BYTES) as secret, secret.expose() as words:
        _expand(key, words)
        for position in range(_ROUND_KEY_BYTES):
            number, place = divmod(position, 16)
            column, row = divmod(place, 4)
            first = nonce[place] if place < NONCE_BYTES else 0
            octet = words[position] ^ (AFFINE if number else first)
            for bit in range(8):
                planes[((number * 8 + bit) * 4 + row) * 4 + column] = (octet >> bit & 1) * 0xFF


def signed(word: int) -> int:
    """Give 32 bits as the number that a device's int32 holds; torch refuses any other."""
    return word - (1 << 32) if word >> 31 else word


def _expand(key: memoryview, words: memoryview) -> None:
    """Write the 60 words of FIPS 197, section 5.2."""
    words[:KEY_BYTES] = key
    constant = 1
    for at in range(KEY_BYTES, len(words), 4):
        last = words[at - 4 : at]
        if at % KEY_BYTES == 0:
            mixed = _substituted(last[1], last[2], last[3], last[0])
            words[at] = mixed[0] ^ constant ^ words[at - KEY_BYTES]
            constant <<= 1
            done = 1
        else:
            mixed = _substituted(*last) if at % KEY_BYTES == 16 else tuple(last)
            done = 0
        for index in range(done, 4):
            words[at + index] = mixed[index] ^ words[at + index - KEY_BYTES]


def _substituted(*octets: int) -> tuple[int, ...]:
    """Give the S-box of four bytes."""
    inputs = [sum((octet >> bit & 1) << lane for lane, octet in enumerate(octets)) for bit in range(8)]
    outputs = sbox(*inputs)
    return tuple(sum((outputs[bit] >> lane & 1) << bit for bit in range(8)) ^ AFFINE for lane in range(len(octets)))
