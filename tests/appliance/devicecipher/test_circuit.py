"""The S-box as a circuit, its program over registers, and the key schedule."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from appliance.devicecipher.circuit import AFFINE, sbox
from appliance.devicecipher.schedule import PLANE_BYTES, ROUNDS, write_planes
from appliance.devicecipher.trace import trace


def _s(value: int) -> int:
    """The S-box by its definition: inverse in the field of FIPS 197, then the affine map."""
    inverse = next((other for other in range(256) if _product(value, other) == 1), 0)
    turned = inverse
    for _ in range(4):
        inverse = (inverse << 1 | inverse >> 7) & 0xFF
        turned ^= inverse
    return turned ^ 0x63


def _product(left: int, right: int) -> int:
    product = 0
    while right:
        product ^= left if right & 1 else 0
        left = left << 1 ^ (0x11B if left & 0x80 else 0)
        right >>= 1
    return product


def test_circuit_is_the_substitution_of_every_byte() -> None:
    # All 256 inputs at once, as the bits of eight long integers.
    inputs = [sum((value >> bit & 1) << value for value in range(256)) for bit in range(8)]
    outputs = sbox(*inputs)
    for value in range(256):
        given = sum((outputs[bit] >> value & 1) << bit for bit in range(8))
        assert given ^ AFFINE == _s(value)


def test_program_does_what_the_circuit_does() -> None:
    program = trace(sbox)
    for value in range(256):
        registers = [value >> bit & 1 for bit in range(8)] + [0] * (program.registers - 8)
        for gate in program.gates:
            left, right = registers[gate.left], registers[gate.right]
            registers[gate.out] = left & right if gate.kind == "and" else left ^ right
        assert registers[8:16] == list(sbox(*[value >> bit & 1 for bit in range(8)]))


def test_program_reuses_registers() -> None:
    program = trace(sbox)
    assert program.registers < 48 < len(program.gates)


def _schedule_of_the_standard() -> list[str]:
    """First and last words of FIPS 197, appendix A.3."""
    return ["603deb10", "9ba35411", "706c631e"]


def test_planes_hold_the_round_keys_of_the_standard() -> None:
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    planes = bytearray(PLANE_BYTES)
    write_planes(memoryview(key), memoryview(bytes(12)), memoryview(planes))
    words = []
    for index in range(4 * (ROUNDS + 1)):
        number, column = divmod(index, 4)
        folded = AFFINE if number else 0
        octets = [
            sum((planes[((number * 8 + bit) * 4 + row) * 4 + column] & 1) << bit for bit in range(8)) ^ folded
            for row in range(4)
        ]
        words.append(bytes(octets).hex())
    assert [words[0], words[8], words[59]] == _schedule_of_the_standard()
    assert set(planes) == {0x00, 0xFF}


def test_nonce_is_in_the_planes_of_the_first_round_key() -> None:
    key, nonce = bytes(32), bytes(range(1, 13))
    plain, nonced = bytearray(PLANE_BYTES), bytearray(PLANE_BYTES)
    write_planes(memoryview(key), memoryview(bytes(12)), memoryview(plain))
    write_planes(memoryview(key), memoryview(nonce), memoryview(nonced))
    changed = [place for place in range(PLANE_BYTES) if plain[place] != nonced[place]]
    assert max(changed) < 8 * 4 * 4
    assert len(changed) == sum(octet.bit_count() for octet in nonce)
    assert all(place % 4 < 3 for place in changed)


@pytest.mark.parametrize("sizes", [(31, 12, PLANE_BYTES), (32, 16, PLANE_BYTES), (32, 12, PLANE_BYTES - 4)])
def test_wrong_sizes_are_not_taken(sizes: tuple[int, int, int]) -> None:
    key, nonce, planes = (memoryview(bytearray(size)) for size in sizes)
    with pytest.raises(ValueError, match="a key of"):
        write_planes(key, nonce, planes)


def test_last_round_key_decides_a_block_of_the_library() -> None:
    """One block by hand from the planes: the state before the last key is what the library gives without it."""
    key = bytes(range(32))
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(bytes(16))
    planes = bytearray(PLANE_BYTES)
    write_planes(memoryview(key), memoryview(bytes(12)), memoryview(planes))
    state = list(bytes(16))
    for number in range(ROUNDS + 1):
        if number:
            state = [_s(octet) ^ AFFINE for octet in state]
            state = [state[(place + 4 * (place % 4)) % 16] for place in range(16)]
            if number < ROUNDS:
                state = _mixed(state)
        for place in range(16):
            column, row = divmod(place, 4)
            for bit in range(8):
                state[place] ^= (planes[((number * 8 + bit) * 4 + row) * 4 + column] & 1) << bit
    assert bytes(state) == block


def _mixed(state: list[int]) -> list[int]:
    factors = (2, 3, 1, 1)
    mixed = []
    for place in range(16):
        column, row = divmod(place, 4)
        octet = 0
        for other in range(4):
            octet ^= _product(state[4 * column + other], factors[(other - row) % 4])
        mixed.append(octet)
    return mixed
