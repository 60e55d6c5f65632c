"""The seed corpus: ``python -m tests.fuzz.seeds`` writes it again into ``tests/fuzz/corpus/``.

Sound inputs of each parser, so that a fuzzer begins behind its first checks, and one input for each fault that fuzzing
has found. Names end in ``.bin``, since inputs need not be text.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

from attestation import strictjson
from attestation.policy import AppraisalPolicy
from attestation.strictjson import b64
from provisioning.catalog import Catalog, CatalogFile
from provisioning.geometry import MIN_SEGMENT, Geometry
from provisioning.layout import TensorSpec
from provisioning.manifest import Manifest
from provisioning.table import encode
from tests.fuzz.invariants import BUNDLE_ID, CATALOG_GEOMETRIES
from tests.sim.modelfiles import POLICY, header_of, sound_file, tensors_of

CORPUS = Path(__file__).parent / "corpus"

_MODEL = tensors_of(
    {
        "model.embed_tokens.weight": ("BF16", (4, 2)),
        "model.layers.0.mlp.experts.0.w1.weight": ("F4", (2, 4)),
        "model.norm.weight": ("F32", (2,)),
        "scale": ("F64", ()),
        "empty": ("U8", (0, 3)),
    }
)


def _manifest() -> bytes:
    policy = AppraisalPolicy.from_toml(POLICY)
    return Manifest(
        bundle_id=BUNDLE_ID,
        name="seed",
        purpose="lab",
        owner="ab" * 48,
        epoch=policy.epoch,
        issued_at=datetime(2026, 11, 30, tzinfo=UTC),
        geometry=Geometry(segment_size=1 << 20, section_bytes=1 << 36, file_bytes=63 << 26, streams=(1, 2, 3, 3)),
        table_sha384=bytes(48),
        key_commitment=bytes(48),
        policy=policy,
    ).encode()


def _table() -> bytes:
    geometry = Geometry(
        segment_size=MIN_SEGMENT, section_bytes=2 * MIN_SEGMENT, file_bytes=MIN_SEGMENT, streams=(1, 3, 1)
    )
    digests = [hashlib.sha256(bytes([number])).digest() for number in range(5)]
    return encode(geometry, bundle_id=BUNDLE_ID, tags=bytes(range(80)), digests=digests)


def _catalog(specs: list[TensorSpec], files: list[CatalogFile], *, tiles: int) -> bytes:
    catalog = Catalog(specs, files, tiles=tiles)
    plain = catalog.encode()
    streams = catalog.layout.stream_segments(len(plain), MIN_SEGMENT)
    chosen = next(index for index, geometry in enumerate(CATALOG_GEOMETRIES) if geometry.streams == streams)
    return bytes([chosen]) + plain


def _catalogs() -> dict[str, bytes]:
    rows = TensorSpec("a.q_proj.weight", "BF16", (4, 2), 0)
    columns = TensorSpec("a.o_proj.weight", "U8", (2, 4), 1)
    norm = TensorSpec("norm", "F32", (2,), None)
    blocks = TensorSpec("b.w1.weight", "F8_E4M3", (300, 2), 0, block=128)
    expert = TensorSpec("experts.1.w1.weight", "F4", (2, 4), None, column=1)
    config = CatalogFile("config.json", b"{}")
    return {
        "empty": _catalog([], [], tiles=1),
        "common": _catalog([norm, TensorSpec("none", "U8", (0,), None)], [config], tiles=1),
        "cut": _catalog([rows, norm, columns], [config, CatalogFile("merges.txt", b"\xff\0")], tiles=2),
        "blocks": _catalog([blocks, norm, expert], [config], tiles=2),
    }


def seeds() -> dict[str, dict[str, bytes]]:
    """Give all seeds: target -> name -> input."""
    header = strictjson.dumps(header_of(_MODEL))
    frame = {"payloadType": "application/vnd.lethe.manifest+json", "payload": b64(b"{}")}
    signatures = [{"keyid": "ab#ml-dsa-87", "sig": b64(b"x")}, {"keyid": "ab#ecdsa-p384", "sig": b64(b"y")}]
    return {
        "json": {
            "values": b'{"a":[1,-2,null,true,{"\xc3\xa9":"\\"\\\\[{,"}],"b":9223372036854775807}',
            "deep": b'{"a":' + b"[" * 15 + b"]" * 15 + b"}",
            "escapes": b'{"\\u00e9":"\\ud83d\\ude00"}',
        },
        "envelope": {"sound": strictjson.dumps({**frame, "signatures": signatures})},
        "manifest": {"sound": _manifest()},
        "table": {"sound": _table()},
        "catalog": _catalogs(),
        "header": {
            "sound": header,
            "metadata": b'{"__metadata__":{"format":"pt"}}   ',
            "negative_zero": b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}',
        },
        "safetensors": {"sound": sound_file(_MODEL)},
    }


def main() -> None:
    """Write the corpus."""
    for target, inputs in seeds().items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for name, data in inputs.items():
            (CORPUS / target / f"{name}.bin").write_bytes(data)


if __name__ == "__main__":
    main()
