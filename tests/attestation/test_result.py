from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from attestation import strictjson
from attestation._seal import MINT
from attestation.evidence import EvidenceSet
from attestation.result import AttestationResult, Check, PolicyRefused, render

AT = datetime(2026, 11, 30, 12, tzinfo=UTC)
PASS = Check("3.5", "p.tcb", "pass", "3", "at least 3", "")
OPEN = Check("3.6[0]", "p.debug", "unchecked", "true", "anything", "a laptop")
REFUSED = Check("3.7", "p.devices", "refused", "1", "2", "add one")


def result(bench: Any, platforms: tuple[str, ...]) -> AttestationResult:
    return AttestationResult(
        MINT,
        platform=platforms[0],
        platforms=platforms,
        checks=(PASS, OPEN),
        binding=bench.binding(),
        policy_name="p",
        policy_digest=bytes(48),
        evidence_digest=bytes(48),
        at=AT,
        not_proven=("that pigs fly",),
    )


@pytest.mark.parametrize("platforms", [("simulated",), ("sev-snp", "simulated"), ("nvidia", "simulated", "tdx")])
def test_one_simulated_part_makes_the_whole_a_laboratory(bench: Any, platforms: tuple[str, ...]) -> None:
    made = result(bench, platforms)
    assert (made.assurance, made.simulated) == ("lab", True)
    assert render(made)[0].startswith("SIMULATED")


def test_hardware_only_is_production_and_says_nothing_of_simulation(bench: Any) -> None:
    made = result(bench, ("nvidia", "sev-snp"))
    assert (made.assurance, made.simulated) == ("production", False)
    assert "SIMULATED" not in "\n".join(render(made))


def test_no_caller_can_state_the_assurance(bench: Any) -> None:
    with pytest.raises(TypeError):
        AttestationResult(MINT, assurance="production", platforms=("simulated",))  # type: ignore[call-arg]


def test_renders_every_check_and_what_is_not_proven(bench: Any) -> None:
    lines = render(result(bench, ("simulated",)))
    assert lines[1] == "accepted by policy p: platform simulated, assurance lab"
    assert lines[2] == "  3.5     pass       p.tcb: 3"
    assert lines[3] == "  3.6[0]  unchecked  p.debug: true (left open: a laptop)"
    assert lines[4] == "not proven: that pigs fly"


def test_renders_a_refusal_loudly_with_what_to_do() -> None:
    refusal = PolicyRefused((PASS, REFUSED), platforms=("simulated",), policy_name="p")
    lines = render(refusal)
    assert lines[0].startswith("SIMULATED")
    assert lines[1] == "REFUSED by policy p: platform simulated, 1 of the checks below"
    assert lines[3] == "  3.7     REFUSED    p.devices: 1; expected 2; hint: add one"


def test_a_refusal_carries_its_whole_trail() -> None:
    refusal = PolicyRefused((PASS, REFUSED), platforms=("simulated",), policy_name="p")
    assert (refusal.code, refusal.found, refusal.expected, refusal.hint) == ("p.devices", "1", "2", "add one")
    payload = refusal.trail_payload()
    assert payload["outcome"] == "refused"
    assert payload["simulated"] is True
    assert [check["number"] for check in payload["checks"]] == ["3.5", "3.7"]
    assert json.loads(strictjson.dumps(payload)) == payload


def test_a_result_is_json_without_floats(bench: Any, genuine: EvidenceSet) -> None:
    payload = bench.appraise(genuine).as_payload()
    assert strictjson.loads(strictjson.dumps(payload), limit=1 << 20) == payload
    assert payload["type"] == "attestation-result"


def test_digest_depends_on_evidence_and_time(bench: Any) -> None:
    first, second = bench.appraise(bench.collect()), bench.appraise(bench.collect())
    assert first.digest != second.digest


@pytest.mark.parametrize("number", ["", "4.1", "1", "1.0", "1.100", "1.1[", "1.1[100]", "1.1 ", "x1.1"])
def test_a_check_has_a_number_of_the_specification(number: str) -> None:
    with pytest.raises(ValueError, match="check number"):
        Check(number, "n", "pass", "", "", "")


def test_checks_sort_by_family_number_and_ordinal() -> None:
    numbers = ["3.1", "1.10[0]", "1.2", "1.10[1]", "2.1", "1.9[10]", "1.9[2]", "3.1[0]"]
    ordered = sorted((Check(number, "n", "pass", "", "", "") for number in numbers), key=lambda check: check.order)
    assert [check.number for check in ordered] == [
        "1.2",
        "1.9[2]",
        "1.9[10]",
        "1.10[0]",
        "1.10[1]",
        "2.1",
        "3.1",
        "3.1[0]",
    ]
