"""Make the vectors of the sealed bundle again: ``python -m tests.vectors.make_bundle``.

Writes ``tests/vectors/bundle/``; with ``--expand DIR`` it writes every vector as a whole bundle into DIR instead, for
readers in other languages. What the files mean is in ``tests/vectors/README.md``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from attestation.dsse import unverified_payload
from provisioning.manifest import MAX_PAYLOAD_BYTES
from tests.vectors import catalog_faults, file_faults, manifest_faults, table_faults
from tests.vectors.good import GOOD
from tests.vectors.sealed import BUNDLE_KEY, LAB, PRODUCTION, Plaintext, Vector, VectorSet, owner_file

PLACE = Path(__file__).parent / "bundle"
SOUND = Vector(name="good", about="a sound bundle: every tensor of it is read")
_FAULTS = (file_faults, table_faults, manifest_faults, catalog_faults)


def build(place: Path = PLACE) -> VectorSet:
    """Make all vectors in memory; ``place`` is where envelopes of earlier runs are."""
    made = VectorSet(vectors=[SOUND], plaintexts={"good": GOOD})
    for module in _FAULTS:
        module.add(made, place / "manifests")
    return made


def files_of(made: VectorSet, place: Path = PLACE) -> dict[str, bytes]:
    """Give every file of ``tests/vectors/bundle/`` by its path there."""
    files = {
        "index.json": _json({"bundle_key": BUNDLE_KEY.hex(), "vectors": [_listed(vector) for vector in made.vectors]}),
        "plaintexts.json": _json({name: _kept(plaintext) for name, plaintext in made.plaintexts.items()}),
    }
    for owner in (LAB, PRODUCTION):
        name = f"owner-{owner.purpose}.pub.json"
        files[name] = owner_file(owner, kept=place / name)
    files |= {f"manifests/{name}.dsse.json": data for name, data in made.manifests.items()}
    files |= {f"tables/{name}.idx": data for name, data in made.tables.items()}
    return files


def read(place: Path = PLACE) -> VectorSet:
    """Read the vectors back from their files, as another implementation would."""
    index = json.loads((place / "index.json").read_text())
    made = VectorSet()
    for entry in index["vectors"]:
        entry = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
        for step in ("opened", "verified", "loaded"):
            entry[step] = entry[step] and entry[step]["code"]
        made.vectors.append(Vector(**entry))
    kept = json.loads((place / "plaintexts.json").read_text())
    for name, entry in kept.items():
        entry = {**kept["good"], **entry}
        streams = [entry["catalog"], *entry["tensors"]]
        runs = tuple(tuple((start, text, times) for start, text, times in stream) for stream in streams)
        made.plaintexts[name] = Plaintext(
            streams=tuple(entry["streams"]), runs=runs, descriptors=tuple(entry["descriptors"])
        )
    made.manifests.update({p.name.removesuffix(".dsse.json"): p.read_bytes() for p in (place / "manifests").iterdir()})
    made.tables.update({path.stem: path.read_bytes() for path in (place / "tables").iterdir()})
    return made


def _listed(vector: Vector) -> dict[str, Any]:
    entry = dataclasses.asdict(vector)
    for step in ("opened", "verified", "loaded"):
        entry[step] = entry[step] and {"code": entry[step], "exit": exit_status(entry[step])}
    return entry


def exit_status(code: str) -> int:
    """Give the exit status that belongs to a code (docs/spec/bundle.md, section 12)."""
    families = {"bundle": 7, "segment": 7, "table": 7, "catalog": 7}
    return 6 if code == "bundle.key" else families.get(code.split(".")[0], 6)


def _kept(plaintext: Plaintext) -> dict[str, Any]:
    """Give what a plaintext has of its own; the rest is that of ``good``."""
    catalog, *tensors = plaintext.runs
    entry = {
        "streams": plaintext.streams,
        "catalog": catalog,
        "tensors": tensors,
        "descriptors": plaintext.descriptors,
    }
    if plaintext == GOOD:
        return entry
    good = _kept(GOOD)
    return {name: value for name, value in entry.items() if value != good[name]}


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def main() -> None:
    """Write the vectors, or whole bundles."""
    parser = argparse.ArgumentParser(description="Make the vectors of the sealed bundle.")
    parser.add_argument("--expand", type=Path, metavar="DIR", help="write whole bundles there")
    options = parser.parse_args()
    if options.expand:
        made = read()
        options.expand.mkdir(parents=True)
        for vector in made.vectors:
            made.expand(vector, options.expand / vector.name)
        return
    for name, data in files_of(build()).items():
        path = PLACE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def payload_of(envelope: bytes) -> dict[str, Any]:
    """Give the members of a vector's manifest."""
    members: dict[str, Any] = json.loads(unverified_payload(envelope, "manifest", limit=MAX_PAYLOAD_BYTES))
    return members


if __name__ == "__main__":
    main()
