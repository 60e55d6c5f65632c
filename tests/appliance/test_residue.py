from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.residue import Needle, Searcher, forms_of

CANARY = b"lethe-canary-4f1c9a7be2"


def labels(findings: object) -> set[str]:
    return {hit.label for hit in findings.hits}  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", range(len(forms_of("canary", CANARY))))
@pytest.mark.parametrize("offset", [0, 1, 7, 4093])
def test_finds_each_form_at_any_alignment(tmp_path: Path, form: int, offset: int) -> None:
    needles = forms_of("canary", CANARY)
    (tmp_path / "file").write_bytes(b"\0" * offset + needles[form].data + b"\1\2\3")
    assert labels(Searcher(needles).search_tree(tmp_path)) == {"canary"}


def test_finds_a_value_inside_longer_base64(tmp_path: Path) -> None:
    import base64

    for lead in range(4):
        (tmp_path / "file").write_bytes(base64.b64encode(b"x" * lead + CANARY + b"and more"))
        assert labels(Searcher(forms_of("canary", CANARY)).search_tree(tmp_path)) == {"canary"}


def test_finds_a_needle_that_lies_across_two_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.residue._CHUNK", 64)
    for start in range(40, 80):
        (tmp_path / "file").write_bytes(b"." * start + CANARY + b"." * 100)
        findings = Searcher([Needle("canary", CANARY)]).search_file(tmp_path / "file")
        assert [(hit.offset, hit.label) for hit in findings.hits] == [(start, "canary")]


def test_finds_nothing_in_clean_files_and_says_how_much_it_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(5000))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"")
    findings = Searcher(forms_of("canary", CANARY)).search_tree(tmp_path)
    assert findings.hits == []
    assert findings.places == 2
    assert findings.searched_bytes >= 5000


def test_finds_a_value_in_the_memory_of_another_process() -> None:
    program = "import sys; kept = bytes.fromhex(sys.stdin.readline()); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(CANARY.hex() + "\n")
        child.stdin.flush()
        child.stdout.readline()
        found = Searcher([Needle("canary", CANARY)]).search_process(child.pid)
        other = Searcher([Needle("other", CANARY[::-1])]).search_process(child.pid)
        child.stdin.close()
    assert labels(found) == {"canary"}
    assert other.hits == []


def test_refuses_needles_too_short_to_mean_anything() -> None:
    with pytest.raises(ValueError, match="16"):
        Searcher([Needle("short", b"123")])


def test_a_hole_of_a_terabyte_costs_nothing_and_hides_nothing(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.seek(1 << 40)
        file.write(CANARY)
        file.truncate(1 << 41)
    findings = Searcher([Needle("canary", CANARY)]).search_file(tmp_path / "sparse")
    assert [hit.offset for hit in findings.hits] == [1 << 40]
    assert findings.searched_bytes < 1 << 20
