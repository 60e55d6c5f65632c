"""The command check-wipe: what a wipe record shows, and whether the session that it names signed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from attestation import dsse
from attestation.clock import format_time
from attestation.errors import LetheError
from provisioning import wiperecord
from provisioning.cli.exchange import describe, read_request
from provisioning.cli.report import emit, json_option, say, show_error
from provisioning.errors import WipeIncomplete
from provisioning.files import read_bounded, reading
from provisioning.fingerprint import envelope_fingerprint, fingerprint
from provisioning.request import KeyRequest
from provisioning.wiperecord import WipeRecord


@click.command(name="check-wipe", short_help="Check wipe records of the session of a request.")
@click.argument(
    "record_paths",
    metavar="RECORD...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
)
@click.option(
    "--request",
    "request_path",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="REQUEST",
    help="The key request of the session that was wiped.",
)
@json_option
@click.pass_context
def check_wipe(context: click.Context, record_paths: tuple[Path, ...], request_path: Path, *, as_json: bool) -> None:
    """Check that RECORD is the wipe record of the session that made REQUEST, and that it shows a whole wipe.

    Of several records each is reported, and the exit status is that of the worst.
    """
    asked = read_request(request_path)
    if len(record_paths) > 1:
        context.exit(_check_all(context, record_paths, asked, as_json=as_json))
    envelope, record = _check(record_paths[0], asked)
    if as_json:
        emit(_members(envelope, record, asked))
        return
    _show(envelope, record)
    say("signed by the session that asked for the key; as good as the evidence that bound that session")


def _check_all(context: click.Context, paths: tuple[Path, ...], asked: KeyRequest, *, as_json: bool) -> int:
    program = context.find_root().info_name or ""
    worst = 0
    records: list[dict[str, Any]] = []
    for path in paths:
        try:
            envelope, record = _check(path, asked)
        except LetheError as error:
            # An incomplete wipe (9) outranks a record that is refused (6), and that a file that is not there (2).
            worst = max(worst, error.exit_status)
            records.append({"path": str(path), "error": error.as_payload(), "exit_status": error.exit_status})
            say(f"{path}: refused")
            show_error(error, program=program, as_json=False)
            continue
        records.append({"path": str(path), **_members(envelope, record, asked), "exit_status": 0})
        if not as_json:
            click.echo(f"{path}:")
            _show(envelope, record)
    good = sum(entry["exit_status"] == 0 for entry in records)
    if as_json:
        emit({"records": records, "exit_status": worst})
    else:
        click.echo(f"{good} of {len(paths)} records show a whole wipe by the session of the request")
    return worst


def _check(path: Path, asked: KeyRequest) -> tuple[bytes, WipeRecord]:
    envelope = read_bounded(path, limit=dsse.envelope_limit(wiperecord.LIMIT))
    with reading(path):
        record = wiperecord.read_and_verify(envelope, request=asked)
    if not record.complete:
        raise WipeIncomplete(
            "wipe.incomplete",
            found=f"a record of a wipe that could not be shown to be whole in {path}",
            expected="zero bytes read back from every device",
            hint="treat the weights as still there: the machine must be powered off",
        )
    return envelope, record


def _members(envelope: bytes, record: WipeRecord, asked: KeyRequest) -> dict[str, Any]:
    return {"record": envelope_fingerprint(envelope), **describe(asked), "wipe": record.as_payload()}


def _show(envelope: bytes, record: WipeRecord) -> None:
    overwritten = sum(device.overwritten_bytes for device in record.devices)
    read_back = sum(device.read_back_bytes for device in record.devices)
    session = fingerprint(record.session_digest)
    click.echo(f"wipe record {envelope_fingerprint(envelope)} of node {record.node}, session {session}")
    click.echo(f"{format_time(record.at)}, {record.reason}, {record.milliseconds} ms")
    for device in record.devices:
        click.echo(
            f"  {device.device}: {device.overwritten_bytes} bytes overwritten, {device.read_back_bytes} read back, "
            f"{device.nonzero_bytes} not zero, {device.staging_bytes} of staging overwritten"
        )
    click.echo(f"complete: {overwritten} bytes overwritten, {read_back} read back as zero")


COMMANDS: Final[tuple[click.Command, ...]] = (check_wipe,)
