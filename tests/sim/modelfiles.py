"""Model directories made byte by byte, sound or with one planted fault; and what an honest reader makes of a bundle.

Nothing here uses the product's header reader or packer, so that they are compared with something.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from provisioning.bundle import Bundle
from provisioning.catalog import Catalog
from provisioning.layout import TensorSpec
from provisioning.secret import SecretBytes
from provisioning.segment import TAG_BYTES, SectionOpener

BITS = {"F4": 4, "F6_E2M3": 6, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "BF16": 16, "F16": 16, "F32": 32, "I64": 64, "F64": 64}

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]

POLICY = """
version = 1
name = "laboratory"
epoch = 7
accept = ["simulated"]
challenge_seconds = 86400

[simulated]
root = { equals = "<root>" }
chip_id = { unchecked = "no evidence is appraised here" }
measurement = { unchecked = "no evidence is appraised here" }
tcb = { at_least = 3 }
debug = { equals = false }
devices = { equals = 1 }
device_model = { one_of = ["simulated-cpu-slot"] }
device_measurement = { unchecked = "no evidence is appraised here" }
cc_mode = { equals = "on" }

[serving]
max_context = 256
max_output_tokens = 64
max_concurrent = 4

[grant]
loads = 1
seconds = 86400
reboot = "courier"
""".replace("<root>", "0" * 96)


def size_of(dtype: str, shape: Iterable[int]) -> int:
    bits = BITS[dtype]
    for size in shape:
        bits *= size
    assert bits % 8 == 0
    return bits // 8


def tensors_of(entries: Mapping[str, tuple[str, tuple[int, ...]]], *, seed: int = 1) -> Tensors:
    source = random.Random(seed)
    return {name: (dtype, shape, source.randbytes(size_of(dtype, shape))) for name, (dtype, shape) in entries.items()}


def llama(*, hidden: int, inter: int, layers: int, vocab: int, dtype: str = "BF16", seed: int = 1) -> Tensors:
    """Give a model of the Llama family's names with random bytes."""
    entries: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": (dtype, (vocab, hidden))}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        entries[at + "input_layernorm.weight"] = (dtype, (hidden,))
        entries[at + "self_attn.q_proj.weight"] = (dtype, (hidden, hidden))
        entries[at + "self_attn.k_proj.weight"] = (dtype, (hidden // 4, hidden))
        entries[at + "self_attn.v_proj.weight"] = (dtype, (hidden // 4, hidden))
        entries[at + "self_attn.o_proj.weight"] = (dtype, (hidden, hidden))
        entries[at + "mlp.gate_proj.weight"] = (dtype, (inter, hidden))
        entries[at + "mlp.up_proj.weight"] = (dtype, (inter, hidden))
        entries[at + "mlp.down_proj.weight"] = (dtype, (hidden, inter))
    entries["model.norm.weight"] = (dtype, (hidden,))
    return tensors_of(entries, seed=seed)


def header_of(tensors: Tensors) -> dict[str, Any]:
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(data)]}
        position += len(data)
    return header


def file_of(header: Mapping[str, Any] | bytes, data: bytes, *, length: int | None = None) -> bytes:
    """Put a file together from a header, sound or not, and its data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def sound_file(tensors: Tensors) -> bytes:
    return file_of(header_of(tensors), b"".join(data for _, _, data in tensors.values()))


def write_model(directory: Path, tensors: Tensors, *, shards: int = 1) -> Path:
    """Write a model directory; more than one shard come with an index."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "llama", "rms_norm_eps": 1e-5}')
    (directory / "tokenizer.json").write_text('{"tokens": ["a", "b"]}')
    if shards == 1:
        (directory / "model.safetensors").write_bytes(sound_file(tensors))
        return directory
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = {name: tensors[name] for name in names[number::shards]}
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        (directory / file).write_bytes(sound_file(part))
        weight_map |= dict.fromkeys(part, file)
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: Mapping[str, Any]) -> None:
    index = {"metadata": {"total_size": 1.5e9}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def open_streams(bundle: Bundle, key: SecretBytes, *, streams: Iterable[int] | None = None) -> dict[int, bytes]:
    """Open streams of a bundle, by the specification and without the loader; the catalog is always among them."""
    manifest = bundle.manifest
    wanted = set(range(len(manifest.geometry.streams)) if streams is None else streams) | {0}
    opened: dict[int, bytes] = {}
    catalog: Catalog | None = None
    for stream in sorted(wanted):
        plain = bytearray()
        for section in manifest.geometry.sections_of(stream):
            layout = (catalog or Catalog([], [], tiles=manifest.tiles)).layout
            descriptor = layout.descriptor_digest(section, manifest.segment_size)
            with (
                key.expose() as view,
                SectionOpener(
                    view,
                    bundle_id=manifest.bundle_id,
                    section=section,
                    segment_size=manifest.segment_size,
                    descriptor=descriptor,
                ) as opener,
            ):
                for number in range(section.segments):
                    record = bundle.table.segment(section.base + number)
                    name = manifest.files[record.file].name
                    buffer = bytearray(record.length + TAG_BYTES)
                    with (bundle.path / name).open("rb") as file:
                        file.seek(record.offset)
                        buffer[:-TAG_BYTES] = file.read(record.length)
                    buffer[-TAG_BYTES:] = record.tag
                    with memoryview(buffer) as whole, whole[:-TAG_BYTES] as plaintext:
                        opener.open_to(number, whole, plaintext)
                        plain += plaintext
        opened[stream] = bytes(plain)
        if stream == 0:
            catalog = Catalog.decode(plain, geometry=manifest.geometry)
    return opened


def catalog_of(bundle: Bundle, key: SecretBytes) -> Catalog:
    opened = open_streams(bundle, key, streams=())
    return Catalog.decode(opened[0], geometry=bundle.manifest.geometry)


def assemble(catalog: Catalog, streams: Mapping[int, bytes]) -> dict[str, bytes]:
    """Put tensors together from their tiles in some streams; bytes of no opened stream are 0xEE."""
    made: dict[str, np.ndarray[Any, Any]] = {}
    for spec in catalog.tensors:
        made[spec.name] = np.full((spec.outer, row_bytes(spec)), 0xEE, dtype=np.uint8)
    for stream in catalog.layout.streams:
        if stream.number not in streams:
            continue
        for piece in stream.pieces:
            spec = catalog.tensors[piece.tensor_index]
            tile = np.frombuffer(streams[stream.number], np.uint8, piece.length, piece.offset)
            if spec.parallel is None:
                made[spec.name][:] = tile.reshape(1, -1)
                continue
            unit = row_bytes(spec) / spec.shape[spec.parallel]
            start, stop = round(piece.tile_start * unit), round(piece.tile_stop * unit)
            made[spec.name][:, start:stop] = tile.reshape(spec.outer, stop - start)
    return {name: array.tobytes() for name, array in made.items()}


def row_bytes(spec: TensorSpec) -> int:
    return spec.nbytes // spec.outer if spec.outer else 0
