"""``lethe-owner pack``, ``inspect``, ``verify``: results on standard output, talk on standard error, exit statuses."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors

from provisioning.cli import bundle as commands
from provisioning.cli import group
from provisioning.cli.progress import Meter
from provisioning.cli.report import run
from provisioning.keystore import PassphraseCost
from provisioning.medium import Road
from provisioning.ownerkey import PUBLIC_FILE, OwnerSigner
from provisioning.secret import SecretBytes
from tests.provisioning.conftest import Packed
from tests.sim import modelfiles
from tests.sim.modelfiles import write_model

PASSPHRASE = b"correct horse battery staple"
CHEAP = PassphraseCost(memory_kib=64, iterations=1, lanes=1)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(self.out)
        return made


@pytest.fixture
def owner_program(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def call(*arguments: object) -> Answer:
        with pytest.raises(SystemExit) as left:
            run(group, "lethe-owner", [str(argument) for argument in arguments])
        seen = capsys.readouterr()
        return Answer(int(left.value.code or 0), seen.out, seen.err)

    return call


@dataclass(frozen=True, slots=True)
class Room:
    """An owner's room with keys, policy and a model."""

    path: Path

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def out(self) -> Path:
        return self.path / "bundle"

    def pack(self, *more: object) -> list[object]:
        return [
            "pack",
            self.model,
            "--keys",
            self.path / "keys",
            "--policy",
            self.path / "policy.toml",
            "--out",
            self.out,
            "--passphrase-file",
            self.path / "passphrase",
            *more,
        ]

    @property
    def owner_key(self) -> list[object]:
        return ["--owner-key", self.path / "keys" / PUBLIC_FILE]


@pytest.fixture
def room(tmp_path: Path) -> Room:
    write_model(tmp_path / "model", modelfiles.llama(hidden=64, inter=128, layers=2, vocab=512), shards=2)
    (tmp_path / "policy.toml").write_text(modelfiles.POLICY)
    (tmp_path / "passphrase").write_bytes(PASSPHRASE + b"\n")
    with OwnerSigner.generate("owner", "lab") as signer, SecretBytes.take(bytearray(PASSPHRASE)) as passphrase:
        signer.save(tmp_path / "keys", passphrase, cost=CHEAP)
    return Room(tmp_path)


def test_pack_inspect_verify(room: Room, owner_program: Callable[..., Answer]) -> None:
    made = owner_program(*room.pack("--name", "a model"))
    assert made.status == 0, made.err
    assert f"{room.out}: lab bundle" in made.out
    assert "GB/s" in made.out
    seen = owner_program("inspect", room.out, *room.owner_key)
    assert seen.status == 0
    assert "a model" in seen.out
    assert "simulated.debug equals false" in seen.out
    assert "SIMULATED" in seen.err
    checked = owner_program("verify", room.out, *room.owner_key)
    assert checked.status == 0
    assert "whole" in checked.out
    assert checked.err.startswith("read from ")


def test_pack_reports_json(room: Room, owner_program: Callable[..., Answer]) -> None:
    (room.model / "LICENSE").write_text("terms")
    made = owner_program(*room.pack("--json", "--tiles", "4")).json
    weights = modelfiles.llama(hidden=64, inter=128, layers=2, vocab=512)
    assert made["plaintext_bytes"] == sum(len(data) for _, _, data in weights.values())
    assert made["tensors"] == len(weights)
    assert made["segments"] == 6
    assert made["sealed_bytes"] == 6 << 20
    assert made["bytes_per_second"] > 0
    assert made["name"] == "model"
    assert made["left_out"] == ["LICENSE"]


def test_pack_says_what_it_left_out(room: Room, owner_program: Callable[..., Answer]) -> None:
    (room.model / "LICENSE").write_text("terms")
    assert "left out: LICENSE" in owner_program(*room.pack()).err


def test_inspect_shows_just_what_an_outsider_may_see(room: Room, owner_program: Callable[..., Answer]) -> None:
    owner_program(*room.pack())
    seen = owner_program("inspect", room.out, *room.owner_key, "--json").json
    assert seen["signature"].startswith("by ")
    assert seen["payload"]["streams"] == [1, 1, *[1] * 8]
    assert not {"tensors", "layers", "shape", "dtype", "config.json"} & set(json.dumps(seen).split('"'))


