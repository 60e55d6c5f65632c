"""The sound bundle that every other vector is a change of."""

from __future__ import annotations

import functools

from provisioning.catalog import Catalog, CatalogFile
from provisioning.geometry import Geometry
from provisioning.layout import TensorSpec
from tests.vectors.sealed import SEGMENT, Plaintext, Run, SealedParts, seal

# One of each kind: cut along dimension 0, cut along dimension 1 by blocks, of one expert, and common; the last one
# goes over the edge of a segment. Bytes of tensor t count up from 16 t.
CATALOG = Catalog(
    [
        TensorSpec("model.embed_tokens.weight", "BF16", (6, 4), 0),
        TensorSpec("model.layers.0.mlp.down_proj.weight", "F8_E4M3", (3, 256), 1, block=128),
        TensorSpec("model.layers.0.mlp.experts.1.up_proj.weight", "F32", (2, 2), None, column=1),
        TensorSpec("model.norm.weight", "F32", (4,), None),
        TensorSpec("model.table", "U8", (1200, 251), None),
    ],
    [CatalogFile("config.json", b'{"model_type": "llama"}'), CatalogFile("tokenizer.json", b"{}")],
    tiles=2,
)


@functools.cache
def contents() -> list[bytes]:
    """Give the bytes of each tensor."""
    return [
        bytes((16 * index + place) % 251 for place in range(spec.nbytes)) for index, spec in enumerate(CATALOG.tensors)
    ]


@functools.cache
def _runs(stream: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    for piece in CATALOG.layout.streams[stream].pieces:
        spec, data = CATALOG.tensors[piece.tensor_index], contents()[piece.tensor_index]
        if spec.parallel is None:
            tile = data
        else:
            width = spec.row_bytes(0, spec.shape[spec.parallel])
            first, last = (spec.row_bytes(0, edge) for edge in (piece.tile_start, piece.tile_stop))
            tile = b"".join(data[row * width + first : row * width + last] for row in range(spec.outer))
        period = tile[:251] if len(tile) > 1 << 16 else tile
        runs.append((piece.offset, period.hex(), len(tile) // len(period)))
    return tuple(runs)


def geometry(streams: tuple[int, ...]) -> Geometry:
    return Geometry(segment_size=SEGMENT, section_bytes=2 * SEGMENT, file_bytes=2 * SEGMENT, streams=streams)


def plaintext(catalog: bytes, *, streams: tuple[int, ...] | None = None, behind: Run | None = None) -> Plaintext:
    """Give the sound plaintext with another catalog, and perhaps one run more behind it in stream 0."""
    planned = streams or CATALOG.layout.stream_segments(len(catalog), SEGMENT)
    descriptors = [CATALOG.layout.descriptor_digest(section, SEGMENT) for section in geometry(planned).sections]
    return Plaintext(
        streams=planned,
        runs=(
            ((0, catalog.hex(), 1), *([behind] if behind else [])),
            *(_runs(stream) for stream in range(1, len(planned))),
        ),
        descriptors=tuple(digest.hex() for digest in descriptors),
    )


GOOD = plaintext(CATALOG.encode())


def parts() -> SealedParts:
    """Seal the sound plaintext."""
    return seal(GOOD)
