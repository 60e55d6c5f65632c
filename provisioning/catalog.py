"""The sealed catalog: what the model is. It is stream 0 of a bundle and is opened before everything else.

``u32 header length || JSON header || file bytes`` and zeros up to a whole segment (docs/spec/bundle.md). The header
lists the tensors, in the order of the layout, and the small files (configuration, tokenizer, chat template), whose
bytes follow in the same order. By the time it is parsed the bytes are authentic, and they are still held to bounds.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from attestation import strictjson
from attestation.errors import FormatError
from attestation.strictjson import Fields
from provisioning.errors import BundleDamaged
from provisioning.geometry import MAX_TILES, Geometry
from provisioning.layout import Layout, TensorSpec
from provisioning.stheader import MAX_NAME_CHARACTERS, MAX_RANK, MAX_TENSOR_BYTES, MAX_TENSORS

KIND: Final = "catalog"
VERSION: Final = 1
MAX_HEADER_BYTES: Final = 128 << 20
MAX_FILES: Final = 64
MAX_FILE_BYTES: Final = 64 << 20
MAX_FILES_BYTES: Final = 256 << 20

_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """A small file of the model.

    Attributes:
        name: a plain file name, such as ``tokenizer.json``.
        content: its bytes.
    """

    name: str
    content: bytes


class Catalog:
    """What the model is.

    Args:
        tensors: in the order of the layout.
        files: small files, each name once.
        tiles: W of the layout.

    Raises:
        BundleDamaged: ``catalog.tensor`` or ``catalog.file`` for parts that no bundle can have.
    """

    __slots__ = ("_files", "layout", "tensors")

    def __init__(self, tensors: Sequence[TensorSpec], files: Sequence[CatalogFile], *, tiles: int) -> None:
        self.tensors = tuple(tensors)
        if len({spec.name for spec in self.tensors}) != len(self.tensors):
            _refuse("catalog.tensor", "a tensor name twice", "each name once")
        self._files = {file.name: file.content for file in files}
        if len(self._files) != len(files):
            _refuse("catalog.file", "a file name twice", "each name once")
        try:
            self.layout = Layout(self.tensors, tiles)
        except ValueError as error:
            _refuse("catalog.tensor", str(error), "tensors that can be laid out")

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files."""
        return tuple(self._files)

    def file(self, name: str) -> bytes:
        """Give a file's bytes.

        Raises:
            BundleDamaged: ``catalog.file.missing`` when the model was packed without it.
        """
        content = self._files.get(name)
        if content is None:
            raise BundleDamaged(
                "catalog.file.missing",
                found=f"a model without {name}",
                expected=f"{name} in the sealed catalog",
                hint="ask the owner to pack the model again with that file in its directory",
            )
        return content

    def check_geometry(self, geometry: Geometry) -> None:
        """Check that the manifest's streams are those of this layout.

        Both are the owner's, so a difference is a fault of the packer; a loader must not read past either.

        Raises:
            BundleDamaged: ``catalog.layout``.
        """
        planned = self.layout.stream_segments(geometry.streams[0] * geometry.segment_size, geometry.segment_size)
        if planned != geometry.streams:
            _refuse("catalog.layout", f"a layout of {planned} segments", f"the manifest's {geometry.streams}")

    def encode(self) -> bytes:
        """Write the catalog, without the zeros that fill its last segment."""
        header = strictjson.dumps(
            {
                "type": KIND,
                "version": VERSION,
                "tiles": self.layout.tiles,
                "tensors": [_tensor_payload(spec) for spec in self.tensors],
                "files": [{"name": name, "size": len(content)} for name, content in self._files.items()],
            }
        )
        return b"".join((_LENGTH.pack(len(header)), header, *self._files.values()))

    @classmethod
    def decode(cls, plaintext: bytes | bytearray | memoryview, *, geometry: Geometry) -> Catalog:
        """Read a catalog.

        Args:
            plaintext: the whole of stream 0, opened; it is copied from, and stays the caller's to wipe.
            geometry: of the signed manifest.

        Raises:
            BundleDamaged: ``catalog.*``.
        """
        with memoryview(plaintext) as view:
            if len(view) != geometry.streams[0] * geometry.segment_size:
                raise ValueError(f"a catalog stream of {len(view)} bytes")
            (length,) = _LENGTH.unpack_from(view)
            position = _LENGTH.size + length
            if length > MAX_HEADER_BYTES or position > len(view):
                _refuse("catalog.header", f"a header of {length} bytes", f"at most {min(MAX_HEADER_BYTES, len(view))}")
            tensors, sizes = _read_header(bytes(view[_LENGTH.size : position]), tiles=geometry.tiles)
            if position + sum(size for _, size in sizes) > len(view):
                _refuse("catalog.file", "files beyond the end", f"files within {len(view)} bytes")
            files: list[CatalogFile] = []
            for name, size in sizes:
                files.append(CatalogFile(name, bytes(view[position : position + size])))
                position += size
            if len(view) - position >= geometry.segment_size or any(view[position:]):
                _refuse("catalog.padding", "other bytes than zeros to the end of the segment", "zeros")
        catalog = cls(tensors, files, tiles=geometry.tiles)
        catalog.check_geometry(geometry)
        return catalog