def test_inspect_says_when_nobody_checked_the_signature(room: Room, owner_program: Callable[..., Answer]) -> None:
    owner_program(*room.pack())
    seen = owner_program("inspect", room.out)
    assert seen.status == 0
    assert "not checked" in seen.out
    assert "the signature was not checked" in seen.err
    assert owner_program("inspect", room.out, "--json").json["signature"] == "not checked"


def test_inspect_refuses_another_owner(room: Room, packed: Packed, owner_program: Callable[..., Answer]) -> None:
    answer = owner_program("inspect", packed.path, *room.owner_key)
    assert answer.status == 6
    assert "lethe-owner: error: signature.unknown" in answer.err


def test_verify_reports_json(room: Room, owner_program: Callable[..., Answer]) -> None:
    made = owner_program(*room.pack("--json")).json
    seen = owner_program("verify", room.out, *room.owner_key, "--json").json
    assert (seen["bundle_id"], seen["manifest"]) == (made["bundle_id"], made["manifest"])
    assert (seen["bytes"], seen["segments"], seen["blocks"]) == (10 << 20, 10, 10)
    assert seen["read_from"] in {road.word for road in Road}


def test_verify_names_the_damage_with_status_7(room: Room, owner_program: Callable[..., Answer]) -> None:
    owner_program(*room.pack())
    with (room.out / "data-00003.seal").open("r+b") as file:
        file.write(b"damage")
    answer = owner_program("verify", room.out, *room.owner_key, "--json")
    assert answer.status == 7
    assert answer.json["error"]["code"] == "bundle.digest"
    assert "data-00003.seal" in answer.json["error"]["found"]
    assert "lethe-owner: hint: copy those files again" in answer.err


def test_verify_of_a_path_that_is_not_there_ends_with_2(room: Room, owner_program: Callable[..., Answer]) -> None:
    missed = owner_program("verify", room.path / "nothing", *room.owner_key, "--json")
    assert (missed.status, missed.json["error"]["code"]) == (2, "input.missing")


def test_verify_of_a_damaged_manifest_names_its_file(room: Room, owner_program: Callable[..., Answer]) -> None:
    (room.path / "damaged").mkdir()
    path = room.path / "damaged" / commands.FILE_NAME
    path.write_bytes(b"{")
    refused = owner_program("verify", room.path / "damaged", *room.owner_key)
    assert refused.status == 6
    assert f" in {path}, " in refused.err


def test_verify_demands_an_owner_key(room: Room, owner_program: Callable[..., Answer]) -> None:
    assert owner_program("verify", room.out).status == 2


