"""Where the plaintext of a stream goes: from bytes of a stream to elements of destination tensors.

Which bytes go to which part of a rank's tensor is planned in provisioning/shares.py; here parts become views. A slice
is contiguous in its stream in row order. Its destination is a ``[rows, columns]`` view of the rank's tensor: for a tile
cut along dimension 0 one long row, for one cut along a later dimension a strided block. A run of a stream may begin and
end inside a row, so one slice needs at most three copies: the rest of a first row, whole rows, the start of a last row.
Where the destination has another floating type, the copy converts.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from appliance.errors import ModelUnsupported
from provisioning import shares
from provisioning.layout import Layout, TensorSpec
from provisioning.shares import Part, Slice

# Names of safetensors to torch; 6-bit types have no tensors in torch and are refused.
TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F4": torch.float4_e2m1fn_x2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
# Elements of the checkpoint in one element of torch, along the last dimension.
_PACKED: dict[torch.dtype, int] = {torch.float4_e2m1fn_x2: 2}


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of one piece.

    Attributes:
        start: its first byte in the stream.
        stop: behind its last byte.
        dtype: of the elements in the stream; of one byte each, ``torch.uint8``.
        block: where they go, ``[rows, columns]``, in the destination's dtype.
    """

    start: int
    stop: int
    dtype: torch.dtype
    block: torch.Tensor


def plan(
    layout: Layout,
    *,
    rank: int,
    world: int,
    destinations: Mapping[str, torch.Tensor],
    skip: Callable[[str], bool],
) -> dict[int, tuple[Target, ...]]:
    """Give the targets of every stream of a rank, by stream number and in order of their bytes.

    Args:
        layout: of the sealed catalog.
        rank: which part of the model.
        world: of how many.
        destinations: tensor name to the rank's tensor, of the rank's local shape.
        skip: says of a tensor of the bundle that the model does not need it.

    Raises:
        ModelUnsupported: ``load.tensor.missing``, ``load.tensor.unexpected``, ``load.tensor.shape``,
            ``load.tensor.dtype``.
    """
    parts = shares.parts(layout, rank=rank, world=world)
    wanted = {index: part for index, part in parts.items() if not skip(layout.tensors[index].name)}
    _match_names({layout.tensors[index].name for index in wanted}, set(destinations))
    for index, part in wanted.items():
        spec = layout.tensors[index]
        _match_tensor(spec, part, destinations[spec.name])
    return {
        stream: tuple(
            _target(item, layout.tensors[item.tensor], destinations[layout.tensors[item.tensor].name])
            for item in listed
            if item.tensor in wanted
        )
        for stream, listed in shares.slices(layout, rank=rank, world=world).items()
    }


def _match_names(offered: set[str], wanted: set[str]) -> None:
    if missing := sorted(wanted - offered):
        raise ModelUnsupported(
            "load.tensor.missing",
            found=f"a bundle without {_some(missing)}",
            expected="every tensor of the model",
            hint="ask the owner for a bundle of the whole model",
        )
    if unexpected := sorted(offered - wanted):
        raise ModelUnsupported(
            "load.tensor.unexpected",
            found=f"{_some(unexpected)} in the bundle, which the engine does not use",
            expected="only tensors of the model",
            hint="the engine may be older than the model; update the appliance",
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _match_tensor(spec: TensorSpec, part: Part, destination: torch.Tensor) -> None:
    dtype, shape = _in_torch(spec, part)
    if tuple(destination.shape) != shape:
        raise ModelUnsupported(
            "load.tensor.shape",
            found=f"{spec.name} {list(destination.shape)} in the engine",
            expected=f"{list(shape)}, as the bundle has it",
            hint="config.json does not fit the tensors; ask the owner for a sound bundle",
        )
    # A number of one kind must not silently become one of another: scales and packed weights are no plain floats.
    if dtype is None or (dtype != destination.dtype and not (_converts(dtype) and _converts(destination.dtype))):
        raise ModelUnsupported(
            "load.tensor.dtype",
            found=f"{spec.name} of type {spec.dtype}",
            expected=f"{destination.dtype}, or a floating type of 16 bits or more",
            hint="this engine runs unquantized models; ask the owner for such a bundle",
        )


def _converts(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2


def _in_torch(spec: TensorSpec, part: Part) -> tuple[torch.dtype | None, tuple[int, ...]]:
    """Give type and shape that a part has in torch; no type where torch has none for it."""
    dtype = TORCH_DTYPES.get(spec.dtype)
    packed = 1 if dtype is None else _PACKED.get(dtype, 1)
    if packed == 1:
        return dtype, part.shape
    if not part.shape or part.shape[-1] % packed:
        # Rows would share an element of torch.
        return None, part.shape
    return dtype, (*part.shape[:-1], part.shape[-1] // packed)


def _target(item: Slice, spec: TensorSpec, destination: torch.Tensor) -> Target:
    dtype = TORCH_DTYPES[spec.dtype]
    packed = _PACKED.get(dtype, 1) if item.dimension == len(spec.shape) - 1 else 1
    if dtype.itemsize == 1:
        # Moved as bytes: these are never converted, and not every device has copies for every small type.
        dtype, destination = torch.uint8, destination.view(torch.uint8)
    own = destination
    if item.dimension is not None:
        own = destination.narrow(item.dimension, item.first // packed, (item.last - item.first) // packed)
    try:
        # A view, never a reshape: that would copy where the strides do not fit, and the copy would be filled instead.
        block = own.view(spec.outer, -1)
    except RuntimeError:
        raise ModelUnsupported(
            "load.tensor.layout",
            found=f"{spec.name} with strides {destination.stride()} in the engine",
            expected="rows one behind the other",
            hint="this is a fault of the engine; report it",
        ) from None
    return Target(item.start, item.stop, dtype, block)


def place(targets: Sequence[Target], start: int, plain: torch.Tensor) -> None:
    """Copy opened bytes of a stream to where they belong; zeros between pieces and skipped tensors are left out.

    Args:
        targets: of the stream, in order of their bytes.
        start: the stream's byte at ``plain[0]``.
        plain: ``[bytes] uint8``, on the destinations' device; a multiple of 64 bytes.
    """
    stop = start + plain.numel()
    first = bisect.bisect_right(targets, start, key=lambda target: target.stop)
    for index in range(first, len(targets)):
        target = targets[index]
        if target.start >= stop:
            return
        low, high = max(start, target.start), min(stop, target.stop)
        elements = plain[low - start : high - start].view(target.dtype)
        _copy(target.block, (low - target.start) // target.dtype.itemsize, elements)


def _copy(block: torch.Tensor, start: int, elements: torch.Tensor) -> None:
    """Write elements into a ``[rows, columns]`` block, from its element ``start`` on in row order."""
    columns = block.shape[1]
    row, column = divmod(start, columns)
    if column or elements.numel() < columns:
        head = min(columns - column, elements.numel())
        block[row, column : column + head].copy_(elements[:head], non_blocking=True)
        elements = elements[head:]
        row += 1
    rows, rest = divmod(elements.numel(), columns)
    if rows:
        block[row : row + rows].copy_(elements[: rows * columns].view(rows, columns), non_blocking=True)
    if rest:
        block[row + rows, :rest].copy_(elements[rows * columns :], non_blocking=True)
