"""The specifications say what the code does: numbers, names, codes and the worked example."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import pytest

from attestation import policy, rule
from attestation.binding import (
    DEVICE_EVIDENCE_LABEL,
    DEVICE_NONCE_LABEL,
    REPORT_DATA_LABEL,
    Binding,
    device_evidence_digest,
    frame,
)
from attestation.evidence import Evidence
from attestation.policy import AppraisalPolicy
from attestation.simulated.rules import RULES

SPEC = Path(__file__).parents[2] / "docs" / "spec"
APPRAISAL = (SPEC / "appraisal.md").read_text(encoding="utf-8")
POLICY = (SPEC / "policy.md").read_text(encoding="utf-8")

EXAMPLE = Binding(
    nonce=bytes(range(32)),
    session_key_digest=b"\x11" * 48,
    tls_key_digest=b"\x22" * 48,
    policy_digest=b"\x33" * 48,
    manifest_digest=b"\x44" * 48,
    config_digest=b"\x55" * 48,
    boot_id=b"\x66" * 16,
)
DEVICES = (Evidence("simulated", b"device zero"), Evidence("simulated", b"device one"))


def block(name: str) -> bytes:
    found = re.search(rf"```hex {name}\n(.*?)```", APPRAISAL, re.DOTALL)
    assert found is not None, name
    return bytes.fromhex(found.group(1))


def device_list() -> bytes:
    items = [(b"protocol", DEVICE_EVIDENCE_LABEL), (b"count", struct.pack(">I", 2))]
    for device in DEVICES:
        items += [(b"platform", device.platform.encode()), (b"evidence", device.body)]
    return frame(items)


def report_list() -> bytes:
    return frame(
        [
            (b"protocol", REPORT_DATA_LABEL),
            (b"nonce", EXAMPLE.nonce),
            (b"session-key", EXAMPLE.session_key_digest),
            (b"tls-key", EXAMPLE.tls_key_digest),
            (b"device-evidence", device_evidence_digest(DEVICES)),
            (b"policy", EXAMPLE.policy_digest),
            (b"manifest", EXAMPLE.manifest_digest),
            (b"config", EXAMPLE.config_digest),
            (b"boot-id", EXAMPLE.boot_id),
        ]
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device-evidence-list", device_list()),
        ("device-evidence-digest", device_evidence_digest(DEVICES)),
        (
            "device-nonce-list-0",
            frame([(b"protocol", DEVICE_NONCE_LABEL), (b"nonce", EXAMPLE.nonce), (b"ordinal", bytes(4))]),
        ),
        ("device-nonce-0", EXAMPLE.device_nonce(0)),
        ("device-nonce-1", EXAMPLE.device_nonce(1)),
        ("report-data-list", report_list()),
        ("report-data", EXAMPLE.report_data(device_evidence_digest(DEVICES))),
    ],
)
def test_the_worked_example_is_what_the_code_computes(name: str, value: bytes) -> None:
    assert block(name) == value


def test_the_example_is_complete() -> None:
    assert len(re.findall(r"```hex ", APPRAISAL)) == 7


def test_the_offsets_of_report_data_are_those_of_the_bytes() -> None:
    data = report_list()
    rows = re.findall(r"^\| (\d+) \| `([a-z-]+)` \| .*? \| (\d+) \|$", APPRAISAL, re.MULTILINE)
    assert len(rows) == 9
    for offset, label, size in rows:
        start = int(offset)
        (length,) = struct.unpack_from(">H", data, start)
        assert data[start + 2 : start + 2 + length] == label.encode()
        assert struct.unpack_from(">I", data, start + 2 + length) == (int(size),)
    assert len(data) == 483


def test_every_check_has_the_number_and_name_of_the_specification(bench: Any) -> None:
    rows = re.findall(r"^\| (\d\.\d+(?:\[n\])?) \| `([a-z_.]+)` \|", APPRAISAL, re.MULTILINE)
    made = {(re.sub(r"\[\d+\]", "[n]", check.number), check.name) for check in bench.appraise().checks}
    assert made == set(rows)
    assert len(rows) == len(made)


def test_every_rule_is_specified_with_its_forms() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| [^|]+ \| ((?:`[a-z_]+`(?:, )?)+) \|", POLICY, re.MULTILINE)
    assert dict(rows) == {spec.name: ", ".join(f"`{form}`" for form in spec.operators) for spec in RULES}


def test_every_refusal_of_a_policy_is_specified() -> None:
    sources = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in (policy, rule)]
    raised = {code for source in sources for code in re.findall(r'"(policy\.[a-z.]+)"', source)}
    specified = set(re.findall(r"^\| `(policy\.[a-z.]+)` \|", POLICY, re.MULTILINE))
    assert raised == specified


def test_the_example_policy_is_one() -> None:
    found = re.search(r"```toml\n(.*?)```", POLICY, re.DOTALL)
    assert found is not None
    assert AppraisalPolicy.from_toml(found.group(1)).accept == ("simulated",)


def test_the_platform_words_are_specified() -> None:
    for word in (*policy.PLATFORMS, *policy.RESERVED_PLATFORMS):
        assert f"`{word}`" in POLICY
