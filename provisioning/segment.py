"""One segment at a time: seal in ``pack``, open in the loader; keys and nonces come from the position.

AES-256-GCM. Key and base nonce of a section come from HKDF-SHA384 over the bundle key; a segment's nonce is the base
XOR its number in the section; so no call takes a nonce, and a bundle key is never used by two pack runs. Associated
data bind a segment to its bundle, section, number, count, length and to the plan of its section: a segment that was
swapped, repeated, cut or taken from another bundle does not open (docs/spec/bundle.md).

The library writes the whole plaintext into the buffer before it knows that the tag is wrong, so the opener overwrites
the buffer before it raises. AEAD objects hold a copy of the key: they live inside a ``with`` block, and go with it.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final, NoReturn, final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from provisioning.errors import BundleDamaged, KeyRefused
from provisioning.geometry import Section
from provisioning.secret import SecretBytes

SUITE: Final = "AES-256-GCM/HKDF-SHA384"
BUNDLE_KEY_BYTES: Final = 32
_SECTION_KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
COMMITMENT_BYTES: Final = 48
BUNDLE_ID_BYTES: Final = 16
DESCRIPTOR_BYTES: Final = 48

_SECTION_LABEL: Final = b"lethe/bundle/v1/section\0"
_COMMITMENT_LABEL: Final = b"lethe/bundle/v1/commitment\0"
_SEGMENT_LABEL: Final = b"lethe/bundle/v1/segment\0"


def commitment(key: memoryview, bundle_id: bytes) -> bytes:
    """Give the key-commitment value of a bundle key, 48 bytes.

    GCM does not commit to a key: a ciphertext can be made that opens under two. This value in the signed manifest ties
    a bundle to one key, and it tells a wrong key from a damaged bundle before the first segment is opened.
    """
    _check_sizes(key, bundle_id)
    derived = bytearray(COMMITMENT_BYTES)
    HKDF(hashes.SHA384(), COMMITMENT_BYTES, None, _COMMITMENT_LABEL + bundle_id).derive_into(key, derived)
    return bytes(derived)


def check_commitment(key: memoryview, bundle_id: bytes, expected: bytes) -> None:
    """Check a bundle key against the manifest's commitment.

    Raises:
        KeyRefused: ``bundle.key`` when this is not the key of that bundle.
    """
    if not hmac.compare_digest(commitment(key, bundle_id), expected):
        raise KeyRefused(
            "bundle.key",
            found="a bundle key of another bundle",
            expected=f"the key of bundle {bundle_id.hex()}",
            hint="request a grant for this bundle; its manifest digest must be in the challenge",
        )


def _check_sizes(key: memoryview, bundle_id: bytes) -> None:
    if len(key) != BUNDLE_KEY_BYTES or len(bundle_id) != BUNDLE_ID_BYTES:
        raise ValueError(f"a bundle key of {len(key)} bytes with an id of {len(bundle_id)}")


def section_info(bundle_id: bytes, section: int, segment_size: int) -> bytes:
    """Give the HKDF info of a section's key."""
    suite = SUITE.encode()
    return _SECTION_LABEL + bundle_id + struct.pack("<IIH", section, segment_size, len(suite)) + suite


def associated_data(bundle_id: bytes, section: Section, segment_size: int, descriptor: bytes) -> Callable[[int], bytes]:
    """Give the function from a segment's number in its section to its associated data."""
    head = _SEGMENT_LABEL + bundle_id + struct.pack("<I", section.number)
    tail = struct.pack("<II", section.segments, segment_size) + descriptor
    return lambda number: head + struct.pack("<I", number) + tail


class SectionCipher:
    """What sealing and opening have in common: the key of one section, for the length of a ``with`` block."""

    __slots__ = ("_aad", "_aead", "_base", "_secret", "section", "segment_size")

    def __init__(
        self, key: memoryview, *, bundle_id: bytes, section: Section, segment_size: int, descriptor: bytes
    ) -> None:
        _check_sizes(key, bundle_id)
        if len(descriptor) != DESCRIPTOR_BYTES:
            raise ValueError(f"a descriptor digest of {len(descriptor)} bytes")
        self.section = section
        self.segment_size = segment_size
        self._aad = associated_data(bundle_id, section, segment_size, descriptor)
        self._secret: SecretBytes | None = SecretBytes(_SECTION_KEY_BYTES + NONCE_BYTES)
        info = section_info(bundle_id, section.number, segment_size)
        with self._secret.expose() as derived:
            HKDF(hashes.SHA384(), len(derived), None, info).derive_into(key, derived)
            self._aead: AESGCM | None = AESGCM(derived[:_SECTION_KEY_BYTES])
            self._base = int.from_bytes(derived[_SECTION_KEY_BYTES:], "big")

    def _prepare(self, number: int) -> tuple[AESGCM, bytes, bytes]:
        """Give (cipher, nonce, associated data) of a segment."""
        if not 0 <= number < self.section.segments:
            raise ValueError(f"segment {number} of {self.section.segments}")
        if self._aead is None:
            raise ValueError("this section is closed")
        return self._aead, (self._base ^ number).to_bytes(NONCE_BYTES, "big"), self._aad(number)

    def _damaged(self, number: int) -> BundleDamaged:
        return BundleDamaged(
            "segment.tag",
            found=f"segment {number} of section {self.section.number}, which is not authentic",
            expected="the segment that the owner sealed",
            hint="run lethe-owner verify on the bundle; copy it again from the owner's medium",
        )

    def close(self) -> None:
        """Wipe the section's key and drop the cipher that holds a copy of it. May be called again."""
        self._aead = None
        self._base = 0
        if self._secret is not None:
            self._secret.close()
            self._secret = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a section's key is not copied or pickled")


