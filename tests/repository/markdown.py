"""Read a Markdown file as far as the tests need it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Document:
    """One Markdown file."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """Path relative to the checkout."""
        return str(self.path.relative_to(ROOT))

    @property
    def prose(self) -> str:
        """The text without fenced code."""
        return re.sub(r"^```.*?^```\n", "", self.text, flags=re.MULTILINE | re.DOTALL)

    @property
    def headings(self) -> list[str]:
        """Every heading without its marks."""
        return re.findall(r"^#+ +(.*?) *$", self.prose, flags=re.MULTILINE)

    def rows(self, first_heading: str) -> list[list[str]]:
        """Cells of the table whose first column is headed ``first_heading``."""
        lines = self.prose.splitlines()
        start = next(n for n, line in enumerate(lines) if re.match(rf"\| *{re.escape(first_heading)} *\|", line))
        found: list[list[str]] = []
        for line in lines[start + 2 :]:
            if not line.startswith("|"):
                break
            found.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        return found
