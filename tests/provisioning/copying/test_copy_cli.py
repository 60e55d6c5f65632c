"""``lethe copy`` and ``lethe-owner copy``: what they print, and how they end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import appliance.cli
import provisioning.cli
from provisioning.cli import copy as command
from provisioning.cli.report import run
from provisioning.medium import Road
from provisioning.ownerkey import OwnerSigner
from tests.provisioning.copying.conftest import Room, flip

Program = Callable[..., tuple[int, str, str]]
CONFIG = """
[node]
name = "here"

[model]
bundle = "bundle"
owner_key = "owner.pub.json"

[platform]
kind = "simulated"
lab_dir = "lab"

[api]
keys_file = "clients"
model = "model"
"""


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Program:
    def call(group: click.Group, *arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            run(group, "program", [str(argument) for argument in arguments])
        seen = capsys.readouterr()
        return int(left.value.code or 0), seen.out, seen.err

    return call


@pytest.fixture
def key(copies: Room, lab_signer: OwnerSigner) -> Path:
    path = copies.place / "owner.pub.json"
    path.write_bytes(lab_signer._public_envelope())
    return path


OWNER, NODE = provisioning.cli.group, appliance.cli.group


@pytest.mark.parametrize("group", [OWNER, NODE], ids=["lethe-owner", "lethe"])
def test_copies_and_says_so(copies: Room, program: Program, key: Path, group: click.Group) -> None:
    status, out, err = program(group, "copy", copies.bundle, copies.copy, "--owner-key", key)
    assert status == 0, err
    assert f"{copies.copy}: whole; lab bundle" in out
    assert "0 were there; all read back" in out
    assert "\nread back from" in "\n" + err
    assert "not checked" not in out + err
    copies.check()


def test_says_plainly_when_only_digests_were_checked(copies: Room, program: Program) -> None:
    status, _, err = program(OWNER, "copy", copies.bundle, copies.copy)
    assert status == 0
    assert "the owner's signature was not checked, only digests were: give --owner-key" in err


def test_reports_json(copies: Room, program: Program, key: Path) -> None:
    (copies.place / "x").mkdir()
    status, out, _ = program(OWNER, "copy", copies.bundle, copies.copy, "--owner-key", key, "--json")
    seen = json.loads(out)
    assert status == 0
    assert seen["signature"] == f"by {copies.owner.key_id}"
    assert seen["copy"] == str(copies.copy)
    assert (seen["kept"], seen["copied"]) == (0, seen["blocks"])
    assert seen["read_from"] in {road.word for road in Road}
    assert seen["left_out"] == []
    assert json.loads(program(OWNER, "copy", copies.bundle, copies.place / "b", "--json")[1])["signature"] == (
        "not checked"
    )


def test_a_bundle_of_somebody_else_is_refused(copies: Room, program: Program, tmp_path: Path) -> None:
    with OwnerSigner.generate("somebody", "lab") as other:
        (tmp_path / "other.pub.json").write_bytes(other._public_envelope())
    status, out, _ = program(
        OWNER, "copy", copies.bundle, copies.copy, "--owner-key", tmp_path / "other.pub.json", "--json"
    )
    assert (status, json.loads(out)["error"]["code"]) == (6, "signature.unknown")
    assert not copies.partial.exists()


def test_damage_ends_with_7_and_the_hint_says_how_to_go_on(copies: Room, program: Program) -> None:
    room = copies.own_source()
    flip(room.bundle / room.files()[0][0], 0)
    status, _, err = program(OWNER, "copy", room.bundle, room.copy)
    assert status == 7
    assert "bundle.digest" in err
    assert "copy.partial keeps all other blocks" in err


def test_a_path_that_is_not_there_ends_with_2(copies: Room, program: Program) -> None:
    status, out, _ = program(OWNER, "copy", copies.place / "nothing", copies.copy, "--json")
    assert (status, json.loads(out)["error"]["code"]) == (2, "input.missing")


def test_a_taken_name_ends_with_74(copies: Room, program: Program) -> None:
    copies.copy.mkdir()
    status, out, _ = program(OWNER, "copy", copies.bundle, copies.copy, "--json")
    assert (status, json.loads(out)["error"]["code"]) == (74, "copy.exists")


def test_an_interrupt_ends_with_130_and_says_how_to_go_on(
    copies: Room, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command._Stages, "__call__", interrupt)
    status, out, err = program(OWNER, "copy", copies.bundle, copies.copy)
    assert (status, out) == (130, "")
    assert f"what was copied stays in {copies.partial}; the same command goes on there" in err


def test_names_that_were_left_out_are_said(copies: Room, program: Program) -> None:
    room = copies.own_source()
    (room.bundle / "auto\nrun.inf").write_text("")
    _, _, err = program(OWNER, "copy", room.bundle, room.copy)
    assert "1 names in the source are not the bundle's and were not copied: 'auto\\nrun.inf'" in err


def test_lethe_takes_the_key_of_its_configuration(copies: Room, program: Program, key: Path) -> None:
    config = copies.place / "lethe.toml"
    config.write_text(CONFIG)
    status, out, err = program(NODE, "--config", config, "copy", copies.bundle, copies.copy, "--json")
    assert status == 0, err
    assert json.loads(out)["signature"] == f"by {copies.owner.key_id}"


def test_a_configuration_that_was_named_must_be_there(copies: Room, program: Program) -> None:
    status, _, _ = program(NODE, "--config", copies.place / "no.toml", "copy", copies.bundle, copies.copy)
    assert status == 78
    assert not copies.partial.exists()


def test_a_machine_without_a_configuration_copies_by_digests(
    copies: Room, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = next(parameter for parameter in NODE.params if parameter.name == "config_path")
    monkeypatch.setattr(option, "default", copies.place / "no.toml")
    status, out, err = program(NODE, "copy", copies.bundle, copies.copy, "--json")
    assert status == 0, err
    assert json.loads(out)["signature"] == "not checked"


def test_each_pass_has_a_meter_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("provisioning.cli.progress._PLAIN_SECONDS", 0.0)
    with command._Stages() as stages:
        stages("copying", 5, 10)
        stages("copying", 10, 10)
        stages("reading back", 1, 10)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("%")[0].rsplit(None, 1) for line in lines] == [
        ["copying", "50"],
        ["copying", "100"],
        ["reading back", "10"],
    ]
    assert all(line.endswith(" left") for line in lines)
