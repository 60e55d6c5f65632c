"""Triton compiles the kernel for a GPU that is not here; eight blocks stay in registers, and no file is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[3]

_PROGRAM = """
import sys, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from appliance.devicecipher import kernel

source = ASTSource(
    fn=kernel.counter_mode,
    signature={"data": "*i32", "planes": "*i32", "first": "i32", "counter": "i32", "blocks": "i32", "programs": "i32",
               "width": "constexpr", "rounds": "constexpr"},
    constexprs={"width": 128, "rounds": 14},
)
with kernel.compiling():
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    if not any(Path(triton.knobs.cache.dir).iterdir()):
        sys.exit("it was compiled into another directory")
Path(sys.argv[1]).write_bytes(compiled.asm["cubin"])
"""


def test_kernel_compiles_for_hopper_without_spilling(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this build of triton has no compiler for NVIDIA GPUs")
    home = tmp_path / "home"
    home.mkdir()
    environment = {name: text for name, text in os.environ.items() if not name.startswith("TRITON")}
    environment["HOME"] = str(home)
    subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "kernel.cubin")],
        check=True,
        env=environment,
        cwd=_ROOT,
        timeout=280,
    )
    usage = subprocess.run(
        [tool, "-res-usage", tmp_path / "kernel.cubin"], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    assert 32 < registers <= 128
    assert stack == local == 0
    # Nothing is left of what was compiled, neither in the usual directory nor in the one made for it.
    assert list(home.iterdir()) == []
