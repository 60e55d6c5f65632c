"""The main job, once, on a real model: pack, verify, attest, grant, load, serve, wipe, and search for what is left.

Everything runs through the two programs that an owner and an operator use, ``lethe-owner`` and ``lethe``, with the
simulated platform and the CPU as device. Each line of the transcript is a result of this run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import ssl
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import openai

from appliance.residue import Findings, Searcher, forms_of
from demo.needles import bundle_key, weight_windows
from demo.rooms import CONFIG, NODE, POLICY, DemoFailed, Rooms

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / "build" / "models" / "SmolLM2-135M-Instruct"
QUESTION = "(ticket {canary}) What is the capital of France?"
WINDOWS = 4096
# Where programs leave files that nobody asked for.
ELSEWHERE = (Path("/dev/shm"), Path("/tmp"), Path("/var/tmp"), Path.home() / ".cache")


def step(number: int, title: str) -> None:
    """Print the heading of a step."""
    print(f"\n{number:2}. {title}", flush=True)


def tell(text: str) -> None:
    """Print one result."""
    print(f"    {text}", flush=True)


def size(count: float) -> str:
    """Give a byte count for people."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,.0f} bytes"


def main() -> None:
    """Run the demo; the exit status is 0 only if every step gave what it must give."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="directory of the plaintext model")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build" / "demo", help="where the run's files go")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.work, ignore_errors=True)
    try:
        show(arguments.model, arguments.work)
    except DemoFailed as error:
        print(f"\nthe demo failed: {error}", file=sys.stderr)
        sys.exit(1)


def show(model: Path, work: Path) -> None:
    """Do the main job and print its transcript."""
    began = time.time()
    rooms = Rooms(work / "run")
    canaries = {name: f"lethe-{name}-{secrets.token_hex(12)}" for name in ("prompt", "catalog")}
    marked = plant(model, work / "model", canaries["catalog"])
    needles = weight_windows(model / "model.safetensors", count=WINDOWS)
    needles += [needle for name, text in canaries.items() for needle in forms_of(f"{name} canary", text.encode())]

    print("Lethe: the main job on a real model, with the SIMULATED platform: no hardware vouches for anything here")
    make_keys(rooms)
    pack_and_verify(rooms, marked)
    with rooms.agent() as agent:
        exchange(rooms)
        searcher = Searcher([*needles, *forms_of("bundle key", bundle_key(rooms))])
        status = load(rooms)
        ask(status, rooms.client_key(), canaries["prompt"])
        before = search_memory(searcher, status["processes"])
        after = wipe(rooms, searcher)
        ended = agent.wait(60)
    if ended != 0:
        raise DemoFailed(f"the agent ended with status {ended}:\n{rooms.log.read_text()}")
    check_record(rooms)
    search(rooms, searcher, model, began, before, after)
    print(
        "\nshown: a sealed model answered a client, and nothing of it, its key or the prompt was left; not shown by a "
        "simulated\nplatform: that the machine is what it says it is, and that GPU memory behaves as host memory does."
    )


def plant(source: Path, target: Path, canary: str) -> Path:
    """Give the model a canary in a file that goes into the sealed catalog; weights are linked, not copied."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "generation_config.json":
            os.link(path, target / path.name)
    settings = json.loads((source / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps(settings | {"lethe_demo_canary": canary}))
    return target


def make_keys(rooms: Rooms) -> None:
    """Step 1."""
    step(1, "the owner makes signing keys, the laboratory its root (SIMULATED)")
    made = rooms.lethe_owner(
        "keygen",
        "--purpose",
        "lab",
        "--name",
        "demo owner",
        "--out",
        rooms.owner,
        "--passphrase-file",
        rooms.passphrase,
    )
    tell(f"owner key {made['key_id'][:16]}: ML-DSA-87 with ECDSA P-384, purpose {made['purpose']}, encrypted at rest")
    laboratory = rooms.lethe("lab-root", "--out", rooms.root / "lab")
    tell(f"laboratory root {laboratory['root'][:16]}, pinned in the owner's policy")
    rooms.policy.write_text(POLICY.format(root=laboratory["root"]))
    rooms.config.write_text(CONFIG.format(node=NODE))
    shutil.copyfile(rooms.owner / "owner.pub.json", rooms.media / "owner.pub.json")


def pack_and_verify(rooms: Rooms, model: Path) -> None:
    """Steps 2 and 3."""
    step(2, "the model is packed into a sealed bundle")
    name = ("--name", "SmolLM2-135M-Instruct")
    packed = rooms.lethe_owner("pack", model, "--policy", rooms.policy, "--out", rooms.bundle, *name, keys=True)
    tell(
        f"{packed['tensors']} tensors, {size(packed['plaintext_bytes'])} -> {packed['segments']} sealed segments, "
        f"{size(packed['sealed_bytes'])}, {packed['bytes_per_second'] / 1e9:.2f} GB/s"
    )
    step(3, "anyone can verify the bundle without a key")
    began = time.monotonic()
    verified = rooms.lethe("verify", rooms.bundle)
    tell(
        f"signatures, table and {verified['blocks']} ciphertext digests match: {size(verified['bytes'])} "
        f"in {time.monotonic() - began:.1f} s"
    )


def exchange(rooms: Rooms) -> None:
    """Steps 4 and 5."""
    step(4, "challenge out, key request back, evidence appraised")
    rooms.lethe_owner("challenge", rooms.bundle, "--out", rooms.media / "challenge", keys=True)
    request = rooms.media / "request"
    asked = rooms.lethe("request", "--challenge", rooms.media / "challenge", "--out", request)
    tell(f"request {asked['fingerprint']}, {asked['bytes']:,} bytes: bound to challenge, session key, TLS key, policy,")
    tell("manifest, configuration and boot")
    verdict = rooms.lethe_owner("appraise", request, "--bundle", rooms.bundle, "--keys", rooms.owner)
    result = verdict["result"]
    outcomes = Counter(check["outcome"] for check in result["checks"])
    tell(
        f"SIMULATED evidence, assurance {result['assurance']}: {outcomes['pass']} checks passed, "
        f"{outcomes['unchecked']} left unchecked by the owner with a reason"
    )
    step(5, "the owner grants the bundle key to exactly this session")
    granted = rooms.lethe_owner("grant", request, "--bundle", rooms.bundle, "--out", rooms.media / "grant", keys=True)
    tell(f"grant {granted['grant']}: sealed with HPKE (ML-KEM-1024 with P-384), {granted['loads']} load, in the ledger")


def load(rooms: Rooms) -> dict[str, Any]:
    """Step 6; gives the appliance's status."""
    step(6, "the grant is opened and the weights stream into device memory")
    status = rooms.lethe("grant", rooms.media / "grant")
    (device,) = status["devices"]
    resident = device["resident"]
    rate = device["total_bytes"] / max(resident["milliseconds"], 1) / 1e6
    tell(
        f"{resident['segments']} segments opened, each once: {size(device['total_bytes'])} sealed -> "
        f"{size(resident['weight_bytes'])} resident, {rate:.2f} GB/s"
    )
    tell(
        f"peak plaintext in host memory {resident['peak_plaintext_bytes']:,} bytes, "
        f"in a locked ring of {resident['ring_bytes']:,}"
    )
    return status


def ask(status: dict[str, Any], key: str, canary: str) -> None:
    """Step 7: ask through the OpenAI client, streaming. The canary is not printed: the search would find it there."""
    step(7, "a client asks through the OpenAI library, over TLS whose key the evidence binds")
    api = status["api"]
    # The certificate was made in the memory of the attested process; trusting only it is pinning.
    trust = ssl.create_default_context(cafile=api["certificate"])
    with openai.OpenAI(base_url=api["url"], api_key=key, http_client=httpx2.Client(verify=trust)) as client:
        began = time.monotonic()
        first = 0.0
        words: list[str] = []
        tokens = 0
        for chunk in client.chat.completions.create(
            model=api["model"],
            messages=[{"role": "user", "content": QUESTION.format(canary=canary)}],
            temperature=0,
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        ):
            for choice in chunk.choices:
                first = first or time.monotonic() - began
                words.append(choice.delta.content or "")
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
        seconds = time.monotonic() - began
    answer = "".join(words).strip()
    if not answer:
        raise DemoFailed("the model gave no answer")
    tell(f"asked:    {QUESTION.format(canary='lethe-prompt-...')}")
    for line in textwrap.wrap(answer, 100):
        tell(f"answered: {line}")
    tell(f"first token after {first:.2f} s, {tokens} tokens in {seconds:.2f} s")


def wipe(rooms: Rooms, searcher: Searcher) -> Findings | None:
    """Step 8: zeroize, and search the memory of the wiped processes while they are held."""
    step(8, "zeroize: keys, admission, device memory, staging, processes, record")
    with rooms.zeroize("--hold", "600") as held:
        status = json.loads(held.stdout.readline() if held.stdout else "")
        for device in status["devices"]:
            wiped = device["wiped"]
            tell(
                f"{device['device']}: {wiped['overwritten_bytes']:,} bytes overwritten, {wiped['read_back_bytes']:,} "
                f"read back, {wiped['nonzero_bytes']} not zero; staging {wiped['staging_bytes']:,}; "
                f"{wiped['milliseconds']} ms"
            )
        findings = search_memory(searcher, status["processes"])
        with rooms.zeroize() as release:  # a second order ends the hold
            release.communicate()
        held.communicate()
    if held.returncode != 0:
        raise DemoFailed(f"zeroize ended with status {held.returncode}")
    return findings


def check_record(rooms: Rooms) -> None:
    """Step 9."""
    step(9, "the wipe record is signed by the session that the evidence bound")
    (record,) = (rooms.root / "state").glob("wipe-*.dsse.json")
    checked = rooms.lethe_owner("check-wipe", record, "--request", rooms.media / "request")["wipe"]
    tell(f"{record.name}: complete, {len(checked['devices'])} device, reason {checked['reason']!r}")


def search_memory(searcher: Searcher, processes: dict[str, int]) -> Findings | None:
    """Search the memory of the appliance's processes; None without the right to read it."""
    if os.geteuid() != 0:
        return None
    findings = Findings()
    for pid in processes.values():
        findings.add(searcher.search_process(pid))
    return findings


def search_files(searcher: Searcher, rooms: Rooms, began: float) -> Findings:
    """Search every file of the run, and what appeared since where programs leave files that nobody asked for."""
    findings = searcher.search_tree(rooms.root)
    for path in (path for place in ELSEWHERE if place.is_dir() for path in place.rglob("*")):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink() and path.stat().st_mtime >= began:
                findings.add(searcher.search_file(path))
    return findings


def search(
    rooms: Rooms, searcher: Searcher, model: Path, began: float, before: Findings | None, after: Findings | None
) -> None:
    """Step 10: what is left, with positive controls."""
    step(10, f"search for the canaries, the bundle key and {WINDOWS:,} windows of the plaintext weights")
    control = searcher.search_file(model / "model.safetensors")
    tell(f"control:  the plaintext model, which must be found: {labels(control)}")
    if before is None or after is None:
        tell("memory:   not searched: only root may read the memory of these processes")
    else:
        tell(f"control:  memory while serving, {size(before.searched_bytes)}: {labels(before)}")
        tell(f"memory:   {after.places} wiped processes, {size(after.searched_bytes)}: {labels(after)}")
    files = search_files(searcher, rooms, began)
    tell(
        f"files:    {files.places} written since the start, here and in temporary places, "
        f"{size(files.searched_bytes)}: {labels(files)}"
    )
    if not control.hits or (before is not None and not before.hits):
        raise DemoFailed("a positive control found nothing, so the search proves nothing")
    if found := files.hits + (after.hits if after else []):
        raise DemoFailed(f"residue was found: {found[:8]}")


def labels(findings: Findings) -> str:
    """Say what was found, by label."""
    counts: Counter[str] = Counter(hit.label for hit in findings.hits)
    return ", ".join(f"{count} x {label}" for label, count in sorted(counts.items())) or "nothing found"


if __name__ == "__main__":
    main()
