"""A whole house for one test: an owner's room, a sealed bundle of a tiny real model, and an appliance to run."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from appliance.residue import Needle, Searcher, forms_of
from tests.sim import tinymodel

NODE = "test-node"
CATALOG_CANARY = "lethe-catalog-canary-52ab9c0d17"
PASSPHRASE = "only for this test"
PATIENCE = 60

POLICY = """\
version = 1
name = "test laboratory"
epoch = 1
accept = ["simulated"]
challenge_seconds = 3600

[simulated]
root = {{ equals = "{root}" }}
chip_id = {{ unchecked = "any machine of the test" }}
measurement = {{ unchecked = "the test runs from a source tree" }}
tcb = {{ at_least = 3 }}
debug = {{ equals = false }}
devices = {{ equals = 1 }}
device_model = {{ equals = "simulated-cpu-slot" }}
device_measurement = {{ unchecked = "a simulated device has no firmware" }}
cc_mode = {{ equals = "on" }}

[serving]
max_context = 256
max_output_tokens = 128
max_concurrent = 4

[grant]
loads = 1
seconds = {seconds}
reboot = "courier"
"""

CONFIG = f"""\
[node]
name = "{NODE}"
state_dir = "state"
runtime_dir = "run"
[model]
bundle = "media/bundle"
owner_key = "media/owner.pub.json"
[platform]
kind = "simulated"
lab_dir = "lab"
[devices]
compute_threads = 1
[engine]
kv_cache_mib = 8
[loading]
ring_mib = 4
[api]
port = 0
keys_file = "clients"
model = "tiny"
max_body_kib = 64
"""


class Program:
    """What a program said and how it ended."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.status = done.returncode
        self.out = done.stdout
        self.err = done.stderr

    @property
    def json(self) -> dict[str, Any]:
        """The last JSON line of standard output."""
        return dict(json.loads(self.out.splitlines()[-1]))

    @property
    def code(self) -> str:
        """The code of the refusal, from ``--json``."""
        return str(self.json["error"]["code"])


