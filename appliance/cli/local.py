"""Commands that work alone: the agent itself, checks of files, client keys, the laboratory root."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
from click.core import ParameterSource

from appliance import config
from appliance.api import access
from appliance.config import Config
from appliance.hardening import harden_process, restart_clean
from appliance.preflight import require_installation, require_places
from attestation.clock import SystemClock
from attestation.simulated import lab
from provisioning.cli.copy import copy_and_show
from provisioning.cli.report import emit, json_option, say, show_error
from provisioning.cli.verify import verify_and_show
from provisioning.ownerkey import OwnerKey


@click.command()
@click.pass_obj
def agent(path: Path) -> None:
    """Run the appliance in the foreground until it is zeroized."""
    require_installation()
    restart_clean("appliance.cli")
    harden_process()
    from appliance.agent import Agent  # after the restart, and not for the other commands

    async def run() -> int:
        agent = Agent(config.load(path), tell=say)
        status = await agent.run()
        if agent.fault is not None:
            show_error(agent.fault, program="lethe", as_json=False)
        if agent.drill is not None and agent.drill.record_path is not None:
            say(f"wipe record: {agent.drill.record_path}")
        return status

    raise click.exceptions.Exit(asyncio.run(run()))


@click.command(name="check-config")
@json_option
@click.pass_obj
def check_config(path: Path, *, as_json: bool) -> None:
    """Read the configuration and say what is wrong with it."""
    read = config.load(path)
    require_places(read)
    if as_json:
        emit({"config": str(path), "sha384": read.digest.hex(), "node": read.node.name})
    else:
        click.echo(f"{path}: good; node {read.node.name}, sha384 {read.digest.hex()[:16]}")


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--owner-key",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Instead of the one in the configuration.",
)
@json_option
@click.pass_obj
def verify(path: Path, bundle: Path, owner_key: Path | None, *, as_json: bool) -> None:
    """Check every byte of BUNDLE without a key: signatures, table, digests, names, sizes."""
    trusted = owner_key or config.load(path).model.owner_key
    verify_and_show(bundle, [OwnerKey.read_file(trusted)], as_json=as_json)


@click.command(short_help="Copy a bundle to another medium, read it back, resume.")
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@click.option(
    "--owner-key",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Instead of the one in the configuration; on a machine without one, only digests are checked.",
)
@json_option
@click.pass_context
def copy(context: click.Context, bundle: Path, destination: Path, owner_key: Path | None, *, as_json: bool) -> None:
    """Copy BUNDLE to DEST, a new path, and read the copy back from its medium.

    Until it is whole the copy is DEST.partial; the same command goes on where it broke off.
    """
    trusted = owner_key or _configured_owner(context)
    copy_and_show(bundle, destination, [OwnerKey.read_file(trusted)] if trusted else [], as_json=as_json)


def _configured_owner(context: click.Context) -> Path | None:
    """Give the configured owner's key; none where nobody named a configuration and the machine has none."""
    path: Path = context.obj
    named = context.find_root().get_parameter_source("config_path") is not ParameterSource.DEFAULT
    return config.load(path).model.owner_key if named or path.exists() else None


@click.command(name="lab-root")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New directory for root and platform key.")
@click.option("--devices", type=click.IntRange(0, 32), default=1, show_default=True, help="Simulated devices.")
@json_option
def lab_root(out: Path, devices: int, *, as_json: bool) -> None:
    """Make a laboratory root on the spot, for SIMULATED evidence only."""
    root = lab.create(out, devices=devices, at=SystemClock().now())
    if as_json:
        emit({"lab_dir": str(out), "root": root.root_digest, "simulated": True})
    else:
        click.echo(root.root_digest)
        say("SIMULATED: this root proves nothing about a machine; name it in a laboratory policy as simulated.root")


@click.group()
def apikey() -> None:
    """Manage the keys of API clients."""


@apikey.command(name="add")
@click.argument("label")
@click.option("--expires", type=click.DateTime(["%Y-%m-%d"]), help="Last day on which it works, UTC.")
@click.pass_obj
def apikey_add(path: Path, label: str, expires: datetime | None) -> None:
    """Make a key and print it, this once; only its salted hash is kept."""
    # The named day is the last one on which the key works.
    ends = expires.replace(tzinfo=UTC) + timedelta(days=1) if expires else None
    click.echo(access.issue_key(_keys_file(path), label, expires=ends))
    say(f"this is the only time the key of {label!r} is shown")


@apikey.command(name="list")
@json_option
@click.pass_obj
def apikey_list(path: Path, *, as_json: bool) -> None:
    """List labels and dates; keys cannot be shown."""
    entries = access.list_keys(_keys_file(path))
    if as_json:
        emit({"keys": [entry.as_payload() for entry in entries]})
        return
    for entry in entries:
        click.echo(entry.describe())


@apikey.command(name="revoke")
@click.argument("label")
@click.pass_obj
def apikey_revoke(path: Path, label: str) -> None:
    """Revoke a key; a running API notices at once."""
    access.revoke_key(_keys_file(path), label)
    click.echo(f"{label} revoked")


def _keys_file(path: Path) -> Path:
    read: Config = config.load(path)
    return read.api.keys_file


COMMANDS = (agent, check_config, verify, copy, lab_root, apikey)
