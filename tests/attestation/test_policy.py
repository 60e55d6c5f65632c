"""Invariant: any file gives a policy in which every rule is stated, or a PolicyInvalid."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attestation import strictjson
from attestation.errors import PolicyInvalid
from attestation.policy import AppraisalPolicy, AtLeast, Equals, OneOf, Unchecked
from attestation.simulated.rules import RULES

TOML = """
version = 1
name = "laboratory"
epoch = 4
accept = ["simulated"]
challenge_seconds = 86400

[simulated]
root        = { equals = "ROOT" }
chip_id     = { unchecked = "any laboratory machine" }
measurement = { unchecked = "the laboratory's code changes daily" }
tcb         = { at_least = 3 }
debug       = { equals = false }
devices     = { equals = 1 }
device_model = { one_of = ["simulated-cpu-slot"] }
device_measurement = { unchecked = "no firmware" }
cc_mode     = { equals = "on" }

[serving]
max_context = 2048
max_output_tokens = 512
max_concurrent = 16

[grant]
loads = 1
seconds = 86400
reboot = "courier"
""".replace("ROOT", "ab" * 48)

RULE_NAMES = [spec.name for spec in RULES]


@pytest.fixture
def members() -> dict[str, Any]:
    return AppraisalPolicy.from_toml(TOML).as_payload()


def refusal(members: dict[str, Any]) -> PolicyInvalid:
    with pytest.raises(PolicyInvalid) as caught:
        AppraisalPolicy.from_payload(members)
    assert caught.value.exit_status == 78
    assert caught.value.found
    assert caught.value.hint
    return caught.value


def toml_refusal(text: str) -> PolicyInvalid:
    with pytest.raises(PolicyInvalid) as caught:
        AppraisalPolicy.from_toml(text)
    return caught.value


def test_reads_the_owners_file() -> None:
    policy = AppraisalPolicy.from_toml(TOML)
    assert (policy.name, policy.epoch, policy.accept, policy.challenge_seconds) == (
        "laboratory",
        4,
        ("simulated",),
        86400,
    )
    rules = policy.rules("simulated")
    assert rules["tcb"] == AtLeast(3)
    assert rules["debug"] == Equals(False)
    assert rules["device_model"] == OneOf(("simulated-cpu-slot",))
    assert rules["chip_id"] == Unchecked("any laboratory machine")
    assert (policy.serving.max_context, policy.serving.max_output_tokens, policy.serving.max_concurrent) == (
        2048,
        512,
        16,
    )
    assert (policy.grant.loads, policy.grant.seconds, policy.grant.reboot) == (1, 86400, "courier")
    assert policy.accepts_simulated


def test_file_and_manifest_form_are_one_policy(members: dict[str, Any]) -> None:
    from_file = AppraisalPolicy.from_toml(TOML)
    from_manifest = AppraisalPolicy.from_payload(strictjson.loads(strictjson.dumps(members), limit=1 << 20))
    assert from_manifest == from_file
    assert from_manifest.digest == from_file.digest
    assert len(from_file.digest) == 48


@pytest.mark.parametrize("name", RULE_NAMES)
def test_refuses_a_policy_that_does_not_state_a_rule(members: dict[str, Any], name: str) -> None:
    del members["simulated"][name]
    error = refusal(members)
    assert error.code == "policy.rule.missing"
    assert name in error.found


@pytest.mark.parametrize("name", RULE_NAMES)
def test_refuses_a_rule_left_open_without_a_reason(members: dict[str, Any], name: str) -> None:
    members["simulated"][name] = {}
    assert refusal(members).code == "policy.rule.open"


@pytest.mark.parametrize("name", [spec.name for spec in RULES if "unchecked" in spec.operators])
def test_refuses_an_empty_reason(members: dict[str, Any], name: str) -> None:
    members["simulated"][name] = {"unchecked": " "}
    error = refusal(members)
    assert error.code == "policy.rule.open"
    assert name in error.found


@pytest.mark.parametrize("name", ["root", "devices"])
def test_root_and_device_count_cannot_be_left_open(members: dict[str, Any], name: str) -> None:
    members["simulated"][name] = {"unchecked": "convenience"}
    assert refusal(members).code == "policy.rule.operator"


def test_an_unknown_rule_gets_the_nearest_name(members: dict[str, Any]) -> None:
    members["simulated"]["tbc"] = {"at_least": 1}
    error = refusal(members)
    assert (error.code, error.hint) == ("policy.rule.unknown", "did you mean tcb")


@pytest.mark.parametrize("word", ["sev-snp", "tdx", "tpm", "nvidia"])
def test_refuses_platforms_that_this_release_cannot_appraise(members: dict[str, Any], word: str) -> None:
    members["accept"] = ["simulated", word]
    error = refusal(members)
    assert (error.code, error.found) == ("policy.platform.unavailable", word)
    assert "simulated" in error.hint


def test_an_unknown_platform_gets_the_nearest_name(members: dict[str, Any]) -> None:
    members["accept"] = ["simulate"]
    error = refusal(members)
    assert (error.code, error.hint) == ("policy.platform.unknown", "did you mean simulated")


@pytest.mark.parametrize(
    "words", [[], "simulated", ["simulated", "simulated"], [1], [["simulated"]], {"simulated": 1}, ["x"] * 9]
)
def test_refuses_an_accept_that_is_no_list_of_words(members: dict[str, Any], words: object) -> None:
    members["accept"] = words
    assert refusal(members).code == "policy.accept"


def test_refuses_rules_for_a_platform_that_is_not_accepted(members: dict[str, Any]) -> None:
    members["sev-snp"] = {}
    assert refusal(members).code == "policy.platform.unused"


@pytest.mark.parametrize(
    "path",
    [
        *("version", "name", "epoch", "accept", "challenge_seconds", "simulated", "serving", "grant"),
        *("serving.max_context", "serving.max_output_tokens", "serving.max_concurrent"),
        *("grant.loads", "grant.seconds", "grant.reboot"),
    ],
)
def test_nothing_has_a_default(members: dict[str, Any], path: str) -> None:
    *tables, name = path.split(".")
    table = members[tables[0]] if tables else members
    del table[name]
    error = refusal(members)
    assert error.code == "policy.missing"
    assert name in error.found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("name", ""),
        ("name", "x" * 65),
        ("name", "a\nb"),
        ("name", 1),
        ("epoch", -1),
        ("epoch", True),
        ("epoch", 1.0),
        ("epoch", 1 << 70),
        ("challenge_seconds", 0),
        ("challenge_seconds", 1 << 40),
        ("version", "1"),
        ("simulated", []),
        ("serving", 1),
        ("serving.max_context", 0),
        ("serving.max_context", (1 << 24) + 1),
        ("serving.max_output_tokens", "512"),
        ("serving.max_concurrent", 4097),
        ("grant.loads", 0),
        ("grant.seconds", 0),
        ("grant.reboot", 1),
    ],
)
def test_refuses_values_out_of_bounds(members: dict[str, Any], path: str, value: object) -> None:
    *tables, name = path.split(".")
    (members[tables[0]] if tables else members)[name] = value
    assert refusal(members).code == "policy.value"


@pytest.mark.parametrize("word", ["broker", "counted", "never", "courrier"])
def test_refuses_other_ways_to_get_a_key_after_a_reboot(members: dict[str, Any], word: str) -> None:
    members["grant"]["reboot"] = word
    assert refusal(members).code == "policy.grant.reboot"


def test_refuses_another_version(members: dict[str, Any]) -> None:
    members["version"] = 2
    assert refusal(members).code == "policy.version"


@pytest.mark.parametrize(("table", "hint"), [(None, "did you mean serving"), ("grant", "did you mean seconds")])
def test_unknown_members_get_the_nearest_name(members: dict[str, Any], table: str | None, hint: str) -> None:
    (members if table is None else members[table])["servin" if table is None else "secnds"] = 1
    error = refusal(members)
    assert (error.code, error.hint) == ("policy.unknown", hint)


@pytest.mark.parametrize(
    ("path", "misspelt", "code"),
    [
        ("epoch", "epock", "policy.unknown"),
        ("version", "versoin", "policy.unknown"),
        ("accept", "acept", "policy.unknown"),
        ("grant", "grants", "policy.unknown"),
        ("simulated", "simulatd", "policy.unknown"),
        ("serving.max_context", "max_contxt", "policy.unknown"),
        ("grant.loads", "load", "policy.unknown"),
        ("simulated.chip_id", "chipid", "policy.rule.unknown"),
    ],
)
def test_a_misspelt_name_is_reported_and_not_the_one_that_is_missing(
    members: dict[str, Any], path: str, misspelt: str, code: str
) -> None:
    *tables, name = path.split(".")
    table = members[tables[0]] if tables else members
    table[misspelt] = table.pop(name)
    error = refusal(members)
    assert (error.code, error.hint) == (code, f"did you mean {name}")
    assert misspelt in error.found


def test_an_unknown_name_is_shown_without_control_characters(members: dict[str, Any]) -> None:
    members["\x1b[2J"] = 1
    assert refusal(members).found.isprintable()


@pytest.mark.parametrize("name", RULE_NAMES)
def test_every_rule_changes_the_digest(members: dict[str, Any], name: str) -> None:
    changed = copy.deepcopy(members)
    rule = changed["simulated"][name]
    ((operator, value),) = rule.items()
    if isinstance(value, bool):
        rule[operator] = not value
    elif isinstance(value, int):
        rule[operator] = value + 1
    elif isinstance(value, list):
        rule[operator] = [*value, "another"]
    else:
        rule[operator] = value[:-1] + ("d" if value[-1] != "d" else "e")
    assert AppraisalPolicy.from_payload(changed).digest != AppraisalPolicy.from_payload(members).digest


def test_refuses_text_that_is_no_toml() -> None:
    error = toml_refusal(TOML + "\n[grant]\n")
    assert error.code == "policy.toml"
    assert error.found.isprintable()


def test_refuses_toml_that_nests_too_deep() -> None:
    assert toml_refusal("x = " + "[" * 20_000).code == "policy.toml"


def test_refuses_a_number_too_long_to_read() -> None:
    assert toml_refusal(TOML.replace("epoch = 4", "epoch = " + "9" * 10_000)).code == "policy.toml"


def test_refuses_a_number_too_long_to_print() -> None:
    assert toml_refusal(TOML.replace("epoch = 4", "epoch = 0x" + "f" * 10_000)).code == "policy.value"


@pytest.mark.parametrize("value", ["4.0", "2026-11-30", "2026-11-30T12:00:00Z", "inf", "nan"])
def test_refuses_floats_and_dates(value: str) -> None:
    assert toml_refusal(TOML.replace("epoch = 4", f"epoch = {value}")).code == "policy.value"


def test_refuses_a_file_of_absurd_size() -> None:
    assert toml_refusal("#" * (64 * 1024 + 1)).code == "policy.size"


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)


@given(path=st.sampled_from(["", "simulated", "serving", "grant"]), data=st.data(), value=_JSON)
@settings(deadline=None, max_examples=200)
def test_any_value_anywhere_gives_a_policy_or_our_own_error(path: str, data: st.DataObject, value: object) -> None:
    members = AppraisalPolicy.from_toml(TOML).as_payload()
    table = members[path] if path else members
    table[data.draw(st.sampled_from([*sorted(table), "new"]))] = value
    try:
        policy = AppraisalPolicy.from_payload(members)
    except PolicyInvalid:
        return
    assert AppraisalPolicy.from_payload(policy.as_payload()) == policy


@given(st.text(max_size=80))
@settings(deadline=None, max_examples=150)
def test_any_text_gives_our_own_error(text: str) -> None:
    assert toml_refusal(text).hint


@given(st.integers(0, len(TOML) - 1), st.text(max_size=2))
@settings(deadline=None, max_examples=150)
def test_any_edit_of_the_file_gives_a_policy_or_our_own_error(place: int, text: str) -> None:
    try:
        policy = AppraisalPolicy.from_toml(TOML[:place] + text + TOML[place + 1 :])
    except PolicyInvalid:
        return
    assert json.loads(strictjson.dumps(policy.as_payload())) == policy.as_payload()


def test_an_accepted_platform_has_rules_and_another_has_none() -> None:
    policy = AppraisalPolicy.from_toml(TOML)
    with pytest.raises(KeyError):
        policy.rules("tdx")
    with pytest.raises(KeyError):
        policy.rules("simulated")["vmpl"]
