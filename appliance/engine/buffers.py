"""What the CPU's math libraries keep of the weights, and how it is overwritten.

A product of matrices on a CPU first packs panels of the weight into a work buffer, and small kernels pack on the
stack. The buffers belong to the library and outlive the call, so after the weights are overwritten megabytes of them
are still in the process, in pieces of a few rows. docs/adr/0005-engine.md tells what was measured.

Four steps remove them. The same products over zeros overwrite every buffer that they reach and the stacks of the
library's own threads, whose depth is always the same. What is below the calling thread's stack is overwritten
directly. Then the library is told to free its buffers, and the allocator to give free pages back to the kernel. A GPU
needs none of this: there, work buffers come from the slot's device and hold partial sums, not weights.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from appliance.engine.layers import project

# Row counts that reach every kernel: one row, few, both orders of the product, small and large blocks.
_ROWS: Final = (1, 2, 3, 4, 5, 8, 9, 12, 16, 24, 32, 40, 41, 48, 64, 100, 128, 256, 512)
# No step computes logits for more rows than run together; a product this wide is expensive.
_MOST_ROWS_OF_A_WIDE_WEIGHT: Final = 16
_WIDE: Final = 1 << 15

# Offset of the stack pointer in ucontext_t (sys/ucontext.h, x86-64: the registers start at 40, REG_RSP is 15).
_STACK_POINTER: Final = 40 + 15 * 8
# The call that overwrites stands on the stack itself, a few hundred bytes deeper than the one that asked.
_STACK_IN_USE: Final = 1024


def overwrite_buffers(weights: Iterable[torch.Tensor]) -> None:
    """Overwrite the libraries' copies of weights; to be called on the thread that used the weights.

    Args:
        weights: one weight of every shape, ``[outputs, inputs]``; they are zeroed here, if they are not zero yet.
    """
    with torch.inference_mode():
        for weight in weights:
            weight.zero_()
            for rows in _ROWS:
                if weight.shape[0] < _WIDE or rows <= _MOST_ROWS_OF_A_WIDE_WEIGHT:
                    project(torch.zeros((rows, weight.shape[1]), dtype=weight.dtype, device=weight.device), weight)
    _overwrite_dead_stack()
    _free_buffers()


def _overwrite_dead_stack() -> None:
    """Overwrite the calling thread's stack below what is in use."""
    libc = ctypes.CDLL(None)
    if sys.platform != "linux" or platform.machine() != "x86_64" or not hasattr(libc, "getcontext"):
        return
    context = ctypes.create_string_buffer(4096)
    libc.getcontext(context)
    pointer = int.from_bytes(context.raw[_STACK_POINTER : _STACK_POINTER + 8], "little")
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        start, stop = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        if start <= pointer < stop:
            libc.memset(ctypes.c_void_p(start), 0, ctypes.c_size_t(pointer - _STACK_IN_USE - start))


def _free_buffers() -> None:
    """Make MKL free its buffers and the C library return free pages; neither is there on every system."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if library.is_file():
        # Loaded already, so this gives the same library. The public name mkl_free_buffers is not exported by torch.
        free = getattr(ctypes.CDLL(str(library)), "mkl_serv_free_buffers", None)
        if free is not None:
            free.restype, free.argtypes = None, ()
            free()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
