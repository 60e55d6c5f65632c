from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from attestation.evidence import EvidenceSet
from attestation.simulated import abi, collect, lab


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return directory


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write(tmp_path / "one" / "product", {"__init__.py": "", "a.py": "x = 1\n", "sub/b.py": "y = 2\n"})


def test_measurement_does_not_depend_on_the_place(package: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(package, tmp_path / "two" / "product"))
    assert collect.measure_installation([copy]) == collect.measure_installation([package])


def test_measurement_leaves_out_what_is_no_source(package: Path) -> None:
    before = collect.measure_installation([package])
    write(package, {"__pycache__/a.pyc": "cache", "notes.txt": "text"})
    assert collect.measure_installation([package]) == before


def test_measurement_does_not_depend_on_the_order_of_packages_and_files(package: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "one" / "another", {"z.py": "", "a.py": ""})
    assert collect.measure_installation([package, other]) == collect.measure_installation([other, package])


@pytest.mark.parametrize(
    "files", [{"a.py": "x = 2\n"}, {"c.py": ""}, {"sub/c.py": "x = 1\n"}, {"__init__.py": " "}], ids=str
)
def test_measurement_tells_changed_and_added_files(package: Path, files: dict[str, str]) -> None:
    before = collect.measure_installation([package])
    write(package, files)
    assert collect.measure_installation([package]) != before


def test_measurement_tells_removed_renamed_and_exchanged_files(package: Path) -> None:
    seen = {collect.measure_installation([package])}
    (package / "a.py").rename(package / "z.py")
    seen.add(collect.measure_installation([package]))
    (package / "z.py").rename(package / "a.py")
    write(package, {"a.py": "y = 2\n", "sub/b.py": "x = 1\n"})
    seen.add(collect.measure_installation([package]))
    (package / "a.py").unlink()
    seen.add(collect.measure_installation([package]))
    assert len(seen) == 4


def test_measures_the_packages_of_the_product() -> None:
    roots = collect.installed_packages()
    assert [root.name for root in roots] == ["appliance", "attestation", "provisioning"]
    assert len(collect.measure_installation(roots)) == 48


def test_evidence_carries_the_measurement_of_this_installation(bench: Any, genuine: EvidenceSet) -> None:
    result = bench.appraise()
    check = next(check for check in result.checks if check.name == "simulated.measurement")
    assert check.seen == collect.measure_installation(collect.installed_packages()).hex()


def test_all_evidence_says_simulated(genuine: EvidenceSet) -> None:
    assert genuine.platforms == ("simulated",)
    for item in (genuine.cpu, *genuine.devices):
        assert item.body.startswith(abi.MAGIC)
        assert b"SIMULATED" in item.body


def test_a_machine_without_devices_gives_evidence_of_the_processor_only(own_bench: Any) -> None:
    own_bench.edit_machine(devices=())
    assert own_bench.collect().devices == ()


def test_refuses_to_collect_without_a_laboratory(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(lab.LaboratoryInvalid) as caught:
        collect.collect(tmp_path / "none", bench.binding())
    assert caught.value.code == "simulated.lab.missing"
