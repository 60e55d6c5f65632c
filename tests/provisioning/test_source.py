"""A model directory: what is taken, what is left out, and the tricks that are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from provisioning.errors import ModelRefused
from provisioning.source import Source
from tests.sim.modelfiles import Tensors, file_of, sound_file, tensors_of, write_index, write_model

TENSORS = tensors_of({"a.q_proj.weight": ("BF16", (8, 4)), "b": ("F32", (3,)), "c": ("U8", (5,))})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", TENSORS)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", TENSORS, shards=2)


def refusal(path: Path) -> ModelRefused:
    with pytest.raises(ModelRefused) as refused, Source(path):
        pass
    assert refused.value.exit_status == 2
    return refused.value


def shard(directory: Path, number: int, of: int = 2) -> Path:
    return directory / f"model-{number:05d}-of-{of:05d}.safetensors"


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def read_all(source: Source) -> Tensors:
    return {
        item.info.name: (
            item.info.dtype,
            item.info.shape,
            os.pread(source.shards[item.shard].descriptor, item.info.stop - item.info.start, item.info.start),
        )
        for item in source.tensors
    }


def test_reads_a_single_file(model: Path) -> None:
    with Source(model) as source:
        assert [part.name for part in source.shards] == ["model.safetensors"]
        assert [file.name for file in source.files] == ["config.json", "tokenizer.json"]
        assert read_all(source) == TENSORS
        assert source.left_out == ()


def test_reads_shards_through_their_index(sharded: Path) -> None:
    with Source(sharded) as source:
        assert [part.name for part in source.shards] == [shard(sharded, 1).name, shard(sharded, 2).name]
        assert read_all(source) == TENSORS
        assert source.left_out == ()


def test_reads_shards_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with Source(sharded) as source:
        assert read_all(source) == TENSORS


def test_reads_shard_two_before_shard_ten(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", {})
    (directory / "model.safetensors").unlink()
    for number in (10, 2, 1):
        part = tensors_of({f"t{number}": ("U8", (1,))})
        (directory / f"part-{number}.safetensors").write_bytes(sound_file(part))
    with Source(directory) as source:
        assert [item.info.name for item in source.tensors] == ["t1", "t2", "t10"]


def test_the_index_decides_when_there_are_other_weight_files(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").write_bytes(sound_file(TENSORS))
    with Source(sharded) as source:
        assert read_all(source) == TENSORS
        assert source.left_out == ("consolidated.safetensors",)


def test_names_what_it_leaves_out(model: Path) -> None:
    (model / "README.md").write_text("read me")
    (model / "pytorch_model.bin").write_bytes(b"\x80\x02")
    (model / "original").mkdir()
    with Source(model) as source:
        assert source.left_out == ("README.md", "original", "pytorch_model.bin")


def test_follows_a_link_inside_of_the_directory(model: Path) -> None:
    (model / "model.safetensors").rename(model / "blob")
    (model / "model.safetensors").symlink_to("blob")
    with Source(model) as source:
        assert read_all(source) == TENSORS


def test_closes_every_file_again(sharded: Path) -> None:
    before = descriptors()
    source = Source(sharded)
    source.close()
    source.close()
    shard(sharded, 2).write_bytes(b"")
    refusal(sharded)
    assert descriptors() == before


def test_notices_a_file_that_is_written_to(model: Path) -> None:
    with Source(model) as source:
        source.check_unchanged()
        os.utime(model / "model.safetensors", ns=(1, 1))
        with pytest.raises(ModelRefused) as refused:
            source.check_unchanged()
    assert refused.value.code == "source.changed"


def test_refuses_what_is_no_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nothing").code == "source.directory"


def test_refuses_a_directory_without_configuration(model: Path) -> None:
    (model / "config.json").unlink()
    assert refusal(model).code == "source.config"


def test_refuses_a_directory_without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert refusal(model).code == "source.weights"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"])
def test_refuses_pickled_weights(model: Path, name: str) -> None:
    (model / "model.safetensors").rename(model / name)
    assert refusal(model).code == "source.pickle"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_refuses_an_index_that_names_pickled_weights(sharded: Path, name: str) -> None:
    write_index(sharded, dict.fromkeys(TENSORS, name))
    assert refusal(sharded).code == "source.pickle"


def test_refuses_a_pickle_that_is_named_safetensors(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\x80\x04\x95" + bytes(range(200)))
    assert refusal(model).code == "safetensors.header.size"


TRICKS = [
    "../model.safetensors",
    "/etc/passwd.safetensors",
    "sub/model.safetensors",
    "..",
    "",
    ".hidden.safetensors",
    "a\\b.safetensors",
    "a\0b.safetensors",
    "a b.safetensors",
    "model.gguf",
    "model.safetensors\n",
    "x" * 250 + ".safetensors",
    7,
    None,
    ["model.safetensors"],
]


@pytest.mark.parametrize("name", TRICKS, ids=repr)
def test_refuses_path_tricks_in_an_index(sharded: Path, name: Any) -> None:
    write_index(sharded, dict.fromkeys(TENSORS, name))
    assert refusal(sharded).code == "source.index.path"


INDEXES = {
    "no JSON": b"{",
    "not UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "no map": b"{}",
    "an empty map": b'{"weight_map": {}}',
    "a map that is text": b'{"weight_map": "x"}',
    "deep nesting": b'{"weight_map": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of many digits": b'{"weight_map": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("fault", INDEXES)
def test_refuses_an_index_of_another_form(sharded: Path, fault: str) -> None:
    (sharded / "model.safetensors.index.json").write_bytes(INDEXES[fault])
    assert refusal(sharded).code == "source.index"


def test_refuses_a_name_twice_in_the_index(sharded: Path) -> None:
    name = json.dumps(shard(sharded, 1).name)
    (sharded / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"b": {name}, "b": {name}}}}}')
    assert refusal(sharded).code == "source.duplicate"


def test_refuses_an_index_that_names_a_missing_file(sharded: Path) -> None:
    shard(sharded, 2).unlink()
    assert refusal(sharded).code == "source.file.missing"


def test_refuses_a_tensor_in_two_shards(sharded: Path) -> None:
    for path in (shard(sharded, 1), shard(sharded, 2)):
        path.write_bytes(sound_file(TENSORS))
    error = refusal(sharded)
    assert error.code == "source.duplicate"
    assert shard(sharded, 1).name in error.found


@pytest.mark.parametrize("change", ["missing", "more", "elsewhere"])
def test_refuses_an_index_that_does_not_fit_the_shards(sharded: Path, change: str) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    if change == "missing":
        del index["c"]
    elif change == "more":
        index["z"] = index["b"]
    else:
        index["a.q_proj.weight"], index["b"] = index["b"], index["a.q_proj.weight"]
    write_index(sharded, index)
    assert refusal(sharded).code == "source.index.mismatch"


def test_refuses_a_link_out_of_the_directory(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").rename(tmp_path / "blob")
    (model / "model.safetensors").symlink_to(tmp_path / "blob")
    assert refusal(model).code == "source.symlink"


def test_refuses_a_small_file_that_is_a_link_out_of_the_directory(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to("/etc/hostname")
    assert refusal(model).code == "source.symlink"


def test_refuses_a_link_in_a_circle(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to("tokenizer.json")
    assert refusal(model).code == "source.symlink"


def test_refuses_a_link_to_nothing(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to("gone")
    assert refusal(model).code == "source.file.unreadable"


def test_refuses_a_pipe_in_place_of_a_file_and_does_not_wait(model: Path) -> None:
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    assert refusal(model).code == "source.file.kind"


def test_refuses_a_directory_in_place_of_a_file(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").mkdir()
    assert refusal(model).code == "source.file.kind"


def test_refuses_a_small_file_beyond_the_bound(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioning.source.MAX_FILE_BYTES", 30)
    assert refusal(model).code == "source.file.size"


def test_refuses_small_files_beyond_the_bound_together(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioning.source.MAX_FILES_BYTES", 60)
    assert refusal(model).code == "source.file.size"


def test_names_the_shard_whose_header_is_refused(sharded: Path) -> None:
    shard(sharded, 2).write_bytes(file_of(b"{}", b"x"))
    error = refusal(sharded)
    assert error.code == "safetensors.trailing"
    assert error.found.startswith(shard(sharded, 2).name)


def test_refuses_a_model_without_tensors(model: Path) -> None:
    (model / "model.safetensors").write_bytes(file_of(b"{}", b""))
    assert refusal(model).code == "source.empty"


def test_refuses_too_many_tensors_over_all_shards(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    monkeypatch.setattr("provisioning.source.MAX_TENSORS", 2)
    assert refusal(sharded).code == "source.count"


def test_refuses_too_many_shards(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioning.source.MAX_SHARDS", 1)
    assert refusal(sharded).code == "source.count"
