"""What ``verify`` of both programs does, so that owner, courier and operator read the same result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from provisioning import bundle as sealed
from provisioning.cli.progress import Meter
from provisioning.cli.report import emit
from provisioning.errors import InputFailed
from provisioning.ownerkey import OwnerKey


def verify_and_show(bundle: Path, owners: Sequence[OwnerKey], *, as_json: bool) -> None:
    """Check every byte of a bundle without a key and print what was read.

    Raises:
        InputFailed: ``input.missing``.
        LetheError: as :meth:`provisioning.bundle.Bundle.open` and :func:`provisioning.bundle.verify`.
    """
    if not bundle.exists():
        # A wrong path is no damage, and copying the bundle again would not help.
        raise InputFailed(
            "input.missing",
            found=f"{bundle}: no such directory",
            expected="the directory of a sealed bundle",
            hint="check the path, and that the medium is mounted",
        )
    with sealed.Bundle.open(bundle, owners) as opened, Meter("verifying") as meter:
        report = sealed.verify(opened, meter)
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
