"""The checkout as the tests see it: its root, its tracked files, its Markdown documents."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.repository.markdown import ROOT, Document


@pytest.fixture(scope="session")
def root() -> Path:
    """Top of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def tracked() -> list[Path]:
    """Every file that is in version control, or would be by ``git add --all``."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = [ROOT / name.decode() for name in listed.stdout.split(b"\0") if name]
    return [path for path in paths if path.is_file()]


@pytest.fixture(scope="session")
def documents(tracked: list[Path]) -> list[Document]:
    """Every Markdown file."""
    return [Document(path, path.read_text(encoding="utf-8")) for path in tracked if path.suffix == ".md"]
