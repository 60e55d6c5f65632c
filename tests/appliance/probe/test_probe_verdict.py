"""Which stage is said to bound a load, for made-up rates; and findings cross to the command line whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.probe.findings import CipherRate, CopyRate, Findings, LoadRate, ReadRate
from appliance.probe.verdict import judge
from attestation import strictjson
from attestation.errors import FormatError

GB = 1_000_000_000


def _load(rate: float) -> LoadRate:
    return LoadRate(nbytes=GB, milliseconds=round(1000 / rate), ring_bytes=1 << 23, peak_plaintext_bytes=1 << 21)


FINDINGS = Findings(
    directory="/srv",
    file_system="ext4",
    device="cuda:0",
    open_on="host",
    cores=4,
    readers=2,
    openers=2,
    reads=(ReadRate(1 << 20, 1, GB), ReadRate(4 << 20, 2, 2 * GB)),
    ciphers=(CipherRate(1, 4 * GB), CipherRate(2, 8 * GB)),
    copies=(CopyRate(1 << 20, 10 * GB), CopyRate(1 << 24, 20 * GB)),
    cold=_load(1.9),
    warm=_load(7.5),
)


def test_medium_bounds_a_load_that_is_as_fast_as_it() -> None:
    verdict = judge(FINDINGS)
    assert verdict.stage == "medium"
    assert verdict.sentence == (
        "the medium: 2.00 GB/s, and the cold load reached 1.90 GB/s; "
        "faster media would help until AES-256-GCM at 8.00 GB/s"
    )


def test_cipher_bounds_where_the_medium_is_faster() -> None:
    verdict = judge(replace(FINDINGS, reads=(ReadRate(4 << 20, 2, 30 * GB),), cold=_load(7.8)))
    assert verdict.stage == "cipher"
    assert "more openers (loading.openers = 2 of 4 cores)" in verdict.sentence
    assert "until the copy to the device at 20.00 GB/s" in verdict.sentence


def test_more_openers_are_not_advised_when_every_core_has_one() -> None:
    verdict = judge(replace(FINDINGS, cores=2, reads=(ReadRate(4 << 20, 2, 30 * GB),), cold=_load(7.8)))
    assert "more cores" in verdict.sentence


def test_copy_bounds_where_it_is_slowest() -> None:
    verdict = judge(replace(FINDINGS, copies=(CopyRate(1 << 20, GB),), cold=_load(0.9)))
    assert verdict.stage == "copy"


def test_copy_never_bounds_a_processor_slot() -> None:
    verdict = judge(replace(FINDINGS, device="cpu", copies=(CopyRate(1 << 20, GB // 2),)))
    assert verdict.stage == "medium"


def test_load_slower_than_every_stage_is_blamed_on_none() -> None:
    verdict = judge(replace(FINDINGS, cold=_load(0.5)))
    assert verdict.stage == "loader"
    assert "the cold load reached 0.50 GB/s where the slowest stage, the medium, gives 2.00 GB/s" in verdict.sentence


def test_warm_load_is_judged_where_there_is_no_cold_one() -> None:
    verdict = judge(replace(FINDINGS, cold=None))
    assert verdict.stage == "cipher"
    assert "the warm load reached 7.52 GB/s" in verdict.sentence


def test_medium_without_direct_reads_is_not_judged() -> None:
    assert judge(replace(FINDINGS, reads=(), cold=_load(7.8))).stage == "cipher"


@pytest.mark.parametrize("findings", [FINDINGS, replace(FINDINGS, cold=None), replace(FINDINGS, reads=())])
def test_findings_cross_as_json(findings: Findings) -> None:
    data = strictjson.dumps(findings.as_payload())
    assert Findings.from_payload(strictjson.loads(data, limit=len(data))) == findings


@pytest.mark.parametrize("member", ["directory", "cores", "reads", "warm"])
def test_findings_without_a_member_are_refused(member: str) -> None:
    members = FINDINGS.as_payload()
    del members[member]
    with pytest.raises(FormatError) as caught:
        Findings.from_payload(members)
    assert caught.value.code.startswith("json.")