@final
class SectionOpener(SectionCipher):
    """Opens the segments of one section, in any order and from several threads at once.

    Args:
        key: the bundle key, 32 bytes; it is read here and not kept.
        bundle_id: 16 bytes, of the signed manifest.
        section: which section, of the signed manifest.
        segment_size: bytes of a segment, of the signed manifest.
        descriptor: ``Layout.descriptor_digest`` of the section.
    """

    __slots__ = ("_aes", "_views")

    def __init__(
        self, key: memoryview, *, bundle_id: bytes, section: Section, segment_size: int, descriptor: bytes
    ) -> None:
        super().__init__(key, bundle_id=bundle_id, section=section, segment_size=segment_size, descriptor=descriptor)
        self._aes: algorithms.AES256 | None = None
        self._views = ExitStack()

    def __enter__(self) -> SectionOpener:
        return self

    def open_to(self, number: int, sealed: memoryview, plaintext: memoryview) -> None:
        """Authenticate one segment and decrypt it to another place, or to where its ciphertext is.

        Args:
            number: the segment's number in the section.
            sealed: ``segment_size + 16`` bytes: ciphertext, then tag. Nobody else may write there meanwhile.
            plaintext: writable, ``segment_size`` bytes: the first bytes of ``sealed``, or apart from them.

        Raises:
            BundleDamaged: ``segment.tag`` when the segment is not authentic; ``plaintext`` is all zeros then.
        """
        if len(sealed) != self.segment_size + TAG_BYTES or len(plaintext) != self.segment_size:
            raise ValueError(
                f"buffers of {len(sealed)} and {len(plaintext)} bytes for a segment of {self.segment_size}"
            )
        aead, nonce, associated = self._prepare(number)
        try:
            aead.decrypt_into(nonce, sealed, associated, plaintext)
        except InvalidTag:
            # decrypt_into has left the unauthenticated plaintext there (docs/limitations.md).
            plaintext[:] = bytes(len(plaintext))
            raise self._damaged(number) from None

    def open_parts(self, number: int, ciphertext: memoryview, tag: bytes, parts: Sequence[memoryview]) -> None:
        """Authenticate one segment and decrypt it to several places, one part of it to each.

        It takes about a twentieth longer than :meth:`open_to`, and wants no tag behind the ciphertext. What is in the
        parts is authentic only when this returns.

        Args:
            number: the segment's number in the section.
            ciphertext: ``segment_size`` bytes. Nobody else may write there meanwhile.
            tag: 16 bytes.
            parts: writable, ``segment_size`` bytes together; each the very place of its ciphertext, or apart from it.

        Raises:
            BundleDamaged: ``segment.tag`` when the segment is not authentic; all parts are zeros then.
        """
        if len(ciphertext) != self.segment_size or sum(len(part) for part in parts) != self.segment_size:
            raise ValueError(f"parts that are not a segment of {self.segment_size} bytes")
        _, nonce, associated = self._prepare(number)
        cipher = Cipher(self._block_cipher(), modes.GCM(nonce, tag)).decryptor()
        cipher.authenticate_additional_data(associated)
        start = 0
        for part in parts:
            cipher.update_into(ciphertext[start : start + len(part)], part)
            start += len(part)
        try:
            cipher.finalize()
        except InvalidTag:
            for part in parts:
                part[:] = bytes(len(part))
            raise self._damaged(number) from None

    def _block_cipher(self) -> algorithms.AES256:
        if self._aes is None:
            if self._secret is None:
                raise ValueError("this section is closed")
            # The object keeps a view of the protected pages, not a copy; it goes before they do.
            self._aes = algorithms.AES256(self._views.enter_context(self._secret.expose())[:_SECTION_KEY_BYTES])
        return self._aes

    def close(self) -> None:
        """Wipe the section's key and drop what looks at it. May be called again."""
        self._aes = None
        self._views.close()
        super().close()


@final
class SectionSealer(SectionCipher):
    """Seals the segments of one section, each once and in order; only ``pack`` uses it.

    Args: as :class:`SectionOpener`; the key must be fresh.
    """

    __slots__ = ("_next",)

    def __init__(
        self, key: memoryview, *, bundle_id: bytes, section: Section, segment_size: int, descriptor: bytes
    ) -> None:
        super().__init__(key, bundle_id=bundle_id, section=section, segment_size=segment_size, descriptor=descriptor)
        self._next = 0

    def __enter__(self) -> SectionSealer:
        return self

    @property
    def sealed(self) -> int:
        """How many segments of the section are sealed."""
        return self._next

    def seal_into(self, buffer: memoryview) -> None:
        """Encrypt the section's next segment in place.

        The number is counted here and not given, so that no nonce can be used twice.

        Args:
            buffer: writable, ``segment_size + 16`` bytes: plaintext, then room for the tag.
        """
        if len(buffer) != self.segment_size + TAG_BYTES:
            raise ValueError(f"a buffer of {len(buffer)} bytes for a segment of {self.segment_size}")
        aead, nonce, associated = self._prepare(self._next)
        self._next += 1
        aead.encrypt_into(nonce, buffer[: self.segment_size], associated, buffer)
