"""Commands of the sealed bundle: pack, inspect, verify, copy."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import click

from attestation import dsse
from attestation.clock import format_time
from attestation.errors import PolicyInvalid
from attestation.policy import MAX_TOML_BYTES, AppraisalPolicy
from attestation.rule import write_rule
from provisioning.cli.copy import copy_and_show
from provisioning.cli.passphrase import passphrase_options, read_passphrase
from provisioning.cli.progress import Meter
from provisioning.cli.report import emit, json_option, say
from provisioning.cli.verify import verify_and_show
from provisioning.errors import ModelRefused
from provisioning.files import read_bounded, reading, refuse_existing
from provisioning.manifest import FILE_NAME, KIND, MAX_ENVELOPE_BYTES, MAX_PAYLOAD_BYTES, Manifest, SignedManifest
from provisioning.ownerkey import OwnerKey, OwnerSigner
from provisioning.pack import DEFAULT_TILES, PackReport
from provisioning.pack import pack as pack_model
from provisioning.source import Shard, Source

_TILES: Final = ("1", "2", "4", "8", "16", "32", "64")

_bundle_argument = click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
_owner_keys_option = partial(
    click.option,
    "--owner-key",
    "owner_keys",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    metavar="FILE",
)


@click.command(short_help="Seal a model directory into a bundle.")
@click.argument("model_dir", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--keys",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="The owner's key directory; it takes the bundle's key, wrapped.",
)
@click.option(
    "--policy",
    "policy_path",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE.toml",
    help="Who may open the bundle, and on what terms.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="BUNDLE", help="Directory to make.")
@click.option("--name", help="Name that outsiders see; the model directory's when not given.")
@click.option(
    "--tiles",
    type=click.Choice(_TILES),
    default=str(DEFAULT_TILES),
    show_default=True,
    help="Cut parallel tensors into this many tiles; numbers of devices that divide it read just their own bytes.",
)
@passphrase_options
@json_option
def pack(
    model_dir: Path,
    keys: Path,
    policy_path: Path,
    out: Path,
    name: str | None,
    tiles: str,
    passphrase_file: Path | None,
    passphrase_fd: int | None,
    *,
    as_json: bool,
) -> None:
    """Seal the model in MODEL_DIR: config.json, tokenizer files and *.safetensors."""
    refuse_existing(out)
    policy = _read_policy(policy_path)
    with (
        read_passphrase(passphrase_file, passphrase_fd) as passphrase,
        OwnerSigner.load(keys, passphrase) as signer,
        _stop_on_terminate(),
        Meter("packing") as meter,
    ):
        report = pack_model(
            model_dir,
            signer=signer,
            key_dir=keys,
            policy=policy,
            name=name or model_dir.resolve().name,
            out=out,
            tiles=int(tiles),
            examine=second_opinion,
            progress=meter,
        )
    if as_json:
        emit(report.as_payload())
        return
    _show_pack(report)


def _show_pack(report: PackReport) -> None:
    click.echo(f"{report.path}: {report.purpose} bundle {report.bundle_id} of {report.name}")
    click.echo(
        f"{report.tensors} tensors, {report.weight_bytes} bytes -> {report.segments} segments, "
        f"{report.data_bytes} bytes in {report.files} files"
    )
    click.echo(f"{report.seconds:.1f} s, {report.bytes_per_second / 1e9:.2f} GB/s")
    click.echo(f"manifest {report.manifest_digest}")
    click.echo(f"sealed with the weights: {', '.join(report.catalog_files)}")
    if report.left_out:
        say(f"left out: {', '.join(report.left_out)}")


def _read_policy(path: Path) -> AppraisalPolicy:
    try:
        text = read_bounded(path, limit=MAX_TOML_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise PolicyInvalid(
            "policy.toml", found=f"{path}, which is not UTF-8", expected="TOML 1.0", hint="save the file as UTF-8"
        ) from None
    return AppraisalPolicy.from_toml(text)


@contextlib.contextmanager
def _stop_on_terminate() -> Iterator[None]:
    """Let SIGTERM clean up as Ctrl-C does."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def second_opinion(source: Source) -> None:
    """Compare our header reader with the ``safetensors`` package: names, types and shapes of every file.

    The package opens its files through numpy, which an owner's machine may not have; then this says so and goes on.

    Raises:
        ModelRefused: ``safetensors.opinion`` when the package refuses a file or reads another model in it.
    """
    if importlib.util.find_spec("numpy") is None:
        say("no second opinion on the headers: numpy is not installed")
        return
    ours: dict[int, dict[str, tuple[str, list[int]]]] = {number: {} for number in range(len(source.shards))}
    for item in source.tensors:
        ours[item.shard][item.info.name] = (item.info.dtype, list(item.info.shape))
    for number, shard in enumerate(source.shards):
        if _their_reading(shard) != ours[number]:
            _refuse_opinion(shard, "which safetensors reads as another model")


