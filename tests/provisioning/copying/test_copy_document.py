"""docs/copying.md says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from provisioning.medium import Road

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/copying.md").read_text(encoding="utf-8")
MODULES = ("copying", "destination", "partial")


def test_every_refusal_is_listed_with_its_status_and_every_listed_one_exists() -> None:
    status = {"InputFailed": "2", "OutputFailed": "74"}
    raised = {
        (code, status[kind])
        for module in MODULES
        for kind, code in re.findall(
            r'raise (\w+)\(\s*"(copy\.\w+)"', (ROOT / f"provisioning/{module}.py").read_text(encoding="utf-8")
        )
    }
    listed = set(re.findall(r"^\| `(copy\.\w+)` \| (\d+) \|", TEXT, flags=re.MULTILINE))
    assert listed == raised


def test_every_road_is_explained() -> None:
    listed = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", TEXT, flags=re.MULTILINE)
    assert listed == [road.word for road in Road]
