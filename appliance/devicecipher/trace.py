"""From a circuit to a short program over few registers.

torch has no way to fuse operations without a compiler, and would give every wire of the circuit memory of its own.
So the circuit is run once with symbols, and each wire is given the first register that is free again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["and", "xor"]


@dataclass(frozen=True, slots=True)
class Gate:
    """One operation: ``registers[out] = registers[left] kind registers[right]``."""

    kind: Kind
    out: int
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class Program:
    """A circuit over registers.

    Attributes:
        gates: in order.
        inputs: registers 0 to ``inputs - 1`` hold the inputs; they are overwritten.
        outputs: the registers behind the inputs, ``inputs`` to ``2 * inputs - 1``, hold the outputs.
        registers: how many there are.
    """

    gates: tuple[Gate, ...]
    inputs: int
    registers: int


class _Wire:
    """A symbol that notes what is done with it."""

    __slots__ = ("_notes", "number")

    def __init__(self, number: int, notes: list[tuple[Kind, int, int]]) -> None:
        self.number = number
        self._notes = notes

    def __and__(self, other: _Wire) -> _Wire:
        return self._note("and", other)

    def __xor__(self, other: _Wire) -> _Wire:
        return self._note("xor", other)

    def _note(self, kind: Kind, other: _Wire) -> _Wire:
        self._notes.append((kind, self.number, other.number))
        return _Wire(_INPUTS + len(self._notes) - 1, self._notes)


_INPUTS = 8


def trace(circuit: Callable[..., Any]) -> Program:
    """Give the program of a circuit of eight inputs and eight outputs; every output is the result of a gate."""
    notes: list[tuple[Kind, int, int]] = []
    results: Sequence[_Wire] = circuit(*[_Wire(number, notes) for number in range(_INPUTS)])
    # The outputs have registers of their own from the start, which nothing else uses.
    places = {wire.number: _INPUTS + index for index, wire in enumerate(results)}
    places.update({number: number for number in range(_INPUTS)})
    last_use = {wire: step for step, (_, *operands) in enumerate(notes) for wire in operands}
    free: list[int] = []
    registers = 2 * _INPUTS
    gates = []
    for step, (kind, left, right) in enumerate(notes):
        # An operand that is used for the last time leaves its place at once: operations are element by element.
        free += [places[wire] for wire in {left, right} if last_use[wire] == step and not _output(places[wire])]
        wire = _INPUTS + step
        if wire not in places:
            if not free:
                free.append(registers)
                registers += 1
            places[wire] = free.pop()
        gates.append(Gate(kind, places[wire], places[left], places[right]))
    return Program(tuple(gates), _INPUTS, registers)


def _output(register: int) -> bool:
    return _INPUTS <= register < 2 * _INPUTS
