"""Policy rules as small values: what a rule may say, how it is written, and how it judges one claim.

A rule is written as a table with exactly one member: ``{ equals = 3 }``, ``{ one_of = ["a", "b"] }``,
``{ at_least = 3 }`` or ``{ unchecked = "why" }``. There is no default and no other way to leave a rule open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

from attestation.errors import PolicyInvalid
from attestation.nearest import nearest
from attestation.result import Check

Value: TypeAlias = str | int | bool
Kind = Literal["text", "hex", "integer", "flag"]

MAX_CHOICES = 64
MAX_TEXT = 256
MAX_INTEGER = 2**53 - 1


@dataclass(frozen=True, slots=True)
class Equals:
    """The claim must be exactly this."""

    value: Value


@dataclass(frozen=True, slots=True)
class OneOf:
    """The claim must be one of these."""

    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The claim, a number that grows with each repair, must not be below this."""

    value: int


@dataclass(frozen=True, slots=True)
class Unchecked:
    """The owner accepts any claim, and says why; the reason is shown in every result."""

    because: str


Rule: TypeAlias = Equals | OneOf | AtLeast | Unchecked


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSpec:
    """What one rule of a platform may say.

    Attributes:
        name: the rule's name in the policy file.
        kind: the type of its values.
        operators: which of ``equals``, ``one_of``, ``at_least``, ``unchecked`` it allows.
        hex_bytes: for ``hex`` the exact length of a value in bytes, else 0.
        meaning: what the claim is, for people.
        hint: what the operator can do when this rule refuses.
    """

    name: str
    kind: Kind
    operators: tuple[str, ...]
    hex_bytes: int
    meaning: str
    hint: str


def _refuse(code: str, found: str, expected: str, hint: str) -> NoReturn:
    raise PolicyInvalid(code, found=found, expected=expected, hint=hint)


def read_rule(spec: RuleSpec, written: object, where: str) -> Rule:
    """Read one rule.

    Args:
        spec: what the rule may say.
        written: the value found in the file.
        where: the rule's full name, such as ``simulated.tcb``.

    Raises:
        PolicyInvalid: ``policy.rule.form``, ``policy.rule.open``, ``policy.rule.operator`` or ``policy.rule.value``.
    """
    if not isinstance(written, Mapping):
        example = "{ equals = ... }" if "equals" in spec.operators else "{ at_least = ... }"
        _refuse("policy.rule.form", f"{where} as {type(written).__name__}", "a table", f"write {where} = {example}")
    if not written:
        _refuse("policy.rule.open", f"{where} that says nothing", "a rule", _how_to_leave_open(spec))
    if len(written) > 1:
        found = f"{where} with {len(written)} members"
        _refuse("policy.rule.form", found, "exactly one member", "keep one of them")
    ((operator, value),) = written.items()
    if operator not in spec.operators:
        _refuse(
            "policy.rule.operator",
            f"{where} with {str(operator)[:32]!a}",
            f"one of {', '.join(spec.operators)}",
            nearest(str(operator), spec.operators) if operator not in _OPERATORS else spec.meaning,
        )
    if operator == "unchecked":
        return Unchecked(_read_reason(value, where, spec))
    if operator == "one_of":
        return OneOf(_read_choices(spec, value, where))
    read = _read_value(spec, value, where)
    if operator == "at_least" and isinstance(read, int):
        return AtLeast(read)
    return Equals(read)


_OPERATORS = ("equals", "one_of", "at_least", "unchecked")


def _how_to_leave_open(spec: RuleSpec) -> str:
    if "unchecked" in spec.operators:
        return 'to leave it open on purpose write { unchecked = "the reason" }'
    return "this rule cannot be left open"


def _read_reason(value: object, where: str, spec: RuleSpec) -> str:
    if not isinstance(value, str) or not value.strip():
        _refuse("policy.rule.open", f"{where} left open without a reason", "a reason", _how_to_leave_open(spec))
    if len(value) > MAX_TEXT or not value.isprintable():
        expected = f"at most {MAX_TEXT} printable characters"
        _refuse("policy.rule.value", f"the reason of {where}", expected, "shorten the reason to one line")
    return value


