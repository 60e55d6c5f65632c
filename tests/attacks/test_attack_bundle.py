"""Attacks 16 to 18: a supplier's model directory and a courier's bundle."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from provisioning.errors import ModelRefused
from provisioning.source import INDEX_NAME, Source


def test_16_a_large_index_with_a_name_twice_is_refused_at_once(tmp_path: Path) -> None:
    # Looking for the name took time by the square of the index: days for one that is within the limit on its size.
    (tmp_path / "config.json").write_text("{}")
    names = [f'"{number}":"a.safetensors"' for number in [*range(200_000), 199_999]]
    (tmp_path / INDEX_NAME).write_text('{"weight_map":{' + ",".join(names) + "}}")
    seen: list[str] = []

    def read() -> None:
        try:
            Source(tmp_path)
        except ModelRefused as error:
            seen.append(error.code)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(20)
    assert seen == ["source.duplicate"]


@pytest.mark.parametrize("kind", ["fifo", "device", "directory"])
def test_17_a_weight_file_that_is_no_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    place = tmp_path / "model.safetensors"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        place.mkdir()
    with pytest.raises(ModelRefused) as refused:
        Source(tmp_path)
    assert refused.value.code == ("source.symlink" if kind == "device" else "source.file.kind")


def test_18_offsets_at_the_edge_of_integers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    most = 2**63 - 1
    header = json.dumps({"a": {"dtype": "F32", "shape": [0], "data_offsets": [most, most]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelRefused) as refused:
        Source(tmp_path)
    assert refused.value.code == "safetensors.range"
