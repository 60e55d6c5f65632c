"""Vectors of a medium or courier: files that are missing, of another kind or size, changed, or in another's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attestation import strictjson
from tests.vectors.good import GOOD, parts
from tests.vectors.sealed import LAB, SEGMENT, Vector, VectorSet, manifest_of, signed

_COMMON = "data-00001.seal"
_TABLE = "segments.idx"
_MANIFEST = "manifest.dsse.json"

_OPENED: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "no-directory": ("nothing is there", "bundle.directory", [{"do": "remove"}]),
    "no-manifest": ("the manifest is missing", "bundle.file.missing", [{"do": "remove", "file": _MANIFEST}]),
    "no-table": ("the table is missing", "bundle.file.missing", [{"do": "remove", "file": _TABLE}]),
    "link-manifest": ("the manifest is a link", "bundle.file.kind", [{"do": "link", "file": _MANIFEST}]),
    "pipe-table": (
        "the table is a pipe, which would keep a reader waiting",
        "bundle.file.kind",
        [{"do": "remove", "file": _TABLE}, {"do": "pipe", "file": _TABLE}],
    ),
    "long-manifest": (
        "the manifest is longer than any",
        "bundle.file.size",
        [{"do": "resize", "file": _MANIFEST, "size": 1 << 30}],
    ),
    "long-table": (
        "the table has one byte more",
        "bundle.file.size",
        [{"do": "resize", "file": _TABLE, "size": 64 + 32 * 5 + 32 * 4 + 1}],
    ),
    "huge-table": (
        "the table is beyond all memory",
        "bundle.file.size",
        [{"do": "resize", "file": _TABLE, "size": 1 << 42}],
    ),
    "short-table": ("the table ends early", "bundle.file.size", [{"do": "resize", "file": _TABLE, "size": 64}]),
    "flipped-table": ("one bit of a tag", "bundle.table", [{"do": "flip", "file": _TABLE, "offset": 80, "bit": 0}]),
}

# Opening does not look at data files; verify names what it finds, and a load meets it too.
_DATA: dict[str, tuple[str, str | None, str | None, list[dict[str, Any]]]] = {
    "no-data": (
        "a data file is missing",
        "bundle.file.missing",
        "bundle.file.missing",
        [{"do": "remove", "file": _COMMON}],
    ),
    "link-data": (
        "a data file is a link to a good one",
        "bundle.file.kind",
        "bundle.file.kind",
        [{"do": "link", "file": _COMMON}],
    ),
    "directory-data": (
        "a data file is a directory",
        "bundle.file.kind",
        "bundle.file.kind",
        [{"do": "remove", "file": _COMMON}, {"do": "mkdir", "file": _COMMON}],
    ),
    "short-data": (
        "a data file ends a byte early",
        "bundle.file.size",
        "bundle.file.size",
        [{"do": "resize", "file": _COMMON, "size": 2 * SEGMENT - 1}],
    ),
    "long-data": (
        "a data file has a segment more",
        "bundle.file.size",
        "bundle.file.size",
        [{"do": "resize", "file": _COMMON, "size": 3 * SEGMENT}],
    ),
    "extra-file": (
        "a name that is not the bundle's; a loader never reads it",
        "bundle.file.extra",
        None,
        [{"do": "write", "file": "autorun.inf", "hex": "00"}],
    ),
    "flipped-data": (
        "one bit of ciphertext, in the last byte",
        "bundle.digest",
        "segment.tag",
        [{"do": "flip", "file": _COMMON, "offset": 2 * SEGMENT - 1, "bit": 7}],
    ),
    "swapped-segments": (
        "two segments of one section have changed places",
        "bundle.digest",
        "segment.tag",
        [{"do": "exchange", "file": _COMMON, "offsets": [0, SEGMENT]}],
    ),
    "repeated-segment": (
        "a segment stands in the place of the next one too",
        "bundle.digest",
        "segment.tag",
        [{"do": "copy", "file": _COMMON, "source": _COMMON, "offset": 0, "to": SEGMENT}],
    ),
    "foreign-segment": (
        "a segment of another section",
        "bundle.digest",
        "segment.tag",
        [{"do": "copy", "file": "data-00002.seal", "source": "data-00003.seal", "offset": 0, "to": 0}],
    ),
    "flipped-catalog": (
        "one bit of the sealed catalog",
        "bundle.digest",
        "segment.tag",
        [{"do": "flip", "file": "data-00000.seal", "offset": 5, "bit": 3}],
    ),
}


def add(made: VectorSet, kept: Path) -> None:
    """Add the sound parts, and these vectors, which change files of them."""
    table = parts().table
    payload = strictjson.dumps(manifest_of(GOOD.geometry, table))
    made.tables["good"] = table
    made.manifests["good"] = signed("manifest", payload, [LAB], kept=kept / "good.dsse.json")
    for name, (about, code, changes) in _OPENED.items():
        made.vectors.append(Vector(name=name, about=about, changes=tuple(changes), opened=code))
    for name, (about, verified, loaded, changes) in _DATA.items():
        made.vectors.append(Vector(name=name, about=about, changes=tuple(changes), verified=verified, loaded=loaded))
