from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attestation.errors import PolicyInvalid
from attestation.rule import (
    AtLeast,
    Equals,
    OneOf,
    Rule,
    RuleSpec,
    Unchecked,
    Value,
    judge,
    read_rule,
    shown,
    write_rule,
)

ALL = ("equals", "one_of", "at_least", "unchecked")


def spec(kind: Any, operators: tuple[str, ...] = ALL, hex_bytes: int = 0) -> RuleSpec:
    return RuleSpec(name="r", kind=kind, operators=operators, hex_bytes=hex_bytes, meaning="a test", hint="a hint")


INTEGER, FLAG, TEXT, HEX = spec("integer"), spec("flag", ("equals", "unchecked")), spec("text"), spec("hex", ALL, 2)


def refusal(of: RuleSpec, written: object) -> PolicyInvalid:
    with pytest.raises(PolicyInvalid) as caught:
        read_rule(of, written, "p.r")
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("of", "written", "rule"),
    [
        (INTEGER, {"equals": 0}, Equals(0)),
        (INTEGER, {"at_least": 3}, AtLeast(3)),
        (INTEGER, {"one_of": [1, 2]}, OneOf((1, 2))),
        (INTEGER, {"unchecked": "why"}, Unchecked("why")),
        (FLAG, {"equals": False}, Equals(False)),
        (TEXT, {"equals": "a b"}, Equals("a b")),
        (HEX, {"equals": "00ff"}, Equals("00ff")),
    ],
)
def test_reads_each_form_and_writes_it_back(of: RuleSpec, written: dict[str, Any], rule: Rule) -> None:
    assert read_rule(of, written, "p.r") == rule
    assert write_rule(rule) == written


@pytest.mark.parametrize(
    ("of", "written", "code"),
    [
        (INTEGER, 3, "policy.rule.form"),
        (INTEGER, "unchecked", "policy.rule.form"),
        (INTEGER, {"equals": 1, "unchecked": "x"}, "policy.rule.form"),
        (INTEGER, {}, "policy.rule.open"),
        (INTEGER, {"unchecked": ""}, "policy.rule.open"),
        (INTEGER, {"unchecked": "  "}, "policy.rule.open"),
        (INTEGER, {"unchecked": True}, "policy.rule.open"),
        (INTEGER, {"unchecked": None}, "policy.rule.open"),
        (INTEGER, {"unchecked": "a\nb"}, "policy.rule.value"),
        (INTEGER, {"unchecked": "x" * 257}, "policy.rule.value"),
        (INTEGER, {"atleast": 3}, "policy.rule.operator"),
        (FLAG, {"one_of": [True]}, "policy.rule.operator"),
        (INTEGER, {"equals": True}, "policy.rule.value"),
        (INTEGER, {"equals": -1}, "policy.rule.value"),
        (INTEGER, {"equals": 2**53}, "policy.rule.value"),
        (INTEGER, {"equals": 1.0}, "policy.rule.value"),
        (INTEGER, {"equals": "1"}, "policy.rule.value"),
        (FLAG, {"equals": 0}, "policy.rule.value"),
        (FLAG, {"equals": "false"}, "policy.rule.value"),
        (TEXT, {"equals": ""}, "policy.rule.value"),
        (TEXT, {"equals": "a\x1b"}, "policy.rule.value"),
        (TEXT, {"equals": 1}, "policy.rule.value"),
        (HEX, {"equals": "00f"}, "policy.rule.value"),
        (HEX, {"equals": "00FF"}, "policy.rule.value"),
        (HEX, {"equals": "00ff\n"}, "policy.rule.value"),
        (INTEGER, {"one_of": []}, "policy.rule.value"),
        (INTEGER, {"one_of": 1}, "policy.rule.value"),
        (INTEGER, {"one_of": [1, 1]}, "policy.rule.value"),
        (INTEGER, {"one_of": [1, "2"]}, "policy.rule.value"),
        (INTEGER, {"one_of": list(range(65))}, "policy.rule.value"),
    ],
)
def test_refuses_each_fault_with_its_code(of: RuleSpec, written: object, code: str) -> None:
    assert refusal(of, written).code == code


def test_a_misspelt_form_gets_the_nearest_name() -> None:
    assert refusal(INTEGER, {"atleast": 3}).hint == "did you mean at_least"


def test_a_rule_that_cannot_be_left_open_says_so() -> None:
    pinned = spec("hex", ("equals",), 2)
    assert refusal(pinned, {}).hint == "this rule cannot be left open"
    assert refusal(pinned, {"unchecked": "why"}).code == "policy.rule.operator"


def test_a_rule_without_equals_shows_a_form_that_it_has() -> None:
    assert "at_least" in refusal(spec("integer", ("at_least",)), 3).hint


@pytest.mark.parametrize(
    ("rule", "seen", "outcome"),
    [
        (Equals(3), 3, "pass"),
        (Equals(3), 4, "refused"),
        (Equals(1), True, "refused"),
        (Equals(False), 0, "refused"),
        (Equals("a"), "a", "pass"),
        (OneOf((1, 2)), 2, "pass"),
        (OneOf((1, 2)), 3, "refused"),
        (OneOf((1, 2)), True, "refused"),
        (AtLeast(3), 3, "pass"),
        (AtLeast(3), 2, "refused"),
        (AtLeast(0), True, "refused"),
        (AtLeast(0), "9", "refused"),
        (Unchecked("why"), 0, "unchecked"),
    ],
)
def test_judges_one_claim(rule: Rule, seen: Value, outcome: str) -> None:
    assert judge(rule, seen, number="3.5", name="p.r", hint="a hint").outcome == outcome


def test_a_refused_check_says_seen_expected_and_what_to_do() -> None:
    check = judge(OneOf(("on", "devtools")), "off", number="3.10[1]", name="simulated.cc_mode", hint="switch it on")
    assert (check.seen, check.expected, check.reason) == ("off", "one of on, devtools", "switch it on")


def test_an_open_rule_carries_the_owners_reason_and_what_was_seen() -> None:
    check = judge(Unchecked("a laptop"), False, number="3.6", name="simulated.debug", hint="a hint")
    assert (check.seen, check.expected, check.reason) == ("false", "anything", "a laptop")


@given(st.integers(0, 2**53 - 1), st.integers(0, 2**53 - 1))
def test_at_least_is_the_order_of_numbers(floor: int, seen: int) -> None:
    outcome = judge(AtLeast(floor), seen, number="3.5", name="p.r", hint="h").outcome
    assert outcome == ("pass" if seen >= floor else "refused")


@given(st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()), st.lists))
def test_any_written_value_is_shown_short_and_printable(value: object) -> None:
    text = shown(value)
    assert text.isprintable()
    assert len(text) < 700


def test_a_number_too_long_to_print_is_shown_by_its_type() -> None:
    assert shown(1 << 100_000) == "a value of type int"
