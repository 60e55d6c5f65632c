"""What a tensor's name says of its part in the model, by the names of Hugging Face checkpoints. Pure.

Three things follow from a name: along which dimension tensor parallelism cuts the tensor, with which others it must be
cut alike, and whether it belongs to one expert, which is never cut. Names that say nothing leave a tensor common: every
rank then opens it, which costs time but is never wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

_ROWS: Final = frozenset(
    {
        "q_proj",
        "k_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
        "w1",
        "w3",
        "q_b_proj",
        "kv_b_proj",
        "embed_tokens",
        "lm_head",
    }
)
_COLUMNS: Final = frozenset({"o_proj", "down_proj", "w2"})
# The matrices of one feed-forward block: what the first ones put out is what the last one takes in.
_FEED_FORWARD: Final = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
_EXPERT_STACKS: Final = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")

# Parameters as [outputs, inputs]: of plain matrices, of FP8 and FP4, and of compressed-tensors.
_PLAIN: Final = frozenset(
    {"weight", "bias", "scale", "weight_scale", "weight_scale_inv", "weight_packed", "weight_zero_point"}
)
# Parameters as [inputs, outputs]: of GPTQ and AWQ.
_TURNED: Final = frozenset({"qweight", "qzeros", "scales"})
# The group of each input, where groups are not in the order of the inputs.
GROUP_INDEX: Final = frozenset({"g_idx", "weight_g_idx"})
# Both dimensions of the matrix before packing: needed by all, cut by none.
_WHOLE: Final = frozenset({"weight_shape"})
WEIGHTS: Final = frozenset({"", "weight", "weight_packed", "qweight", "blocks"})
# What a group index orders.
GROUPED: Final = frozenset({"scales", "qzeros", "weight_scale", "weight_zero_point"})

_STACK_SUFFIX: Final = re.compile("(?:_(blocks|scales|bias|scale|scale_inv|weight_scale|weight_scale_inv))?")
_EXPERT: Final = re.compile("[0-9]{1,6}")


class Kind(Enum):
    """How the module that a tensor belongs to is split between ranks."""

    ROWS = "by outputs"
    COLUMNS = "by inputs"
    STACK = "by experts that lie in one tensor"
    EXPERT = "by experts that have tensors of their own"


@dataclass(frozen=True, slots=True)
class Role:
    """A tensor's part in the model.

    Attributes:
        kind: how its module is split.
        unit: the module; a matrix, its scales and its bias are one unit and must be cut alike.
        family: units that should be cut alike as well, because what one puts out another takes in.
        parameter: the name behind the module's, empty for a tensor that is named as its module.
        expert: number of its expert, for ``Kind.EXPERT``; else 0.
    """

    kind: Kind
    unit: str
    family: str
    parameter: str
    expert: int = 0

    @property
    def known(self) -> bool:
        """Say whether it is known how this parameter relates to its matrix."""
        return self.parameter in WEIGHTS or self.parameter in _PLAIN | _TURNED | GROUP_INDEX | _WHOLE

    def dimension(self, rank: int) -> int | None:
        """Give the dimension along which a tensor of ``rank`` dimensions is cut, or None."""
        if self.kind is Kind.EXPERT or not self.known or self.parameter in _WHOLE:
            return None
        if self.kind is Kind.STACK:
            dimension = 0
        elif self.parameter in GROUP_INDEX:
            # One number for each input.
            return 0 if self.kind is Kind.COLUMNS and rank == 1 else None
        else:
            dimension = int((self.kind is Kind.COLUMNS) != (self.parameter in _TURNED))
        return dimension if dimension < rank else None


def role_of(name: str) -> Role | None:
    """Read a name; None where it says nothing of how the tensor is split."""
    parts = name.split(".")
    if "experts" in parts[:-1]:
        return _in_experts(parts, len(parts) - 1 - parts[::-1].index("experts"))
    for at in range(len(parts) - 1, -1, -1):
        module = parts[at]
        if module in _ROWS or module in _COLUMNS:
            unit = ".".join(parts[: at + 1])
            family = ".".join((*parts[:at], "<feed-forward>")) if module in _FEED_FORWARD else unit
            kind = Kind.ROWS if module in _ROWS else Kind.COLUMNS
            return Role(kind, unit, family, ".".join(parts[at + 1 :]))
    return None


def _in_experts(parts: list[str], at: int) -> Role:
    prefix = ".".join(parts[: at + 1])
    module = parts[at + 1]
    if _EXPERT.fullmatch(module):
        return Role(Kind.EXPERT, f"{prefix}.{module}", prefix, ".".join(parts[at + 2 :]), int(module))
    for stack in _EXPERT_STACKS:
        if module.startswith(stack) and (match := _STACK_SUFFIX.fullmatch(module, len(stack))):
            parameter = ".".join((*filter(None, [match[1]]), *parts[at + 2 :]))
            return Role(Kind.STACK, prefix, prefix, parameter)
    # Something else that all experts share: the stack is not known well enough to be cut.
    return Role(Kind.STACK, prefix, prefix, "<" + ".".join(parts[at + 1 :]) + ">")


def is_single(shape: Sequence[int]) -> bool:
    """Say whether a tensor has at most one element: whatever it means, all ranks can share it."""
    return math.prod(shape) <= 1
