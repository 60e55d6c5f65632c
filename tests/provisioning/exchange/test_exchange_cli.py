from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from attestation.simulated import lab
from provisioning import challenge, request
from provisioning.cli import group
from provisioning.cli.report import json_option, run
from provisioning.ledger import read_ledger
from provisioning.ownerkey import OwnerKey, OwnerSigner
from provisioning.session import Session
from provisioning.wiperecord import DeviceWipe, WipeRecord


class Owner:
    """The program, with the clock and the bundle of an exchange."""

    def __init__(self, exchange: Any, keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.exchange = exchange
        self.keys = keys
        self.bundle = exchange.write_bundle()
        self.passphrase = exchange.directory / "passphrase"
        self.passphrase.write_bytes(b"correct horse battery\n")
        self._capsys = capsys

    def run(self, *words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            run(group, "lethe-owner", [str(word) for word in words])
        out, err = self._capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    def run_json(self, *words: object) -> tuple[int, dict[str, Any]]:
        status, out, _ = self.run(*words, "--json")
        members: dict[str, Any] = json.loads(out)
        assert members["schema"] == 1
        return status, members

    def refusal(self, *words: object) -> tuple[int, str]:
        """Check that a refusal reads the same for people and for programs; gives exit status and code."""
        status, _, err = self.run(*words)
        lines = err.splitlines()
        code = lines[-2].split()[2].rstrip(":")
        assert lines[-2].startswith(f"lethe-owner: error: {code}: found ")
        assert lines[-1].startswith("lethe-owner: hint: ")
        again, members = self.run_json(*words)
        assert (again, members["exit_status"], members["error"]["code"]) == (status, status, code)
        return status, code

    def challenge_words(self, out: Path) -> tuple[object, ...]:
        return (
            "challenge",
            self.bundle,
            "--keys",
            self.keys,
            "--out",
            out,
            "--passphrase-file",
            self.passphrase,
            "--ledger",
            self.exchange.ledger_path,
        )

    def grant_words(self, asked: Path, out: Path) -> tuple[object, ...]:
        return (
            "grant",
            asked,
            "--keys",
            self.keys,
            "--bundle",
            self.bundle,
            "--out",
            out,
            "--passphrase-file",
            self.passphrase,
            "--ledger",
            self.exchange.ledger_path,
        )

    def appraise_words(self, asked: Path) -> tuple[object, ...]:
        return "appraise", asked, "--keys", self.keys, "--bundle", self.bundle

    def asked(self, session: Session) -> Path:
        path: Path = self.exchange.directory / "request"
        path.write_bytes(self.exchange.request(session))
        return path


@pytest.fixture
def owner(
    exchange: Any, key_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Owner:
    monkeypatch.setattr("provisioning.cli.exchange._now", exchange.clock.now)
    return Owner(exchange, key_directory, capsys)


@pytest.fixture
def out(exchange: Any) -> Path:
    path: Path = exchange.directory / "out"
    return path


# --- the way it should go ----------------------------------------------------------------------------------------


def test_challenge_request_grant_open(owner: Owner, session: Session, tmp_path: Path) -> None:
    exchange = owner.exchange
    status, said, _ = owner.run(*owner.challenge_words(tmp_path / "challenge"))
    assert status == 0
    (tmp_path / "asked").write_bytes(exchange.request(session, (tmp_path / "challenge").read_bytes()))
    assert "challenge " in said
    status, said, _ = owner.run(*owner.grant_words(tmp_path / "asked", tmp_path / "granted"))
    assert status == 0
    assert said.startswith("SIMULATED")
    with (
        exchange.open(session, (tmp_path / "granted").read_bytes()) as grant,
        grant.bundle_key() as view,
        exchange.bundle_key.expose() as key,
    ):
        assert bytes(view) == bytes(key)


def test_both_rooms_see_the_same_fingerprints(owner: Owner, session: Session, out: Path) -> None:
    asked = owner.asked(session)
    read = request.read(asked.read_bytes())
    status, members = owner.run_json(*owner.grant_words(asked, out))
    assert status == 0
    first = read.digest.hex()[:16]
    assert members["request"] == "-".join(first[start : start + 4] for start in range(0, 16, 4))
    assert members["simulated"] is True
    assert (members["loads"], members["seconds"]) == (1, 600)


def test_keygen_makes_keys_that_the_passphrase_opens(owner: Owner, out: Path, passphrase: Any) -> None:
    status, members = owner.run_json(
        "keygen", "--purpose", "production", "--out", out, "--name", "acme", "--passphrase-file", owner.passphrase
    )
    assert status == 0
    assert (members["purpose"], members["name"]) == ("production", "acme")
    assert OwnerSigner.load(out, passphrase).owner == OwnerKey.load(out)
    assert json.loads((out / "owner.key").read_bytes())["kdf"]["memory_kib"] == 262_144


def test_keygen_reads_its_passphrase_from_a_descriptor(owner: Owner, out: Path, passphrase: Any) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"correct horse battery")
    os.close(writer)
    status, said, _ = owner.run("keygen", "--purpose", "lab", "--out", out, "--passphrase-fd", reader)
    os.close(reader)
    assert status == 0
    assert OwnerSigner.load(out, passphrase).key_id in said


def test_a_book_of_challenges_is_a_directory_of_files(owner: Owner, out: Path) -> None:
    status, members = owner.run_json(*owner.challenge_words(out), "--count", 3)
    assert status == 0
    read = [challenge.read(path.read_bytes(), owner.exchange.signer.owner) for path in sorted(out.iterdir())]
    assert len({one.nonce for one in read}) == 3
    assert [Path(entry["path"]).name for entry in members["challenges"]] == [
        f"challenge-000{number}.dsse.json" for number in (1, 2, 3)
    ]


def test_appraise_prints_every_rule_and_says_simulated(owner: Owner, session: Session) -> None:
    status, said, _ = owner.run(*owner.appraise_words(owner.asked(session)))
    assert status == 0
    assert "SIMULATED" in said
    for rule in ("tcb", "debug", "measurement", "any laboratory machine"):
        assert rule in said


def test_appraise_gives_every_check_as_json(owner: Owner, session: Session) -> None:
    status, members = owner.run_json(*owner.appraise_words(owner.asked(session)))
    assert status == 0
    assert members["result"]["simulated"] is True
    assert {check["outcome"] for check in members["result"]["checks"]} == {"pass", "unchecked"}


def test_ledger_shows_every_entry(owner: Owner, session: Session, out: Path) -> None:
    owner.run(*owner.grant_words(owner.asked(session), out))
    status, said, _ = owner.run("ledger", "--keys", owner.keys, "--ledger", owner.exchange.ledger_path)
    assert status == 0
    assert [line.split()[2] for line in said.splitlines()[:-1]] == ["ledger.begun", "challenge.issued", "grant.given"]
    status, members = owner.run_json("ledger", "--keys", owner.keys, "--ledger", owner.exchange.ledger_path)
    assert [entry["seq"] for entry in members["entries"]] == [0, 1, 2]


def test_the_ledger_lies_in_the_key_directory(owner: Owner, out: Path) -> None:
    words = owner.challenge_words(out)[:-2]
    assert owner.run(*words)[0] == 0
    assert len(read_ledger(owner.keys / "ledger.jsonl")) == 2


# --- refusals ----------------------------------------------------------------------------------------------------


def test_a_second_grant_for_one_challenge_is_refused(owner: Owner, session: Session, out: Path) -> None:
    asked = owner.asked(session)
    assert owner.run(*owner.grant_words(asked, out))[0] == 0
    assert owner.refusal(*owner.grant_words(asked, out.with_name("again"))) == (6, "challenge.used")
    assert not out.with_name("again").exists()


def test_a_stale_challenge_is_refused(owner: Owner, session: Session, out: Path) -> None:
    asked = owner.asked(session)
    owner.exchange.clock.pass_seconds(3601)
    assert owner.refusal(*owner.grant_words(asked, out)) == (6, "challenge.stale")


def test_an_unknown_challenge_is_refused(owner: Owner, session: Session, out: Path) -> None:
    asked = owner.asked(session)
    owner.exchange.ledger_path.unlink()
    assert owner.refusal(*owner.grant_words(asked, out)) == (6, "challenge.unknown")


def test_a_request_with_a_flipped_bit_is_refused(
    owner: Owner, session: Session, out: Path, flip: Callable[[bytes, int], bytes]
) -> None:
    asked = owner.asked(session)
    asked.write_bytes(flip(asked.read_bytes(), 5000))
    status, _ = owner.refusal(*owner.grant_words(asked, out))
    assert status == 6


def test_a_wrong_passphrase_is_refused(owner: Owner, session: Session, out: Path) -> None:
    owner.passphrase.write_bytes(b"incorrect horse battery")
    assert owner.refusal(*owner.grant_words(owner.asked(session), out)) == (6, "owner.passphrase")


def test_the_key_directory_of_another_owner_is_refused(
    owner: Owner, session: Session, out: Path, passphrase: Any, cheap: Any
) -> None:
    owner.keys = owner.exchange.directory / "stranger"
    owner.exchange.stranger.save(owner.keys, passphrase, cost=cheap)
    assert owner.refusal(*owner.grant_words(owner.asked(session), out)) == (6, "signature.unknown")


def test_a_key_directory_without_the_bundles_key_is_refused(owner: Owner, session: Session, out: Path) -> None:
    (owner.keys / "bundles" / f"{owner.exchange.manifest.bundle_id.hex()}.key").unlink()
    assert owner.refusal(*owner.grant_words(owner.asked(session), out)) == (6, "owner.bundle.unknown")


def test_evidence_that_the_policy_refuses_ends_with_4(
    make_exchange: Callable[..., Any],
    session: Session,
    out: Path,
    passphrase: Any,
    cheap: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchange = make_exchange(tcb=99)
    exchange.signer.save(exchange.directory / "keys2", passphrase, cost=cheap)
    exchange.signer.store_bundle_key(exchange.directory / "keys2", exchange.manifest.bundle_id, exchange.bundle_key)
    monkeypatch.setattr("provisioning.cli.exchange._now", exchange.clock.now)
    owner = Owner(exchange, exchange.directory / "keys2", capsys)
    asked = owner.asked(session)
    for words in (owner.appraise_words(asked), owner.grant_words(asked, out)):
        assert owner.refusal(*words) == (4, "simulated.tcb")
        _, said, _ = owner.run(*words)
        assert said.startswith("request ")
        assert "SIMULATED" in said
    assert not out.exists()


def test_evidence_of_an_unknown_root_ends_with_3(owner: Owner, session: Session, tmp_path: Path) -> None:
    owner.exchange.laboratory = lab.create(tmp_path / "other", devices=1, at=owner.exchange.clock.now()).directory
    status, _ = owner.refusal(*owner.appraise_words(owner.asked(session)))
    assert status == 3


def test_a_withdrawn_epoch_is_refused(owner: Owner, session: Session, out: Path) -> None:
    words = owner.grant_words(owner.asked(session), out)
    assert owner.refusal(*words, "--epoch-floor", 99) == (6, "grant.epoch")


def test_an_existing_output_is_refused_before_the_challenge_is_used_up(
    owner: Owner, session: Session, out: Path
) -> None:
    out.write_bytes(b"old")
    asked = owner.asked(session)
    assert owner.refusal(*owner.grant_words(asked, out)) == (74, "output.exists")
    out.unlink()
    assert owner.run(*owner.grant_words(asked, out))[0] == 0


def test_a_grant_into_no_directory_leaves_the_challenge_open(owner: Owner, session: Session, out: Path) -> None:
    asked = owner.asked(session)
    before = owner.exchange.ledger_path.read_bytes()
    assert owner.refusal(*owner.grant_words(asked, out / "in" / "no" / "directory")) == (74, "output.failed")
    assert owner.exchange.ledger_path.read_bytes() == before
    assert owner.run(*owner.grant_words(asked, out))[0] == 0


@pytest.mark.parametrize("count", [1, 2], ids=["file", "book"])
def test_a_challenge_into_no_directory_is_not_recorded(owner: Owner, out: Path, count: int) -> None:
    words = owner.challenge_words(out / "in" / "no" / "directory")
    assert owner.refusal(*words, "--count", count) == (74, "output.failed")
    assert not owner.exchange.ledger_path.exists()


def test_a_refused_grant_leaves_no_part_of_its_output(owner: Owner, session: Session, out: Path) -> None:
    asked = owner.asked(session)
    owner.exchange.clock.pass_seconds(3601)
    before = sorted(out.parent.iterdir())
    assert owner.refusal(*owner.grant_words(asked, out)) == (6, "challenge.stale")
    assert sorted(out.parent.iterdir()) == before


def test_a_grant_that_cannot_be_written_says_that_its_challenge_is_used_up(
    owner: Owner, session: Session, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("provisioning.files._publish", fill_the_disk)
    status, _, err = owner.run(*owner.grant_words(owner.asked(session), out))
    assert status == 74
    assert "used up" in err


def test_an_edited_ledger_is_refused(owner: Owner, session: Session, out: Path) -> None:
    asked = owner.asked(session)
    path = owner.exchange.ledger_path
    path.write_bytes(path.read_bytes().replace(b'"seq":1', b'"seq":7'))
    assert owner.refusal(*owner.grant_words(asked, out)) == (74, "ledger.chain")
    assert owner.refusal("ledger", "--keys", owner.keys, "--ledger", path) == (74, "ledger.chain")


def test_a_missing_file_ends_with_2(owner: Owner, out: Path) -> None:
    assert owner.refusal(*owner.grant_words(out.with_name("nothing"), out)) == (2, "input.missing")


@pytest.mark.parametrize("option", ["request", "manifest", "key"])
def test_a_refusal_names_the_file(owner: Owner, session: Session, option: str) -> None:
    asked = owner.asked(session)
    path = {
        "request": asked,
        "manifest": next(owner.bundle.glob("manifest*")),
        "key": owner.keys / "owner.pub.json",
    }[option]
    path.write_bytes(b"")
    _, _, err = owner.run(*owner.appraise_words(asked))
    assert f"json.syntax: found an empty file in {path}, expected JSON" in err


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb"], ids=["empty", "long", "control"])
def test_keygen_refuses_a_name_as_a_usage_error(owner: Owner, out: Path, name: str) -> None:
    words = ("keygen", "--purpose", "lab", "--out", out, "--passphrase-file", owner.passphrase, "--name", name)
    status, members = owner.run_json(*words)
    assert (status, members["error"]["code"]) == (2, "usage")
    assert "1 to 64 printable characters" in members["error"]["found"]
    assert not out.exists()


def test_every_command_is_described_in_one_line() -> None:
    for name, command in group.commands.items():
        assert command.short_help, name
        assert len(command.short_help) <= 55, name


def test_keygen_refuses_a_short_passphrase(owner: Owner, out: Path) -> None:
    owner.passphrase.write_bytes(b"short\n")
    words = ("keygen", "--purpose", "lab", "--out", out, "--passphrase-file", owner.passphrase)
    assert owner.refusal(*words) == (2, "passphrase.short")
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "code"), [(b"", "passphrase.size"), (b"\r\n", "passphrase.size"), (b"x" * 1025, "passphrase.size")]
)
def test_refuses_passphrases_of_absurd_sizes(owner: Owner, out: Path, content: bytes, code: str) -> None:
    owner.passphrase.write_bytes(content)
    words = ("keygen", "--purpose", "lab", "--out", out, "--passphrase-file", owner.passphrase)
    assert owner.refusal(*words) == (2, code)


def test_keygen_never_overwrites(owner: Owner) -> None:
    words = ("keygen", "--purpose", "lab", "--out", owner.keys, "--passphrase-file", owner.passphrase)
    assert owner.refusal(*words) == (74, "output.exists")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("nothing",),
        ("keygen",),
        ("keygen", "--purpose", "demo", "--out", "x"),
        ("keygen", "--purpose", "lab", "--out", "x", "--passphrase", "on the command line"),
        ("challenge", "x", "--keys", "y", "--out", "z", "--count", "0"),
    ],
    ids=["nothing", "unknown command", "no purpose", "unknown purpose", "passphrase as argument", "no challenges"],
)
def test_usage_errors_end_with_2(owner: Owner, words: tuple[str, ...]) -> None:
    status, out, _ = owner.run(*words)
    assert status == 2
    assert out == ""


