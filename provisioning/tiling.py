"""How the tensors of a whole model are cut, so that what belongs together is cut alike. Pure.

A matrix, its bias and its scales are one *unit*. Along the dimension that is split they have different sizes: a matrix
of 4096 inputs has 1024 words of packed weights and 32 scales. Their common measure is the smallest of these sizes; each
tensor is cut at equal shares of that many blocks, so a rank that holds a part of a matrix holds just the scales of
that part. The block of each tensor is written into the catalog, and a reader needs no names.

The matrices of one feed-forward block are one *family* and are cut alike too, if they can: a rank then takes in what it
put out. A unit that cannot be cut alike is left whole; it is never cut by a guess (docs/adr/0017-blocks.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from provisioning.layout import TensorSpec, byte_block
from provisioning.naming import GROUP_INDEX, GROUPED, WEIGHTS, Kind, Role, is_single, role_of
from provisioning.stheader import DTYPE_BITS

# A tensor to be planned: name, dtype, shape.
Plain = tuple[str, str, tuple[int, ...]]
# Number of the tensor -> dimension and block.
_Cuts = dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Member:
    """A tensor of a unit: its number, its role, and the dimension along which it would be cut, if any."""

    index: int
    role: Role
    dtype: str
    shape: tuple[int, ...]
    dimension: int | None

    @property
    def size(self) -> int:
        return 0 if self.dimension is None else self.shape[self.dimension]

    @property
    def bytes_block(self) -> int:
        return 1 if self.dimension is None else byte_block(self.dtype, self.shape, self.dimension)


def plan(tensors: Iterable[Plain], *, tiles: int) -> list[TensorSpec]:
    """Choose how every tensor of a model is cut.

    Args:
        tensors: name, dtype and shape of each, in the order of the layout.
        tiles: W.
    """
    specs: list[TensorSpec] = []
    families: dict[str, list[_Member]] = {}
    experts: dict[str, list[_Member]] = {}
    for index, (name, dtype, shape) in enumerate(tensors):
        specs.append(TensorSpec(name, dtype, shape, None))
        role = role_of(name)
        # An unknown dtype is refused by the layout, with its own message.
        if role is None or dtype not in DTYPE_BITS:
            continue
        group = experts if role.kind is Kind.EXPERT else families
        group.setdefault(role.family, []).append(_Member(index, role, dtype, shape, role.dimension(len(shape))))
    for members in experts.values():
        count = max(member.role.expert for member in members) + 1
        for member in members:
            column = expert_column(member.role.expert, count, tiles=tiles)
            specs[member.index] = replace(specs[member.index], column=column)
    for members in families.values():
        for index, (dimension, block) in _cuts(members).items():
            specs[index] = replace(specs[index], parallel=dimension, block=block)
    return specs


def expert_column(expert: int, experts: int, *, tiles: int) -> int:
    """Give the column of an expert: the one that holds it also where experts are stacked in one tensor."""
    return ((expert + 1) * tiles - 1) // experts


def _cuts(family: Sequence[_Member]) -> _Cuts:
    """Cut a family alike, or else each of its units, or else leave a unit whole."""
    units = [list(_cuttable(unit)) for unit in _units(family)]
    if (together := _align([member for unit in units for member in unit])) is not None:
        return together
    return {index: cut for unit in units for index, cut in (_align(unit) or {}).items()}


def _units(family: Sequence[_Member]) -> Iterable[list[_Member]]:
    units: dict[str, list[_Member]] = {}
    for member in family:
        units.setdefault(member.role.unit, []).append(member)
    return units.values()


def _cuttable(unit: Sequence[_Member]) -> Iterator[_Member]:
    """Give the members of a unit that are to be cut; none where one of them is not understood."""
    if any(not member.role.known and not is_single(member.shape) for member in unit):
        return
    weights = [member for member in unit if member.role.parameter in WEIGHTS]
    if any(member.size < 2 for member in weights):
        return
    # With a group index, the groups of a rank's inputs can lie anywhere: all ranks need all scales.
    loose = any(member.role.kind is Kind.COLUMNS and member.role.parameter in GROUP_INDEX for member in unit)
    for member in unit:
        # One scale for all inputs is everybody's.
        if member.size >= 2 and not (loose and member.role.parameter in GROUPED):
            yield member


def _align(members: Sequence[_Member]) -> _Cuts | None:
    """Give each tensor the block with which all have the same number of blocks; None where there are no such blocks."""
    if not members:
        return {}
    if members[0].role.kind is Kind.STACK and len({member.size for member in members}) > 1:
        # Nothing is quantized across experts, so other sizes than the number of experts mean something unknown.
        return None
    blocks = min(-(-member.size // member.bytes_block) for member in members)
    cuts: _Cuts = {}
    for member in members:
        block = block_of(member.size, blocks)
        if member.dimension is None or block is None:
            return None
        spec = TensorSpec(member.role.parameter, member.dtype, member.shape, member.dimension, block)
        if spec.check() is not None:
            return None
        cuts[member.index] = (member.dimension, block)
    return cuts


def block_of(size: int, blocks: int) -> int | None:
    """Give how many elements a block has when ``size`` elements lie in ``blocks`` blocks, the last one maybe shorter.

    Blocks are powers of two, or of equal size. Where the numbers allow both (960 elements in 8 blocks: 120 or 128), the
    block is not known, and None is given.
    """
    if blocks < 2 or size < blocks:
        return None
    low, high = -(-size // blocks), -(-size // (blocks - 1)) - 1
    equal = size // blocks if size % blocks == 0 else None
    power = 1 << (low - 1).bit_length()
    if power > high:
        return equal
    return power if equal in (None, power) else None
