"""Documents say what the code says, and their links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any, get_type_hints

from appliance import config, lifecycle
from attestation.errors import LetheError
from tests.repository.markdown import Document

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PASS_ON = {"RemoteError", "RankError"}  # carry the status that another process chose
_RESERVED = {"0", "9", "10", "11", "12"}


def _document(documents: list[Document], name: str) -> Document:
    return next(document for document in documents if document.name == name)


def _anchors(document: Document) -> set[str]:
    """Give the anchors that Markdown viewers make of headings."""
    found: set[str] = set()
    for heading in document.headings:
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (name := f"{anchor}-{number}" if number else anchor) in found:
            number += 1
        found.add(name)
    return found


def test_links_between_documents_resolve(documents: list[Document], root: Path) -> None:
    by_path = {document.path: document for document in documents}
    dead: list[str] = []
    seen = 0
    for document in documents:
        for link in _LINK.findall(document.prose):
            if re.match(r"(https?|mailto):", link):
                continue
            seen += 1
            name, _, anchor = link.partition("#")
            target = (document.path.parent / name).resolve() if name else document.path
            if not target.exists() or (anchor and anchor not in _anchors(by_path[target])):
                dead.append(f"{document.name}: {link}")
            elif root not in target.parents and target != root:
                dead.append(f"{document.name}: {link} leaves the repository")
    assert dead == []
    assert seen > 10


def test_files_named_in_documents_exist(documents: list[Document], root: Path) -> None:
    """`path/of/file.py` in prose names a file of the tree."""
    pattern = re.compile(
        r"`((?:appliance|attestation|provisioning|tests|docs|systemd|demo|benchmarks|requirements)/[\w./-]*)`"
    )
    missing = [
        f"{document.name}: {name}"
        for document in documents
        for name in pattern.findall(document.prose)
        if not (root / name).exists()
    ]
    assert missing == []


def test_documents_named_in_code_exist(tracked: list[Path], root: Path) -> None:
    missing = [
        f"{path.relative_to(root)}: {name}"
        for path in tracked
        if path.suffix in {".py", ".toml", ".service"} and path.parts[-2] not in {"repository", "demo"}
        for name in re.findall(r"\bdocs/[\w./-]+\.md", path.read_text(encoding="utf-8"))
        if not (root / name).exists()
    ]
    assert missing == []


def test_every_decision_record_is_numbered_titled_and_has_its_sections(documents: list[Document]) -> None:
    records = sorted(
        (d for d in documents if d.name.startswith("docs/adr/") and d.path.name != "README.md"), key=lambda d: d.name
    )
    numbers = [int(record.path.name[:4]) for record in records]
    assert len(numbers) == len(set(numbers)), "a number is given once"
    for record in records:
        assert record.headings[0].startswith(f"{record.path.name[:4]}: "), record.name
        assert record.headings[1] == "Context", record.name
        assert {"Context", "Options", "Choice", "What gets worse"} <= set(record.headings), record.name
        assert re.search(r"^- Status: (accepted|superseded by \d{4}|proposed)", record.text, flags=re.MULTILINE), (
            record.name
        )


def test_index_of_decision_records_is_complete(documents: list[Document]) -> None:
    index = _document(documents, "docs/adr/README.md")
    for record in documents:
        if record.name.startswith("docs/adr/") and record.path.name not in {"README.md", "0000-template.md"}:
            number, title = record.headings[0].split(": ", 1)
            assert f"| [{number}]({record.path.name}) | {title} |" in index.text, record.name


def _refusals() -> list[type[LetheError]]:
    for package in ("attestation", "provisioning", "appliance"):
        top = importlib.import_module(package)
        for module in pkgutil.walk_packages(top.__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)

    def below(kind: type[LetheError]) -> list[type[LetheError]]:
        return [found for child in kind.__subclasses__() for found in (child, *below(child))]

    top_level = {"attestation", "provisioning", "appliance"}
    return [kind for kind in below(LetheError) if kind.__module__.split(".")[0] in top_level]


def test_table_of_exit_codes_is_that_of_the_code(documents: list[Document]) -> None:
    rows = _document(documents, "docs/exit-codes.md").rows("exit")
    written = {(name, row[0]) for row in rows for name in re.findall(r"`([A-Z]\w+)`", row[3])}
    kinds = {kind for kind in _refusals() if not kind.__name__.startswith("_") and kind.__name__ not in _PASS_ON}
    bases = {base for kind in kinds for base in kind.__mro__[1:] if base.__name__ == "AppraisalRefused"}
    assert written == {(kind.__name__, str(kind.exit_status)) for kind in kinds - bases}
    statuses = [row[0] for row in rows]
    assert statuses == sorted(statuses, key=int)
    assert {"0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "69", "74", "77", "78", "130"} == set(statuses)


def test_table_of_configuration_keys_is_that_of_the_code(documents: list[Document]) -> None:
    rows = {row[0].strip("`"): row for row in _document(documents, "docs/configuration.md").rows("key")}
    keys: dict[str, dataclasses.Field[Any]] = {}
    for section, kind in get_type_hints(config.Config).items():
        if dataclasses.is_dataclass(kind):
            keys |= {f"{section}.{member.name}": member for member in dataclasses.fields(kind)}
    assert rows.keys() == keys.keys()
    for key, member in keys.items():
        shown = rows[key][1].strip("`")
        assert shown == _shown(member.default), key
        if key in config._RANGES:
            low, high = config._RANGES[key]
            assert rows[key][2] == f"{low} to {high}", key
        if key in config._CHOICES:
            assert re.findall(r"`([^`]+)`", rows[key][2]) == list(config._CHOICES[key]), key


def _shown(default: Any) -> str:
    if default is dataclasses.MISSING:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return "[" + ", ".join(f'"{item}"' for item in default) + "]"
    return str(default)


def test_example_configuration_is_accepted(documents: list[Document]) -> None:
    text = _document(documents, "docs/configuration.md").text
    example = re.search(r"^```toml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert example is not None
    assert config.parse(example[1].encode(), base=Path("/etc/lethe")).node.name == "rack1-node4"


def test_tests_named_by_the_threat_model_exist(documents: list[Document], root: Path) -> None:
    document = _document(documents, "docs/threat-model.md")
    rows = document.rows("guarantee")
    assert len(rows) >= 10
    guarantees = re.findall(r"^\*\*(G\d+)\.", document.text, flags=re.MULTILINE)
    assert [row[0] for row in rows] == guarantees
    for row in rows:
        names = re.findall(r"`([^`]+)`", row[1])
        assert names, f"{row[0]} is held by no test"
        for name in names:
            file, _, test = name.partition("::")
            assert (root / file).is_file(), f"{row[0]}: {file}"
            if test:
                assert f"def {test}(" in (root / file).read_text(encoding="utf-8"), f"{row[0]}: {name}"


def test_limitations_are_numbered_without_gaps(documents: list[Document]) -> None:
    text = _document(documents, "docs/limitations.md").text
    numbers = [int(number) for number in re.findall(r"^\*\*L(\d+)\.", text, flags=re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_references_to_guarantees_and_limitations_exist(documents: list[Document]) -> None:
    model = _document(documents, "docs/threat-model.md").text
    limits = _document(documents, "docs/limitations.md").text
    known = set(re.findall(r"^\*\*([GNL]\d+)\.", model + "\n" + limits, flags=re.MULTILINE))
    for name in ("docs/threat-model.md", "docs/limitations.md", "SECURITY.md", "README.md"):
        used = set(re.findall(r"\b([GNL]\d{1,2})\b", _document(documents, name).prose))
        assert used <= known, name


def test_glossary_is_sorted_into_one_row_per_word(documents: list[Document]) -> None:
    words = [row[0] for row in _document(documents, "docs/glossary.md").rows("word")]
    assert len(words) == len(set(words))


def test_changelog_has_the_version_of_the_package(documents: list[Document]) -> None:
    version = importlib.import_module("appliance").__version__
    assert re.search(rf"^## \[{re.escape(version)}\]", _document(documents, "CHANGELOG.md").text, flags=re.MULTILINE)


def test_lifecycle_diagram_is_that_of_the_table(documents: list[Document]) -> None:
    text = _document(documents, "docs/lifecycle.md").text
    drawn = re.search(r"^```mermaid\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert drawn is not None
    assert drawn[1] == lifecycle.diagram()
    rows = _document(documents, "docs/lifecycle.md").rows("state")
    assert [row[0] for row in rows] == [state.value for state in lifecycle.State]


def test_members_of_the_status_are_described(documents: list[Document], root: Path) -> None:
    module = ast.parse((root / "appliance/status.py").read_text(encoding="utf-8"))
    function = next(node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "snapshot")
    returned = next(node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    assert isinstance(returned, ast.Dict)
    written = [row[0].strip("`") for row in _document(documents, "docs/control.md").rows("member")]
    assert written == [key.value for key in returned.keys if isinstance(key, ast.Constant)]


def test_events_of_the_journal_are_described(documents: list[Document], root: Path) -> None:
    sources = [path.read_text(encoding="utf-8") for path in (root / "appliance").glob("*.py")]
    recorded = {name for text in sources for name in re.findall(r"\b(?:record|_note)\(\s*\"([a-z]+\.[a-z_]+)\"", text)}
    chain = (root / "provisioning/chainfile.py").read_text(encoding="utf-8")
    recorded |= {f"journal.{name}" for name in re.findall(r"\{self\._words\.name\}\.(\w+)\"", chain)}
    recorded |= {"zeroize.done", "zeroize.incomplete"}
    assert "agent.started" in recorded
    assert {row[0].strip("`") for row in _document(documents, "docs/control.md").rows("event")} == recorded