def test_refuses_two_sources_of_a_passphrase(owner: Owner, out: Path) -> None:
    status, _, err = owner.run(
        "keygen", "--purpose", "lab", "--out", out, "--passphrase-file", owner.passphrase, "--passphrase-fd", 0
    )
    assert status == 2
    assert "not both" in err


# --- wipe records ------------------------------------------------------------------------------------------------


@pytest.fixture
def wipe(exchange: Any, session: Session) -> Callable[..., Path]:
    def make(*, complete: bool = True, by: Session | None = None) -> Path:
        record = WipeRecord(
            node="node-1",
            boot_id=exchange.boot_id,
            reason="operator 1000",
            session_digest=(by or session).digest,
            manifest_digest=exchange.manifest.digest,
            epoch=3,
            devices=(DeviceWipe("cpu", 1000, 1000, 0 if complete else 9, 64, shown=complete),),
            milliseconds=12,
            complete=complete,
            at=exchange.clock.now(),
        )
        path: Path = exchange.directory / ("wipe" if complete else "incomplete")
        path.write_bytes(record.sign(by or session))
        return path

    return make


def test_check_wipe_accepts_the_record_of_the_session(
    owner: Owner, session: Session, wipe: Callable[..., Path]
) -> None:
    asked = owner.asked(session)
    status, said, _ = owner.run("check-wipe", wipe(), "--request", asked)
    assert status == 0
    assert "1000 bytes overwritten, 1000 read back as zero" in said
    status, members = owner.run_json("check-wipe", wipe(), "--request", asked)
    assert (status, members["wipe"]["complete"]) == (0, True)


