"""How fast these cores open AES-256-GCM when the ciphertext is in memory already: the limit of every warm load.

Segments as the loader opens them, with genuine tags, from one place in memory to another, by ``decrypt_into``, which
lets other threads run meanwhile. Where a device decrypts, the cores only authenticate, which is GMAC over the segment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from appliance import pages
from appliance.probe.rate import Rate, run_together

SEGMENT = 1 << 20
_TAG = 16
_ASSOCIATED = bytes(64)  # as long as what the loader authenticates beside each segment


class Ciphertext:
    """Segments in memory with their tags behind them, and room for the plaintext; both touched.

    Args:
        nbytes: of plaintext; rounded up to whole segments. It should be well above the processor's caches.
        segment_bytes: of a segment.
    """

    def __init__(self, nbytes: int, *, segment_bytes: int = SEGMENT) -> None:
        self._size = segment_bytes
        self._count = max(1, -(-nbytes // segment_bytes))
        self._stride = segment_bytes + pages.PAGE
        self._aead = AESGCM(AESGCM.generate_key(256))
        self._sealed = memoryview(pages.map_private(self._count * self._stride))
        self._opened = memoryview(pages.map_private(self._count * segment_bytes))
        # Zeros would do for the cipher, but not for memory that merges or compresses equal pages.
        plain = os.urandom(segment_bytes)
        for number in range(self._count):
            self._aead.encrypt_into(_nonce(number), plain, _ASSOCIATED, self._segment(number))
            self._opened[number * segment_bytes : (number + 1) * segment_bytes] = plain

    @property
    def nbytes(self) -> int:
        """Bytes of plaintext."""
        return self._count * self._size

    def _segment(self, number: int) -> memoryview:
        start = number * self._stride
        return self._sealed[start : start + self._size + _TAG]

    def open_all(self, *, threads: int) -> Rate:
        """Open every segment once.

        Args:
            threads: openers at work.

        Raises:
            InvalidTag: the memory was changed; that cannot happen to genuine segments.
        """
        return self._together(self._open, threads)

    def authenticate_all(self, *, threads: int) -> Rate:
        """Do with every segment once what authenticating it costs.

        Args:
            threads: openers at work.
        """
        return self._together(self._authenticate, threads)

    def _together(self, work: Callable[[Iterator[int]], int], threads: int) -> Rate:
        numbers = iter(range(self._count))
        return run_together([partial(work, numbers) for _ in range(threads)])

    def _authenticate(self, numbers: Iterator[int]) -> int:
        done = 0
        tag = bytearray(_TAG)
        for number in numbers:
            self._aead.encrypt_into(_nonce(number), b"", self._segment(number)[: self._size], tag)
            done += self._size
        return done

    def _open(self, numbers: Iterator[int]) -> int:
        done = 0
        for number in numbers:  # one iterator of all threads: each number is given out once
            start = number * self._size
            target = self._opened[start : start + self._size]
            done += self._aead.decrypt_into(_nonce(number), self._segment(number), _ASSOCIATED, target)
        return done


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def scaling(
    *, nbytes: int, threads: list[int], repeats: int = 3, open_on: Literal["host", "device"] = "host"
) -> dict[int, Rate]:
    """Measure the rate for several numbers of threads, the best of a few tries each.

    Args:
        nbytes: opened in one try.
        threads: numbers of threads.
        repeats: tries.
        open_on: ``device`` measures what a device that decrypts leaves to the cores.
    """
    ciphertext = Ciphertext(nbytes)
    work = ciphertext.open_all if open_on == "host" else ciphertext.authenticate_all
    return {count: max((work(threads=count) for _ in range(repeats)), key=lambda rate: rate.gb_s) for count in threads}
