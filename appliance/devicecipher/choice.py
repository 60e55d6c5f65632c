"""Which form of counter mode a slot's device runs, and whether it computes AES.

A wrong kernel would fill the model with noise, which no tag can tell: tags are of ciphertext. So before a load the
chosen form encrypts known blocks on the device, and the result is compared with that of the cryptography library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from appliance.devicecipher.plain import PlainCounter, scratch_words
from appliance.devicecipher.schedule import GRAIN, KEY_BYTES, NONCE_BYTES, PLANE_BYTES, PLANE_WORDS, write_planes
from appliance.errors import DeviceFault
from appliance.slot import Slot

# Scratch memory of the torch form is eight times this, for each lane. On a CPU it should stay in the cache; on a GPU
# two thousand launches, of some microseconds each, are paid for every chunk.
_CPU_CHUNK: Final = 256 << 10
_GPU_CHUNK: Final = 16 << 20
# The first counter of a segment: GCM keeps 1 for the tag.
FIRST_COUNTER: Final = 2
# Of the self-test: two segments of as many bytes, more than one program of the kernel each.
_TEST_SEGMENT: Final = 160 * GRAIN
# The number of the first, and its first counter: in all four bytes, and both carry over more than one.
_TEST_FIRST: Final = 0xF1E2FFFF
_TEST_COUNTER: Final = 0x8796FFF0
# How often the caller of a choice under way is told that it still is, seconds.
_TICK: Final = 0.02

Form = Literal["triton", "torch"]


class Counter(Protocol):
    """AES-256 in counter mode over segments on a device; see :class:`appliance.devicecipher.plain.PlainCounter`."""

    def apply(self, data: torch.Tensor, planes: torch.Tensor, *, first: int, segment_bytes: int, counter: int) -> None:
        """XOR the key stream over whole segments, in place; only enqueues."""
        ...

    def secret_blocks(self) -> tuple[torch.Tensor, ...]:
        """Give the flat ``[bytes] uint8`` blocks to be overwritten at the end; nothing can be applied after that."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """A form of counter mode that has passed its self-test.

    Attributes:
        form: which.
        make: gives one for a lane that brings so many bytes at most; its scratch memory comes from the slot, so the
            wipe covers it.
    """

    form: Form
    make: Callable[[int], Counter]


def choose(slot: Slot) -> Choice:
    """Give the fastest form that runs on the slot's device: Triton on a GPU where it is usable, else torch.

    Raises:
        DeviceFault: ``cipher.selftest`` when a form gives wrong bytes; ``slot.memory``.
    """
    if slot.device.type == "cuda" and (kernel := _kernel(slot)) is not None:
        return kernel
    make = _plain(slot)
    self_test(slot, make(_TEST_SEGMENT), "torch")
    return Choice("torch", make)


class Choosing:
    """A choice under way on a thread of its own: what compiles for seconds must not keep its caller from hearing.

    It uses public test values only, so it may be left behind when its caller gives up.

    Args:
        slot: as for :func:`choose`.
    """

    def __init__(self, slot: Slot) -> None:
        self._over = threading.Event()
        self._choice: Choice | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, args=(slot,), daemon=True).start()

    def _run(self, slot: Slot) -> None:
        try:
            self._choice = choose(slot)
        except BaseException as error:  # noqa: BLE001  # carried over to the thread that waits, which raises it
            self._error = error
        finally:
            self._over.set()

    def wait(self, on_tick: Callable[[], None]) -> Choice:
        """Give the choice once it is made.

        Args:
            on_tick: called many times a second until then; an error that it raises ends the waiting.

        Raises:
            DeviceFault: as :func:`choose`.
        """
        while not self._over.wait(_TICK):
            on_tick()
        if self._choice is None:
            raise self._error or RuntimeError("no form was chosen")
        return self._choice


def _kernel(slot: Slot) -> Choice | None:
    """Give the Triton form, or None where triton is missing, or cannot compile or launch."""
    try:
        from appliance.devicecipher.kernel import UNUSABLE, KernelCounter, compiling
    except ImportError:
        return None
    try:
        # Every later launch is of the form that is compiled here.
        with compiling():
            self_test(slot, KernelCounter(), "triton")
    except UNUSABLE:
        return None
    return Choice("triton", lambda _: KernelCounter())


def _plain(slot: Slot) -> Callable[[int], Counter]:
    most = _CPU_CHUNK if slot.device.type == "cpu" else _GPU_CHUNK

    def make(nbytes: int) -> Counter:
        chunk = min(most, -(-nbytes // GRAIN) * GRAIN)
        return PlainCounter(slot.empty((scratch_words(chunk),), torch.int32), chunk_bytes=chunk)

    return make


def self_test(slot: Slot, counter: Counter, form: Form) -> None:
    """Encrypt known blocks under a known key and compare.

    Raises:
        DeviceFault: ``cipher.selftest``.
    """
    key, nonce = bytes(range(KEY_BYTES)), bytes(range(0xF0, 0xF0 + NONCE_BYTES))
    host = bytearray(PLANE_BYTES)
    write_planes(memoryview(key), memoryview(nonce), memoryview(host))
    planes = slot.empty((PLANE_WORDS,), torch.int32)
    planes.copy_(torch.frombuffer(host, dtype=torch.int32))
    data = slot.empty((2 * _TEST_SEGMENT,), torch.uint8)
    data.zero_()
    counter.apply(data, planes, first=_TEST_FIRST, segment_bytes=_TEST_SEGMENT, counter=_TEST_COUNTER)
    if bytes(data.cpu().numpy().data) != _expected(key, nonce):
        raise DeviceFault(
            "cipher.selftest",
            found=f"wrong AES-256 from the {form} form on {slot.name}",
            expected="the bytes of the cryptography library",
            hint="set loading.open_on to host, and report the device, its driver and the version of torch",
        )


def _expected(key: bytes, nonce: bytes) -> bytes:
    """Give the key stream of the self-test's two segments."""
    blocks = []
    for number in (_TEST_FIRST, _TEST_FIRST + 1):
        start = (int.from_bytes(nonce, "big") ^ number).to_bytes(NONCE_BYTES, "big") + _TEST_COUNTER.to_bytes(4, "big")
        blocks.append(Cipher(algorithms.AES(key), modes.CTR(start)).encryptor().update(bytes(_TEST_SEGMENT)))
    return b"".join(blocks)