def _their_reading(shard: Shard) -> dict[str, tuple[str, list[int]]]:
    # Here, since it brings numpy, which no other command needs.
    from safetensors import SafetensorError, safe_open

    try:
        # By descriptor, so that both readers see one file whatever happens to its name.
        with safe_open(f"/proc/self/fd/{shard.descriptor}", framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except SafetensorError as error:
        _refuse_opinion(shard, f"which safetensors refuses ({str(error)[:120]})")


def _refuse_opinion(shard: Shard, found: str) -> NoReturn:
    raise ModelRefused(
        "safetensors.opinion",
        found=f"{shard.name}, {found}",
        expected="one reading by both readers",
        hint="write the file again with safetensors, and report the old one",
    )


@click.command(short_help="Show what an outsider may see of a bundle.")
@_bundle_argument
@_owner_keys_option(help="The owner's owner.pub.json; without it the signature is not checked.")
@json_option
def inspect(bundle: Path, owner_keys: tuple[Path, ...], *, as_json: bool) -> None:
    """Show what an outsider may see of BUNDLE."""
    path = bundle / FILE_NAME
    envelope = read_bounded(path, limit=MAX_ENVELOPE_BYTES)
    owners = _read_owners(owner_keys)
    with reading(path):
        payload = dsse.unverified_payload(envelope, KIND, limit=MAX_PAYLOAD_BYTES)
        manifest = SignedManifest.read(envelope, owners).manifest if owners else Manifest.parse(payload)
    digest = hashlib.sha384(payload).hexdigest()
    signature = f"by {manifest.owner}" if owners else "not checked"
    if as_json:
        emit(_outside(manifest, digest, signature))
        return
    _show_manifest(manifest, digest, signature)


def _outside(manifest: Manifest, digest: str, signature: str) -> dict[str, Any]:
    geometry = manifest.geometry
    return {
        "signature": signature,
        "manifest": digest,
        "bytes": geometry.data_bytes,
        "segments": geometry.segments,
        "files": len(geometry.files),
        "payload": manifest.as_payload(),
    }


def _show_manifest(manifest: Manifest, digest: str, signature: str) -> None:
    geometry, policy = manifest.geometry, manifest.policy
    serving, grant = policy.serving, policy.grant
    rows = (
        ("name", manifest.name),
        ("bundle id", manifest.bundle_id.hex()),
        ("manifest", digest),
        ("owner", manifest.owner),
        ("signature", signature),
        ("purpose", manifest.purpose),
        ("packed", f"{format_time(manifest.issued_at)}, epoch {manifest.epoch}"),
        ("data", f"{geometry.data_bytes} bytes, {geometry.segments} segments, {len(geometry.files)} files"),
        ("tiles", str(geometry.tiles)),
        ("policy", f"{policy.name}, accepts {', '.join(policy.accept)}"),
        (
            "serving",
            f"at most {serving.max_context} tokens of context, {serving.max_output_tokens} of output, "
            f"{serving.max_concurrent} requests at once",
        ),
        ("grant", f"{grant.loads} loads, {grant.seconds} s, reboot by {grant.reboot}"),
    )
    for label, text in rows:
        click.echo(f"{label:<10} {text}")
    for stated in policy.platforms:
        for rule, value in stated.rules:
            ((operator, operand),) = write_rule(value).items()
            click.echo(f"{'rule':<10} {stated.platform}.{rule} {operator} {json.dumps(operand)}")
    if policy.accepts_simulated:
        say("SIMULATED evidence opens this bundle; it proves nothing about a machine")
    if signature == "not checked":
        say("the signature was not checked: give --owner-key")


@click.command(short_help="Check every byte of a bundle, without a key.")
@_bundle_argument
@_owner_keys_option(help="The owner's owner.pub.json; may be given again for other owners.", required=True)
@json_option
def verify(bundle: Path, owner_keys: tuple[Path, ...], *, as_json: bool) -> None:
    """Check every byte of BUNDLE without a key: signatures, table, digests, names, sizes."""
    verify_and_show(bundle, _read_owners(owner_keys), as_json=as_json)


@click.command(short_help="Copy a bundle to another medium, read it back, resume.")
@_bundle_argument
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@_owner_keys_option(help="The owner's owner.pub.json; without it only digests are checked.")
@json_option
def copy(bundle: Path, destination: Path, owner_keys: tuple[Path, ...], *, as_json: bool) -> None:
    """Copy BUNDLE to DEST, a new path, and read the copy back from its medium.

    Until it is whole the copy is DEST.partial; the same command goes on where it broke off.
    """
    copy_and_show(bundle, destination, _read_owners(owner_keys), as_json=as_json)


def _read_owners(paths: tuple[Path, ...]) -> list[OwnerKey]:
    return [OwnerKey.read_file(path) for path in paths]


COMMANDS: Final[tuple[click.Command, ...]] = (pack, inspect, verify, copy)
