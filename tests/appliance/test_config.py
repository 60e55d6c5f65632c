from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from appliance import config
from appliance.errors import ConfigError

MINIMAL = """
[node]
name = "node-1"
[model]
bundle = "bundle"
owner_key = "/media/owner.pub.json"
[platform]
kind = "simulated"
lab_dir = "lab"
[api]
keys_file = "keys"
"""


def parse(text: str) -> config.Config:
    return config.parse(text.encode(), base=Path("/etc/lethe"))


def test_a_minimal_file_takes_the_documented_defaults() -> None:
    read = parse(MINIMAL)
    assert read.api.host == "127.0.0.1"
    assert read.devices.slots == ("cpu",)
    assert read.digest == hashlib.sha384(MINIMAL.encode()).digest()


def test_relative_paths_are_relative_to_the_file() -> None:
    read = parse(MINIMAL)
    assert read.model.bundle == Path("/etc/lethe/bundle")
    assert read.model.owner_key == Path("/media/owner.pub.json")


@pytest.mark.parametrize(
    ("text", "code", "in_message"),
    [
        pytest.param("a = = 1\n", "config.syntax", "line 1", id="no toml"),
        pytest.param(MINIMAL + "[nodes]\n", "config.unknown", "did you mean node", id="unknown section"),
        pytest.param(MINIMAL + "prot = 1\n", "config.unknown", "did you mean api.port", id="unknown key"),
        pytest.param(MINIMAL.replace('name = "node-1"', ""), "config.missing", "node.name", id="missing"),
        pytest.param(MINIMAL + 'port = "1"\n', "config.type", "a whole number", id="type"),
        pytest.param(MINIMAL + "port = true\n", "config.type", "a whole number", id="bool for int"),
        pytest.param(MINIMAL + "port = 70000\n", "config.range", "0 to 65535", id="range"),
        pytest.param(MINIMAL.replace('"simulated"', '"sev"'), "config.choice", "simulated", id="choice"),
        pytest.param(MINIMAL.replace("node-1", "Node 1"), "config.node.name", "hyphens", id="node name"),
        pytest.param("node = 1\n" + MINIMAL.replace("[node]", "[x]"), "config.unknown", "x", id="table as value"),
        pytest.param(MINIMAL + '[devices]\nslots = ["cpu", "cpu"]\n', "config.devices.slots", "one device", id="slots"),
        pytest.param(MINIMAL + '[loading]\nopen_on = "gpu"\n', "config.choice", "host or device", id="open_on"),
        pytest.param(
            MINIMAL + '[loading]\nopen_on = "device"\n',
            "config.loading.open_on",
            "the memory of that device is the host's",
            id="opening on a cpu",
        ),
    ],
)
def test_refuses_and_names_the_key(text: str, code: str, in_message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(text)
    error = refusal.value
    assert error.code == code
    assert error.exit_status == 78
    assert in_message in f"{error} {error.hint}"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.file.*absent\.toml"):
        config.load(tmp_path / "absent.toml")


def test_opening_on_the_device_is_taken_with_a_gpu() -> None:
    read = parse(MINIMAL + '[devices]\nslots = ["cuda:0"]\n[loading]\nopen_on = "device"\n')
    assert read.loading.open_on == "device"
    assert parse(MINIMAL).loading.open_on == "host"
