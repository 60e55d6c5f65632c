"""docs/spec/bundle.md against the code: its worked example is computed again, and its list of refusals is complete."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from provisioning import catalog, geometry, manifest, source, stheader
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


def block_of(key: bytes, block: bytes) -> bytes:
    """Encrypt one block; the mode is that of one block, which is the cipher itself."""
    return Cipher(algorithms.AES256(key), modes.ECB()).encryptor().update(block)


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
        "nonce of segment 1": (int.from_bytes(derived[32:], "big") ^ 1).to_bytes(12, "big"),
        "hash key, section 11": block_of(derived[:32], bytes(16)),
        "mask of segment 0": block_of(derived[:32], derived[32:] + (1).to_bytes(4, "big")),
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


CODE = re.compile(r'"((?:safetensors|source|catalog|table|bundle|segment|manifest|pack|share)(?:\.[a-z_]+)+)"')
# Names of files, and of members in messages.
NOT_CODES = {"manifest.dsse.json", "manifest.partial", "manifest.partial.new", "catalog.files", "catalog.tensors"}


def test_every_refusal_is_listed_and_every_listed_one_exists() -> None:
    modules = [path for package in ("provisioning", "appliance") for path in (ROOT / package).rglob("*.py")]
    raised = {code for path in modules for code in CODE.findall(path.read_text())} - NOT_CODES
    listed = re.findall(r"^\| `([a-z_.]+)` \| \d+ \|", SPEC, re.MULTILINE)
    assert sorted(listed) == sorted(raised)


KINDS = {"bundle": 7, "segment": 7, "table": 7, "catalog": 7, "share": 7, "manifest": 6, "source": 2, "safetensors": 2}
STATUSES = {"bundle.key": 6, "pack.geometry": 2, "pack.catalog": 2, "pack.disk.full": 74, "pack.output": 74}


def test_every_refusal_is_listed_with_its_exit_status() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| (\d+) \|", SPEC, re.MULTILINE)
    assert {code: int(status) for code, status in rows} == {
        code: STATUSES.get(code) or KINDS[code.split(".")[0]] for code, _ in rows
    }


def test_the_order_of_reading_names_every_refusal_of_a_reader() -> None:
    (order,) = re.findall(r"^## 10\. Reading\n(.*?)^## 11", SPEC, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`([a-z_.]+\.(?:[a-z_]+|\*))`", order))
    rows = re.findall(r"^\| `((?:bundle|segment|table|catalog|manifest)\.[a-z_.]+)` ", SPEC, re.MULTILINE)
    elsewhere = {"table.size", "catalog.file.missing", "manifest.dsse.json"}
    families = {name.removesuffix("*") for name in named if name.endswith("*")}
    assert [code for code in rows if code not in named | elsewhere and not code.startswith(tuple(families))] == []


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
        catalog.MAX_BYTES,
        catalog.MAX_HEADER_BYTES,
        catalog.MAX_FILE_BYTES,
        manifest.MAX_PAYLOAD_BYTES,
        manifest.MAX_ENVELOPE_BYTES,
        1 + stheader.MAX_TENSORS + catalog.MAX_FILES,
        source.MAX_SHARDS,
    ],
)
def test_bounds_are_stated(number: int) -> None:
    assert f"{number:,}" in SPEC
