"""The lock files: complete, pinned by hash, of one mind, and without what must not reach a machine."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

_NAMES = ["bench", "build", "demo", "dev", "fuzz", "node", "owner", "pip", "torch", "torch-cuda"]
_PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==([^ ;]+)(?: ; ([^\\]+?))? \\$")


def _pins(root: Path, name: str) -> dict[tuple[str, str], str]:
    """Give {(package, marker): version} of a lock file."""
    text = (root / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    matches = [_PIN.match(line) for line in text.splitlines()]
    return {(match[1], match[3] or ""): match[2] for match in matches if match}


def _packages(root: Path, name: str) -> set[str]:
    return {package for package, _ in _pins(root, name)}


def _canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[ <>=!~;\[]", requirement, maxsplit=1)[0]).lower()


def _project(root: Path) -> dict[str, list[str]]:
    with (root / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    return {"base": project["dependencies"], **project["optional-dependencies"]}


@pytest.mark.parametrize("name", _NAMES)
def test_every_line_is_a_pin_with_hashes(name: str, root: Path) -> None:
    lines = (root / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    requirements = [line for line in lines if line and not line.lstrip().startswith("#")]
    assert requirements
    for before, line in zip(["", *requirements], requirements, strict=False):
        if line.startswith("    --hash=sha256:"):
            assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line)
            assert before.endswith("\\")
        else:
            assert _PIN.match(line), line
            assert not before.endswith("\\"), f"{before} has no hash"


def test_lists_agree_on_versions(root: Path) -> None:
    dev = _pins(root, "dev")
    for name in ["owner", "node", "demo", "build"]:
        for key, version in _pins(root, name).items():
            assert dev[key] == version, f"{key} in {name}.txt"


def test_bench_list_takes_from_the_others_what_they_have(root: Path) -> None:
    """Else the comparison would run our loader with other libraries than the appliance does."""
    dev, bench = _pins(root, "dev"), _pins(root, "bench")
    assert {key: bench[key] for key in dev.keys() & bench.keys()} == {
        key: dev[key] for key in dev.keys() & bench.keys()
    }
    assert _packages(root, "node") <= _packages(root, "bench")


def test_loaders_of_others_reach_no_machine(root: Path) -> None:
    with (root / "pyproject.toml").open("rb") as file:
        others = {_canonical(requirement) for requirement in tomllib.load(file)["dependency-groups"]["bench"]}
    assert others <= _packages(root, "bench")
    for name in ["owner", "node", "demo", "dev"]:
        assert not others & _packages(root, name), name


def test_fuzz_list_is_the_owners_and_the_fuzzer(root: Path) -> None:
    fuzz = _pins(root, "fuzz")
    assert {key: version for key, version in fuzz.items() if key[0] != "atheris"} == _pins(root, "owner")
    assert "atheris" in _packages(root, "fuzz")


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("owner", ["base"]),
        ("node", ["base", "node"]),
        ("demo", ["base", "node", "demo"]),
        ("dev", ["base", "node", "demo", "test"]),
    ],
)
def test_list_covers_the_declared_dependencies(name: str, extras: list[str], root: Path) -> None:
    project = _project(root)
    wanted = {_canonical(requirement) for extra in extras for requirement in project[extra]} - {"torch"}
    assert wanted <= _packages(root, name)


def test_torch_is_in_its_own_list_and_within_the_declared_range(root: Path) -> None:
    assert _pins(root, "torch") == {("torch", ""): "2.13.0"}
    assert "torch>=2.11,<3" in _project(root)["node"]


def test_owner_list_is_small(root: Path) -> None:
    assert _packages(root, "owner") == {"cffi", "click", "cryptography", "pycparser", "safetensors"}


def test_node_list_has_no_client_of_a_model_hub_and_no_test_tool(root: Path) -> None:
    unwanted = {
        "huggingface-hub",
        "requests",
        "httpx2",
        "openai",
        "gguf",
        "transformers",
        "pytest",
        "uvloop",
        "httptools",
    }
    assert not unwanted & _packages(root, "node")


def test_cuda_list_adds_only_cuda_and_triton(root: Path) -> None:
    assert all(re.match(r"(nvidia-|cuda-|triton$)", package) for package in _packages(root, "torch-cuda"))


def test_every_dependency_is_justified(root: Path) -> None:
    record = (root / "docs/adr/0002-dependencies.md").read_text(encoding="utf-8")
    sections = " ".join(re.findall(r"^### (.*)$", record, flags=re.MULTILINE))
    project = _project(root)
    for requirement in project["base"] + project["node"] + project["demo"]:
        assert re.search(rf"\b{_canonical(requirement)}\b", sections), requirement


def test_api_libraries_import_without_the_client_of_a_model_hub() -> None:
    """node.txt leaves out huggingface-hub, which tokenizers declares; importing it fails there, as it does here."""
    program = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"huggingface_hub", "requests", "httpx2", "transformers"}:
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
import h11, jinja2, jinja2.sandbox, starlette.applications, uvicorn
tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
assert tokenizer.encode("b").ids == [1]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
