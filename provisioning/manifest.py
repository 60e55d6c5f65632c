"""The manifest of a sealed bundle: all that an outsider may know, and the policy under which it may be opened.

Names, shapes, types and the number of layers are not in it; they are in the sealed catalog (provisioning/catalog.py).
:class:`Manifest` is what the bytes say; :class:`SignedManifest` is the proof that a configured owner said it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn, final

from attestation import dsse, strictjson
from attestation.binding import DIGEST_BYTES
from attestation.clock import format_time
from attestation.errors import FormatError, PolicyInvalid
from attestation.policy import AppraisalPolicy
from attestation.proof import Proof
from attestation.strictjson import Fields, b64
from provisioning._seal import MINT
from provisioning.catalog import MAX_BYTES as MAX_CATALOG_BYTES
from provisioning.errors import ExchangeRefused
from provisioning.geometry import (
    CATALOG_STREAM,
    FIRST_COLUMN,
    MAX_SECTION_BYTES,
    MAX_SEGMENT,
    MAX_SEGMENTS,
    MAX_TILES,
    DataFile,
    Geometry,
    Section,
    segment_count,
)
from provisioning.ownerkey import OwnerKey, OwnerSigner, Purpose, public_keys, read_purpose
from provisioning.segment import BUNDLE_ID_BYTES, COMMITMENT_BYTES, SUITE

KIND: Final = "manifest"
VERSION: Final = 1
FILE_NAME: Final = "manifest.dsse.json"
MAX_PAYLOAD_BYTES: Final = 256 << 10
MAX_ENVELOPE_BYTES: Final = dsse.envelope_limit(MAX_PAYLOAD_BYTES)
MAX_NAME_CHARACTERS: Final = 128
_KEY_ID_CHARACTERS: Final = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a manifest says; not checked against any signature.

    Attributes:
        bundle_id: 16 random bytes.
        name: display name, chosen by the owner for outsiders to see.
        purpose: ``lab`` or ``production``, that of the owner's key.
        owner: key id of the owner who packed it, 96 hex digits.
        epoch: the policy's; a floor against older bundles.
        issued_at: when it was packed.
        geometry: segments, sections, files.
        table_sha384: SHA-384 of ``segments.idx``.
        key_commitment: ties the bundle to one key (``segment.commitment``).
        policy: the appraisal policy, which holds the caps on serving and the terms of grants.
    """

    bundle_id: bytes
    name: str
    purpose: Purpose
    owner: str
    epoch: int
    issued_at: datetime
    geometry: Geometry
    table_sha384: bytes
    key_commitment: bytes
    policy: AppraisalPolicy

    def as_payload(self) -> dict[str, Any]:
        """Give the signed members."""
        return {
            **strictjson.header(KIND, epoch=self.epoch, issued_at=format_time(self.issued_at), version=VERSION),
            "bundle_id": b64(self.bundle_id),
            "name": self.name,
            "purpose": self.purpose,
            "owner": self.owner,
            "suite": SUITE,
            "segment_size": self.geometry.segment_size,
            "section_bytes": self.geometry.section_bytes,
            "file_bytes": self.geometry.file_bytes,
            "streams": list(self.geometry.streams),
            "table_sha384": b64(self.table_sha384),
            "key_commitment": b64(self.key_commitment),
            "policy": self.policy.as_payload(),
        }

    @classmethod
    def parse(cls, payload: bytes) -> Manifest:
        """Read a payload, without any check of who signed it: for display only.

        Raises:
            FormatError: ``manifest.*``, ``object.*`` or ``json.*``.
        """
        fields = Fields(strictjson.loads(payload, limit=MAX_PAYLOAD_BYTES), KIND)
        epoch, issued_at = strictjson.read_header(fields, KIND, version=VERSION)
        suite = fields.text("suite", limit=64)
        if suite != SUITE:
            raise FormatError("manifest.suite", found=suite, expected=SUITE, hint="use a newer release of Lethe")
        manifest = cls(
            bundle_id=fields.blob("bundle_id", size=BUNDLE_ID_BYTES),
            name=check_name(fields.text("name", limit=MAX_NAME_CHARACTERS)),
            purpose=read_purpose(fields),
            owner=_read_key_id(fields),
            epoch=epoch,
            issued_at=issued_at,
            geometry=_read_geometry(fields),
            table_sha384=fields.blob("table_sha384", size=DIGEST_BYTES),
            key_commitment=fields.blob("key_commitment", size=COMMITMENT_BYTES),
            policy=_read_policy(fields),
        )
        fields.end()
        if manifest.epoch != manifest.policy.epoch:
            raise FormatError(
                "manifest.epoch",
                found=f"epoch {manifest.epoch} with a policy of epoch {manifest.policy.epoch}",
                expected="one epoch",
                hint="pack the bundle again",
            )
        if manifest.encode() != payload:
            raise FormatError(
                "manifest.form",
                found="a manifest in another form than lethe-owner writes",
                expected="sorted members without spaces, and the policy in its one form",
                hint="pack the bundle again",
            )
        return manifest

    def encode(self) -> bytes:
        """Give the payload, the exact bytes that are signed."""
        return strictjson.dumps(self.as_payload())

    @property
    def digest(self) -> bytes:
        """SHA-384 of the payload, 48 bytes."""
        return hashlib.sha384(self.encode()).digest()

    def sign(self, signer: OwnerSigner) -> bytes:
        """Give the envelope.

        Raises:
            KeyRefused: ``owner.purpose`` when a production key is asked to accept simulated evidence.
        """
        return signer.sign(KIND, self.encode(), policy=self.policy)


