"""docs/spec/bundle.md against the code: its worked example is computed again, and its list of refusals is complete."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from provisioning import geometry, stheader
from provisioning.catalog import Catalog, CatalogFile
from provisioning.geometry import Geometry, Section
from provisioning.layout import Layout, Piece, TensorSpec, descriptor_digest
from provisioning.secret import SecretBytes
from provisioning.segment import SectionSealer, associated_data, commitment, section_info
from provisioning.table import encode

ROOT = Path(__file__).parents[2]
SPEC = (ROOT / "docs" / "spec" / "bundle.md").read_text()
LINE = 32

SIZE = 256 << 10
BUNDLE = bytes.fromhex("a0a1a2a3a4a5a6a7a8a9aaabacadaeaf")
KEY = bytes(range(32))
SHAPE = Geometry(segment_size=SIZE, section_bytes=SIZE, file_bytes=SIZE, streams=(1, 1, 1))
SECTION = Section(number=2, stream=2, first=0, segments=1, base=2)
CATALOG = Catalog(
    [TensorSpec("a.q_proj.weight", "BF16", (2, 3), 0), TensorSpec("norm", "F32", (2,), None)],
    [CatalogFile("config.json", b"{}")],
    tiles=1,
)


def example() -> dict[str, bytes]:
    """Compute the values of the worked example, in the document's order."""
    layout = CATALOG.layout
    descriptor = layout.descriptor_digest(SECTION, SIZE)
    plain = bytearray(SIZE + 16)
    plain[:12] = bytes(range(1, 13))
    with SecretBytes.take(bytearray(KEY)) as secret, secret.expose() as key:
        committed = commitment(key, BUNDLE)
        with SectionSealer(key, bundle_id=BUNDLE, section=SECTION, segment_size=SIZE, descriptor=descriptor) as sealer:
            assert sealer._secret is not None
            with sealer._secret.expose() as view:
                derived = bytes(view)
            sealer.seal_into(memoryview(plain))
    tags = bytes(16) + bytes(16) + bytes(plain[SIZE:])
    digests = [bytes(32), bytes(32), hashlib.sha256(plain[:SIZE]).digest()]
    table = encode(SHAPE, bundle_id=BUNDLE, tags=tags, digests=digests)
    return {
        "bundle key": KEY,
        "bundle id": BUNDLE,
        "key commitment": committed,
        "section info": section_info(BUNDLE, 2, SIZE),
        "section key": derived[:32],
        "base nonce": derived[32:],
        "tile descriptor": descriptor,
        "empty descriptor": descriptor_digest(()),
        "associated data": associated_data(BUNDLE, SECTION, SIZE, descriptor)(0),
        "plaintext, first 16": bytes(range(1, 13)) + bytes(4),
        "ciphertext, first 16": bytes(plain[:16]),
        "ciphertext, SHA-256": digests[2],
        "tag": bytes(plain[SIZE:]),
        "table header": table[:64],
        "third record": table[64 + 64 : 64 + 96],
        "table, SHA-384": hashlib.sha384(table).digest(),
        "catalog": CATALOG.encode(),
    }


def printed(values: dict[str, bytes]) -> str:
    return "\n".join(
        f"{'' if start else name:<21} {value[start : start + LINE].hex()}"
        for name, value in values.items()
        for start in range(0, len(value), LINE)
    )


def test_the_worked_example_is_what_the_code_computes() -> None:
    (block,) = re.findall(r"```hex\n(.*?)\n```", SPEC, re.DOTALL)
    assert block == printed(example())


def test_the_example_lays_out_as_the_document_says() -> None:
    layout = Layout(CATALOG.tensors, 1)
    assert layout.streams[2].pieces == (Piece(0, 0, 2, 2, 0, 12),)
    assert layout.streams[1].pieces == (Piece(1, 0, 2, 1, 0, 8),)


MODULES = (
    "stheader source layout shares geometry segment table manifest catalog bundle blocks verify pack weave sealing "
    "cli/bundle"
)
CODE = re.compile(r'"((?:safetensors|source|catalog|table|bundle|segment|manifest|pack|share)(?:\.[a-z_]+)+)"')
NOT_CODES = {"manifest.dsse.json", "catalog.files", "catalog.tensors"}


def test_every_refusal_is_listed_and_every_listed_one_exists() -> None:
    raised: set[str] = set()
    for module in MODULES.split():
        raised |= set(CODE.findall((ROOT / "provisioning" / f"{module}.py").read_text()))
    listed = set(re.findall(r"^\| `([a-z_.]+)` \| \d+ \|", SPEC, re.MULTILINE))
    assert listed == raised - NOT_CODES


@pytest.mark.parametrize("dtype", stheader.DTYPE_BITS)
def test_every_type_is_listed_with_its_size(dtype: str) -> None:
    assert re.search(rf"`{dtype}`", SPEC)


@pytest.mark.parametrize(
    "number",
    [
        stheader.MAX_HEADER_BYTES,
        stheader.MAX_TENSORS,
        geometry.MAX_SEGMENTS,
        geometry.MAX_FILES,
        geometry.MAX_SECTION_BYTES,
        geometry.FILE_BYTES,
    ],
)
def test_bounds_are_stated(number: int) -> None:
    assert f"{number:,}" in SPEC
