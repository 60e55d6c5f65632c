"""Bundles with fixed keys, for vectors only: what is sealed, how it is kept small, and how it is put together.

The product makes every key and nonce itself. Here the bundle key and the owners' seeds are constants, so that the same
bytes come out again; the sealing is the product's own. A data file is never kept: plaintext is stored as runs, and
ciphertext follows from it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from attestation import dsse, strictjson
from attestation.policy import AppraisalPolicy
from attestation.signature import PrivateKeys
from provisioning.geometry import MIN_SEGMENT, Geometry
from provisioning.manifest import Manifest
from provisioning.ownerkey import KIND as OWNER_KIND
from provisioning.ownerkey import OwnerKey, Purpose
from provisioning.secret import SecretBytes
from provisioning.segment import TAG_BYTES, SectionSealer, commitment
from provisioning.table import encode
from tests.sim.modelfiles import POLICY

SEGMENT = MIN_SEGMENT
BUNDLE_KEY = bytes(range(0x40, 0x60))
BUNDLE_ID = bytes.fromhex("00112233445566778899aabbccddeeff")
MADE_AT = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)

# A run of plaintext: where it begins, its bytes as hex, how often they are repeated. Everything else is zero.
Run = tuple[int, str, int]


@functools.cache
def owner_keys(number: int) -> PrivateKeys:
    """Give a key pair of a vector's owner; its seed is public, so it is worth nothing."""
    scalar = int.from_bytes(hashlib.sha384(b"lethe vectors %d" % number).digest(), "big") >> 8
    der = ec.derive_private_key(scalar, ec.SECP384R1()).private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return PrivateKeys.from_private_parts(bytes([number]) * 32, der)


@dataclass(frozen=True, slots=True)
class Owner:
    """Somebody who signs vectors."""

    number: int
    purpose: Purpose

    @property
    def keys(self) -> PrivateKeys:
        return owner_keys(self.number)

    @property
    def public(self) -> OwnerKey:
        return OwnerKey(f"vectors {self.number}", self.purpose, self.keys.public, MADE_AT)


LAB = Owner(1, "lab")
PRODUCTION = Owner(2, "production")
# Nobody has configured this one.
STRANGER = Owner(3, "lab")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plaintext:
    """What is sealed.

    Attributes:
        streams: segments of each stream.
        runs: of each stream, what is not zero.
        descriptors: tile descriptor of each section, hex.
    """

    streams: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    descriptors: tuple[str, ...]

    @property
    def geometry(self) -> Geometry:
        return Geometry(segment_size=SEGMENT, section_bytes=2 * SEGMENT, file_bytes=2 * SEGMENT, streams=self.streams)

    def stream(self, number: int) -> bytearray:
        plain = bytearray(self.streams[number] * SEGMENT)
        for start, text, times in self.runs[number]:
            data = bytes.fromhex(text) * times
            plain[start : start + len(data)] = data
        return plain


@dataclass(frozen=True, slots=True)
class SealedParts:
    """Ciphertext of each data file, and the table."""

    files: dict[str, bytes]
    table: bytes


@functools.cache
def seal(plaintext: Plaintext) -> SealedParts:
    """Seal with the fixed key, by the product's own cipher."""
    geometry = plaintext.geometry
    tags, files = bytearray(), {}
    for section in geometry.sections:
        plain = plaintext.stream(section.stream)
        ciphertext = bytearray()
        with (
            SecretBytes.take(bytearray(BUNDLE_KEY)) as secret,
            secret.expose() as key,
            SectionSealer(
                key,
                bundle_id=BUNDLE_ID,
                section=section,
                segment_size=SEGMENT,
                descriptor=bytes.fromhex(plaintext.descriptors[section.number]),
            ) as sealer,
        ):
            for number in range(section.first, section.first + section.segments):
                buffer = bytearray(plain[number * SEGMENT : (number + 1) * SEGMENT]) + bytes(TAG_BYTES)
                sealer.seal_into(memoryview(buffer))
                ciphertext += buffer[:SEGMENT]
                tags += buffer[SEGMENT:]
        # A section is one file here, since both have two segments at most.
        (file,) = [file for file in geometry.files if file.section == section.number]
        files[file.name] = bytes(ciphertext)
    digests = [hashlib.sha256(data).digest() for data in files.values()]
    return SealedParts(files, encode(geometry, bundle_id=BUNDLE_ID, tags=tags, digests=digests))