def check_name(name: str) -> str:
    """Check a display name.

    Raises:
        FormatError: ``manifest.name``.
    """
    if not name.strip() or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise FormatError(
            "manifest.name",
            found=ascii(name[:40]),
            expected=f"1 to {MAX_NAME_CHARACTERS} printable characters",
            hint="give the bundle another --name",
        )
    return name


def _read_key_id(fields: Fields) -> str:
    text = fields.text("owner", limit=_KEY_ID_CHARACTERS)
    if len(text) != _KEY_ID_CHARACTERS or set(text) - set("0123456789abcdef"):
        raise FormatError(
            "manifest.owner", found=text[:16], expected=f"{_KEY_ID_CHARACTERS} hex digits", hint="pack the bundle again"
        )
    return text


def _read_geometry(fields: Fields) -> Geometry:
    counts: list[int] = []
    for item in fields.items("streams", limit=FIRST_COLUMN + MAX_TILES):
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= MAX_SEGMENTS:
            raise FormatError(
                "manifest.geometry", found="a bad member of streams", expected="counts", hint="pack the bundle again"
            )
        counts.append(item)
    try:
        return _bounded_catalog(
            Geometry(
                segment_size=fields.integer("segment_size", low=1, high=MAX_SEGMENT),
                section_bytes=fields.integer("section_bytes", low=1, high=MAX_SECTION_BYTES),
                file_bytes=fields.integer("file_bytes", low=1, high=MAX_SECTION_BYTES),
                streams=tuple(counts),
            )
        )
    except ValueError as error:
        raise FormatError(
            "manifest.geometry",
            found=str(error),
            expected="sizes within the bounds of the format",
            hint="pack the bundle again",
        ) from None


def _bounded_catalog(geometry: Geometry) -> Geometry:
    """Check the length of stream 0, which a reader holds in memory as a whole.

    Raises:
        ValueError: it is longer than any catalog.
    """
    most = segment_count(MAX_CATALOG_BYTES, geometry.segment_size)
    if geometry.streams[CATALOG_STREAM] > most:
        raise ValueError(f"a catalog of {geometry.streams[CATALOG_STREAM]} segments, more than {most}")
    return geometry


