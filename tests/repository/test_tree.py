"""What must not be in the tree, and how the tree is laid out."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

# Put together here so that this file does not contain what it looks for.
_FORBIDDEN = {
    "a path of one machine": "|".join(
        ["/wor" + "k/", "/roo" + "t/", "/hom" + "e/[a-z]", "/opt/whe" + "els", "/opt/py" + "pi"]
    ),
    "the host of a package registry": "|".join(
        [r"pypi\.(org|io)", "python" + r"hosted\.org", r"npmjs\.", r"deb\.debian\."]
    ),
    "a private key": "-----BEGIN [A-Z ]*PRIV" + "ATE KEY-----",
    "an access token": "|".join(["gh[pousr]_[A-Za-z0-9]{30}", "AKI" + "A[0-9A-Z]{16}", "hf_[A-Za-z0-9]{30}"]),
    "an unfinished part": "|".join([r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bXX" + r"X\b"]),
}
_TEXT = {".py", ".md", ".toml", ".txt", ".sh", ".service", ".target", ".conf", ".json", ".yaml", ".cfg", ".jinja", ""}


@pytest.mark.parametrize("what", _FORBIDDEN)
def test_no_file_contains(what: str, tracked: list[Path], root: Path) -> None:
    pattern = re.compile(_FORBIDDEN[what])
    found = [
        f"{path.relative_to(root)}:{number}: {line.strip()[:100]}"
        for path in tracked
        if path.suffix in _TEXT and path.name != "LICENSE"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []


def test_search_for_forbidden_text_finds_a_planted_line() -> None:
    planted = ["cd /hom" + "e/alice", "https://py" + "pi.org/simple", "-----BEGIN EC PRIV" + "ATE KEY-----"]
    for line in planted:
        assert any(re.search(pattern, line) for pattern in _FORBIDDEN.values()), line


def test_only_small_files_are_tracked(tracked: list[Path], root: Path) -> None:
    assert [str(path.relative_to(root)) for path in tracked if path.stat().st_size > 1 << 20] == []


def test_top_level_is_as_agreed(tracked: list[Path], root: Path) -> None:
    files = ".gitignore CHANGELOG.md CONTRIBUTING.md LICENSE Makefile README.md SECURITY.md pyproject.toml"
    folders = ".ci appliance attestation benchmarks demo docs provisioning requirements systemd tests"
    assert {path.relative_to(root).parts[0] for path in tracked} == {*files.split(), *folders.split()}


def test_test_files_have_unique_names(tracked: list[Path], root: Path) -> None:
    names = Counter(path.name for path in tracked if root / "tests" in path.parents and path.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []


def test_test_directories_are_no_packages(tracked: list[Path], root: Path) -> None:
    assert [path for path in tracked if root / "tests" in path.parents and path.name == "__init__.py"] == []


@pytest.mark.parametrize("package", ["appliance", "attestation", "provisioning"])
def test_product_imports_neither_tests_nor_demo(package: str, root: Path) -> None:
    outside = {"tests", "demo", "benchmarks", "transformers", "gguf", "openai", "pytest", "hypothesis"}
    found = []
    for path in (root / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            found += [f"{path}: {name}" for name in names if name.split(".")[0] in outside]
    assert found == []


@pytest.mark.parametrize("package", ["appliance", "attestation", "provisioning"])
def test_every_module_says_what_it_is_for(package: str, root: Path) -> None:
    silent = [
        str(path) for path in (root / package).rglob("*.py") if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


@pytest.mark.parametrize("package", ["appliance", "attestation", "provisioning"])
def test_no_module_is_longer_than_400_lines(package: str, root: Path) -> None:
    paths = [str(path.relative_to(root)) for path in (root / package).rglob("*.py")]
    long = {path for path in paths if len((root / path).read_text(encoding="utf-8").splitlines()) > 400}
    assert long == set()
