"""Appraisal of the simulated platform: what is accepted, and every way to be refused, by number."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attestation.appraise import AppraisalRefused, EndorsementsRefused, EvidenceRefused, PolicyRefused, appraise
from attestation.binding import device_evidence_digest
from attestation.errors import EndorsementRefused, EvidenceNotGenuine
from attestation.evidence import Evidence, EvidenceSet
from attestation.policy import AppraisalPolicy
from attestation.signature import PrivateKeys
from attestation.simulated import abi, lab

AT = datetime(2026, 11, 30, 12, tzinfo=UTC)


def refused(refusal: AppraisalRefused) -> list[str]:
    """Give the numbers of the checks that refused on their own account."""
    return [check.number for check in refusal.refused if check.seen != "not judged"]


# --- accepted ------------------------------------------------------------------------------------------------------


def test_accepts_genuine_evidence(bench: Any) -> None:
    result = bench.appraise()
    assert {check.outcome for check in result.checks} == {"pass", "unchecked"}
    assert result.platform == "simulated"
    assert result.policy_digest == bench.policy().digest


def test_what_is_simulated_is_never_more_than_lab(bench: Any) -> None:
    result = bench.appraise()
    assert result.assurance == "lab"
    assert result.simulated
    assert result.as_payload()["simulated"] is True


def test_lists_every_rule_stated_or_left_open_with_the_reason(bench: Any) -> None:
    result = bench.appraise()
    open_rules = {check.name: check.reason for check in result.checks if check.outcome == "unchecked"}
    assert open_rules == {
        "simulated.chip_id": "any laboratory machine",
        "simulated.measurement": "the code changes daily",
    }


def test_checks_come_in_the_order_of_the_specification(bench: Any) -> None:
    orders = [check.order for check in bench.appraise().checks]
    assert orders == sorted(orders)
    assert len(set(orders)) == len(orders)


def test_result_names_evidence_binding_and_time(bench: Any, genuine: EvidenceSet) -> None:
    result = bench.appraise(genuine)
    assert result.evidence_digest == genuine.digest
    assert result.binding == bench.binding()
    assert result.at == AT
    assert len(result.digest) == 48


def test_the_same_inputs_give_the_same_result(bench: Any, genuine: EvidenceSet) -> None:
    assert bench.appraise(genuine).digest == bench.appraise(genuine).digest


def test_says_what_is_not_proven(bench: Any) -> None:
    assert any("confidential machine" in text for text in bench.appraise().not_proven)


def test_accepts_one_of_several_pinned_roots(bench: Any) -> None:
    policy = bench.policy(root={"one_of": ["00" * 48, bench.root_digest]})
    assert bench.appraise(policy=policy).assurance == "lab"


def test_accepts_the_pinned_machine(bench: Any) -> None:
    policy = bench.policy(chip_id={"equals": bench.laboratory.machine.chip_id.hex()})
    assert bench.appraise(policy=policy).assurance == "lab"


def test_accepts_a_processor_without_devices_where_the_policy_says_none(own_bench: Any) -> None:
    own_bench.edit_machine(devices=())
    assert own_bench.appraise(policy=own_bench.policy(devices={"equals": 0})).assurance == "lab"


# --- family 1: another session -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field", ["nonce", "session_key_digest", "tls_key_digest", "manifest_digest", "config_digest", "boot_id"]
)
def test_refuses_evidence_of_another_session(bench: Any, genuine: EvidenceSet, field: str) -> None:
    binding = bench.binding(**{field: b"\xff" * len(getattr(bench.binding(), field))})
    with pytest.raises(EvidenceRefused) as caught:
        appraise(genuine, binding=binding, policy=bench.policy(), at=AT)
    assert caught.value.code == "simulated.cpu.report_data"
    assert caught.value.exit_status == 3
    expected = ["1.6", "1.12[0]", "1.12[1]"] if field == "nonce" else ["1.6"]
    assert refused(caught.value) == expected


def test_refuses_a_session_bound_to_another_policy(bench: Any, genuine: EvidenceSet) -> None:
    binding = bench.binding(policy_digest=b"\xff" * 48)
    with pytest.raises(EvidenceRefused) as caught:
        appraise(genuine, binding=binding, policy=bench.policy(), at=AT)
    assert refused(caught.value) == ["1.6", "3.2"]


def test_a_machine_that_honestly_works_under_another_policy_is_refused(bench: Any) -> None:
    other = bench.policy(tcb={"at_least": 0})
    with pytest.raises(PolicyRefused) as caught:
        appraise(bench.collect(other), binding=bench.binding(other), policy=bench.policy(), at=AT)
    assert (caught.value.code, refused(caught.value)) == ("appraise.policy", ["3.2"])


# --- family 1: the processor ---------------------------------------------------------------------------------------


def test_refuses_bytes_that_are_no_evidence(bench: Any, genuine: EvidenceSet) -> None:
    refusal = bench.refusal(EvidenceSet(Evidence("simulated", b"hello"), genuine.devices))
    assert (refusal.code, refusal.exit_status, refused(refusal)) == ("simulated.cpu.form", 3, ["1.1"])


def test_refuses_a_device_in_the_processors_place(bench: Any, genuine: EvidenceSet) -> None:
    refusal = bench.refusal(EvidenceSet(genuine.devices[0], genuine.devices))
    assert refused(refusal) == ["1.1"]


def forger(bench: Any, tmp_path: Path) -> Any:
    """Make a laboratory whose names, identities, dates and settings are all those of the genuine one."""
    forged = lab.create(tmp_path / "forged", devices=2, at=AT)
    made = type(bench)(forged.directory, forged.root_digest)
    machine = bench.laboratory.machine
    made.edit_machine(chip_id=machine.chip_id, devices=machine.devices)
    certificates = {"cpu.cert.dsse.json": ("cpu", machine.chip_id, made.laboratory.cpu)}
    for ordinal, device in enumerate(machine.devices):
        name = lab.device_certificate_file(ordinal)
        certificates[name] = ("device", device.device_id, made.laboratory.devices[ordinal])
    for name, (role, identity, signer) in certificates.items():
        envelope = bench.certificate(role, identity, signer.keys, made.root_keys)
        (forged.directory / name).write_bytes(envelope)
    return made


def test_refuses_a_forged_root_with_identical_names(bench: Any, tmp_path: Path) -> None:
    evidence = forger(bench, tmp_path).collect(bench.policy())
    refusal = bench.refusal(evidence)
    assert refused(refusal) == ["1.2", "1.8[0]", "1.8[1]"]
    assert refusal.code == "simulated.cpu.root"
    assert isinstance(refusal, EvidenceNotGenuine)
    # What hangs on a foreign root is not even looked at.
    not_judged = {check.number for check in refusal.checks if check.seen == "not judged"}
    assert {"1.3", "1.4", "1.6", "2.1", "3.5", "1.9[0]", "3.10[1]"} <= not_judged


def test_a_forgery_is_genuine_to_its_own_root_only(bench: Any, tmp_path: Path) -> None:
    # Positive control: the forgery is perfect but for the root, so nothing else refused it above.
    made = forger(bench, tmp_path)
    assert made.appraise().assurance == "lab"


def test_refuses_a_forged_chain_that_shows_the_genuine_root(bench: Any, tmp_path: Path) -> None:
    made = forger(bench, tmp_path)
    devices = tuple(
        made.sign("device", bench.device_report(place), made.laboratory.devices[place], root=bench.laboratory.root)
        for place in range(2)
    )
    cpu = made.sign("cpu", bench.cpu_report(devices), made.laboratory.cpu, root=bench.laboratory.root)
    assert refused(bench.refusal(EvidenceSet(cpu, devices))) == ["1.3", "1.9[0]", "1.9[1]"]


def test_refuses_a_report_signed_by_another_key_than_the_certified(
    bench: Any, genuine: EvidenceSet, other_keys: PrivateKeys
) -> None:
    signer = lab.Signer(other_keys, bench.laboratory.cpu.certificate)
    cpu = bench.sign("cpu", bench.cpu_report(genuine.devices), signer)
    assert refused(bench.refusal(EvidenceSet(cpu, genuine.devices))) == ["1.4"]


def test_refuses_a_device_key_that_signs_as_the_processor(bench: Any, genuine: EvidenceSet) -> None:
    cpu = bench.sign("cpu", bench.cpu_report(genuine.devices), bench.laboratory.devices[0])
    refusal = bench.refusal(EvidenceSet(cpu, genuine.devices))
    assert refused(refusal) == ["1.3"]
    assert "role device" in refusal.found


def test_refuses_a_certified_key_that_certifies_another(
    bench: Any, genuine: EvidenceSet, other_keys: PrivateKeys
) -> None:
    machine = bench.laboratory.machine
    certificate = bench.certificate("cpu", machine.chip_id, other_keys, bench.laboratory.cpu.keys)
    cpu = bench.sign("cpu", bench.cpu_report(genuine.devices), lab.Signer(other_keys, certificate))
    assert refused(bench.refusal(EvidenceSet(cpu, genuine.devices))) == ["1.3"]


def test_refuses_a_report_of_another_chip_than_the_certified(bench: Any, genuine: EvidenceSet) -> None:
    report = bench.cpu_report(genuine.devices, chip_id=bytes(32))
    cpu = bench.sign("cpu", report, bench.laboratory.cpu)
    assert refused(bench.refusal(EvidenceSet(cpu, genuine.devices))) == ["1.5"]


def test_refuses_a_device_report_signed_by_the_processor(bench: Any, genuine: EvidenceSet) -> None:
    signer = bench.laboratory.cpu
    body = abi.read_body(bench.sign("device", bench.device_report(0), signer).body, "device")
    cpu = Evidence("simulated", abi.write_body(body, "cpu"))
    assert refused(bench.refusal(EvidenceSet(cpu, genuine.devices))) == ["1.4"]


def test_nothing_of_an_ungenuine_processor_is_judged_as_if_it_were(bench: Any, genuine: EvidenceSet) -> None:
    refusal = bench.refusal(EvidenceSet(Evidence("simulated", b"hello"), genuine.devices))
    not_judged = {check.number for check in refusal.checks if check.seen == "not judged"}
    assert not_judged == {"1.2", "1.3", "1.4", "1.5", "1.6", "2.1", "3.3", "3.4", "3.5", "3.6"}
    assert all(check.outcome == "refused" for check in refusal.checks if check.number in not_judged)


@given(place=st.integers(0, 1 << 16), bit=st.integers(0, 7))
@settings(deadline=None, max_examples=120)
def test_no_flipped_bit_of_the_processors_evidence_is_accepted(
    bench: Any, genuine: EvidenceSet, place: int, bit: int
) -> None:
    spoiled = bytearray(genuine.cpu.body)
    spoiled[place % len(spoiled)] ^= 1 << bit
    refusal = bench.refusal(EvidenceSet(Evidence("simulated", bytes(spoiled)), genuine.devices))
    assert refusal.exit_status == 3


@given(place=st.integers(0, 1 << 16), bit=st.integers(0, 7))
@settings(deadline=None, max_examples=80)
def test_no_flipped_bit_of_a_devices_evidence_is_accepted(
    bench: Any, genuine: EvidenceSet, place: int, bit: int
) -> None:
    spoiled = bytearray(genuine.devices[1].body)
    spoiled[place % len(spoiled)] ^= 1 << bit
    devices = (genuine.devices[0], Evidence("simulated", bytes(spoiled)))
    # The processor vouches for the spoiled set, so that the device's own chain has to catch it.
    refusal = bench.refusal(bench.with_devices(devices))
    assert refusal.exit_status == 3
    assert all("[1]" in number for number in refused(refusal))


@given(st.binary(min_size=1, max_size=200))
@settings(deadline=None, max_examples=60)
def test_any_bytes_are_refused_and_nothing_else_happens(bench: Any, genuine: EvidenceSet, data: bytes) -> None:
    junk = Evidence("simulated", data)
    assert bench.refusal(EvidenceSet(junk, (junk, junk))).exit_status == 3
    assert bench.refusal(EvidenceSet(Evidence("simulated", abi.MAGIC + data), genuine.devices)).exit_status == 3


# --- family 1: the devices -----------------------------------------------------------------------------------------


def test_refuses_devices_that_changed_places(bench: Any, genuine: EvidenceSet) -> None:
    swapped = genuine.devices[::-1]
    assert refused(bench.refusal(EvidenceSet(genuine.cpu, swapped))) == ["1.6", "1.12[0]", "1.12[1]"]
    assert refused(bench.refusal(bench.with_devices(swapped))) == ["1.12[0]", "1.12[1]"]


def test_refuses_one_device_that_answers_for_two(bench: Any, genuine: EvidenceSet) -> None:
    twin = bench.sign(
        "device", bench.device_report(0, nonce=bench.binding().device_nonce(1)), bench.laboratory.devices[0]
    )
    refusal = bench.refusal(bench.with_devices((genuine.devices[0], twin)))
    assert refused(refusal) == ["1.13"]
    assert refusal.code == "simulated.devices.distinct"


def test_refuses_one_report_in_two_places(bench: Any, genuine: EvidenceSet) -> None:
    refusal = bench.refusal(bench.with_devices((genuine.devices[0], genuine.devices[0])))
    assert refused(refusal) == ["1.12[1]", "1.13"]


def test_refuses_a_device_that_gives_itself_the_identity_of_another(bench: Any, genuine: EvidenceSet) -> None:
    other = bench.laboratory.machine.devices[0].device_id
    liar = bench.sign("device", bench.device_report(1, device_id=other), bench.laboratory.devices[1])
    assert refused(bench.refusal(bench.with_devices((genuine.devices[0], liar)))) == ["1.11[1]", "1.13"]


def test_refuses_a_processor_in_a_devices_place(bench: Any, genuine: EvidenceSet) -> None:
    assert refused(bench.refusal(bench.with_devices((genuine.devices[0], genuine.cpu)))) == ["1.7[1]"]


def test_refuses_a_processors_key_that_signs_as_a_device(bench: Any, genuine: EvidenceSet) -> None:
    fake = bench.sign("device", bench.device_report(1), bench.laboratory.cpu)
    assert refused(bench.refusal(bench.with_devices((genuine.devices[0], fake)))) == ["1.9[1]"]


def test_refuses_a_device_of_another_challenge(bench: Any, genuine: EvidenceSet) -> None:
    stale = bench.sign("device", bench.device_report(1, nonce=bytes(32)), bench.laboratory.devices[1])
    assert refused(bench.refusal(bench.with_devices((genuine.devices[0], stale)))) == ["1.12[1]"]


def test_one_good_device_does_not_hide_a_bad_one(bench: Any, genuine: EvidenceSet) -> None:
    for place in range(2):
        devices = list(genuine.devices)
        devices[place] = Evidence("simulated", b"junk")
        assert refused(bench.refusal(bench.with_devices(tuple(devices)))) == [f"1.7[{place}]"]


# --- family 2 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edge", ["not_before", "not_after"])
def test_certificates_hold_to_the_second(bench: Any, edge: str) -> None:
    signer = bench.laboratory.cpu
    machine = bench.laboratory.machine
    root = bench.root_keys
    changes = {edge: AT}
    devices = tuple(
        bench.sign(
            "device",
            bench.device_report(place),
            item,
            certificate=bench.certificate("device", machine.devices[place].device_id, item.keys, root, **changes),
        )
        for place, item in enumerate(bench.laboratory.devices)
    )
    certificate = bench.certificate("cpu", machine.chip_id, signer.keys, root, **changes)
    evidence = EvidenceSet(bench.sign("cpu", bench.cpu_report(devices), signer, certificate=certificate), devices)
    assert bench.appraise(evidence).assurance == "lab"

    outside = AT + timedelta(seconds=1 if edge == "not_after" else -1)
    refusal = bench.refusal(evidence, at=outside)
    assert refused(refusal) == ["2.1", "2.2[0]", "2.2[1]"]
    assert isinstance(refusal, EndorsementsRefused)
    assert isinstance(refusal, EndorsementRefused)
    assert (refusal.code, refusal.exit_status) == ("simulated.cpu.validity", 5)


@pytest.mark.parametrize("year", [1970, 2099])
def test_a_clock_that_is_far_off_is_refused(bench: Any, genuine: EvidenceSet, year: int) -> None:
    assert bench.refusal(genuine, at=AT.replace(year=year)).exit_status == 5


# --- family 3 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "number", "code"),
    [({"debug": True}, "3.6", "simulated.debug"), ({"tcb": 2}, "3.5", "simulated.tcb")],
)
def test_refuses_a_machine_that_breaks_a_rule(own_bench: Any, machine: dict[str, Any], number: str, code: str) -> None:
    own_bench.edit_machine(**machine)
    refusal = own_bench.refusal()
    assert isinstance(refusal, PolicyRefused)
    assert (refused(refusal), refusal.code, refusal.exit_status) == ([number], code, 4)


@pytest.mark.parametrize(
    ("device", "number", "code"),
    [
        ({"cc_mode": "off"}, "3.10[1]", "simulated.cc_mode"),
        ({"cc_mode": "devtools"}, "3.10[1]", "simulated.cc_mode"),
        ({"model": "another"}, "3.8[1]", "simulated.device_model"),
        ({"measurement": bytes(48)}, "3.9[1]", "simulated.device_measurement"),
    ],
)
def test_refuses_a_device_that_breaks_a_rule(own_bench: Any, device: dict[str, Any], number: str, code: str) -> None:
    own_bench.edit_device(1, **device)
    refusal = own_bench.refusal()
    assert (refused(refusal), refusal.code, refusal.exit_status) == ([number], code, 4)


@pytest.mark.parametrize(
    ("rule", "value", "number"),
    [
        ("chip_id", "00" * 32, "3.3"),
        ("measurement", "00" * 48, "3.4"),
    ],
)
def test_refuses_another_machine_and_other_code(bench: Any, rule: str, value: str, number: str) -> None:
    refusal = bench.refusal(policy=bench.policy(**{rule: {"equals": value}}))
    assert (refused(refusal), refusal.exit_status) == ([number], 4)


@pytest.mark.parametrize("kept", [0, 1])
def test_refuses_a_missing_device(bench: Any, genuine: EvidenceSet, kept: int) -> None:
    refusal = bench.refusal(bench.with_devices(genuine.devices[:kept]))
    assert refused(refusal) == ["3.7"]
    assert (refusal.found, refusal.expected) == (str(kept), "2")


def test_a_device_cannot_be_dropped_on_the_way(bench: Any, genuine: EvidenceSet) -> None:
    refusal = bench.refusal(EvidenceSet(genuine.cpu, genuine.devices[:1]))
    assert refused(refusal) == ["1.6", "3.7"]
    assert refusal.exit_status == 3


def test_refuses_an_extra_device(bench: Any) -> None:
    refusal = bench.refusal(policy=bench.policy(devices={"equals": 1}))
    assert (refused(refusal), refusal.code) == (["3.7"], "simulated.devices")


def test_all_refusals_are_gathered(own_bench: Any) -> None:
    own_bench.edit_machine(debug=True, tcb=0)
    own_bench.edit_device(0, cc_mode="off")
    own_bench.edit_device(1, model="another")
    assert refused(own_bench.refusal()) == ["3.5", "3.6", "3.8[1]", "3.10[0]"]


def test_the_lowest_family_gives_the_exit_status(own_bench: Any) -> None:
    own_bench.edit_machine(debug=True)
    late = AT.replace(year=2099)
    evidence = own_bench.collect()
    assert own_bench.refusal(evidence).exit_status == 4
    assert own_bench.refusal(evidence, at=late).exit_status == 5
    dropped = EvidenceSet(evidence.cpu, evidence.devices[:1])
    assert own_bench.refusal(dropped, at=late).exit_status == 3


@pytest.mark.parametrize("word", ["sev-snp", "tdx", "unheard-of"])
def test_refuses_a_platform_that_the_policy_does_not_name(bench: Any, genuine: EvidenceSet, word: str) -> None:
    relabelled = EvidenceSet(
        dataclasses.replace(genuine.cpu, platform=word),
        tuple(dataclasses.replace(device, platform=word) for device in genuine.devices),
    )
    refusal = bench.refusal(relabelled)
    assert refused(refusal) == ["3.1", "3.1[0]", "3.1[1]"]
    assert (refusal.code, refusal.exit_status, refusal.simulated) == ("appraise.platform", 4, False)


def test_refuses_a_device_of_a_platform_that_the_policy_does_not_name(bench: Any, genuine: EvidenceSet) -> None:
    devices = (genuine.devices[0], dataclasses.replace(genuine.devices[1], platform="nvidia"))
    assert refused(bench.refusal(bench.with_devices(devices))) == ["3.1[1]", "3.7"]


def test_devices_do_not_make_up_for_a_foreign_processor(bench: Any, genuine: EvidenceSet) -> None:
    refusal = bench.refusal(EvidenceSet(dataclasses.replace(genuine.cpu, platform="tdx"), genuine.devices))
    assert refused(refusal) == ["3.1"]
    assert refusal.simulated


def mixed_policy(bench: Any) -> AppraisalPolicy:
    """Give what no file can say yet: a policy that accepts another platform beside simulated."""
    policy: AppraisalPolicy = dataclasses.replace(bench.policy(), accept=("sev-snp", "simulated"))
    return policy


def test_a_mixed_policy_makes_simulated_evidence_no_better_than_lab(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = bench.policy()
    mixed = mixed_policy(bench)
    evidence = bench.collect(mixed)
    result = appraise(evidence, binding=bench.binding(mixed), policy=mixed, at=AT)
    assert mixed.accepts_simulated
    assert mixed.digest != policy.digest
    assert result.assurance == "lab"


def test_a_platform_without_a_verifier_is_refused_even_if_a_policy_names_it(bench: Any, genuine: EvidenceSet) -> None:
    mixed = mixed_policy(bench)
    relabelled = EvidenceSet(dataclasses.replace(genuine.cpu, platform="sev-snp"), genuine.devices)
    with pytest.raises(AppraisalRefused) as caught:
        appraise(relabelled, binding=bench.binding(mixed), policy=mixed, at=AT)
    assert "3.1" in refused(caught.value)


def test_every_refusal_says_what_to_do(own_bench: Any) -> None:
    own_bench.edit_machine(debug=True, tcb=0)
    refusal = own_bench.refusal()
    for check in refusal.refused:
        assert check.seen
        assert check.expected
        assert check.reason
    assert (refusal.found, refusal.expected) == ("0", "at least 3")
    assert "firmware" in refusal.hint


def test_the_digest_that_the_processor_vouches_for_is_that_of_the_set(bench: Any, genuine: EvidenceSet) -> None:
    result = bench.appraise(genuine)
    check = next(check for check in result.checks if check.number == "1.6")
    assert check.seen == bench.binding().report_data(device_evidence_digest(genuine.devices)).hex()