def test_check_wipe_refuses_the_record_of_another_session(
    owner: Owner, session: Session, wipe: Callable[..., Path]
) -> None:
    asked = owner.asked(session)
    assert owner.refusal("check-wipe", wipe(by=Session()), "--request", asked) == (6, "wipe.session")


def test_check_wipe_of_an_incomplete_wipe_ends_with_9(
    owner: Owner, session: Session, wipe: Callable[..., Path]
) -> None:
    asked = owner.asked(session)
    assert owner.refusal("check-wipe", wipe(complete=False), "--request", asked) == (9, "wipe.incomplete")


def test_check_wipe_reports_each_record_and_ends_as_the_worst(
    owner: Owner, session: Session, wipe: Callable[..., Path]
) -> None:
    asked = owner.asked(session)
    words = ("check-wipe", asked, wipe(complete=False), wipe(), "--request", asked)
    status, said, err = owner.run(*words)
    assert status == 9
    assert "1 of 3 records" in said
    assert "envelope.type" in err
    assert "wipe.incomplete" in err
    status, members = owner.run_json(*words)
    assert (status, members["exit_status"]) == (9, 9)
    assert [record["exit_status"] for record in members["records"]] == [6, 9, 0]
    assert members["records"][2]["wipe"]["complete"] is True


