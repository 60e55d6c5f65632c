"""What a rank does before its first segment, for a model of 700 GB, on metadata alone: no byte of a weight is made.

``python -m benchmarks.scaling.setup`` builds the table and the catalog of a bundle with the shapes of DeepSeek V3's
experts (89,088 tensors, 654 GB) and prints how much of a core each part takes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from appliance.runs import plan_runs
from benchmarks.scaling.inputs import MIB
from provisioning.catalog import Catalog
from provisioning.geometry import FIRST_COLUMN, Geometry, segment_count
from provisioning.layout import Layout, TensorSpec
from provisioning.table import Table, digest_blocks, encode

LAYERS, EXPERTS, TILES = 58, 256, 8
MATRICES = {"gate_proj": (2048, 7168), "up_proj": (2048, 7168), "down_proj": (7168, 2048)}
SECTION = 16 << 30


def specs() -> Iterator[TensorSpec]:
    """Give every expert's matrices with their block scales, each expert in one column."""
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, (rows, columns) in MATRICES.items():
                name = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                column = expert * TILES // EXPERTS
                yield TensorSpec(name, "F8_E4M3", (rows, columns), None, 1, column)
                yield TensorSpec(f"{name}_scale_inv", "F32", (rows // 128, columns // 128), None, 1, column)


def main() -> None:
    catalog = Catalog(list(specs()), [], tiles=TILES)
    encoded = catalog.encode()
    sealed = encoded + bytes(-len(encoded) % MIB)
    streams = tuple(segment_count(stream.length, MIB) for stream in catalog.layout.streams[1:])
    geometry = Geometry(
        segment_size=MIB, section_bytes=SECTION, file_bytes=SECTION, streams=(len(sealed) // MIB, *streams)
    )
    digests = [bytes(32)] * sum(digest_blocks(file) for file in geometry.files)
    data = encode(geometry, bundle_id=bytes(16), tags=bytes(16 * geometry.segments), digests=digests)
    wanted = (1, FIRST_COLUMN)
    print(f"{geometry.segments} segments, {geometry.data_bytes / 1e9:.0f} GB")

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begin = time.process_time()
        result = work()
        print(f"{name:32}{time.process_time() - begin:6.2f} s")
        return result

    begin = time.process_time()
    timed("digest of the table", lambda: hashlib.sha384(data).digest())
    timed("table", lambda: Table(data, geometry, bundle_id=bytes(16)))
    layout: Layout = timed("catalog", lambda: Catalog.decode(sealed, geometry=geometry)).layout
    sections = [section for section in geometry.sections if section.stream in wanted]
    timed("digests of the rank's sections", lambda: [layout.descriptor_digest(one, MIB) for one in sections])
    timed("plan of the rank's reads", lambda: list(plan_runs(geometry, wanted, lambda _: 32 * MIB)))
    print(f"{'together':32}{time.process_time() - begin:6.2f} s")


if __name__ == "__main__":
    main()
