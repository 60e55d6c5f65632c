"""What another process finds of a bundle key in the memory of the agent that opened it and handed it on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from provisioning.ownerkey import PUBLIC_FILE

# How the units start the agent (systemd/): freed objects are overwritten, and no lazy symbol lookup saves vector
# registers, which may hold half a key, on the stack.
AS_STARTED_BY_THE_UNIT = {"PYTHONMALLOC": "debug", "LD_BIND_NOW": "1"}

NODE = """
import os, secrets, sys
from pathlib import Path
from attestation.appraise import appraise
from attestation.binding import Binding
from attestation.clock import SystemClock
from attestation.simulated import collect
from provisioning import challenge, request
from provisioning.grant import SignedGrant
from provisioning.manifest import SignedManifest
from provisioning.ownerkey import OwnerKey
from provisioning.session import Session

directory, laboratory = Path(sys.argv[1]), Path(sys.argv[2])
owner = OwnerKey.load(directory / "keys")
manifest = SignedManifest.read((directory / "manifest").read_bytes(), [owner])
asked = challenge.read((directory / "challenge").read_bytes(), owner)
session, clock = Session(), SystemClock()

def bind(nonce):
    return Binding(
        nonce=nonce, session_key_digest=session.digest, tls_key_digest=bytes(48),
        policy_digest=manifest.policy.digest, manifest_digest=manifest.digest,
        config_digest=bytes(48), boot_id=bytes(16),
    )

def say(word):
    print(word, flush=True)
    sys.stdin.readline()

binding = bind(asked.nonce)
evidence = collect.collect(laboratory, binding)
made = request.make(node="n", challenge=asked, session=session, binding=binding, evidence=evidence, clock=clock)
(directory / "request").write_bytes(made)
say("asked")
sealed = SignedGrant.read((directory / "granted").read_bytes(), owner)
binding = bind(secrets.token_bytes(32))
result = appraise(
    collect.collect(laboratory, binding), binding=binding, policy=manifest.policy, at=asked.issued_at
)
grant = session.open(sealed, manifest=manifest, result=result, clock=clock)
planted = bytearray(32)
with grant.bundle_key() as view:
    planted[:] = view
say("opened")
planted[:] = bytes(32)
reader, writer = os.pipe()
grant.hand_over([writer])
os.readv(reader, [planted])
planted[:] = bytes(32)
say("handed over")
session.wipe()
say("wiped")
"""


def _windows_in_memory(process: int, key: bytes) -> int:
    """Count appearances of 8-byte windows of a key in all readable memory of another process."""
    windows = [key[start : start + 8] for start in range(len(key) - 7)]
    found = 0
    memory = os.open(f"/proc/{process}/mem", os.O_RDONLY)
    try:
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            span, rights = line.split()[:2]
            if not rights.startswith("r"):
                continue
            low, high = (int(part, 16) for part in span.split("-"))
            # Special mappings, and secret memory above all, cannot be read by anyone.
            with suppress(OSError, OverflowError):
                data = os.pread(memory, high - low, low)
                found += sum(data.count(window) for window in windows)
    finally:
        os.close(memory)
    return found


@contextmanager
def _node(exchange: Any) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, **AS_STARTED_BY_THE_UNIT, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", NODE, str(exchange.directory), str(exchange.laboratory)]
    node = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield node
    finally:
        node.kill()
        node.communicate()


def _next(node: subprocess.Popen[str], word: str) -> None:
    if node.stdin is None or node.stdout is None:
        raise AssertionError
    if word != "asked":
        node.stdin.write("\n")
        node.stdin.flush()
    assert node.stdout.readline() == word + "\n"


def test_nothing_of_the_key_is_left_after_it_was_handed_over(exchange: Any, key_directory: Path) -> None:
    assert (key_directory / PUBLIC_FILE).exists()
    (exchange.directory / "manifest").write_bytes(exchange.manifest_envelope)
    (exchange.directory / "challenge").write_bytes(exchange.challenge())
    with exchange.bundle_key.expose() as view:
        key = bytes(view)
    with _node(exchange) as node:
        _next(node, "asked")
        try:
            os.close(os.open(f"/proc/{node.pid}/mem", os.O_RDONLY))
        except PermissionError:
            pytest.skip("this user may not read the memory of a child")
        granted = exchange.grant((exchange.directory / "request").read_bytes())
        (exchange.directory / "granted").write_bytes(granted)
        _next(node, "opened")
        # The control: one planted copy, all of its 25 windows, and nothing else. The key itself is in secret memory.
        control = _windows_in_memory(node.pid, key)
        _next(node, "handed over")
        handed_over = _windows_in_memory(node.pid, key)
        _next(node, "wiped")
        wiped = _windows_in_memory(node.pid, key)
    assert control >= 25
    assert (handed_over, wiped) == (0, 0)
