"""The places of the demo: the owner's room, the medium that is carried, and the appliance; and their programs."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NODE = "demo-node"
START_SECONDS = 60

POLICY = """\
version = 1
name = "demo laboratory"
epoch = 1
accept = ["simulated"]
challenge_seconds = 3600

[simulated]
root = {{ equals = "{root}" }}
chip_id = {{ unchecked = "any machine of the laboratory" }}
measurement = {{ unchecked = "the demo runs from a source tree that may change" }}
tcb = {{ at_least = 3 }}
debug = {{ equals = false }}
devices = {{ equals = 1 }}
device_model = {{ equals = "simulated-cpu-slot" }}
device_measurement = {{ unchecked = "a simulated device has no firmware" }}
cc_mode = {{ equals = "on" }}

[serving]
max_context = 2048
max_output_tokens = 256
max_concurrent = 8

[grant]
loads = 1
seconds = 3600
reboot = "courier"
"""

CONFIG = """\
[node]
name = "{node}"
state_dir = "state"
runtime_dir = "run"

[model]
bundle = "media/bundle"
owner_key = "media/owner.pub.json"

[platform]
kind = "simulated"
lab_dir = "lab"

[api]
port = 0
keys_file = "state/clients"
model = "smollm2"
"""


class DemoFailed(Exception):
    """A step did not give what it must give."""


class Rooms:
    """The directories of one run and the programs that work in them.

    Args:
        root: made here.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.owner = root / "owner"
        self.media = root / "media"
        self.bundle = self.media / "bundle"
        self.policy = root / "policy.toml"
        self.config = root / "lethe.toml"
        self.passphrase = root / "passphrase"
        self.log = root / "agent.log"
        self.media.mkdir(parents=True)
        self.passphrase.touch(mode=0o600)
        self.passphrase.write_text(secrets.token_urlsafe(24))

    def lethe_owner(self, *words: str | Path, keys: bool = False) -> dict[str, Any]:
        """Run ``lethe-owner`` and give its JSON result; ``keys`` adds key directory and passphrase."""
        more = ("--keys", self.owner, "--passphrase-file", self.passphrase) if keys else ()
        return _run("provisioning.cli", *words, *more, "--json")

    def lethe(self, *words: str | Path) -> dict[str, Any]:
        """Run ``lethe`` on the appliance and give its JSON result."""
        return _run("appliance.cli", "--config", self.config, *words, "--json")

    def client_key(self) -> str:
        """Make a key for an API client."""
        command = _command("appliance.cli", "--config", self.config, "apikey", "add", "demo")
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    @contextlib.contextmanager
    def agent(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run ``lethe agent`` for the length of a block, and never leave it behind."""
        with self.log.open("wb") as log:
            command = _command("appliance.cli", "--config", self.config, "agent")
            agent = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                self._await_agent(agent)
                yield agent
            finally:
                if agent.poll() is None:
                    agent.send_signal(signal.SIGTERM)
                    agent.wait(START_SECONDS)

    def _await_agent(self, agent: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not (self.root / "run" / "control.sock").exists():
            if agent.poll() is not None or time.monotonic() > deadline:
                raise DemoFailed(f"the agent did not start:\n{self.log.read_text()}")
            time.sleep(0.05)

    def zeroize(self, *words: str) -> subprocess.Popen[str]:
        """Begin ``lethe zeroize``; its JSON lines come on its standard output."""
        command = _command(
            "appliance.cli", "--config", self.config, "zeroize", "--confirm", f"ZEROIZE {NODE}", "--json"
        )
        return subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _command(module: str, *words: str | Path) -> list[str]:
    return [sys.executable, "-m", module, *map(str, words)]


def _run(module: str, *words: str | Path) -> dict[str, Any]:
    """Run a program that prints JSON; DemoFailed when it ends with another status than 0."""
    done = subprocess.run(_command(module, *words), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = f"{done.stderr}{done.stdout}"
        raise DemoFailed(f"{module} {words[0]} ended with status {done.returncode}:\n{said}")
    return dict(json.loads(done.stdout.splitlines()[-1]))
