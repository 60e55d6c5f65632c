"""Predict how long a sealed load takes on machines that we do not have; first show that the model gets ours right.

    python benchmarks/load_model.py [--result FILE] [--write]

The newest result of ``benchmarks/sealed_load.py`` is put together from its measured steps and compared with what that
run measured, warm and cold. When one of the two is off by more than 15 % the program says so, predicts nothing, and
ends with 1. Otherwise it prints the tables of docs/scaling.md; ``--write`` puts them and the picture into the page.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from benchmarks.scaling import measured, plot, tables

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "scaling.md"
PICTURE = ROOT / "docs" / "scaling.svg"


def block(name: str) -> re.Pattern[str]:
    """Give the pattern of a table's place in the page, with what is in it now."""
    return re.compile(rf"(<!-- table: {name} -->\n)(.*?)(\n<!-- end -->)", re.DOTALL)


def fill(page: str, made: dict[str, str]) -> str:
    """Put tables into their places.

    Raises:
        ValueError: the page has no place, or more than one, for a table.
    """
    for name, text in made.items():
        page, count = block(name).subn(lambda match, text=text: f"{match[1]}\n{text}\n{match[3]}", page)  # type: ignore[misc]  # a default argument
        if count != 1:
            raise ValueError(f"{count} places for the table {name!r}")
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--result", type=Path, help="of benchmarks/sealed_load.py; the newest one when not given")
    parser.add_argument("--write", action="store_true", help="write tables and picture into docs/")
    given = parser.parse_args()
    try:
        subject = measured.read(given.result or measured.newest())
    except measured.Unusable as reason:
        print(f"nothing to hold the model against: {reason}", file=sys.stderr)
        return 1
    found = measured.compare(subject)
    comparison = tables.comparison(subject, found)
    print(comparison)
    if not all(one.holds for one in found):
        print(f"\nThe model is off by more than {measured.TOLERANCE:.0%}; it predicts nothing.", file=sys.stderr)
        return 1
    made = {name: make() for name, make in tables.PREDICTIONS.items()}
    if given.write:
        PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), made | {"comparison": comparison}), encoding="utf-8")
        PICTURE.write_text(plot.draw(), encoding="utf-8")
        return 0
    for name, text in made.items():
        print(f"\n{name}\n\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
