"""What ``verify`` of both programs does, so that owner, courier and operator read the same result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from provisioning.bundle import Bundle
from provisioning.cli.progress import Meter
from provisioning.cli.report import emit, say
from provisioning.errors import InputFailed
from provisioning.medium import Road
from provisioning.ownerkey import OwnerKey
from provisioning.verify import verify

# What follows "read" or "read back".
ROADS: Final = {
    Road.MEDIUM: "from the medium, past the page cache",
    Road.DROPPED: "from the medium, after its pages were dropped from memory",
    Road.REMOTE: "through a network or guest file system; whether its server read its medium cannot be seen here",
    Road.CACHE: "through the page cache, which kept pages: this says nothing certain about the medium",
    Road.MEMORY: "from a file system in memory: there is no medium to read from",
}


def require_bundle(bundle: Path) -> None:
    """Refuse a path that is not there.

    Raises:
        InputFailed: ``input.missing``; a wrong path is no damage, and copying the bundle again would not help.
    """
    if not bundle.exists():
        raise InputFailed(
            "input.missing",
            found=f"{bundle}: no such directory",
            expected="the directory of a sealed bundle",
            hint="check the path, and that the medium is mounted",
        )


def verify_and_show(bundle: Path, owners: Sequence[OwnerKey], *, as_json: bool) -> None:
    """Check every byte of a bundle without a key and print what was read.

    Raises:
        InputFailed: ``input.missing``.
        LetheError: as :meth:`provisioning.bundle.Bundle.open` and :func:`provisioning.verify.verify`.
    """
    require_bundle(bundle)
    with Bundle.open(bundle, owners) as opened, Meter("verifying") as meter:
        report = verify(opened, meter)
        manifest = opened.manifest
    if as_json:
        members = {"bundle": str(bundle), "bundle_id": manifest.bundle_id.hex(), "manifest": manifest.digest.hex()}
        emit({**members, **report.as_payload()})
        return
    click.echo(f"{bundle}: whole; {manifest.purpose} bundle {manifest.bundle_id.hex()} of {manifest.name}")
    click.echo(
        f"{report.files} files, {report.segments} segments, {report.blocks} digests, {report.bytes} bytes "
        f"in {report.seconds:.1f} s, {report.bytes / max(report.seconds, 1e-9) / 1e9:.2f} GB/s"
    )
    say(f"read {ROADS[report.road]}")