def _refuse(code: str, found: str, expected: str) -> NoReturn:
    raise BundleDamaged(
        code, found=found, expected=expected, hint="ask the owner to pack the model again; the bundle is authentic"
    ) from None


def _tensor_payload(spec: TensorSpec) -> dict[str, Any]:
    members: dict[str, Any] = {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}
    if spec.parallel is not None:
        members["parallel"] = spec.parallel
    if spec.block > 1:
        members["block"] = spec.block
    if spec.column is not None:
        members["column"] = spec.column
    return members


def _read_header(text: bytes, *, tiles: int) -> tuple[list[TensorSpec], list[tuple[str, int]]]:
    try:
        fields = Fields(strictjson.loads(text, limit=MAX_HEADER_BYTES), KIND)
        if fields.text("type", limit=64) != KIND or fields.integer("version") != VERSION:
            _refuse("catalog.version", "a catalog of another version", f"version {VERSION}")
        if fields.integer("tiles") != tiles:
            _refuse("catalog.layout", "another number of tiles than in the manifest", str(tiles))
        tensors = [_read_tensor(item) for item in fields.mappings("tensors", limit=MAX_TENSORS)]
        files = [_read_file(item) for item in fields.mappings("files", limit=MAX_FILES)]
        fields.end()
    except FormatError as error:
        _refuse("catalog.header", error.found, error.expected)
    return tensors, files


def _read_tensor(members: dict[str, Any]) -> TensorSpec:
    fields = Fields(members, "catalog.tensors")
    shape = fields.items("shape", limit=MAX_RANK)
    if not all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= MAX_TENSOR_BYTES for size in shape
    ):
        _refuse("catalog.tensor", "a shape of other things than whole numbers", "sizes in elements")
    spec = TensorSpec(
        fields.text("name", limit=MAX_NAME_CHARACTERS),
        fields.text("dtype", limit=32),
        tuple(shape),
        fields.integer("parallel", high=MAX_RANK - 1) if fields.has("parallel") else None,
        # Blocks of one element are not written, so that a catalog has one form.
        fields.integer("block", low=2, high=MAX_TENSOR_BYTES) if fields.has("block") else 1,
        fields.integer("column", high=MAX_TILES - 1) if fields.has("column") else None,
    )
    fields.end()
    return spec


def _read_file(members: dict[str, Any]) -> tuple[str, int]:
    fields = Fields(members, "catalog.files")
    name = fields.text("name", limit=128)
    size = fields.integer("size", high=MAX_FILE_BYTES)
    fields.end()
    return name, size
