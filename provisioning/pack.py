"""Pack a model directory into a sealed bundle: the only writer of bundles, and the only maker of bundle keys.

One pass over the tensors: each is read once, cut into tiles and put into the streams of its columns. The bundle grows
in a hidden sibling directory and appears under its name in one rename, after everything is synced and its key is in the
owner's key store; so what is interrupted leaves nothing that opens. Memory is bounded whatever the model's size.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NoReturn

from attestation.policy import AppraisalPolicy
from provisioning import shares, tiling
from provisioning.bundle import TABLE_NAME
from provisioning.catalog import MAX_HEADER_BYTES, Catalog
from provisioning.errors import ModelRefused, OutputFailed
from provisioning.files import refuse_existing, sync_directory
from provisioning.geometry import FILE_BYTES, MAX_SECTION_BYTES, MAX_TILES, Geometry, is_power_of_two
from provisioning.layout import Layout
from provisioning.manifest import FILE_NAME, MAX_ENVELOPE_BYTES, Manifest, check_name
from provisioning.ownerkey import OwnerSigner
from provisioning.sealing import Sealing, refuse_output
from provisioning.secret import SecretBytes
from provisioning.segment import BUNDLE_ID_BYTES, BUNDLE_KEY_BYTES, commitment
from provisioning.source import Source
from provisioning.table import encode, table_bytes
from provisioning.weave import weave

DEFAULT_TILES: Final = 8
DEFAULT_SEGMENT: Final = 1 << 20

Progress = Callable[[int, int], None]
Examine = Callable[[Source], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """What was packed.

    Attributes:
        bundle_id: 32 hex digits.
        manifest_digest: SHA-384 of the manifest, 96 hex digits.
        name: display name.
        path: the bundle.
        purpose: ``lab`` or ``production``.
        tensors: how many.
        weight_bytes: bytes of all tensors.
        data_bytes: bytes of ciphertext.
        segments: how many.
        files: data files.
        seconds: wall time, with syncing.
        catalog_files: small files sealed with the weights.
        left_out: names in the model directory that were not sealed.
    """

    bundle_id: str
    manifest_digest: str
    name: str
    path: Path
    purpose: str
    tensors: int
    weight_bytes: int
    data_bytes: int
    segments: int
    files: int
    seconds: float
    catalog_files: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def bytes_per_second(self) -> int:
        """Bytes of weights per second of wall time."""
        return round(self.weight_bytes / self.seconds) if self.seconds else 0

    def as_payload(self) -> dict[str, Any]:
        """Give the report as JSON members, time in whole milliseconds."""
        return {
            "bundle": str(self.path),
            "bundle_id": self.bundle_id,
            "manifest": self.manifest_digest,
            "name": self.name,
            "purpose": self.purpose,
            "tensors": self.tensors,
            "plaintext_bytes": self.weight_bytes,
            "sealed_bytes": self.data_bytes,
            "segments": self.segments,
            "files": self.files,
            "milliseconds": round(self.seconds * 1000),
            "bytes_per_second": self.bytes_per_second,
            "catalog_files": list(self.catalog_files),
            "left_out": list(self.left_out),
        }


def pack(
    source_dir: Path,
    *,
    signer: OwnerSigner,
    key_dir: Path,
    policy: AppraisalPolicy,
    name: str,
    out: Path,
    tiles: int = DEFAULT_TILES,
    segment_size: int = DEFAULT_SEGMENT,
    section_bytes: int = MAX_SECTION_BYTES,
    file_cap: int = FILE_BYTES,
    at: datetime | None = None,
    examine: Examine | None = None,
    progress: Progress | None = None,
) -> PackReport:
    """Pack a model.

    Args:
        source_dir: a Hugging Face model directory.
        signer: the owner's open keys.
        key_dir: the owner's key directory, which takes the wrapped bundle key.
        policy: who may open the bundle, and on what terms.
        name: display name, for outsiders to see.
        out: the bundle's directory, which must not exist.
        tiles: W; world sizes that divide it read just their own bytes.
        segment_size: bytes of a segment: a power of two, 256 KiB to 4 MiB.
        section_bytes: most bytes under one key; smaller ones only in tests.
        file_cap: most bytes of a data file.
        at: issue time; the system's clock when not given.
        examine: a second look at the open source before anything is written.
        progress: told (bytes written, bytes in all) now and then.

    Raises:
        ModelRefused: ``source.*`` or ``safetensors.*``; nothing was written.
        KeyRefused: ``owner.purpose`` when the key must not sign for this policy; nothing was written.
        OutputFailed: ``output.exists``, ``pack.disk.full`` or ``pack.output``; nothing is left behind.
        BundleDamaged: ``share.*`` for a fault of the plan itself; nothing was written.
    """
    started = time.monotonic()
    signer.require_purpose(policy)
    check_name(name)
    refuse_existing(out)
    if not is_power_of_two(tiles, low=1, high=MAX_TILES):
        _refuse_geometry(f"{tiles} tiles")
    with Source(source_dir) as source, _workplace(out) as (directory, work):
        if examine is not None:
            examine(source)
        specs = tiling.plan(
            ((item.info.name, item.info.dtype, item.info.shape) for item in source.tensors), tiles=tiles
        )
        catalog = Catalog(specs, source.files, tiles=tiles)
        head = _encode(catalog)
        geometry = _geometry(catalog.layout, len(head), segment_size, section_bytes, file_cap)
        # A plan that loses a byte must be found now, not after the model was carried to a machine that cannot load it.
        shares.check_all(catalog.layout, geometry)
        _check_room(out.parent, geometry)
        with SecretBytes.random(BUNDLE_KEY_BYTES) as key:
            bundle_id = secrets.token_bytes(BUNDLE_ID_BYTES)
            table = _seal(
                source,
                catalog,
                head,
                directory=directory,
                geometry=geometry,
                key=key,
                bundle_id=bundle_id,
                progress=progress,
            )
            source.check_unchanged()
            with key.expose() as view:
                committed = commitment(view, bundle_id)
            manifest = Manifest(
                bundle_id=bundle_id,
                name=name,
                purpose=signer.purpose,
                owner=signer.key_id,
                epoch=policy.epoch,
                issued_at=(at or datetime.now(UTC)).replace(microsecond=0),
                geometry=geometry,
                table_sha384=hashlib.sha384(table).digest(),
                key_commitment=committed,
                policy=policy,
            )
            envelope = manifest.sign(signer)
            _write(directory, TABLE_NAME, table)
            signer.store_bundle_key(key_dir, bundle_id, key)
        _write(directory, FILE_NAME, envelope)
        _publish(directory, work, out)
        return PackReport(
            bundle_id=bundle_id.hex(),
            manifest_digest=manifest.digest.hex(),
            name=name,
            path=out,
            purpose=signer.purpose,
            tensors=len(specs),
            weight_bytes=sum(spec.nbytes for spec in specs),
            data_bytes=geometry.data_bytes,
            segments=geometry.segments,
            files=len(geometry.files),
            seconds=time.monotonic() - started,
            catalog_files=catalog.files,
            left_out=source.left_out,
        )


def _encode(catalog: Catalog) -> bytes:
    """Write the catalog, unless no reader would take it; names alone can make it as long as that."""
    head = catalog.encode()
    beside = sum(len(catalog.file(name)) for name in catalog.files)
    if len(head) - beside > MAX_HEADER_BYTES:
        raise ModelRefused(
            "pack.catalog",
            found=f"{len(head) - beside} bytes to list {len(catalog.tensors)} tensors",
            expected=f"at most {MAX_HEADER_BYTES} bytes",
            hint="give the tensors shorter names, or pack fewer of them",
        )
    return head


def _geometry(layout: Layout, catalog_bytes: int, segment_size: int, section_bytes: int, file_cap: int) -> Geometry:
    try:
        return Geometry(
            segment_size=segment_size,
            section_bytes=section_bytes,
            file_bytes=file_cap,
            streams=layout.stream_segments(catalog_bytes, segment_size),
        )
    except ValueError as error:
        _refuse_geometry(str(error))


def _refuse_geometry(found: str) -> NoReturn:
    raise ModelRefused(
        "pack.geometry",
        found=found,
        expected="sizes within the bounds of the format",
        hint="choose another number of tiles, segment size or file size (docs/spec/bundle.md)",
    ) from None


def _check_room(parent: Path, geometry: Geometry) -> None:
    """Refuse at once what would fail after hours."""
    needed = geometry.data_bytes + table_bytes(geometry) + MAX_ENVELOPE_BYTES
    state = os.statvfs(parent)
    free = state.f_bavail * state.f_frsize
    if free < needed:
        raise OutputFailed(
            "pack.disk.full",
            found=f"{free} bytes free in {parent}",
            expected=f"{needed} bytes for the bundle",
            hint="free space or name another --out; nothing was left behind",
        )


def _seal(
    source: Source,
    catalog: Catalog,
    head: bytes,
    *,
    directory: int,
    geometry: Geometry,
    key: SecretBytes,
    bundle_id: bytes,
    progress: Progress | None,
) -> bytes:
    """Write the data files; gives the table."""
    layout, total = catalog.layout, geometry.data_bytes

    def report(written: int) -> None:
        if progress is not None:
            progress(written, total)

    with Sealing(
        directory,
        geometry=geometry,
        key=key,
        bundle_id=bundle_id,
        descriptor=lambda section: layout.descriptor_digest(section, geometry.segment_size),
        progress=report,
    ) as sealing:
        weave(source, layout, head, sealing.sinks)
        sealing.finish()
        digests = [digest for blocks in sealing.digests for digest in blocks]
        return encode(geometry, bundle_id=bundle_id, tags=sealing.tags, digests=digests)


@contextlib.contextmanager
def _workplace(out: Path) -> Iterator[tuple[int, Path]]:
    """Make a hidden sibling directory; gives its descriptor and path, and removes it unless it was published."""
    prefix = f".{out.name}.packing-"
    work = out.with_name(prefix + secrets.token_hex(8))
    try:
        _remove_abandoned(out.parent, prefix)
        work.mkdir(mode=0o700)
        directory = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        refuse_output(error, str(work))
    try:
        # The lock goes with the process, however it ends; so a directory without one is abandoned.
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield directory, work
    finally:
        os.close(directory)
        shutil.rmtree(work, ignore_errors=True)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove what a killed run left: ciphertext whose key died with it."""
    for path in parent.iterdir():
        if not path.name.startswith(prefix) or path.is_symlink():
            continue
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            # Another run packs to the same name; its rename or ours will be refused.
            continue
        finally:
            os.close(descriptor)


def _write(directory: int, name: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(name, flags, 0o644, dir_fd=directory), "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        refuse_output(error, name)


def _publish(directory: int, work: Path, out: Path) -> None:
    try:
        os.fchmod(directory, 0o755)
        os.fsync(directory)
        refuse_existing(out)
        work.rename(out)
        sync_directory(out.parent)
    except OSError as error:
        refuse_output(error, str(out))
