"""Feed hostile inputs to the parsers, each in a process of its own with little memory; prints what became of each.

Run as a program. A case is an input and the parser that takes it; it may use twelve times the input's size and 64 MiB,
since a text with one wide letter takes four bytes for each of its letters.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from attestation import strictjson
from attestation.errors import LetheError
from provisioning.catalog import Catalog
from provisioning.geometry import MAX_SECTION_BYTES, MAX_SEGMENTS, MIN_SEGMENT, Geometry
from provisioning.manifest import Manifest
from provisioning.source import INDEX_NAME, Source
from provisioning.stheader import MAX_HEADER_BYTES, MAX_TENSORS, read_header
from provisioning.table import Table

_ROOM = 64 << 20
_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Case:
    """One hostile input.

    Attributes:
        feed: the parser.
        make: makes the input.
        code: of the refusal.
    """

    feed: Callable[[bytes], object]
    make: Callable[[], bytes]
    code: str


def _file(data: bytes, *, size: int | None = None) -> object:
    descriptor = os.memfd_create("hostile")
    os.write(descriptor, data)
    if size is not None:
        os.truncate(descriptor, size)
    return read_header(descriptor)


def _header(text: bytes) -> object:
    """Give a file with this header to the reader of safetensors."""
    return _file(len(text).to_bytes(8, "little") + text)


def _length(data: bytes) -> object:
    """Give a sparse file of a terabyte with this length of a header."""
    return _file(data, size=1 << 40)


def _catalog(text: bytes) -> object:
    plain = len(text).to_bytes(4, "little") + text
    plain += bytes(-len(plain) % MIN_SEGMENT)
    streams = (len(plain) // MIN_SEGMENT, 0, 0)
    geometry = Geometry(
        segment_size=MIN_SEGMENT, section_bytes=MAX_SECTION_BYTES, file_bytes=MAX_SECTION_BYTES, streams=streams
    )
    return Catalog.decode(plain, geometry=geometry)


def _table(data: bytes) -> object:
    sizes = {"segment_size": MIN_SEGMENT, "section_bytes": 64 * MIN_SEGMENT, "file_bytes": 64 * MIN_SEGMENT}
    geometry = Geometry(**sizes, streams=(1, MAX_SEGMENTS - 64, 0))
    return Table(data, geometry, bundle_id=bytes(16))


def _index(text: bytes) -> object:
    """Give a model directory with this index to the packer."""
    directory = Path(f"{sys.argv[1]}/{os.getpid()}")
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / INDEX_NAME).write_bytes(text)
    return Source(directory)


def _json(text: bytes) -> object:
    return strictjson.loads(text, limit=len(text))


def _filled(text: bytes, *, before: bytes = b"{", size: int = MAX_HEADER_BYTES - 16) -> bytes:
    return before + text * ((size - len(before)) // len(text))


_TENSOR = b'"%07d":{"dtype":"U8","shape":[],"data_offsets":[0,1]},'


def _many(count: int, entry: bytes) -> bytes:
    return b"{" + b"".join(entry % number for number in range(count))[:-1] + b"}"


CASES: dict[str, Case] = {
    "header of 2^63-1 bytes": Case(_length, lambda: (2**63 - 1).to_bytes(8, "little"), "safetensors.header.size"),
    "header of 2^64-1 bytes": Case(_length, lambda: b"\xff" * 8, "safetensors.header.size"),
    "header of zeros": Case(_length, lambda: MAX_HEADER_BYTES.to_bytes(8, "little"), "safetensors.json"),
    "a million tensors": Case(_header, lambda: _many(1_000_000, b'"%07d":{},'), "safetensors.count"),
    "one tensor too many": Case(_header, lambda: _many(MAX_TENSORS + 2, _TENSOR), "safetensors.count"),
    "ten million arrays": Case(_header, lambda: _filled(b"[],", before=b'{"a":['), "safetensors.json"),
    "ten million members": Case(_header, lambda: _filled(b'"":0,'), "safetensors.json"),
    "ten million numbers": Case(_header, lambda: _filled(b"0,", before=b'{"a":['), "safetensors.json"),
    "deep": Case(_header, lambda: _filled(b'{"":'), "safetensors.count"),
    "deep and closed": Case(_header, lambda: b'{"a":' + b"[" * 9_000_000 + b"]" * 9_000_000 + b"}", "safetensors.json"),
    "quotes": Case(_header, lambda: _filled(b'"'), "safetensors.json"),
    "quotes with brackets": Case(_header, lambda: _filled(b'"["'), "safetensors.json"),
    "backslashes": Case(_header, lambda: _filled(b"\\", before=b'{"'), "safetensors.json"),
    "one long name": Case(_header, lambda: _filled(b"a", before=b'{"') + b'":{}}', "safetensors.name"),
    "one long number": Case(_header, lambda: _filled(b"9", before=b'{"a":') + b"}", "safetensors.json"),
    "long metadata of one wide letter": Case(
        _header,
        lambda: _filled(b"a", before='{"__metadata__":{"a":"\U0001f600'.encode()) + b'"},"b":1}',
        "safetensors.member",
    ),
    "catalog of a million tensors": Case(
        _catalog, lambda: b'{"tensors":[' + b"{}," * 1_000_000 + b"{}]}", "catalog.header"
    ),
    "catalog of ten million numbers": Case(_catalog, lambda: _filled(b"0,", before=b'{"a":['), "catalog.header"),
    "catalog of one deep value": Case(_catalog, lambda: _filled(b"[", before=b'{"a":'), "catalog.header"),
    "table of another size": Case(_table, lambda: b"LETHEIDX" * 8, "table.size"),
    "manifest beyond the bound": Case(Manifest.parse, lambda: _filled(b'"":0,'), "json.size"),
    "object of many members": Case(_json, lambda: _filled(b'"":0,', size=1 << 20), "json.syntax"),
    "index of ten million members": Case(_index, lambda: _filled(b'"":0,', size=64 << 20), "source.index"),
    "index of ten million arrays": Case(_index, lambda: _filled(b"[],", before=b'{"a":['), "source.index"),
    "deep index": Case(_index, lambda: _filled(b'{"":'), "source.index"),
}


def _pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0])


def _run(case: Case) -> str:
    """Feed one case in a child; gives the code, or what happened instead."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            data = case.make()
            room = _pages() * resource.getpagesize() + 12 * len(data) + _ROOM
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
            resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
            case.feed(data)
            said = "accepted"
        except LetheError as error:
            said = error.code
        except Exception as error:  # noqa: BLE001 - whatever it was, its name is the result
            said = type(error).__name__
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        said = stream.read().decode()
    _, status = os.waitpid(child, 0)
    return said or f"ended with {status}"


if __name__ == "__main__":
    print(json.dumps({name: _run(case) for name, case in CASES.items()}))