def committed(key: bytes) -> bytes:
    """Give the commitment to a key."""
    with SecretBytes.take(bytearray(key)) as secret, secret.expose() as view:
        return commitment(view, BUNDLE_ID)


def manifest_of(geometry: Geometry, table: bytes) -> dict[str, Any]:
    """Give the members of a sound manifest, signed by LAB."""
    policy = AppraisalPolicy.from_toml(POLICY)
    return Manifest(
        bundle_id=BUNDLE_ID,
        name="vectors",
        purpose="lab",
        owner=LAB.keys.public.key_id,
        epoch=policy.epoch,
        issued_at=MADE_AT,
        geometry=geometry,
        table_sha384=hashlib.sha384(table).digest(),
        key_commitment=committed(BUNDLE_KEY),
        policy=policy,
    ).as_payload()


def signed(kind: str, payload: bytes, owners: Sequence[Owner], *, kept: Path) -> bytes:
    """Sign, unless ``kept`` is an envelope of the same payload by the same owners.

    Both signatures of a hybrid pair are randomized, so an envelope is made once and kept for as long as it is right.
    """
    keys = [owner.keys for owner in owners]
    if kept.exists():
        envelope = kept.read_bytes()
        found, names = dsse.signed_by(envelope, kind, [pair.public for pair in keys], limit=1 << 20)
        if found == payload and len(names) == len(keys):
            return envelope
    return dsse.sign(kind, payload, keys)


def owner_file(owner: Owner, *, kept: Path) -> bytes:
    """Give an owner's ``owner.pub.json``."""
    return signed(OWNER_KIND, strictjson.dumps(owner.public.as_payload()), [owner], kept=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """One vector, as the index lists it.

    Attributes:
        name: unique.
        about: what is wrong.
        plaintext: name of what is sealed.
        manifest: name of the manifest's file in ``manifests/``.
        table: name of the table's file in ``tables/``.
        changes: what is then done to the directory, in order; see :func:`change`.
        opened: code of the refusal when it is opened; None when it opens.
        verified: the same for ``verify``, which comes after opening.
        loaded: the same for a load, which comes after opening too.
    """

    name: str
    about: str
    plaintext: str = "good"
    manifest: str = "good"
    table: str = "good"
    changes: tuple[dict[str, Any], ...] = ()
    opened: str | None = None
    verified: str | None = None
    loaded: str | None = None


@dataclass(frozen=True, slots=True)
class VectorSet:
    """All vectors: index entries, and the parts that they name."""

    vectors: list[Vector] = field(default_factory=list)
    plaintexts: dict[str, Plaintext] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    tables: dict[str, bytes] = field(default_factory=dict)

    def expand(self, vector: Vector, directory: Path) -> None:
        """Write the bundle of a vector into a directory that does not exist."""
        directory.mkdir()
        for name, data in seal(self.plaintexts[vector.plaintext]).files.items():
            (directory / name).write_bytes(data)
        (directory / "manifest.dsse.json").write_bytes(self.manifests[vector.manifest])
        (directory / "segments.idx").write_bytes(self.tables[vector.table])
        for step in vector.changes:
            change(directory, **step)


def change(directory: Path, *, do: str, file: str = "", **how: Any) -> None:
    """Do one thing to a bundle's directory: flip, patch, resize, remove, link, pipe, mkdir, write, exchange or copy."""
    path = directory / file
    if do == "flip":
        _patch(path, how["offset"], bytes([path.read_bytes()[how["offset"]] ^ (1 << how["bit"])]))
    elif do == "patch":
        _patch(path, how["offset"], bytes.fromhex(how["hex"]))
    elif do == "resize":
        os.truncate(path, how["size"])
    elif do == "remove":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif do == "link":
        path.rename(directory.with_suffix(".moved"))
        path.symlink_to(directory.with_suffix(".moved"))
    elif do == "pipe":
        os.mkfifo(path)
    elif do == "mkdir":
        path.mkdir()
    elif do == "write":
        path.write_bytes(bytes.fromhex(how["hex"]))
    elif do == "exchange":
        one, two = (path.read_bytes()[offset : offset + SEGMENT] for offset in how["offsets"])
        _patch(path, how["offsets"][0], two)
        _patch(path, how["offsets"][1], one)
    elif do == "copy":
        data = (directory / how["source"]).read_bytes()[how["offset"] : how["offset"] + SEGMENT]
        _patch(path, how["to"], data)
    else:
        raise ValueError(do)


def _patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
