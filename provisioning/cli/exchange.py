"""Commands of the exchange: keygen, challenge, appraise, grant, ledger."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from attestation.clock import SystemClock, format_time
from attestation.errors import FormatError
from attestation.result import SIMULATED_BANNER, AppraisalRefused, AttestationResult, render
from attestation.strictjson import Fields
from provisioning import broker, challenge, request
from provisioning.chainfile import Record
from provisioning.cli.passphrase import passphrase_options, read_passphrase
from provisioning.cli.report import emit, json_option, say
from provisioning.errors import OutputFailed
from provisioning.files import NewFile, read_bounded, reading, refuse_existing, reserve_directory, reserve_file
from provisioning.fingerprint import envelope_fingerprint, fingerprint
from provisioning.ledger import FILE_NAME, Ledger, head_of, read_ledger
from provisioning.manifest import FILE_NAME as MANIFEST_FILE
from provisioning.manifest import MAX_ENVELOPE_BYTES, SignedManifest
from provisioning.ownerkey import PUBLIC_FILE, OwnerKey, OwnerSigner, Purpose, read_name

_MAX_BOOK = 1000

keys_option = click.option(
    "--keys",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="The owner's key directory.",
)
_ledger_option = click.option(
    "--ledger",
    "ledger_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help=f"The ledger; {FILE_NAME} in the key directory when not given.",
)
_bundle_option = click.option(
    "--bundle",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="BUNDLE",
    help="The sealed bundle; only its manifest is read.",
)


def _now() -> datetime:
    return SystemClock().now()


def _manifest(bundle: Path, owner: OwnerKey) -> SignedManifest:
    path = bundle / MANIFEST_FILE
    envelope = read_bounded(path, limit=MAX_ENVELOPE_BYTES)
    with reading(path):
        return SignedManifest.read(envelope, [owner])


def read_request(path: Path) -> request.KeyRequest:
    """Read a key request file, and check that its session signed it."""
    envelope = read_bounded(path, limit=request.ENVELOPE_LIMIT)
    with reading(path):
        return request.read(envelope)


def _check_name(_context: click.Context, _parameter: click.Parameter, name: str) -> str:
    try:
        return read_name(Fields({"name": name}, "owner"))
    except FormatError:
        raise click.BadParameter("give 1 to 64 printable characters") from None


def _open_ledger(keys: Path, ledger_path: Path | None, owner: OwnerKey, at: datetime) -> Ledger:
    return Ledger(ledger_path or keys / FILE_NAME, owner=owner.key_id, at=at)


@click.command(short_help="Make an owner key.")
@click.option("--purpose", type=click.Choice(["lab", "production"]), required=True, help="What the key may sign.")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Directory to make.")
@click.option("--name", default="owner", show_default=True, callback=_check_name, help="Name for people to read.")
@passphrase_options
@json_option
def keygen(
    purpose: Purpose, out: Path, name: str, passphrase_file: Path | None, passphrase_fd: int | None, *, as_json: bool
) -> None:
    """Make an owner key: ML-DSA-87 with ECDSA P-384, encrypted with a passphrase."""
    refuse_existing(out / PUBLIC_FILE)
    with (
        read_passphrase(passphrase_file, passphrase_fd, new=True) as passphrase,
        OwnerSigner.generate(name, purpose, at=_now()) as signer,
    ):
        signer.save(out, passphrase)
    if as_json:
        emit({"keys": str(out), "name": name, "purpose": purpose, "key_id": signer.key_id})
        return
    click.echo(f"{purpose} key {name} in {out}")
    click.echo(f"key id {signer.key_id}")
    say(f"give {out / PUBLIC_FILE} to the appliance, and compare the key id by another way")
    say("back up the directory and the passphrase: without them no bundle packed with this key can be granted")


@click.command(name="challenge", short_help="Make a challenge for an appliance.")
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@keys_option
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="PATH", help="File, or directory of a book."
)
@click.option(
    "--count",
    type=click.IntRange(1, _MAX_BOOK),
    default=1,
    show_default=True,
    help="Make a book of this many one-time challenges, a file each.",
)
@_ledger_option
@passphrase_options
@json_option
def make_challenge(
    bundle: Path,
    keys: Path,
    out: Path,
    count: int,
    ledger_path: Path | None,
    passphrase_file: Path | None,
    passphrase_fd: int | None,
    *,
    as_json: bool,
) -> None:
    """Make a challenge for the appliance that holds BUNDLE."""
    refuse_existing(out)
    owner = OwnerKey.load(keys)
    manifest = _manifest(bundle, owner)
    at = _now()
    with (
        # Before the ledger: a challenge must not be recorded for a file that cannot be written.
        _places(out, count) as write,
        read_passphrase(passphrase_file, passphrase_fd) as passphrase,
        OwnerSigner.load(keys, passphrase) as signer,
        _open_ledger(keys, ledger_path, owner, at) as ledger,
    ):
        issued = [challenge.issue(signer=signer, manifest=manifest, ledger=ledger, at=at) for _ in range(count)]
        paths = write(issued)
    marks = [envelope_fingerprint(envelope) for envelope in issued]
    if as_json:
        challenges = [{"path": str(path), "fingerprint": mark} for path, mark in zip(paths, marks, strict=True)]
        emit(
            {
                "bundle_id": manifest.bundle_id.hex(),
                "manifest": manifest.digest.hex(),
                "seconds": manifest.policy.challenge_seconds,
                "challenges": challenges,
            }
        )
        return
    for path, mark in zip(paths, marks, strict=True):
        click.echo(f"challenge {mark} written to {path}")
    say(f"for bundle {manifest.name}, good for {manifest.policy.challenge_seconds} seconds and one grant each")


@contextlib.contextmanager
def _places(out: Path, count: int) -> Iterator[Callable[[list[bytes]], list[Path]]]:
    """Reserve the file or the book; gives what writes the envelopes there."""
    if count == 1:
        with reserve_file(out) as file:
            yield lambda envelopes: _fill(file, envelopes[0])
        return
    with reserve_directory(out) as book:
        yield lambda envelopes: book.publish(
            {f"challenge-{number:04d}.dsse.json": envelope for number, envelope in enumerate(envelopes, 1)}
        )


def _fill(file: NewFile, envelope: bytes) -> list[Path]:
    file.publish(envelope)
    return [file.path]


@click.command(short_help="Judge the evidence in a request; grants nothing.")
@click.argument("request_path", metavar="REQUEST", type=click.Path(path_type=Path, dir_okay=False))
@keys_option
@_bundle_option
@json_option
def appraise(request_path: Path, keys: Path, bundle: Path, *, as_json: bool) -> None:
    """Judge the evidence in REQUEST under the bundle's policy, rule by rule. Grants nothing, needs no passphrase."""
    asked = read_request(request_path)
    manifest = _manifest(bundle, OwnerKey.load(keys))
    try:
        result = broker.appraise_request(asked, manifest=manifest, at=_now())
    except AppraisalRefused as refusal:
        if not as_json:
            _show_trail(asked, refusal)
        raise
    if as_json:
        emit({**describe(asked), "result": result.as_payload(), "result_digest": result.digest.hex()})
        return
    _show_trail(asked, result)
    say("this judges the evidence only; grant also checks the challenge against the ledger")


