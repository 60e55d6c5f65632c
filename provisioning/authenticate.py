"""Authenticate a sealed segment without decrypting it, for a device that turns ciphertext into plaintext itself.

The tag of GCM is a sum over GF(2): a polynomial hash of associated data, ciphertext and their lengths, plus a mask that
only key and nonce give. GMAC, the same function with everything in the associated data, over the ciphertext alone
differs from the tag by two terms that do not depend on the ciphertext: that of the lengths, the same for all segments
of a section, and that of the associated data, of which only the segment's number changes. Both are linear, so the
difference of every segment is a sum of one term for the section and one for each bit of the number. These terms are
found with the library itself, as differences of tags under one nonce; so nothing here multiplies in the field, and the
ciphertext is read where it lies, at the rate of GMAC (NIST SP 800-38D, sections 6.4 and 7).

The terms are multiples of the hash key, with which a tag can be forged: they live in secret memory, and so do the tags
they are made from. The nonce of those tags differs in its first bit from the nonce of every segment, and what is
encrypted under it, zeros, leaves this module in no form.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Callable, Iterator
from typing import Final, final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from provisioning.geometry import Section
from provisioning.secret import SecretBytes
from provisioning.segment import NONCE_BYTES, TAG_BYTES, SectionCipher

_BLOCK: Final = 16
# A segment's number is 32 bits, at the low end of the nonce; the first bit of a nonce is no segment's.
_SPARE: Final = 1 << (8 * NONCE_BYTES - 1)
# Terms are looked up by so many bits of the number at once.
_DIGIT: Final = 8
_TERMS: Final = 1 << _DIGIT


@final
class SectionAuthenticator(SectionCipher):
    """Authenticates the segments of one section, in any order and from several threads at once.

    Args: as :class:`provisioning.segment.SectionOpener`.
    """

    __slots__ = ("_digits", "_terms")

    def __init__(
        self, key: memoryview, *, bundle_id: bytes, section: Section, segment_size: int, descriptor: bytes
    ) -> None:
        super().__init__(key, bundle_id=bundle_id, section=section, segment_size=segment_size, descriptor=descriptor)
        bits = max(1, (section.segments - 1).bit_length())
        self._digits = -(-bits // _DIGIT)
        self._terms: SecretBytes | None = SecretBytes(self._digits * _TERMS * TAG_BYTES)
        aead, _, _ = self._prepare(0)
        nonce = (self._base ^ _SPARE).to_bytes(NONCE_BYTES, "big")
        with self._terms.expose() as terms:
            _write_terms(terms, bits, aead, nonce, self._aad, segment_size)

    def __enter__(self) -> SectionAuthenticator:
        return self

    def authenticate(self, number: int, ciphertext: memoryview, tag: bytes) -> None:
        """Check one segment, which stays as it is.

        Args:
            number: the segment's number in the section.
            ciphertext: ``segment_size`` bytes. Nobody else may be able to change them, now or until they are used.
            tag: of the table.

        Raises:
            BundleDamaged: ``segment.tag`` when the segment is not authentic.
        """
        if len(ciphertext) != self.segment_size or len(tag) != TAG_BYTES:
            raise ValueError(f"a segment of {len(ciphertext)} bytes with a tag of {len(tag)}")
        aead, nonce, _ = self._prepare(number)
        if self._terms is None:
            raise ValueError("this section is closed")
        expected = bytearray(TAG_BYTES)
        aead.encrypt_into(nonce, b"", ciphertext, expected)
        with self._terms.expose() as terms:
            for digit in range(self._digits):
                at = (digit * _TERMS + (number >> _DIGIT * digit) % _TERMS) * TAG_BYTES
                _add(expected, terms[at : at + TAG_BYTES])
        if not hmac.compare_digest(expected, tag):
            raise self._damaged(number)

    @contextlib.contextmanager
    def expose(self) -> Iterator[tuple[memoryview, memoryview]]:
        """Give (key, base nonce), 32 and 12 bytes, for a device's key schedule, for the length of a ``with`` block."""
        if self._secret is None:
            raise ValueError("this section is closed")
        with self._secret.expose() as derived:
            yield derived[:-NONCE_BYTES], derived[-NONCE_BYTES:]

    def close(self) -> None:
        """Wipe key and terms. May be called again."""
        super().close()
        if self._terms is not None:
            self._terms.close()
            self._terms = None


def _write_terms(
    terms: memoryview, bits: int, aead: AESGCM, nonce: bytes, associated: Callable[[int], bytes], size: int
) -> None:
    """Fill the tables, one for each digit of a number: what to add to a GMAC to make it the segment's tag.

    Args:
        terms: ``[digits, 256, 16]`` bytes; the first digit's entries also have the term of the section.
        bits: of the section's numbers.
        aead: of the section.
        nonce: of no segment.
        associated: from a segment's number to its associated data.
        size: bytes of a segment.
    """
    front = associated(0)
    room = -(-len(front) // _BLOCK) * _BLOCK
    padded = bytearray(room + size)
    sealed = bytearray(size + TAG_BYTES)
    with SecretBytes(2 * TAG_BYTES) as secret, secret.expose() as work:
        origin, other = work[:TAG_BYTES], work[TAG_BYTES:]
        # A segment of zeros, under the spare nonce: its tag and its ciphertext's GMAC differ by the section's term.
        aead.encrypt_into(nonce, memoryview(padded)[room:], front, sealed)
        aead.encrypt_into(nonce, b"", memoryview(sealed)[:size], origin)
        _add(origin, memoryview(sealed)[size:])
        terms[:TAG_BYTES] = origin
        sealed[:] = bytes(len(sealed))
        # Associated data lie as far in front of the end here as in a segment, whose blocks are zeros for this.
        padded[: len(front)] = front
        aead.encrypt_into(nonce, b"", padded, origin)
        for bit in range(bits):
            padded[: len(front)] = associated(1 << bit)
            aead.encrypt_into(nonce, b"", padded, other)
            _add(other, origin)
            digit, place = divmod(bit, _DIGIT)
            table = terms[digit * _TERMS * TAG_BYTES :]
            for known in range(1 << place):
                new = (known | 1 << place) * TAG_BYTES
                table[new : new + TAG_BYTES] = other
                _add(table[new : new + TAG_BYTES], table[known * TAG_BYTES : (known + 1) * TAG_BYTES])


def _add(target: bytearray | memoryview, term: memoryview) -> None:
    # Byte by byte: these are numbers that Python keeps as shared objects, so no object holds a piece of a term.
    for index in range(TAG_BYTES):
        target[index] ^= term[index]
