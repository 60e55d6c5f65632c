"""``lethe bench``: how fast this machine loads a sealed bundle, and which stage bounds it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from appliance import config
from appliance.config import Loading
from appliance.control import RemoteError
from appliance.errors import ProtocolError
from appliance.hardening import clean_environment
from appliance.probe.findings import CipherRate, Findings, LoadRate
from appliance.probe.verdict import judge
from attestation import strictjson
from provisioning.cli.progress import Meter
from provisioning.cli.report import emit, json_option, say

_LINE: Final = 1 << 20
# A probe that was told to stop removes what it wrote; on a slow medium that takes a moment.
_STOP_SECONDS: Final = 30.0


@click.group()
def bench() -> None:
    """Measure this machine."""


def _number(_context: click.Context, _option: click.Parameter, value: float) -> float:
    # "nan" is a float that no range excludes.
    if math.isnan(value):
        raise click.BadParameter("not a number")
    return value


@bench.command(short_help="Measure medium, cipher, copies and a load.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="On the medium to measure; where the configured bundle lies when not given.",
)
@click.option(
    "--gb",
    type=click.FloatRange(0.01, 1000),
    default=1.0,
    show_default=True,
    callback=_number,
    help="Size of the model.",
)
@click.option("--device", metavar="cpu|cuda:N", help="Where to load to; the configured device when not given.")
@json_option
@click.pass_obj
def load(path: Path, directory: Path | None, gb: float, device: str | None, *, as_json: bool) -> None:
    """Measure the stages of a load, then load a throw-away bundle, cold and warm, and say which stage bounds it.

    The bundle is made with a fresh key under the directory, which needs room for twice its size, and is removed at the
    end. Threads and ring are those of the configuration.
    """
    read = config.load(path) if path.exists() or directory is None else None
    loading = read.loading if read else Loading()
    chosen = directory or (read.model.bundle.resolve().parent if read else Path())
    target = device or (read.devices.slots[0] if read else "cpu")
    request = {
        "directory": str(chosen.resolve()),
        "bytes": round(gb * 1e9),
        "device": target,
        # A configuration for a GPU that decrypts is no reason to refuse a look at the processor.
        "open_on": "host" if target == "cpu" else loading.open_on,
        "ring_mib": loading.ring_mib,
        "readers": loading.readers,
        "openers": loading.openers,
    }
    findings = _measure(request)
    verdict = judge(findings)
    if as_json:
        emit({**findings.as_payload(), "verdict": asdict(verdict)})
        return
    for line in describe(findings):
        click.echo(line)
    click.echo(f"bound       {verdict.sentence}")


def _measure(request: dict[str, Any]) -> Findings:
    # Closed here, not when the collector gets to it: the probe has removed what it wrote before anything else is said.
    with contextlib.closing(_events(request)) as events, contextlib.ExitStack() as stack:
        meter: tuple[str, Meter] | None = None
        for event in events:
            match event["event"]:
                case "progress":
                    if meter is None or meter[0] != event["label"]:
                        meter = (event["label"], stack.enter_context(Meter(event["label"])))
                    meter[1](event["done"], event["total"])
                case "stage":
                    # Ends the meter's line, if there is one, before the next line begins.
                    stack.close()
                    meter = None
                    say(event["text"])
                case "error":
                    raise RemoteError(event["error"])
                case "result":
                    return Findings.from_payload(event["findings"])
    raise ProtocolError("bench.ended", found="no result", expected="the probe's findings", hint="run it again")


def _events(request: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Run the probe and give what it tells; it is stopped, and has cleaned up, when the caller stops listening."""
    process = subprocess.Popen(
        [sys.executable, "-s", "-P", "-m", "appliance.probe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_environment(os.environ),
        # A key press at the terminal reaches this process only, which then ends the probe in order.
        start_new_session=True,
    )
    with process:
        requests, answers = process.stdin, process.stdout
        if requests is None or answers is None:  # never, but the type does not know that both are pipes
            return
        try:
            with contextlib.suppress(BrokenPipeError):
                requests.write(strictjson.dumps(request) + b"\n")
                requests.close()
            while line := answers.readline(_LINE):
                yield strictjson.loads(line, limit=_LINE)
            process.wait(_STOP_SECONDS)
        finally:
            _end(process)
    if process.returncode:
        raise ProtocolError(
            "bench.ended",
            found=_ending(process.returncode),
            expected="the probe's findings",
            hint="if memory was short, give a smaller --gb or loading.ring_mib; else report the messages above",
        )


def _ending(status: int) -> str:
    return f"a probe ended by {signal.Signals(-status).name}" if status < 0 else f"a probe that left with {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def describe(findings: Findings) -> list[str]:
    """Give findings as lines for people, widest first column 12."""
    ciphers = ", ".join(_cipher(one) for one in findings.ciphers)
    copies = ", ".join(f"{one.copy_bytes >> 20} MiB {one.bytes_per_second / 1e9:.2f}" for one in findings.copies)
    what = "memory to memory" if findings.open_on == "host" else "tags alone, since the device decrypts"
    lines = [*_medium(findings), f"cipher      AES-256-GCM, {what}: {ciphers}; {findings.cores} cores"]
    lines.append(f"copy        to {findings.device}, GB/s by size: {copies}")
    if findings.cold is None:
        lines.append(f"cold        not measured: {findings.file_system} keeps its files in memory")
    else:
        lines.append(f"cold        {_load(findings.cold)}")
    lines.append(f"warm        {_load(findings.warm)}")
    return lines


def _medium(findings: Findings) -> list[str]:
    place = f"{findings.directory} ({findings.file_system})"
    if (best := findings.medium) is None:
        return [f"medium      not measured: no direct reads in {place}"]
    lines = [
        f"medium      {best.bytes_per_second / 1e9:.2f} GB/s past the cache: {place}, "
        f"{best.block_bytes >> 20} MiB reads, {best.threads} at once"
    ]
    for block in sorted({one.block_bytes for one in findings.reads}):
        rates = ", ".join(
            f"{one.threads}: {one.bytes_per_second / 1e9:.2f}" for one in findings.reads if one.block_bytes == block
        )
        lines.append(f"            {block >> 20} MiB reads, GB/s by how many at once: {rates}")
    return lines


def _cipher(one: CipherRate) -> str:
    return f"{one.bytes_per_second / 1e9:.2f} GB/s on {one.threads} thread{'' if one.threads == 1 else 's'}"


def _load(one: LoadRate) -> str:
    return (
        f"{one.bytes_per_second / 1e9:.2f} GB/s: {one.nbytes} bytes opened in {one.milliseconds} ms, "
        f"ring {one.ring_bytes} bytes, peak plaintext {one.peak_plaintext_bytes}"
    )


COMMANDS = (bench,)