def _read_choices(spec: RuleSpec, value: object, where: str) -> tuple[Value, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        found = f"{where}.one_of as {type(value).__name__}" if not isinstance(value, list) else f"{len(value)} choices"
        _refuse("policy.rule.value", found, f"a list of 1 to {MAX_CHOICES} values", "name the accepted values")
    choices = tuple(_read_value(spec, item, where) for item in value)
    if len(set(choices)) != len(choices):
        _refuse("policy.rule.value", f"a value of {where} twice", "each value once", "remove the repeated value")
    return choices


def _read_value(spec: RuleSpec, value: object, where: str) -> Value:
    expected = _EXPECTED[spec.kind] if spec.kind != "hex" else f"{spec.hex_bytes * 2} lower-case hex digits"
    if isinstance(value, bool):
        if spec.kind == "flag":
            return value
    elif isinstance(value, int):
        if spec.kind == "integer" and 0 <= value <= MAX_INTEGER:
            return value
    elif isinstance(value, str):
        if spec.kind == "text" and 0 < len(value) <= MAX_TEXT and value.isprintable():
            return value
        if spec.kind == "hex" and re.fullmatch(f"[0-9a-f]{{{spec.hex_bytes * 2}}}", value):
            return value
    _refuse("policy.rule.value", f"{where} = {shown(value)}", expected, f"{where} is {spec.meaning}")


_EXPECTED: dict[Kind, str] = {
    "text": f"1 to {MAX_TEXT} printable characters",
    "integer": f"a whole number from 0 to {MAX_INTEGER}",
    "flag": "true or false",
}


def shown(value: object) -> str:
    """Give a written value as short text without control characters, for an error's ``found``."""
    if isinstance(value, str):
        return ascii(value[:64])
    # A number of thousands of digits cannot even be printed (it raises), so only small ones are.
    if isinstance(value, int) and abs(value) <= 1 << 64:
        return ascii(value)
    return f"a value of type {type(value).__name__}"


def write_rule(rule: Rule) -> dict[str, Any]:
    """Give a rule as the table that :func:`read_rule` reads."""
    match rule:
        case Equals(value):
            return {"equals": value}
        case OneOf(values):
            return {"one_of": list(values)}
        case AtLeast(value):
            return {"at_least": value}
        case Unchecked(because):
            return {"unchecked": because}


def judge(rule: Rule, seen: Value, *, number: str, name: str, hint: str) -> Check:
    """Apply a rule to one claim of genuine evidence.

    Args:
        rule: what the owner stated.
        seen: the claim, of the rule's own type.
        number: the check's place in the specification.
        name: the check's stable dotted name.
        hint: what the operator can do when it refuses.
    """
    expected = describe(rule)
    if isinstance(rule, Unchecked):
        return Check(number, name, "unchecked", _show(seen), expected, rule.because)
    if _accepts(rule, seen):
        return Check(number, name, "pass", _show(seen), expected, "")
    return Check(number, name, "refused", _show(seen), expected, hint)


def _accepts(rule: Equals | OneOf | AtLeast, seen: Value) -> bool:
    # Types are compared too: in Python True == 1, and a flag must not satisfy a number.
    match rule:
        case Equals(value):
            return type(value) is type(seen) and value == seen
        case OneOf(values):
            return any(type(value) is type(seen) and value == seen for value in values)
        case AtLeast(value):
            return type(seen) is int and seen >= value


def describe(rule: Rule) -> str:
    """Say what a rule accepts."""
    match rule:
        case Equals(value):
            return _show(value)
        case OneOf(values):
            return "one of " + ", ".join(_show(value) for value in values)
        case AtLeast(value):
            return f"at least {value}"
        case Unchecked():
            return "anything"


def _show(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
