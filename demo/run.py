"""The main job, once, on a real model: pack, verify, attest, grant, load, serve, wipe, and search for what is left.

Everything runs through the two programs an owner and an operator use, ``lethe-owner`` and ``lethe``, with the simulated
platform and the CPU as device. Each line shows a result of this run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
from needles import weight_windows

from appliance.residue import Findings, Needle, Searcher, forms_of

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / "build" / "models" / "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France? My reference is {canary}."
NODE = "demo-node"

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


def step(number: int, title: str) -> None:
    """Print the heading of a step."""
    print(f"\n{number:2}. {title}", flush=True)


def tell(text: str) -> None:
    """Print one result."""
    print(f"    {text}", flush=True)


def size(count: float) -> str:
    """Give a byte count for people."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,.0f} bytes"


def program(*words: str, **options: Any) -> dict[str, Any]:
    """Run one of the product's programs with ``--json`` and give its last JSON line.

    Raises:
        DemoFailed: the program ended with another status than 0.
    """
    done = subprocess.run([*_python(), *words, "--json"], capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        raise DemoFailed(f"{' '.join(words[:3])} ended with status {done.returncode}:\n{done.stderr}{done.stdout}")
    return json.loads(done.stdout.splitlines()[-1])


def _python() -> list[str]:
    return [sys.executable, "-m"]


OWNER = "provisioning.cli"
OPERATOR = "appliance.cli"


class Rooms:
    """The directories of one run: the owner's room, the medium between, and the appliance."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.owner = root / "owner"
        self.media = root / "media"
        self.config = root / "lethe.toml"
        self.model = root.parent / "model"
        for directory in (root, self.media):
            directory.mkdir(parents=True)

    def lethe(self, *words: str) -> dict[str, Any]:
        """Run ``lethe`` on this appliance."""
        return program(OPERATOR, "--config", str(self.config), *words)


def plant(source: Path, target: Path, canary: str) -> None:
    """Give the model a canary in a file that ends up in the sealed catalog; weights are linked, not copied."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in source.iterdir():
        os.link(path, target / path.name)
    marked = json.loads((source / "generation_config.json").read_text()) | {"lethe_demo_canary": canary}
    (target / "generation_config.json").unlink()
    (target / "generation_config.json").write_text(json.dumps(marked))


@contextlib.contextmanager
def running_agent(rooms: Rooms) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``lethe agent`` for the length of a block, and never leave it behind."""
    with (rooms.root / "agent.log").open("wb") as log:
        agent = subprocess.Popen([*_python(), OPERATOR, "--config", str(rooms.config), "agent"], stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while not (rooms.root / "run" / "control.sock").exists():
                if agent.poll() is not None or time.monotonic() > deadline:
                    raise DemoFailed("the agent did not start:\n" + (rooms.root / "agent.log").read_text())
                time.sleep(0.05)
            yield agent
        finally:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
                agent.wait(60)


def ask_model(status: dict[str, Any], key: str, question: str) -> tuple[str, float, float, int]:
    """Ask through the OpenAI client, streaming: (answer, seconds to first token, seconds in all, tokens)."""
    api = status["api"]
    # The certificate was made in the memory of the attested process; trusting it alone is pinning.
    trust = ssl.create_default_context(cafile=api["certificate"])
    with openai.OpenAI(base_url=api["url"], api_key=key, http_client=httpx2.Client(verify=trust)) as client:
        began = time.monotonic()
        first = 0.0
        words: list[str] = []
        tokens = 0
        for chunk in client.chat.completions.create(
            model=api["model"],
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.monotonic() - began
                words.append(chunk.choices[0].delta.content)
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
        return "".join(words), first, time.monotonic() - began, tokens


def search_files(searcher: Searcher, root: Path, began: float) -> Findings:
    """Search every file of the run, and whatever appeared since in the places where programs leave files."""
    findings = searcher.search_tree(root)
    for place in (Path("/dev/shm"), Path("/tmp"), Path("/var/tmp"), Path.home() / ".cache"):  # noqa: S108 - searched, not used
        for path in place.rglob("*") if place.is_dir() else ():
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink() and path.stat().st_mtime >= began:
                    findings.add(searcher.search_file(path))
    return findings


def search_memory(searcher: Searcher, processes: dict[str, int]) -> Findings | None:
    """Search the memory of the appliance's processes; None without the right to read it."""
    if os.geteuid() != 0:
        return None
    findings = Findings()
    for pid in processes.values():
        findings.add(searcher.search_process(pid))
    return findings


def labels(findings: Findings) -> str:
    """Say what was found, by label."""
    counts: dict[str, int] = {}
    for hit in findings.hits:
        counts[hit.label] = counts.get(hit.label, 0) + 1
    return ", ".join(f"{count} x {label}" for label, count in sorted(counts.items())) or "nothing"


def main() -> None:
    """Run the demo; the exit status is 0 only if every step gave what it must give."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="directory of the plaintext model")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build" / "demo", help="where the run's files go")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.work, ignore_errors=True)
    try:
        show(arguments.model, Rooms(arguments.work / "appliance-and-owner"))
    except DemoFailed as error:
        print(f"\nthe demo failed: {error}", file=sys.stderr)
        sys.exit(1)


def show(model: Path, rooms: Rooms) -> None:
    """Do the main job and print its transcript."""
    began_at = time.time()
    canaries = {name: f"lethe-{name}-{secrets.token_hex(12)}" for name in ("prompt", "catalog")}
    plant(model, rooms.model, canaries["catalog"])
    windows = weight_windows(model / "model.safetensors", count=4096)
    needles = [
        *windows,
        *(needle for name, text in canaries.items() for needle in forms_of(f"{name} canary", text.encode())),
    ]

    print("Lethe: the main job on a real model, with the SIMULATED platform (no hardware vouches for anything here)")
    own_and_pack(rooms)
    with running_agent(rooms) as agent:
        needles += exchange(rooms)
        searcher = Searcher(needles)
        key = subprocess.run(
            [*_python(), OPERATOR, "--config", str(rooms.config), "apikey", "add", "demo"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        load_and_serve(rooms, key, canaries["prompt"])
        before = search_memory(searcher, rooms.lethe("status")["processes"])
        after = wipe(rooms, searcher)
        status = agent.wait(60)
    if status != 0:
        raise DemoFailed(f"the agent ended with status {status}")
    check_record(rooms)
    final_search(rooms, searcher, model, began_at, before, after)


def own_and_pack(rooms: Rooms) -> None:
    """Steps 1 to 3: keys, policy, pack, verify."""
    passphrase = rooms.root / "passphrase"
    passphrase.touch(mode=0o600)
    passphrase.write_text(secrets.token_urlsafe(24))

    step(1, "the owner makes signing keys; the laboratory makes its root (SIMULATED)")
    made = program(OWNER, "keygen", "--purpose", "lab", "--name", "Demo Owner", "--out", str(rooms.owner),
                   "--passphrase-file", str(passphrase))  # fmt: skip
    tell(f"owner key {made['key_id'][:16]}: ML-DSA-87 and ECDSA P-384, purpose lab, encrypted at rest")
    lab = program(OPERATOR, "lab-root", "--out", str(rooms.root / "lab"), "--devices", "1")
    tell(f"laboratory root {lab['root'][:16]}")
    (rooms.root / "policy.toml").write_text(POLICY.format(root=lab["root"]))
    rooms.config.write_text(CONFIG.format(node=NODE))
    shutil.copyfile(rooms.owner / "owner.pub.json", rooms.media / "owner.pub.json")

    step(2, "the model is packed into a sealed bundle")
    packed = program(OWNER, "pack", str(rooms.model), "--keys", str(rooms.owner), "--policy",
                     str(rooms.root / "policy.toml"), "--out", str(rooms.media / "bundle"), "--name", "SmolLM2-135M-Instruct",
                     "--passphrase-file", str(passphrase))  # fmt: skip
    tell(f"{size(packed['plaintext_bytes'])} in {packed['tensors']} tensors -> {packed['segments']} segments, "
         f"{size(packed['sealed_bytes'])} on the medium, {packed['bytes_per_second'] / 1e9:.2f} GB/s")  # fmt: skip

    step(3, "anyone can verify the bundle, without a key")
    verified = program(OWNER, "verify", str(rooms.media / "bundle"), "--owner-key", str(rooms.media / "owner.pub.json"))
    tell(f"signatures, table and {verified['blocks']} ciphertext digests match, {size(verified['bytes'])}")


def exchange(rooms: Rooms) -> list[Needle]:
    """Steps 4 and 5: challenge, request, appraisal, grant. Gives the bundle key as needles, from the owner's room."""
    keys = ("--keys", str(rooms.owner), "--passphrase-file", str(rooms.root / "passphrase"))
    bundle = str(rooms.media / "bundle")
    step(4, "challenge out, key request back, evidence appraised")
    program(OWNER, "challenge", bundle, *keys, "--out", str(rooms.media / "challenge"))
    asked = rooms.lethe("request", "--challenge", str(rooms.media / "challenge"), "--out", str(rooms.media / "request"))
    tell(
        f"request {asked['fingerprint']}, {asked['bytes']} bytes, bound to challenge, session, TLS key and configuration"
    )
    verdict = program(OWNER, "appraise", str(rooms.media / "request"), "--keys", str(rooms.owner), "--bundle", bundle)
    for line in verdict["trail"]:
        tell(line)

    step(5, "the owner grants the key to exactly this session")
    granted = program(OWNER, "grant", str(rooms.media / "request"), *keys, "--bundle", bundle, "--out",
                      str(rooms.media / "grant"))  # fmt: skip
    tell(
        f"grant {granted['fingerprint']}: key sealed with HPKE (ML-KEM-1024 and P-384), {granted['bytes']} bytes; in the ledger"
    )
    return bundle_key_needles(rooms)


def bundle_key_needles(rooms: Rooms) -> list[Needle]:
    """Read the bundle key in the owner's room, to search for it elsewhere."""
    from provisioning.manifest import SignedManifest  # noqa: PLC0415
    from provisioning.ownerkey import OwnerKey, OwnerSigner  # noqa: PLC0415
    from provisioning.secret import SecretBytes  # noqa: PLC0415

    owner = OwnerKey.read((rooms.media / "owner.pub.json").read_bytes())
    manifest = SignedManifest.read((rooms.media / "bundle" / "manifest.dsse.json").read_bytes(), [owner])
    passphrase = SecretBytes.take(bytearray((rooms.root / "passphrase").read_bytes()))
    with OwnerSigner.load(rooms.owner, passphrase).bundle_key(manifest.bundle_id) as key, key.expose() as view:
        return forms_of("bundle key", bytes(view))


def load_and_serve(rooms: Rooms, key: str, canary: str) -> None:
    """Steps 6 and 7: open the grant, stream the weights, answer a question."""
    step(6, "the grant is opened and the weights stream into device memory")
    status = rooms.lethe("grant", str(rooms.media / "grant"))
    (device,) = status["devices"]
    resident = device["resident"]
    rate = resident["weight_bytes"] / max(resident["milliseconds"], 1) / 1e6
    tell(f"{size(resident['weight_bytes'])} in {resident['segments']} segments, each opened once: {rate:.2f} GB/s")
    tell(
        f"peak plaintext in host memory {resident['peak_plaintext_bytes']:,} bytes, ring {resident['ring_bytes']:,} bytes"
    )

    step(7, "a client asks through the OpenAI library, over TLS whose key the evidence vouches for")
    question = QUESTION.format(canary=canary)
    answer, first, seconds, tokens = ask_model(status, key, question)
    if not answer.strip():
        raise DemoFailed("the model gave no answer")
    tell(f"asked:    {question}")
    for line in textwrap.wrap(answer.strip(), 100):
        tell(f"answered: {line}")
    tell(f"first token after {first:.2f} s, {tokens} tokens in {seconds:.2f} s")


def wipe(rooms: Rooms, searcher: Searcher) -> Findings | None:
    """Step 8: zeroize, and search the memory of the wiped processes while they are held."""
    step(8, "zeroize: keys, then admission, then device memory, then processes")
    command = [*_python(), OPERATOR, "--config", str(rooms.config), "zeroize", "--confirm", f"ZEROIZE {NODE}", "--json"]
    held = subprocess.Popen([*command, "--hold", "300"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with held:
        status = json.loads(held.stdout.readline()) if held.stdout else {}
        for device in status["devices"]:
            wiped = device["wiped"]
            tell(f"{device['device']}: {wiped['overwritten_bytes']:,} bytes overwritten, {wiped['read_back_bytes']:,} read back, "
                 f"{wiped['nonzero_bytes']} not zero; staging {wiped['staging_bytes']:,} bytes; {wiped['milliseconds']} ms")  # fmt: skip
        findings = search_memory(searcher, {"agent": agent_pid(rooms), **status["processes"]})
        subprocess.run(command, check=False, capture_output=True)  # a second order ends the hold
        held.communicate()
    if held.returncode != 0:
        raise DemoFailed(f"zeroize ended with status {held.returncode}")
    return findings


def agent_pid(rooms: Rooms) -> int:
    """Give the process id of the agent."""
    return int(rooms.lethe("status")["agent_pid"]) if (rooms.root / "run" / "control.sock").exists() else os.getpid()


def check_record(rooms: Rooms) -> None:
    """Step 9: the signed record of the wipe, checked against the attested request."""
    step(9, "the wipe record is signed by the session that the evidence vouched for")
    (record,) = (rooms.root / "state").glob("wipe-*.dsse.json")
    checked = program(OWNER, "check-wipe", str(record), "--request", str(rooms.media / "request"))
    tell(f"{record.name}: complete {checked['complete']}, reason {checked['reason']!r}")


def final_search(
    rooms: Rooms, searcher: Searcher, model: Path, began: float, before: Findings | None, after: Findings | None
) -> None:
    """Step 10: what is left, with positive controls."""
    step(10, "search for canaries, the bundle key and 4,096 windows of the plaintext weights")
    control = searcher.search_file(model / "model.safetensors")
    if not control.hits:
        raise DemoFailed("the positive control found nothing: the search proves nothing")
    tell(f"control:  the plaintext model itself: {labels(control)}")
    if before is not None and after is not None:
        tell(f"control:  memory while serving, {size(before.searched_bytes)}: {labels(before)}")
        tell(f"memory:   of {after.places} wiped processes, {size(after.searched_bytes)}: {labels(after)}")
    else:
        tell("memory:   not searched; only root may read the memory of these processes")
    files = search_files(searcher, rooms.root, began)
    tell(f"files:    {files.places} written by this run, {size(files.searched_bytes)}: {labels(files)}")
    found = files.hits + (after.hits if after else [])
    if found or (before is not None and not before.hits):
        raise DemoFailed(f"residue: {found[:5]}")
    print(
        "\nshown: a sealed model was served to a client and nothing of it, its key or the prompt was left; "
        "not shown by a simulated platform: that the machine is what it says it is."
    )


if __name__ == "__main__":
    main()
