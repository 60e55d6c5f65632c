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
from attestation.jsonshape import measure
from attestation.strictjson import Fields
from provisioning.collector import resting
from provisioning.errors import BundleDamaged
from provisioning.geometry import MAX_TILES, Geometry
from provisioning.layout import Layout, TensorSpec
from provisioning.stheader import (
    DTYPE_BITS,
    MAX_NAME_CHARACTERS,
    MAX_RANK,
    MAX_TENSOR_BYTES,
    MAX_TENSORS,
    whole_numbers,
)

KIND: Final = "catalog"
VERSION: Final = 1
MAX_HEADER_BYTES: Final = 128 << 20
MAX_FILES: Final = 64
MAX_FILE_BYTES: Final = 64 << 20
MAX_FILES_BYTES: Final = 256 << 20

_LENGTH: Final = struct.Struct("<I")
# What stream 0 can hold at most, before zeros fill its last segment.
MAX_BYTES: Final = _LENGTH.size + MAX_HEADER_BYTES + MAX_FILES_BYTES

# How a tensor lies: common, cut into tiles, cut into tiles by blocks, or whole in one column.
_MEMBERS: Final = frozenset({"name", "dtype", "shape"})
_FORMS: Final = tuple(_MEMBERS | more for more in (set(), {"parallel"}, {"parallel", "block"}, {"column"}))
# Most commas of an entry: one before it, four between its members, seven in its shape.
_COMMAS_EACH: Final = 12


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
        for name in self._files:
            # No reader writes these files anywhere; a name that is no path stays none if one ever does.
            if "/" in name or name in {"", ".", ".."} or not name.isprintable():
                _refuse("catalog.file", f"a file named {name[:40]!a}", "a plain name")
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
            with resting():
                tensors, sizes = _read_header(bytes(view[_LENGTH.size : position]), tiles=geometry.tiles)
            if position + sum(size for _, size in sizes) > len(view):
                _refuse("catalog.file", "files beyond the end", f"files within {len(view)} bytes")
            files: list[CatalogFile] = []
            for name, size in sizes:
                files.append(CatalogFile(name, bytes(view[position : position + size])))
                position += size
            if len(view) - position >= geometry.segment_size or bytes(view[position:]).strip(b"\0"):
                _refuse("catalog.padding", "other bytes than zeros to the end of the segment", "zeros")
        with resting():
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
    shape = measure(text)
    if shape.objects > 1 + MAX_TENSORS + MAX_FILES or shape.commas > shape.objects * _COMMAS_EACH:
        found = f"{shape.objects} objects and {shape.commas} commas"
        _refuse("catalog.header", found, f"at most {MAX_TENSORS} tensors and {MAX_FILES} files")
    try:
        members = strictjson.loads(text, limit=MAX_HEADER_BYTES)
        strictjson.check_form(members, text)
        fields = Fields(members, KIND)
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
    # By hand, not by Fields: this runs half a million times for the largest models.
    if members.keys() not in _FORMS:
        _refuse("catalog.header", "a tensor of other members", "name, dtype, shape and how it is cut")
    name, dtype, shape = members["name"], members["dtype"], whole_numbers(members["shape"])
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        _refuse("catalog.tensor", "a tensor's name of another form", f"1 to {MAX_NAME_CHARACTERS} printable characters")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse("catalog.tensor", f"{name[:80]!a} of an unknown type", "a type of the format")
    if shape is None or len(shape) > MAX_RANK:
        _refuse("catalog.tensor", f"the shape of {name[:80]!a}", f"at most {MAX_RANK} sizes in elements")
    parallel = _number(members, "parallel", high=MAX_RANK - 1)
    # A block of one element is not written, so that there is one text for each tensor.
    block = _number(members, "block", low=2, high=MAX_TENSOR_BYTES)
    return TensorSpec(name, dtype, shape, parallel, block or 1, _number(members, "column", high=MAX_TILES - 1))


def _number(members: dict[str, Any], name: str, *, low: int = 0, high: int) -> int | None:
    if name not in members:
        return None
    value = members[name]
    if type(value) is not int or not low <= value <= high:
        _refuse("catalog.tensor", f"{name} of {members['name'][:80]!a}", f"{low} to {high}")
    return value


def _read_file(members: dict[str, Any]) -> tuple[str, int]:
    fields = Fields(members, "catalog.files")
    name = fields.text("name", limit=128)
    size = fields.integer("size", high=MAX_FILE_BYTES)
    fields.end()
    return name, size
