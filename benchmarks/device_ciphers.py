"""What opening on a device leaves to the CPU, and what it asks of the device, for two suites, on one core.

``python -m benchmarks.device_ciphers [--rounds 7]``

Rows of the host, over 64 MiB in segments of 1 MiB, more than a cache holds:

- AES-256-GCM opened, as the host does it; ChaCha20-Poly1305 opened
- the check of AES-256-GCM's own tag over ciphertext (provisioning/authenticate.py); Poly1305 over ciphertext

Rows of the device, run by torch on this CPU, where only their ratio to each other means something: AES-256-CTR,
bitsliced; ChaCha20. What a GPU needs for a byte is counted elsewhere (docs/adr/0016-opening-on-the-device.md).

All methods take turns in every round, so that a busy machine weighs on all of them. GB are 10^9 bytes of ciphertext,
seconds those of this thread's CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.poly1305 import Poly1305

from appliance.devicecipher.plain import PlainCounter, scratch_words
from appliance.devicecipher.schedule import PLANE_BYTES, write_planes
from benchmarks.comparison.machine import describe
from benchmarks.device.chacha import TorchChaCha20
from provisioning.authenticate import SectionAuthenticator
from provisioning.geometry import Section

ROOT = Path(__file__).resolve().parents[1]
SEGMENT = 1 << 20
SEGMENTS = 64
TORCH_BYTES = 4 << 20
TORCH_CHUNK = 1 << 20
KEY = bytes(range(32))
BUNDLE = bytes(16)

LABELS = {
    "gcm_open": "AES-256-GCM, opened",
    "gcm_check": "AES-256-GCM, tag checked over ciphertext",
    "chacha_open": "ChaCha20-Poly1305, opened",
    "poly1305_check": "Poly1305, tag checked over ciphertext",
    "aes_ctr_torch": "AES-256-CTR, bitsliced, torch",
    "chacha20_torch": "ChaCha20, torch",
}


def host_methods(stack: ExitStack) -> dict[str, Callable[[], None]]:
    """Give what a host can do with sealed segments; each method goes over all of them once."""
    section = Section(number=1, stream=1, first=0, segments=SEGMENTS, base=0)
    checker = stack.enter_context(
        SectionAuthenticator(
            memoryview(KEY), bundle_id=BUNDLE, section=section, segment_size=SEGMENT, descriptor=bytes(48)
        )
    )
    ciphertext = memoryview(bytearray(SEGMENTS * (SEGMENT + 16)))
    other = memoryview(bytearray(SEGMENTS * (SEGMENT + 16)))
    plaintext = memoryview(bytearray(SEGMENTS * SEGMENT))
    chacha = ChaCha20Poly1305(KEY)
    tags, poly_tags, poly_keys = [], [], []
    nonces, data = [], []
    for number in range(SEGMENTS):
        gcm, nonce, associated = checker._prepare(number)  # noqa: SLF001  # the suite's own nonces and associated data
        at = number * (SEGMENT + 16)
        gcm.encrypt_into(nonce, os.urandom(SEGMENT), associated, ciphertext[at : at + SEGMENT + 16])
        chacha.encrypt_into(nonce, plaintext[:SEGMENT], associated, other[at : at + SEGMENT + 16])
        tags.append(bytes(ciphertext[at + SEGMENT : at + SEGMENT + 16]))
        stream = Cipher(algorithms.ChaCha20(KEY, bytes(4) + nonce), None).encryptor()
        poly_keys.append(stream.update(bytes(64))[:32])
        poly_tags.append(bytes(other[at + SEGMENT : at + SEGMENT + 16]))
        nonces.append(nonce)
        data.append(associated)

    def sealed(memory: memoryview, number: int, tail: int) -> memoryview:
        at = number * (SEGMENT + 16)
        return memory[at : at + SEGMENT + tail]

    def gcm_open() -> None:
        aead = checker._prepare(0)[0]  # noqa: SLF001  # as above
        for number in range(SEGMENTS):
            target = plaintext[number * SEGMENT : (number + 1) * SEGMENT]
            aead.decrypt_into(nonces[number], sealed(ciphertext, number, 16), data[number], target)

    def gcm_check() -> None:
        for number in range(SEGMENTS):
            checker.authenticate(number, sealed(ciphertext, number, 0), tags[number])

    def chacha_open() -> None:
        for number in range(SEGMENTS):
            target = plaintext[number * SEGMENT : (number + 1) * SEGMENT]
            chacha.decrypt_into(nonces[number], sealed(other, number, 16), data[number], target)

    def poly1305_check() -> None:
        for number in range(SEGMENTS):
            # RFC 8439, section 2.8: associated data and ciphertext, each padded, then both lengths. The one-time key
            # is the start of the key stream's block 0.
            Cipher(algorithms.ChaCha20(KEY, bytes(4) + nonces[number]), None).encryptor().update(bytes(64))
            checked = Poly1305(poly_keys[number])
            checked.update(data[number] + bytes(-len(data[number]) % 16))
            checked.update(sealed(other, number, 0))
            checked.update(len(data[number]).to_bytes(8, "little") + SEGMENT.to_bytes(8, "little"))
            checked.verify(poly_tags[number])

    return {"gcm_open": gcm_open, "gcm_check": gcm_check, "chacha_open": chacha_open, "poly1305_check": poly1305_check}


def device_methods() -> dict[str, Callable[[], None]]:
    """Give the device's halves, in torch on this CPU."""
    planes = bytearray(PLANE_BYTES)
    write_planes(memoryview(KEY), memoryview(bytes(12)), memoryview(planes))
    keys = torch.frombuffer(planes, dtype=torch.int32)
    scratch = torch.zeros(scratch_words(TORCH_CHUNK), dtype=torch.int32)
    counter = PlainCounter(scratch, chunk_bytes=TORCH_CHUNK)
    chacha = TorchChaCha20(KEY, chunk_bytes=TORCH_CHUNK, device=torch.device("cpu"))
    data = torch.zeros(TORCH_BYTES, dtype=torch.uint8)
    check_chacha(chacha)
    return {
        "aes_ctr_torch": lambda: counter.apply(data, keys, first=0, segment_bytes=SEGMENT, counter=2),
        "chacha20_torch": lambda: chacha.apply(data, nonce=bytes(12), counter=1),
    }


