"""A model directory as Hugging Face writes it: which tensors and small files are to be sealed.

The directory comes from somewhere else, so names in it are not trusted: an index may name only plain files beside it, a
link may not lead out, and formats that run code when they are read are refused. Files are opened once and read by
descriptor; a file that changes while it is packed is refused.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from attestation.errors import reason_of
from attestation.jsonshape import measure
from provisioning.catalog import MAX_FILE_BYTES, MAX_FILES_BYTES, CatalogFile
from provisioning.errors import ModelRefused
from provisioning.stheader import MAX_TENSORS, TensorInfo, read_header

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
CONFIG_NAME: Final = "config.json"
MAX_INDEX_BYTES: Final = 64 << 20
MAX_SHARDS: Final = 4096
# How many values an index may have beside its tensors; real ones have one or two.
_METADATA_VALUES: Final = 1 << 16

# What an engine and a tokenizer need; everything else in the directory stays out, and the report says so.
CATALOG_FILES: Final = (
    CONFIG_NAME,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_WEIGHT_SUFFIX: Final = ".safetensors"


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor and the file it is in.

    Attributes:
        info: its header entry.
        shard: number of its file in ``Source.shards``.
    """

    info: TensorInfo
    shard: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One open safetensors file.

    Attributes:
        name: its name in the directory.
        descriptor: open for reading.
        state: size and time of the last write when it was opened, to notice a change.
    """

    name: str
    descriptor: int
    state: tuple[int, int]


class Source:
    """An open model directory; a context manager that closes its descriptors.

    Attributes:
        path: the directory.
        shards: the safetensors files, in the order in which they are read.
        tensors: all tensors, in the order of their data.
        files: the small files.
        left_out: names in the directory that are not sealed.
    """

    __slots__ = ("files", "left_out", "path", "shards", "tensors")

    def __init__(self, path: Path) -> None:
        """Open and check a directory.

        Raises:
            ModelRefused: ``source.*`` or ``safetensors.*``.
        """
        self.path = path
        self.shards: list[Shard] = []
        try:
            names = sorted(os.listdir(path))  # noqa: PTH208 - names as text are all that is needed
        except OSError as error:
            _refuse("source.directory", f"{path}: {reason_of(error)}", "a model directory")
        try:
            self._open(names)
        except BaseException:
            self.close()
            raise

    def _open(self, names: Sequence[str]) -> None:
        weight_map = self._read_index() if INDEX_NAME in names else None
        chosen = _choose_shards(names, weight_map)
        self.files = self._read_files(names)
        for name in chosen:
            self.shards.append(self._open_shard(name))
        self.tensors = self._read_headers(weight_map)
        used = {INDEX_NAME, *chosen, *(file.name for file in self.files)}
        self.left_out = tuple(name for name in names if name not in used)

    def _open_shard(self, name: str) -> Shard:
        descriptor = _open_inside(self.path, name)
        return Shard(name, descriptor, _state(descriptor))

    def _read_files(self, names: Sequence[str]) -> tuple[CatalogFile, ...]:
        if CONFIG_NAME not in names:
            _refuse("source.config", f"no {CONFIG_NAME} in {self.path}", f"a directory with {CONFIG_NAME}")
        files = [
            CatalogFile(name, _read_small(self.path, name, limit=MAX_FILE_BYTES))
            for name in CATALOG_FILES
            if name in names
        ]
        if (total := sum(len(file.content) for file in files)) > MAX_FILES_BYTES:
            _refuse("source.file.size", f"{total} bytes of small files", f"at most {MAX_FILES_BYTES}")
        return tuple(files)

    def _read_index(self) -> dict[str, str]:
        text = _read_small(self.path, INDEX_NAME, limit=MAX_INDEX_BYTES)
        shape = measure(text)
        if shape.commas > MAX_TENSORS + _METADATA_VALUES or shape.objects + shape.arrays > _METADATA_VALUES:
            # Before it is parsed: a parser makes gigabytes of such a text.
            _refuse("source.index", f"{INDEX_NAME} of {shape.commas} values or more", "JSON with a weight_map")
        try:
            # Some indexes have floats in their metadata, which is not used, so this is not attestation.strictjson.
            index = json.loads(text.decode("utf-8"), object_pairs_hook=_once)
        except (ValueError, RecursionError):
            index = None
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map or len(weight_map) > MAX_TENSORS:
            _refuse("source.index", f"{INDEX_NAME} of another form", "JSON with a weight_map")
        for name in weight_map.values():
            _check_index_name(name)
        return weight_map

    def _read_headers(self, weight_map: dict[str, str] | None) -> tuple[SourceTensor, ...]:
        tensors: list[SourceTensor] = []
        seen: dict[str, str] = {}
        for number, shard in enumerate(self.shards):
            for info in _read_shard_header(shard):
                if info.name in seen:
                    found = f"{json.dumps(info.name[:80])} in {seen[info.name]} and in {shard.name}"
                    _refuse("source.duplicate", found, "each tensor once")
                seen[info.name] = shard.name
                tensors.append(SourceTensor(info, number))
        if weight_map is not None and weight_map != seen:
            name = min(set(weight_map.items()) ^ set(seen.items()))[0]
            found = f"{json.dumps(name[:80])} in {seen.get(name, 'no file')}"
            _refuse("source.index.mismatch", found, f"it in {weight_map.get(name, 'no file')}, as {INDEX_NAME} says")
        if not tensors:
            _refuse("source.empty", "no tensor in any file", "a model")
        if len(tensors) > MAX_TENSORS:
            _refuse("source.count", f"{len(tensors)} tensors", f"at most {MAX_TENSORS}")
        return tuple(tensors)

    def check_unchanged(self) -> None:
        """Check that no file was written to since it was opened.

        Raises:
            ModelRefused: ``source.changed``.
        """
        for shard in self.shards:
            if _state(shard.descriptor) != shard.state:
                _refuse(
                    "source.changed", f"{shard.name}, which changed while it was read", "files that nobody writes to"
                )

    def close(self) -> None:
        """Close all files. May be called again."""
        for shard in self.shards:
            os.close(shard.descriptor)
        self.shards = []

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse(
    code: str, found: str, expected: str, hint: str = "get the model directory again from its maker"
) -> NoReturn:
    raise ModelRefused(code, found=found, expected=expected, hint=hint)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        # By counting once: to look each name up in the whole list would take days for a large index.
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        _refuse("source.duplicate", f"{json.dumps(twice[:80])} twice in {INDEX_NAME}", "each name once")
    return members


def _check_index_name(name: Any) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}", name):
        _refuse("source.index.path", f"{INDEX_NAME} names {ascii(name)[:80]}", "plain names of files beside it")
    if name.endswith(_PICKLE_SUFFIXES):
        _refuse_pickle(f"{INDEX_NAME} names {name}")
    if not name.endswith(_WEIGHT_SUFFIX):
        _refuse("source.index.path", f"{INDEX_NAME} names {name}", f"names that end in {_WEIGHT_SUFFIX}")


def _refuse_pickle(found: str) -> NoReturn:
    hint = "convert the model to safetensors on a machine that holds no secret"
    _refuse("source.pickle", found, "safetensors files; pickled ones run code when they are read", hint)


def _choose_shards(names: Sequence[str], weight_map: dict[str, str] | None) -> tuple[str, ...]:
    """Say which weight files make up the model, in order."""
    present = [name for name in names if name.endswith(_WEIGHT_SUFFIX)]
    if weight_map is not None:
        chosen = sorted(set(weight_map.values()), key=_natural)
        for name in chosen:
            if name not in names:
                _refuse("source.file.missing", f"no {name}", f"every file that {INDEX_NAME} names")
    elif SINGLE_NAME in present:
        chosen = [SINGLE_NAME]
    else:
        chosen = sorted(present, key=_natural)
    if not chosen:
        pickled = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
        if pickled:
            _refuse_pickle(f"{pickled[0]} and no safetensors file")
        _refuse("source.weights", "no safetensors file", f"{SINGLE_NAME}, or shards with {INDEX_NAME}")
    if len(chosen) > MAX_SHARDS:
        _refuse("source.count", f"{len(chosen)} files", f"at most {MAX_SHARDS}")
    return tuple(chosen)


def _natural(name: str) -> tuple[str | int, ...]:
    """Sort key that puts shard 2 before shard 10; digits and text alternate, so kinds never meet."""
    return tuple(int(part) if index % 2 else part for index, part in enumerate(re.split(r"(\d+)", name)))


def _read_shard_header(shard: Shard) -> tuple[TensorInfo, ...]:
    try:
        return read_header(shard.descriptor)
    except ModelRefused as error:
        raise ModelRefused(
            error.code, found=f"{shard.name}: {error.found}", expected=error.expected, hint=error.hint
        ) from None
    except OSError as error:
        _refuse_unreadable(shard.name, error)


def _state(descriptor: int) -> tuple[int, int]:
    state = os.fstat(descriptor)
    return state.st_size, state.st_mtime_ns


def _open_inside(directory: Path, name: str) -> int:
    """Open a regular file of the directory; a link is followed only to a place inside of it."""
    path = directory / name
    try:
        if path.is_symlink():
            target = path.resolve(strict=True)
            if not target.is_relative_to(directory.resolve()):
                hint = "copy the directory with its links followed (cp -rL), then pack the copy"
                _refuse("source.symlink", f"{name}, a link out of the directory", "files inside of it", hint)
            path = target
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno != errno.ELOOP:
            _refuse_unreadable(name, error)
        _refuse("source.symlink", f"{name}, a link in a circle", "files")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        _refuse("source.file.kind", f"{name}, which is no regular file", "a regular file")
    return descriptor


def _refuse_unreadable(name: str, error: OSError) -> NoReturn:
    _refuse("source.file.unreadable", f"{name}: {reason_of(error)}", "a readable file")


def _read_small(directory: Path, name: str, *, limit: int) -> bytes:
    with os.fdopen(_open_inside(directory, name), "rb") as stream:
        try:
            data = stream.read(limit + 1)
        except OSError as error:
            _refuse_unreadable(name, error)
    if len(data) > limit:
        _refuse("source.file.size", f"{name} of more than {limit} bytes", f"at most {limit} bytes")
    return data
