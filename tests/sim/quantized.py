"""Models of random shapes in the formats of quantized checkpoints, and what a rank should have of each tensor.

Written from the formats, not from the product: for each tensor it is said which of its dimensions is the one that is
split and how many elements of the plain matrix one of its own stands for. Content is bits, so that slices of any type
are slices of an array.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from provisioning.stheader import DTYPE_BITS
from tests.sim.modelfiles import Tensors

Bits = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Member:
    """A tensor of a model.

    Attributes:
        dtype: by its name in safetensors.
        shape: in elements.
        unit: name of the matrix that it belongs to; tensors of one unit must be cut alike.
        axis: dimension along which the matrix is split, if this tensor has it.
        each: how many elements of the plain matrix one element stands for along that dimension.
        loose: whether every rank may need all of it all the same.
    """

    dtype: str
    shape: tuple[int, ...]
    unit: str = ""
    axis: int | None = None
    each: int = 1
    loose: bool = False


Model = dict[str, Member]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix to be written in some format: ``[outputs, inputs]``, split by one of them."""

    name: str
    by_outputs: bool
    outputs: int
    inputs: int

    def member(self, dtype: str, outputs: int | None, inputs: int | None, *, turned: bool = False) -> Member:
        """Give a tensor with one element for each so many outputs and inputs; None for a dimension it lacks."""
        sizes = [] if outputs is None else [(-(-self.outputs // outputs), self.by_outputs, outputs)]
        sizes += [] if inputs is None else [(-(-self.inputs // inputs), not self.by_outputs, inputs)]
        if turned:
            sizes.reverse()
        axis = next((at for at, (size, split, _) in enumerate(sizes) if split and size > 1), None)
        each = 1 if axis is None else sizes[axis][2]
        return Member(dtype, tuple(size for size, _, _ in sizes), self.name, axis, each)


def plain(draw: st.DrawFn, matrix: Matrix) -> Model:
    dtype = draw(st.sampled_from(["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"]))
    return {"weight": matrix.member(dtype, 1, 1), "bias": matrix.member(dtype, 1, None)}


def float8_blocks(draw: st.DrawFn, matrix: Matrix) -> Model:
    block = draw(st.sampled_from([4, 16]))
    scales = draw(st.sampled_from(["F32", "BF16", "F8_E8M0"]))
    dtype = draw(st.sampled_from(["F8_E4M3", "F8_E5M2"]))
    return {
        "weight": matrix.member(dtype, 1, 1),
        "weight_scale_inv": matrix.member(scales, block, block),
        "bias": matrix.member("BF16", 1, None),
    }


def float8_channels(draw: st.DrawFn, matrix: Matrix) -> Model:
    scale = matrix.member(draw(st.sampled_from(["F32", "BF16", "F8_E8M0"])), 1, matrix.inputs)
    return {
        "weight": matrix.member("F8_E4M3", 1, 1),
        "weight_scale": scale,
        "input_scale": Member("F32", (), matrix.name),
    }


def float4(draw: st.DrawFn, matrix: Matrix) -> Model:
    group = draw(st.sampled_from([8, 16]))
    return {"weight": matrix.member("F4", 1, 1), "weight_scale": matrix.member("F8_E8M0", 1, group)}


def nvfp4(draw: st.DrawFn, matrix: Matrix) -> Model:
    return {
        "weight": matrix.member("U8", 1, 2),
        "weight_scale": matrix.member("F8_E4M3", 1, 16),
        "weight_scale_2": Member("F32", (), matrix.name),
    }


def packed(draw: st.DrawFn, matrix: Matrix) -> Model:
    group = draw(st.sampled_from([8, 16]))
    return {
        "weight_packed": matrix.member("I32", 1, 8),
        "weight_scale": matrix.member("BF16", 1, group),
        "weight_zero_point": matrix.member("I32", 8, group),
        "weight_shape": Member("I64", (2,), matrix.name),
    }


def gptq(draw: st.DrawFn, matrix: Matrix) -> Model:
    group = draw(st.sampled_from([8, 16]))
    made = {
        "qweight": matrix.member("I32", 1, 8, turned=True),
        "qzeros": matrix.member("I32", 8, group, turned=True),
        "scales": matrix.member("F16", 1, group, turned=True),
    }
    if draw(st.booleans()):
        made["g_idx"] = matrix.member("I32", None, 1)
        if not matrix.by_outputs:
            for name in ("qzeros", "scales"):
                made[name] = Member(made[name].dtype, made[name].shape, matrix.name, loose=True)
    return made


def awq(draw: st.DrawFn, matrix: Matrix) -> Model:
    group = draw(st.sampled_from([8, 16]))
    return {
        "qweight": matrix.member("I32", 8, 1, turned=True),
        "qzeros": matrix.member("I32", 8, group, turned=True),
        "scales": matrix.member("F16", 1, group, turned=True),
        "bias": matrix.member("F16", 1, None),
    }


FORMATS: dict[str, Callable[[st.DrawFn, Matrix], Model]] = {
    "plain": plain,
    "float8_blocks": float8_blocks,
    "float8_channels": float8_channels,
    "float4": float4,
    "nvfp4": nvfp4,
    "packed": packed,
    "gptq": gptq,
    "awq": awq,
}


@st.composite
def matrices(draw: st.DrawFn, *, at: str, formats: tuple[str, ...] = tuple(FORMATS), scale: int = 1) -> Model:
    """Give one matrix in one format; sizes are what the packing of the format needs, and else anything."""
    kind = draw(st.sampled_from(formats))
    # Whole groups where the format wants them; FP8 blocks may be cut short by the matrix's edge.
    unit = 1 if kind in {"plain", "float8_blocks", "float8_channels"} else 16
    by_outputs = draw(st.booleans())
    sizes = [draw(st.integers(1, 96 // unit)) * unit * scale, draw(st.integers(1, max(1, 6 // unit))) * unit]
    outputs, inputs = sizes if by_outputs else reversed(sizes)
    name = at + draw(st.sampled_from(["q_proj", "k_proj", "w1"] if by_outputs else ["o_proj"]))
    made = FORMATS[kind](draw, Matrix(name, by_outputs, outputs, inputs))
    return {f"{name}.{parameter}": member for parameter, member in made.items()}


@st.composite
def experts(draw: st.DrawFn, *, at: str) -> Model:
    """Give experts, stacked in tensors or each with its own."""
    count = draw(st.integers(1, 20))
    if draw(st.booleans()):
        axis = 0 if count > 1 else None
        scales = draw(st.sampled_from(["U8", "F8_E8M0"]))
        return {
            f"{at}experts.gate_up_proj_blocks": Member("U8", (count, 6, 2, 16), at, axis),
            f"{at}experts.gate_up_proj_scales": Member(scales, (count, 6, 2), at, axis),
            f"{at}experts.gate_up_proj_bias": Member("BF16", (count, 6), at, axis),
            f"{at}experts.down_proj_blocks": Member("U8", (count, 4, 1, 16), at, axis),
        }
    made: Model = {}
    for number in range(count):
        for name in ("w1", "w2"):
            made[f"{at}experts.{number}.{name}.weight"] = Member("F8_E4M3", (6, 5))
            made[f"{at}experts.{number}.{name}.weight_scale_inv"] = Member("F32", (1, 1))
    return made


@st.composite
def models(draw: st.DrawFn, *, layers: int = 3, scale: int = 1) -> Model:
    """Give a model: matrices in several formats, experts, and tensors that every rank needs."""
    made: Model = {"model.norm.weight": Member("F32", (draw(st.integers(0, 9)),)), "step": Member("I64", ())}
    for layer in range(draw(st.integers(1, layers))):
        for part in range(draw(st.integers(1, 2))):
            made |= draw(matrices(at=f"model.layers.{layer}.{part}.", scale=scale))
        if draw(st.booleans()):
            made |= draw(experts(at=f"model.layers.{layer}.mlp."))
    # A tensor must be whole bytes; of the formats only FP4 with an odd number of elements is not.
    assert all(math.prod(member.shape) * DTYPE_BITS[member.dtype] % 8 == 0 for member in made.values())
    return made


def filled(model: Model, *, seed: int = 1) -> Tensors:
    """Give every tensor random bytes."""
    source = random.Random(seed)
    return {
        name: (
            member.dtype,
            member.shape,
            source.randbytes(math.prod(member.shape) * DTYPE_BITS[member.dtype] // 8),
        )
        for name, member in model.items()
    }


def bits_of(dtype: str, shape: tuple[int, ...], data: bytes) -> Bits:
    """Give a tensor as an array of its shape and, last, the bits of an element, the lowest first."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return bits.reshape(*shape, DTYPE_BITS[dtype])


def bytes_of(bits: Bits) -> bytes:
    """Give the bytes of such an array."""
    return np.packbits(bits.reshape(-1), bitorder="little").tobytes()