def test_check_wipe_of_several_whole_records_ends_with_0(
    owner: Owner, session: Session, wipe: Callable[..., Path]
) -> None:
    status, said, _ = owner.run("check-wipe", wipe(), wipe(), "--request", owner.asked(session))
    assert (status, "2 of 2 records" in said) == (0, True)


def test_check_wipe_refuses_another_kind_of_file(owner: Owner, session: Session) -> None:
    asked = owner.asked(session)
    assert owner.refusal("check-wipe", asked, "--request", asked) == (6, "envelope.type")


# --- the terminal ------------------------------------------------------------------------------------------------


def _at_a_terminal(words: list[str], answers: list[bytes]) -> tuple[int, bytes]:
    """Run the program at a terminal of its own, and answer each prompt when it shows."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "provisioning.cli", *words])
    seen = b""
    for answer in answers:
        while not seen.endswith(b": "):
            seen += os.read(terminal, 1024)
        os.write(terminal, answer + b"\n")
        seen += os.read(terminal, 1024)
    while True:
        try:
            part = os.read(terminal, 1024)
        except OSError:
            break
        if not part:
            break
        seen += part
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), seen


def test_asks_twice_at_a_terminal_without_echo(out: Path, passphrase: Any) -> None:
    words = ["keygen", "--purpose", "lab", "--out", str(out)]
    status, seen = _at_a_terminal(words, [b"correct horse battery"] * 2)
    assert status == 0, seen
    assert b"correct" not in seen
    assert OwnerSigner.load(out, passphrase).purpose == "lab"


def test_refuses_two_different_answers(out: Path) -> None:
    words = ["keygen", "--purpose", "lab", "--out", str(out)]
    status, seen = _at_a_terminal(words, [b"correct horse battery", b"incorrect horse battery"])
    assert status == 6
    assert b"passphrase.differs" in seen


def test_without_a_terminal_the_options_are_named(tmp_path: Path, exchange: Any, key_directory: Path) -> None:
    words = ["challenge", str(exchange.write_bundle()), "--keys", str(key_directory), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "provisioning.cli", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 2
    assert "passphrase.terminal" in done.stderr
    assert "--passphrase-file" in done.stderr


def test_an_unreadable_passphrase_is_refused(owner: Owner, out: Path) -> None:
    words = ("keygen", "--purpose", "lab", "--out", out)
    assert owner.refusal(*words, "--passphrase-file", out.with_name("nothing")) == (2, "passphrase.read")
    assert owner.refusal(*words, "--passphrase-fd", 987) == (2, "passphrase.read")


def test_help_and_version_end_with_0(owner: Owner) -> None:
    status, said, _ = owner.run("--help")
    assert status == 0
    assert "keygen" in said


def _program(action: Callable[[], None]) -> click.Group:
    return click.Group("g", commands=[click.Command("go", callback=action)])


def _raise(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (click.ClickException("odd"), 1),
        (BrokenPipeError(), 1),
        (click.exceptions.Exit(10), 10),
    ],
    ids=["interrupt", "abort", "click", "pipe", "exit"],
)
def test_every_end_has_its_status(error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    with pytest.raises(SystemExit) as caught:
        run(_program(_raise(error)), "program", ["go"])
    assert caught.value.code == status


def _end(error: BaseException, *words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        run(click.Group("g", commands=[_json_command(error)]), "program", ["go", *words])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def _json_command(error: BaseException) -> click.Command:
    def action(*, as_json: bool) -> None:
        del as_json
        raise error

    return json_option(click.Command("go", callback=action))


def test_a_fault_in_the_program_shows_its_type_and_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert _end(ValueError("a secret"), "--json") == 1
    out, err = capsys.readouterr()
    assert "program: error: internal: found ValueError" in err
    assert "report this with the command and version" in err
    assert "a secret" not in out + err
    assert json.loads(out)["error"]["code"] == "internal"


def test_an_error_of_the_system_has_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert _end(OSError(errno.EIO, "Input/output error", "place"), "--json") == 74
    out, err = capsys.readouterr()
    assert "program: error: output.failed: found place: input/output error" in err
    members = json.loads(out)
    assert (members["error"]["code"], members["exit_status"]) == ("output.failed", 74)


def test_an_interrupt_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert _end(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "program: interrupted\n"


@pytest.mark.parametrize("words", [["--version"], ["ledger"], ["ledger", "--json"]], ids=["result", "list", "refusal"])
def test_a_full_standard_output_ends_with_74_and_no_traceback(owner: Owner, out: Path, words: list[str]) -> None:
    owner.run(*owner.challenge_words(out))
    if words[0] == "ledger":
        path = out.with_name("nothing") if words[-1] == "--json" else owner.exchange.ledger_path
        words = [*words, "--keys", str(owner.keys), "--ledger", str(path)]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "provisioning.cli", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 74
    assert "lethe-owner: error: output.failed: found no space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("words", [("ledger",), ("nothing",), ()], ids=["option", "command", "nothing"])
def test_a_usage_error_has_the_line_of_every_error(owner: Owner, words: tuple[str, ...]) -> None:
    status, _, err = owner.run(*words)
    assert status == 2
    assert "Usage: lethe-owner" in err
    assert err.splitlines()[-2].startswith("lethe-owner: error: usage: ")
    assert err.splitlines()[-1].startswith("lethe-owner: hint: ")


def test_a_usage_error_is_one_json_object(owner: Owner) -> None:
    status, members = owner.run_json("ledger")
    assert (status, members["exit_status"], members["error"]["code"]) == (2, 2, "usage")
    assert "--keys" in members["error"]["found"]


def test_a_name_from_a_file_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(group, "lethe-owner", ["ledger", "--keys", "x\x1b[2J"])
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "x?[2J" in err
