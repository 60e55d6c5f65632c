"""What ``copy`` of both programs does: owners write sticks with it, operators read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from provisioning.bundle import Bundle, SealedFiles, open_unsigned
from provisioning.cli.progress import Meter
from provisioning.cli.report import emit, say
from provisioning.cli.verify import ROADS, require_bundle
from provisioning.copying import CopyReport, copy
from provisioning.ownerkey import OwnerKey
from provisioning.partial import partial_path


def copy_and_show(bundle: Path, destination: Path, owners: Sequence[OwnerKey], *, as_json: bool) -> None:
    """Copy a bundle, read the copy back, and print what was done.

    Args:
        bundle: the source.
        destination: path of the copy.
        owners: whose signature is demanded; none, and only digests are compared, which the result says.
        as_json: print one JSON object.

    Raises:
        InputFailed: ``input.missing``.
        LetheError: as :meth:`provisioning.bundle.Bundle.open` and :func:`provisioning.copying.copy`.
    """
    require_bundle(bundle)
    with _open(bundle, owners) as source, _Stages() as stages, _hint_at_interrupt(destination):
        report = copy(source, destination, progress=stages)
        contents = source.contents
        digest = source.manifest.digest.hex() if isinstance(source, Bundle) else None
    signature = f"by {contents.owner}" if digest else "not checked"
    if as_json:
        members = {"bundle": str(bundle), "copy": str(destination), "bundle_id": contents.bundle_id.hex()}
        emit({**members, "signature": signature, **report.as_payload()})
        return
    click.echo(f"{destination}: whole; {contents.purpose} bundle {contents.bundle_id.hex()} of {contents.name}")
    _show(report)
    if not digest:
        say("the owner's signature was not checked, only digests were: give --owner-key")


def _show(report: CopyReport) -> None:
    click.echo(
        f"{report.files} files, {report.bytes} bytes; {report.copied} blocks copied, {report.kept} were there; "
        f"all read back; {report.seconds:.1f} s"
    )
    say(f"read back {ROADS[report.road]}")
    if report.left_out:
        shown = ", ".join(ascii(name)[:80] for name in report.left_out[:8])
        say(f"{len(report.left_out)} names in the source are not the bundle's and were not copied: {shown}")


def _open(bundle: Path, owners: Sequence[OwnerKey]) -> SealedFiles:
    return Bundle.open(bundle, owners) if owners else open_unsigned(bundle)


@contextlib.contextmanager
def _hint_at_interrupt(destination: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if partial_path(destination).exists():
            say(f"what was copied stays in {partial_path(destination)}; the same command goes on there")
        raise


class _Stages:
    """One meter after the other, since a copy has several passes; a context manager."""

    def __init__(self) -> None:
        self._label = ""
        self._meter: Meter | None = None

    def __call__(self, label: str, done: int, total: int) -> None:
        if self._meter is None or label != self._label:
            self._end()
            self._label, self._meter = label, Meter(label)
        self._meter(done, total)

    def _end(self) -> None:
        if self._meter is not None:
            self._meter.__exit__()

    def __enter__(self) -> _Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