def check_chacha(chacha: TorchChaCha20) -> None:
    """See that the benchmark's own cipher is ChaCha20, before its speed is told."""
    nonce, data = os.urandom(12), torch.frombuffer(bytearray(os.urandom(TORCH_CHUNK)), dtype=torch.uint8)
    stream = Cipher(algorithms.ChaCha20(KEY, (7).to_bytes(4, "little") + nonce), None).encryptor()
    expected = stream.update(data.numpy().data)
    chacha.apply(data, nonce=nonce, counter=7)
    if bytes(data.numpy().data) != expected:
        raise SystemExit("the torch form of ChaCha20 is wrong")


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Give GB per CPU-second of every method: median, least, most."""
    rates: dict[str, list[float]] = {name: [] for name in LABELS}
    with ExitStack() as stack:
        methods = host_methods(stack) | device_methods()
        names = list(methods)
        for number in range(rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                begin = time.thread_time()
                methods[name]()
                taken = time.thread_time() - begin
                nbytes = TORCH_BYTES if name.endswith("_torch") else SEGMENTS * SEGMENT
                if number:  # the first round only warms up
                    rates[name].append(nbytes / taken / 1e9)
    return {
        name: {"median": statistics.median(all_), "least": min(all_), "most": max(all_)} for name, all_ in rates.items()
    }


def as_markdown(report: dict[str, Any]) -> str:
    """Write the report for people."""
    machine, rates = report["machine"], report["gb_per_cpu_second"]
    lines = [
        f"# Ciphers for opening on a device, {report['date']}",
        "",
        f"{machine['cpu']}, AVX-512 AES: {'yes' if machine['avx512_aes'] else 'no'}, Linux {machine['kernel']}, Python "
        f"{machine['python']}, torch {machine['torch']}, cryptography {machine['cryptography']}. One thread, "
        f"{report['rounds']} rounds in which all methods took turns.",
        "",
        "Written by `python -m benchmarks.device_ciphers`.",
        "",
        "| method | GB per CPU-second, median | least to most | times AES-256-GCM opened |",
        "|---|---|---|---|",
    ]
    for name, label in LABELS.items():
        rate = rates[name]
        lines.append(
            f"| {label} | {rate['median']:.3g} | {rate['least']:.3g} to {rate['most']:.3g} "
            f"| {rate['median'] / rates['gcm_open']['median']:.3g} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    report = {
        "date": date,
        "machine": describe(ROOT),
        "rounds": given.rounds,
        "gb_per_cpu_second": measure(given.rounds),
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"device-ciphers-{date}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    page = as_markdown(report)
    (given.out / f"device-ciphers-{date}.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