REFUSED: dict[str, tuple[Callable[[Room], object], str, int]] = {
    "a wrong passphrase": (lambda room: (room.path / "passphrase").write_text("wrong horse"), "owner.passphrase", 6),
    "a policy with an open rule": (
        lambda room: (room.path / "policy.toml").write_text(
            modelfiles.POLICY.replace('chip_id = { unchecked = "no evidence is appraised here" }', "")
        ),
        "policy.rule.missing",
        78,
    ),
    "a policy that is not text": (
        lambda room: (room.path / "policy.toml").write_bytes(b"\xff\xfe"),
        "policy.toml",
        78,
    ),
    "no policy": (lambda room: (room.path / "policy.toml").unlink(), "input.missing", 2),
    "a taken name": (lambda room: room.out.mkdir(), "output.exists", 74),
    "pickled weights": (
        lambda room: modelfiles.write_index(room.model, {"a": "pytorch_model.bin"}),
        "source.pickle",
        2,
    ),
    "a damaged header": (
        lambda room: next(iter(room.model.glob("*.safetensors"))).write_bytes(bytes(40)),
        "safetensors.header.size",
        2,
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_pack_refuses_with_code_and_status_and_writes_nothing(
    room: Room, owner_program: Callable[..., Answer], fault: str
) -> None:
    plant, code, status = REFUSED[fault]
    plant(room)
    answer = owner_program(*room.pack("--json"))
    assert (answer.json["error"]["code"], answer.status) == (code, status)
    assert not any(path.name.startswith((".bundle", "bundle")) and any(path.iterdir()) for path in room.path.iterdir())


def test_a_production_key_refuses_a_policy_that_accepts_simulated(
    room: Room, tmp_path: Path, owner_program: Callable[..., Answer]
) -> None:
    with OwnerSigner.generate("owner", "production") as signer, SecretBytes.take(bytearray(PASSPHRASE)) as passphrase:
        signer.save(tmp_path / "production", passphrase, cost=CHEAP)
    arguments = [tmp_path / "production" if item == room.path / "keys" else item for item in room.pack("--json")]
    answer = owner_program(*arguments)
    assert (answer.json["error"]["code"], answer.status) == ("owner.purpose", 6)


def test_pack_asks_safetensors_for_a_second_opinion(
    room: Room, owner_program: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_their_reading", lambda shard: {"other": ("F32", [1])})
    answer = owner_program(*room.pack("--json"))
    assert (answer.json["error"]["code"], answer.status) == ("safetensors.opinion", 2)
    assert not room.out.exists()


def test_pack_refuses_what_safetensors_refuses(
    room: Room, owner_program: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise safetensors.SafetensorError("no such thing")

    monkeypatch.setattr(safetensors, "safe_open", refuse)
    answer = owner_program(*room.pack("--json"))
    assert answer.json["error"]["code"] == "safetensors.opinion"
    assert "no such thing" in answer.json["error"]["found"]


def test_pack_says_so_when_no_second_opinion_can_be_had(
    room: Room, owner_program: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answer = owner_program(*room.pack())
    assert answer.status == 0
    assert "no second opinion" in answer.err


def in_process(room: Room, before: str) -> subprocess.CompletedProcess[bytes]:
    """Run pack in a process of its own, with a line of Python before it."""
    arguments = [str(argument) for argument in room.pack("--json")]
    code = f"{before}\nfrom provisioning.cli import group\nfrom provisioning.cli.report import run\nimport sys\n"
    code += "run(group, 'lethe-owner', sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        capture_output=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
    )


def test_a_full_disk_ends_with_status_74(room: Room) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, resource.RLIM_INFINITY))"
    done = in_process(room, limit)
    assert done.returncode == 74, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "pack.disk.full"
    assert not room.out.exists()
    assert not list(room.path.glob(".bundle*"))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 700_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_pack_and_leaves_nothing(
    room: Room, owner_program: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(Meter, "__call__", lambda self, done, total: os.kill(os.getpid(), number))
    answer = owner_program(*room.pack())
    assert answer.status == 130
    assert "interrupted" in answer.err
    assert not list(room.path.glob("*bundle*"))
    assert signal.getsignal(signal.SIGTERM) is before


class Terminal:
    """Standard error that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_progress_is_one_rewritten_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("provisioning.cli.progress._TERMINAL_SECONDS", 0.0)
    with Meter("packing") as meter:
        meter(500_000_000, 1_000_000_000)
        meter(1_000_000_000, 1_000_000_000)
    first, second = terminal.text.split("\r")[1:]
    assert "[###############...............] packing  50%, 0.50 of 1.00 GB" in first
    assert "[##############################] packing 100%" in second
    assert terminal.text.count("\n") == 1
    assert terminal.text.endswith("\n")


def test_progress_is_plain_lines_elsewhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("provisioning.cli.progress._PLAIN_SECONDS", 0.0)
    with Meter("packing") as meter:
        meter(1, 4)
        meter(0, 0)
    lines = capsys.readouterr().err.splitlines()
    assert [line[:13] for line in lines] == ["packing  25%,", "packing 100%,"]
    assert "\r" not in "".join(lines)


@pytest.mark.parametrize(
    ("passed", "shown"), [(10.0, "0:10 left"), (100.0, "1:40 left"), (3725.0, "1:02:05 left"), (0.0, "0:00 left")]
)
def test_progress_says_how_long_it_will_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], passed: float, shown: str
) -> None:
    now = [0.0]
    monkeypatch.setattr("provisioning.cli.progress._PLAIN_SECONDS", 0.0)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    meter = Meter("verifying")
    now[0] = passed
    meter(500_000_000, 1_000_000_000)
    line = capsys.readouterr().err.rstrip("\n")
    assert line.startswith("verifying  50%, 0.50 of 1.00 GB, ")
    assert line.endswith(f" GB/s, {shown}")


def test_progress_without_a_byte_does_not_guess(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("provisioning.cli.progress._PLAIN_SECONDS", 0.0)
    Meter("verifying")(0, 1_000_000_000)
    assert capsys.readouterr().err.rstrip().endswith("0.00 GB/s")


def test_progress_is_shown_now_and_then_only(capsys: pytest.CaptureFixture[str]) -> None:
    with Meter("packing") as meter:
        for done in range(1000):
            meter(done, 1000)
    assert capsys.readouterr().err == ""