def _read_policy(fields: Fields) -> AppraisalPolicy:
    try:
        return AppraisalPolicy.from_payload(fields.mapping("policy"))
    except PolicyInvalid as error:
        raise FormatError(
            "manifest.policy",
            found=f"{error.code}, {error.found}",
            expected=error.expected,
            hint="use the release of Lethe that packed the bundle, or pack it again",
        ) from None


@final
class SignedManifest(Proof):
    """Proof that a configured owner signed this manifest, with a key of the right purpose."""

    __slots__ = ("digest", "files", "manifest", "sections")

    def __init__(self, mint: object, manifest: Manifest, payload: bytes) -> None:
        self._demand(mint, MINT)
        self.manifest = manifest
        self.digest = hashlib.sha384(payload).digest()
        self.sections: tuple[Section, ...] = manifest.geometry.sections
        self.files: tuple[DataFile, ...] = manifest.geometry.files

    @classmethod
    def read(cls, envelope: bytes, owners: Sequence[OwnerKey]) -> SignedManifest:
        """Verify an envelope and read it.

        Args:
            envelope: ``manifest.dsse.json``.
            owners: the configured owners.

        Raises:
            FormatError: the envelope or the manifest is malformed.
            SignatureRefused: no configured owner signed it, or a signature is wrong.
            ExchangeRefused: ``manifest.owner`` when the owner it names did not sign it; ``manifest.purpose`` when it
                claims another purpose than its key has, or is for production and accepts simulated evidence.
        """
        payload, signed = dsse.signed_by(envelope, KIND, public_keys(owners), limit=MAX_PAYLOAD_BYTES)
        manifest = Manifest.parse(payload)
        owner = next((owner for owner in owners if owner.key_id in signed and owner.key_id == manifest.owner), None)
        if owner is None:
            raise ExchangeRefused(
                "manifest.owner",
                found=f"a manifest of owner {manifest.owner[:16]}, signed by {', '.join(name[:16] for name in signed)}",
                expected="a signature of the owner that it names",
                hint="get the bundle again from its owner",
            )
        # A reader does not rely on the signer's own refusal: a stolen or altered tool must not be able to make a
        # production bundle that simulated evidence opens.
        if manifest.purpose != owner.purpose:
            _refuse_purpose(f"a {manifest.purpose} manifest signed by a {owner.purpose} key", "one purpose")
        if manifest.purpose == "production" and manifest.policy.accepts_simulated:
            _refuse_purpose("a production manifest that accepts simulated evidence", "hardware platforms only")
        return cls(MINT, manifest, payload)

    @property
    def bundle_id(self) -> bytes:
        """16 bytes."""
        return self.manifest.bundle_id

    @property
    def name(self) -> str:
        """Display name."""
        return self.manifest.name

    @property
    def purpose(self) -> Purpose:
        """``lab`` or ``production``."""
        return self.manifest.purpose

    @property
    def epoch(self) -> int:
        """The owner's epoch."""
        return self.manifest.epoch

    @property
    def issued_at(self) -> datetime:
        """When the bundle was packed."""
        return self.manifest.issued_at

    @property
    def policy(self) -> AppraisalPolicy:
        """The appraisal policy."""
        return self.manifest.policy

    @property
    def geometry(self) -> Geometry:
        """Segments, sections, files."""
        return self.manifest.geometry

    @property
    def segment_size(self) -> int:
        """Bytes of every segment."""
        return self.manifest.geometry.segment_size

    @property
    def tiles(self) -> int:
        """W, the number of tile columns."""
        return self.manifest.geometry.tiles

    @property
    def table_sha384(self) -> bytes:
        """SHA-384 of ``segments.idx``, 48 bytes."""
        return self.manifest.table_sha384

    @property
    def key_commitment(self) -> bytes:
        """What the bundle key must match, 48 bytes."""
        return self.manifest.key_commitment


def _refuse_purpose(found: str, expected: str) -> NoReturn:
    raise ExchangeRefused(
        "manifest.purpose", found=found, expected=expected, hint="get the bundle again from its owner"
    )