class House:
    """An owner and an appliance that share a medium.

    Args:
        root: the directory of everything.
        seconds: how long grants are good for.
    """

    def __init__(self, root: Path, *, seconds: int = 600, **model: Any) -> None:
        self._place(root)
        self.seconds = seconds
        self.model = tinymodel.write(root.parent / f"{root.name}-model", canary=CATALOG_CANARY, **model)
        self._build()

    def copy(self, root: Path) -> House:
        """Give a house with the same keys and bundle in another place: making them costs seconds."""
        shutil.copytree(self.root, root)
        twin = House.__new__(House)
        twin._place(root)
        twin.seconds, twin.model = self.seconds, self.model
        return twin

    def _place(self, root: Path) -> None:
        self.root = root
        self.owner = root / "owner"
        self.media = root / "media"
        self.bundle = self.media / "bundle"
        self.config = root / "lethe.toml"
        self.passphrase = root / "passphrase"
        self.log = root / "agent.log"
        self._files = 0

    def _build(self) -> None:
        self.media.mkdir(parents=True)
        self.passphrase.write_text(PASSPHRASE)
        self.config.write_text(CONFIG)
        made = self.lethe("lab-root", "--out", self.root / "lab").json
        (self.root / "policy.toml").write_text(POLICY.format(root=made["root"], seconds=self.seconds))
        self.make_owner(self.owner)
        shutil.copy(self.owner / "owner.pub.json", self.media)
        self.pack(self.bundle)

    def make_owner(self, directory: Path) -> None:
        """Make another owner key."""
        made = self.run("provisioning.cli", "keygen", "--purpose", "lab", "--out", directory, *self._passphrase())
        assert made.status == 0, made.err

    def pack(self, out: Path, *, keys: Path | None = None) -> None:
        """Pack the model into another bundle."""
        packed = self.lethe_owner("pack", self.model, "--policy", self.root / "policy.toml", "--out", out, keys=keys)
        assert packed.status == 0, packed.err

    def _passphrase(self) -> tuple[str | Path, ...]:
        return ("--passphrase-file", self.passphrase, "--json")

    @staticmethod
    def run(module: str, *words: str | Path) -> Program:
        """Run a program of the product."""
        command = [sys.executable, "-m", module, *map(str, words)]
        return Program(subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False))

    def lethe_owner(self, *words: str | Path, keys: Path | None = None) -> Program:
        """Run ``lethe-owner`` with the owner's keys."""
        return self.run("provisioning.cli", *words, "--keys", keys or self.owner, *self._passphrase())

    def lethe(self, *words: str | Path) -> Program:
        """Run ``lethe`` with ``--json``."""
        return self.run("appliance.cli", "--config", self.config, *words, "--json")

    def fresh(self, name: str) -> Path:
        """Give a path on the medium that is not taken."""
        self._files += 1
        return self.media / f"{name}-{self._files}"

    @contextlib.contextmanager
    def agent(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run the agent for a block; it is ended with SIGTERM, and killed if that does not help."""
        socket = self.root / "run" / "control.sock"
        socket.unlink(missing_ok=True)
        command = [sys.executable, "-m", "appliance.cli", "--config", str(self.config), "agent"]
        with self.log.open("ab") as log, subprocess.Popen(command, stdout=log, stderr=log) as agent:
            try:
                wait_until(lambda: socket.exists() or agent.poll() is not None)
                assert agent.poll() is None, self.log.read_text()
                yield agent
            finally:
                if agent.poll() is None:
                    agent.send_signal(signal.SIGTERM)
                    try:
                        agent.wait(PATIENCE)
                    except subprocess.TimeoutExpired:
                        agent.kill()

    def challenge(self, *, keys: Path | None = None, bundle: Path | None = None) -> Path:
        """Let the owner make a challenge."""
        out = self.fresh("challenge")
        made = self.lethe_owner("challenge", bundle or self.bundle, "--out", out, keys=keys)
        assert made.status == 0, made.err
        return out

    def request(self) -> Path:
        """Challenge the appliance and take its key request."""
        out = self.fresh("request")
        asked = self.lethe("request", "--challenge", self.challenge(), "--out", out)
        assert asked.status == 0, asked.err
        return out

    def grant(self, request: Path | None = None) -> Path:
        """Let the owner answer a request with a grant."""
        out = self.fresh("grant")
        given = self.lethe_owner("grant", request or self.request(), "--bundle", self.bundle, "--out", out)
        assert given.status == 0, given.err
        return out

    def serve(self) -> dict[str, Any]:
        """Go from a fresh agent to serving; gives the status."""
        granted = self.lethe("grant", self.grant())
        assert granted.status == 0, granted.err + self.log.read_text()
        assert granted.json["state"] == "SERVING"
        return granted.json

    def status(self) -> dict[str, Any]:
        """Ask the agent how it is."""
        return self.lethe("status").json

    def zeroize(self, *words: str) -> Program:
        """Wipe by command."""
        return self.lethe("zeroize", "--confirm", f"ZEROIZE {NODE}", *words)

    def client(self, status: dict[str, Any]) -> openai.OpenAI:
        """Give an OpenAI client that trusts only the attested key."""
        label = f"client-{time.monotonic_ns()}"
        key = self.run("appliance.cli", "--config", self.config, "apikey", "add", label).out.strip()
        trust = ssl.create_default_context(cafile=status["api"]["certificate"])
        return openai.OpenAI(
            base_url=status["api"]["url"],
            api_key=key,
            max_retries=0,
            http_client=httpx2.Client(verify=trust, timeout=60),
        )

    def journal(self) -> list[str]:
        """Give the events of the journal."""
        lines = (self.root / "state" / "journal.jsonl").read_text().splitlines()
        return [json.loads(line)["event"] for line in lines]

    def searcher(self, *canaries: str) -> Searcher:
        """Give a searcher for the plaintext weights of the model, its catalog canary, and more canaries."""
        data = (self.model / "model.safetensors").read_bytes()
        starts = range(len(data) // 2, len(data) - 64, max(64, len(data) // 4000))
        needles = [Needle("weights", data[start : start + 32]) for start in starts]
        for canary in (CATALOG_CANARY, *canaries):
            needles += forms_of("canary", canary.encode())
        return Searcher(needles)


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for a condition, and fail when it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Say whether a process still runs (a zombie does not)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture(scope="session")
def tiny_house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """A house with a tiny model, to copy."""
    return House(tmp_path_factory.mktemp("tiny") / "house")


@pytest.fixture(scope="session")
def larger_house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """A house whose model, 200 MB, takes long enough to load to be disturbed in it."""
    return House(tmp_path_factory.mktemp("larger") / "house", hidden=1024, layers=10, heads=8, kv_heads=8)


@pytest.fixture
def house(tiny_house: House, tmp_path: Path) -> House:
    """A house of its own for one test."""
    return tiny_house.copy(tmp_path / "house")


@pytest.fixture
def larger(larger_house: House, tmp_path: Path) -> House:
    """A larger house of its own for one test."""
    return larger_house.copy(tmp_path / "house")
