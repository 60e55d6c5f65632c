"""After a key schedule was written for a device, no round key is left in the memory of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from appliance.devicecipher.circuit import AFFINE
from appliance.devicecipher.schedule import PLANE_BYTES, ROUNDS, write_planes
from appliance.residue import Needle, Searcher

_ROOT = Path(__file__).resolve().parents[3]

_CHILD = """
import os, sys
from appliance.devicecipher.schedule import PLANE_BYTES, write_planes
from provisioning.secret import SecretBytes

with SecretBytes.read(0, 32) as key, key.expose() as view:
    planes = bytearray(PLANE_BYTES)
    write_planes(view, memoryview(bytes(12)), memoryview(planes))
    planes[:] = bytes(PLANE_BYTES)
kept = os.read(0, 32)
print("done", flush=True)
os.read(0, 1)
"""


def _round_keys(key: bytes) -> list[bytes]:
    planes = bytearray(PLANE_BYTES)
    write_planes(memoryview(key), memoryview(bytes(12)), memoryview(planes))
    keys = []
    for number in range(ROUNDS + 1):
        octets = bytearray(16)
        for place in range(16):
            column, row = divmod(place, 4)
            for bit in range(8):
                octets[place] |= (planes[((number * 8 + bit) * 4 + row) * 4 + column] & 1) << bit
            octets[place] ^= AFFINE if number else 0
        keys.append(bytes(octets))
    return keys


def test_no_round_key_is_left_behind() -> None:
    key, control = os.urandom(32), os.urandom(32)
    keys = _round_keys(key)
    assert keys[0] + keys[1] == key
    needles = [Needle(f"round key {number}", data) for number, data in enumerate(keys)] + [Needle("control", control)]
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        bufsize=0,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(key)
        child.stdin.write(control)
        assert child.stdout.readline() == b"done\n"
        found = {hit.label for hit in Searcher(needles).search_process(child.pid).hits}
        child.stdin.write(b"\n")
    assert found == {"control"}
