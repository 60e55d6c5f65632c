"""Commands that talk to a running agent: status, request, grant, zeroize."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from appliance import config
from appliance.control import MAX_ENVELOPE, RemoteError, ask
from appliance.errors import NotServing
from attestation.strictjson import b64, decode_b64
from provisioning.cli.progress import Meter
from provisioning.cli.report import emit, json_option, say, show_error
from provisioning.files import read_bounded, refuse_existing, write_new
from provisioning.fingerprint import envelope_fingerprint

# An agent that was started a moment ago takes this long to listen, on a slow machine.
_START_SECONDS = 10.0


@click.command()
@json_option
@click.pass_obj
def status(path: Path, *, as_json: bool) -> None:
    """Show what the appliance is doing and what it waits for."""
    answer = _last(ask(config.load(path).control_socket, "status"))["status"]
    if as_json:
        emit(answer)
    else:
        for line in describe(answer):
            click.echo(line)
    if answer["state"] != "SERVING":
        raise click.exceptions.Exit(NotServing.exit_status)


@click.command()
@click.option(
    "--challenge", "challenge_path", type=click.Path(path_type=Path), required=True, help="The owner's challenge."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Where to write the key request.")
@json_option
@click.pass_obj
def request(path: Path, challenge_path: Path, out: Path, *, as_json: bool) -> None:
    """Answer the owner's challenge with a key request bound to this session."""
    refuse_existing(out)
    challenge = read_bounded(challenge_path, limit=MAX_ENVELOPE)
    members = {"envelope": b64(challenge)}
    answer = _last(ask(config.load(path).control_socket, "request", members, wait_seconds=_START_SECONDS))
    envelope = decode_b64(answer["envelope"], "request", limit=MAX_ENVELOPE)
    write_new(out, envelope)
    fingerprint = envelope_fingerprint(envelope)
    if as_json:
        emit({"path": str(out), "bytes": len(envelope), "fingerprint": fingerprint})
    else:
        click.echo(f"request {fingerprint} written to {out}, {len(envelope)} bytes")
        say("carry it to the owner; the grant that answers it opens in this agent only, until it stops")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@json_option
@click.pass_obj
def grant(path: Path, file: Path, *, as_json: bool) -> None:
    """Open the owner's grant and load the model."""
    envelope = read_bounded(file, limit=MAX_ENVELOPE)
    answer: dict[str, Any] = {}
    with Meter("loading") as meter:
        for answer in ask(config.load(path).control_socket, "grant", {"envelope": b64(envelope)}):
            if answer["event"] == "progress" and answer["total_bytes"]:
                meter(answer["opened_bytes"], answer["total_bytes"])
    if as_json:
        emit(answer["status"])
        return
    for line in describe(answer["status"]):
        click.echo(line)


@click.command()
@click.option("--confirm", metavar="PHRASE", help='The phrase "ZEROIZE NODE"; asked for when not given.')
@click.option(
    "--hold",
    type=click.IntRange(0, 3600),
    default=0,
    metavar="SECONDS",
    help="Keep the wiped processes alive this long, so that an auditor can search their memory; a second zeroize ends "
    "it. With --json a first object shows the wiped processes.",
)
@json_option
@click.pass_obj
def zeroize(path: Path, confirm: str | None, hold: int, *, as_json: bool) -> None:
    """Wipe keys, weights and caches, read them back, sign a record, and stop the agent."""
    read = config.load(path)
    phrase = f"ZEROIZE {read.node.name}"
    if confirm is None:
        if not sys.stdin.isatty():
            raise click.UsageError(f"no terminal to ask at; give --confirm '{phrase}'")
        confirm = click.prompt(f"the model must be granted and loaded again after this; type {phrase!r}", err=True)
    answer: dict[str, Any] = {}
    for answer in ask(read.control_socket, "zeroize", {"confirm": confirm, "hold_seconds": hold}):
        if answer["event"] == "progress":
            say(f"wiped; processes stay for {hold} s: {answer['status']['processes']}")
            if as_json:
                emit(answer["status"])
    if as_json:
        emit(answer["status"])
    else:
        for line in describe(answer["status"]):
            click.echo(line)
    if answer["error"]:
        show_error(RemoteError(answer["error"]), program="lethe", as_json=False)
    raise click.exceptions.Exit(answer["exit_status"])


def _last(answers: Iterator[dict[str, Any]]) -> dict[str, Any]:
    *_, last = answers
    return last


def describe(status: dict[str, Any]) -> list[str]:
    """Give a status as lines for people, widest first column 12."""
    banner = "  SIMULATED: no hardware vouches for this machine" if status["simulated"] else ""
    lines = [f"state       {status['state']}{banner}", f"node        {status['node']}", f"next        {status['next']}"]
    if bundle := status["bundle"]:
        lines.append(f"bundle      {bundle['name']} ({bundle['purpose']}), {bundle['id'][:16]}")
    lines.append(f"assurance   {status['assurance']}")
    if api := status["api"]:
        lines.append(f"api         {api['url']} model {api['model']}: {api['active']} active, {api['served']} served")
    if status["grant_seconds_left"]:
        lines.append(f"grant       {status['grant_seconds_left']} s left")
    for device in status["devices"]:
        lines += _describe_device(device)
    weak = [fact for fact in status["machine"] if fact["state"] == "weak"]
    lines += [f"weak        {fact['name']}: {fact['seen']} ({fact['hint']})" for fact in weak]
    if status["wipe_record"]:
        lines.append(f"record      {status['wipe_record']}")
    return lines


def _describe_device(device: dict[str, Any]) -> list[str]:
    lines = []
    if (resident := device.get("resident")) and "wiped" not in device:
        milliseconds = max(resident["milliseconds"], 1)
        rate = resident["weight_bytes"] / milliseconds / 1e6
        lines.append(
            f"device      {device['device']}: {resident['weight_bytes']} bytes resident in {milliseconds} ms"
            f" ({rate:.2f} GB/s), peak plaintext on the host {resident['peak_plaintext_bytes']} bytes"
            f" in a ring of {resident['ring_bytes']}"
        )
    elif device["total_bytes"]:
        lines.append(
            f"device      {device['device']}: {device['opened_bytes']} of {device['total_bytes']} bytes, plaintext on"
            f" the host {device['plaintext_bytes']} bytes, at most {device['peak_plaintext_bytes']}"
        )
    if engine := device.get("engine"):
        lines.append(
            f"engine      {engine['running']} running, {engine['waiting']} waiting,"
            f" {engine['kv_blocks_used']} of {engine['kv_blocks_total']} blocks,"
            f" {engine['generated_tokens']} tokens generated"
        )
    if wiped := device.get("wiped"):
        lines.append(
            f"wiped       {device['device']}: {wiped['overwritten_bytes']} bytes overwritten,"
            f" {wiped['read_back_bytes']} read back, {wiped['nonzero_bytes']} not zero, in {wiped['milliseconds']} ms"
        )
    return lines


COMMANDS = (status, request, grant, zeroize)