def describe(asked: request.KeyRequest) -> dict[str, Any]:
    """Give what a request says of itself, as JSON members."""
    return {
        "node": asked.node,
        "request": fingerprint(asked.digest),
        "challenge": fingerprint(asked.challenge_digest),
        "session": fingerprint(asked.session.digest),
        "manifest": asked.binding.manifest_digest.hex(),
    }


def _show_trail(asked: request.KeyRequest, outcome: AttestationResult | AppraisalRefused) -> None:
    click.echo(
        f"request {fingerprint(asked.digest)} of node {asked.node}, session {fingerprint(asked.session.digest)}, "
        f"made {format_time(asked.issued_at)} by its own clock"
    )
    for line in render(outcome):
        click.echo(line)


@click.command(short_help="Judge a request and seal the key to its session.")
@click.argument("request_path", metavar="REQUEST", type=click.Path(path_type=Path, dir_okay=False))
@keys_option
@_bundle_option
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="FILE", help="Where to write it.")
@click.option(
    "--epoch-floor",
    type=click.IntRange(min=0),
    metavar="N",
    help="Withdraw bundles below this epoch; the bundle's own epoch when not given.",
)
@_ledger_option
@passphrase_options
@json_option
def grant(
    request_path: Path,
    keys: Path,
    bundle: Path,
    out: Path,
    epoch_floor: int | None,
    ledger_path: Path | None,
    passphrase_file: Path | None,
    passphrase_fd: int | None,
    *,
    as_json: bool,
) -> None:
    """Judge REQUEST and, if it is acceptable, seal the bundle key to its session."""
    refuse_existing(out)
    asked = read_request(request_path)
    owner = OwnerKey.load(keys)
    manifest = _manifest(bundle, owner)
    at = _now()
    with (
        # Before the ledger: a challenge must not be used up for a file that cannot be written.
        reserve_file(out) as place,
        read_passphrase(passphrase_file, passphrase_fd) as passphrase,
        OwnerSigner.load(keys, passphrase) as signer,
        signer.bundle_key(keys, manifest.bundle_id) as bundle_key,
        _open_ledger(keys, ledger_path, owner, at) as ledger,
    ):
        try:
            envelope = broker.grant(
                asked,
                signer=signer,
                bundle_key=bundle_key,
                manifest=manifest,
                ledger=ledger,
                at=at,
                epoch_floor=epoch_floor,
            )
        except AppraisalRefused as refusal:
            if not as_json:
                _show_trail(asked, refusal)
            raise
        try:
            place.publish(envelope)
        except OutputFailed:
            say("the ledger has this grant, so its challenge is used up: send a new challenge")
            raise
    simulated = manifest.policy.accepts_simulated
    terms = manifest.policy.grant
    if as_json:
        emit(
            {
                **describe(asked),
                "grant": envelope_fingerprint(envelope),
                "path": str(out),
                "simulated": simulated,
                "loads": terms.loads,
                "seconds": terms.seconds,
            }
        )
        return
    if simulated:
        click.echo(SIMULATED_BANNER)
    click.echo(f"grant {envelope_fingerprint(envelope)} written to {out}")
    click.echo(
        f"answers request {fingerprint(asked.digest)} of node {asked.node}, session {fingerprint(asked.session.digest)}"
    )
    say(f"it opens in that session only: {terms.loads} loads within {terms.seconds} seconds of the request")


@click.command(short_help="Check the ledger and show its entries.")
@keys_option
@_ledger_option
@json_option
def ledger(keys: Path, ledger_path: Path | None, *, as_json: bool) -> None:
    """Check the ledger's chain and show its entries. Changes nothing."""
    path = ledger_path or keys / FILE_NAME
    entries = read_ledger(path)
    head = head_of(entries)
    if as_json:
        emit({"ledger": str(path), "head": head.hex(), "entries": [entry.as_payload() for entry in entries]})
        return
    for entry in entries:
        click.echo(_ledger_line(entry))
    click.echo(f"{len(entries)} entries, chain whole, head {fingerprint(head)}")


def _ledger_line(entry: Record) -> str:
    shown = {name: entry.detail.get(name) for name in ("challenge", "request", "grant", "node", "code")}
    words = [
        f"{name} {fingerprint(bytes.fromhex(value)) if len(value) == 96 else value}"
        for name, value in shown.items()
        if isinstance(value, str)
    ]
    return f"{entry.seq:>5}  {format_time(entry.at)}  {entry.event:<17} {', '.join(words)}".rstrip()


COMMANDS: tuple[click.Command, ...] = (keygen, make_challenge, appraise, grant, ledger)
