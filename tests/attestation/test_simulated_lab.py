from __future__ import annotations

import hashlib
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attestation.errors import EvidenceNotGenuine, FormatError
from attestation.simulated import lab

AT = datetime(2026, 11, 30, 12, tzinfo=UTC)


def refusal(attempt: Any) -> lab.LaboratoryInvalid:
    with pytest.raises(lab.LaboratoryInvalid) as caught:
        attempt()
    assert caught.value.exit_status == 78
    assert caught.value.hint
    return caught.value


def test_makes_a_laboratory_with_private_files(tmp_path: Path) -> None:
    root = lab.create(tmp_path / "lab", devices=1, at=AT)
    assert root.directory.stat().st_mode & 0o777 == 0o700
    names = {path.name for path in root.directory.iterdir()}
    assert names == {
        "root.pub.json",
        "root.key.json",
        "cpu.key.json",
        "cpu.cert.dsse.json",
        "machine.json",
        "device-0.key.json",
        "device-0.cert.dsse.json",
    }
    assert {path.stat().st_mode & 0o777 for path in root.directory.iterdir()} == {0o600}
    assert sorted(tmp_path.iterdir()) == [root.directory]


def test_root_digest_is_that_of_the_root_file(tmp_path: Path) -> None:
    root = lab.create(tmp_path / "lab", devices=0, at=AT)
    assert root.root_digest == hashlib.sha384((tmp_path / "lab" / "root.pub.json").read_bytes()).hexdigest()
    assert lab.read_root(tmp_path / "lab") == root


def test_two_laboratories_share_nothing(tmp_path: Path) -> None:
    first = lab.create(tmp_path / "a", devices=1, at=AT)
    second = lab.create(tmp_path / "b", devices=1, at=AT)
    assert first.root_digest != second.root_digest
    machines = lab.load(first.directory).machine, lab.load(second.directory).machine
    assert machines[0].chip_id != machines[1].chip_id
    assert machines[0].devices[0].device_id != machines[1].devices[0].device_id


def test_an_empty_directory_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    lab.create(tmp_path / "lab", devices=0, at=AT)
    assert (tmp_path / "lab").stat().st_mode & 0o777 == 0o700


def test_makes_missing_parents(tmp_path: Path) -> None:
    lab.create(tmp_path / "state" / "lab", devices=0, at=AT)
    lab.load(tmp_path / "state" / "lab")


def test_does_not_write_over_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "x").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("lab", "file", "link"):
        code = refusal(lambda name=name: lab.create(tmp_path / name, devices=0, at=AT)).code
        assert code == "simulated.lab.exists"


@pytest.mark.parametrize("devices", [-1, 33])
def test_refuses_a_device_count_that_no_machine_has(tmp_path: Path, devices: int) -> None:
    assert refusal(lambda: lab.create(tmp_path / "lab", devices=devices, at=AT)).code == "simulated.lab.devices"


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    real_open = os.open

    def fail_on_the_third(path: Any, flags: int, mode: int = 0o777) -> int:
        opened.append(path)
        if len(opened) == 3:
            raise OSError(28, "No space left on device")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", fail_on_the_third)
    assert refusal(lambda: lab.create(tmp_path / "lab", devices=0, at=AT)).code == "simulated.lab.write"
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = refusal(lambda: lab.create(tmp_path / "file" / "lab", devices=0, at=AT))
    assert error.code == "simulated.lab.write"


def test_the_machine_reads_back(bench: Any) -> None:
    machine = bench.laboratory.machine
    assert lab.read_machine(lab.write_machine(machine)) == machine
    assert len(machine.devices) == 2


def test_refuses_a_missing_laboratory(tmp_path: Path) -> None:
    assert refusal(lambda: lab.load(tmp_path / "none")).code == "simulated.lab.missing"
    assert refusal(lambda: lab.read_root(tmp_path / "none")).code == "simulated.lab.missing"


@pytest.mark.parametrize("name", ["root.pub.json", "machine.json", "cpu.key.json", "device-1.cert.dsse.json"])
def test_refuses_a_laboratory_with_a_file_missing(own_bench: Any, name: str) -> None:
    (own_bench.directory / name).unlink()
    assert refusal(lambda: lab.load(own_bench.directory)).code == "simulated.lab.missing"


def test_does_not_follow_a_link_to_a_key(own_bench: Any) -> None:
    key = own_bench.directory / "cpu.key.json"
    key.rename(own_bench.directory / "moved")
    key.symlink_to("moved")
    assert refusal(lambda: lab.load(own_bench.directory)).code == "simulated.lab.missing"


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_refuses_a_key_that_others_can_read(own_bench: Any, mode: int) -> None:
    (own_bench.directory / "device-0.key.json").chmod(mode)
    error = refusal(lambda: lab.load(own_bench.directory))
    assert error.code == "simulated.lab.mode"
    assert "chmod 600" in error.hint


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("machine.json", b"{"),
        ("machine.json", b"{}"),
        ("machine.json", b'{"type":"simulated-machine","version":2}'),
        ("machine.json", b'{"type":"simulated-machine","version":1,"chip_id":"zz"}'),
        ("machine.json", b"x" * 70_000),
        ("cpu.key.json", b'{"type":"simulated-key","version":1,"seed":"QQ==","classical":"QQ=="}'),
        ("cpu.key.json", b'{"type":"owner-key","version":1}'),
    ],
)
def test_refuses_malformed_files(own_bench: Any, name: str, content: bytes) -> None:
    (own_bench.directory / name).write_bytes(content)
    assert refusal(lambda: lab.load(own_bench.directory)).code == "simulated.lab.form"


def test_refuses_a_malformed_root(own_bench: Any) -> None:
    (own_bench.directory / "root.pub.json").write_bytes(b"{}")
    assert refusal(lambda: lab.read_root(own_bench.directory)).code == "simulated.lab.form"


@given(st.binary(max_size=120))
@settings(deadline=None, max_examples=60)
def test_any_machine_file_gives_our_own_error(data: bytes) -> None:
    with pytest.raises((FormatError, EvidenceNotGenuine)):
        lab.read_machine(data)
