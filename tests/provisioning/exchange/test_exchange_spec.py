"""docs/spec/exchange.md says what the code does: its examples, its limits, its codes."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from attestation import strictjson
from attestation.policy import GrantTerms
from attestation.strictjson import b64
from provisioning import challenge, grant, ownerkey, request, wiperecord
from provisioning.chainfile import Record
from provisioning.fingerprint import fingerprint
from provisioning.grant import GrantStatement

ROOT = Path(__file__).parents[3]
SPEC = (ROOT / "docs" / "spec" / "exchange.md").read_text(encoding="utf-8")
NOON = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)


def test_the_example_of_a_challenge() -> None:
    payload = strictjson.dumps(
        {
            **strictjson.header("challenge", epoch=3, issued_at="2026-11-30T12:00:00Z"),
            "nonce": b64(bytes(range(32))),
            "manifest_digest": b64(b"\x11" * 48),
        }
    )
    digest = hashlib.sha384(payload).digest()
    assert payload.decode() in SPEC
    assert f"`{digest[:8].hex()}`" in SPEC
    assert f"`{fingerprint(digest)}`" in SPEC


def test_the_example_of_an_info() -> None:
    statement = GrantStatement(
        epoch=3,
        issued_at=NOON,
        bundle_id=bytes(range(16)),
        manifest_digest=b"\x11" * 48,
        challenge_digest=b"\x22" * 48,
        request_digest=b"\x33" * 48,
        session_digest=b"\x44" * 48,
        result_digest=b"\x55" * 48,
        assurance="lab",
        epoch_floor=3,
        terms=GrantTerms(loads=1, seconds=600, reboot="courier"),
    )
    shown = re.search(r"```hex\n([0-9a-f\n]+)```", SPEC)
    assert shown is not None
    assert statement.hpke_info() == bytes.fromhex(shown[1])


def test_the_example_of_a_ledger_line() -> None:
    line = Record(0, NOON, "ledger.begun", {"version": 1, "owner": "a" * 96}, "0" * 96).as_line()
    assert line.decode() in SPEC
    assert hashlib.sha384(line).hexdigest() in SPEC


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("owner-key", ownerkey._LIMIT),
        (challenge.KIND, challenge.LIMIT),
        (request.KIND, request.LIMIT),
        (grant.KIND, grant.LIMIT),
        (wiperecord.KIND, wiperecord.LIMIT),
    ],
)
def test_the_limits_of_payloads(kind: str, limit: int) -> None:
    assert f"| `{kind}` | {limit:,} |" in SPEC


FILES = (
    "broker",
    "challenge",
    "files",
    "grant",
    "keystore",
    "ledger",
    "ownerkey",
    "request",
    "secret",
    "session",
    "sessionkeys",
    "wiperecord",
    "cli/exchange",
    "cli/passphrase",
    "cli/wipe",
)
_RAISED = re.compile(
    r"(?:Refused|Failed|Error|Incomplete|_refuse)\(\s*(?:\"|f\")"
    r"((?:owner|passphrase|challenge|request|grant|session|secret|output|input|wipe|ledger)\.[a-z.]+)\""
)


@pytest.mark.parametrize("name", FILES)
def test_every_code_of_a_refusal_is_in_the_table(name: str) -> None:
    source = (ROOT / "provisioning" / f"{name}.py").read_text(encoding="utf-8")
    codes = set(_RAISED.findall(source)) - {"ledger.challenge", "ledger.grant"}
    table = SPEC.split("## 9. Refusals")[1].split("## 10.")[0]
    assert {code for code in codes if f"`{code}`" not in table} == set()


def test_the_search_for_codes_finds_them() -> None:
    source = (ROOT / "provisioning" / "session.py").read_text(encoding="utf-8")
    assert {"grant.session", "grant.spent", "grant.sealed", "session.wiped"} <= set(_RAISED.findall(source))


def test_every_code_in_the_table_is_raised_somewhere() -> None:
    table = SPEC.split("## 9. Refusals")[1].split("## 10.")[0]
    listed = {
        code
        for row in table.splitlines()
        if row.startswith("| `")
        for code in re.findall(r"`([^`]+)`", row.split("|")[1])
    }
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "provisioning").rglob("*.py"))
    # Codes of the ledger are put together from its name and a word (provisioning/chainfile.py).
    missing = {
        code for code in listed if f'"{code}"' not in sources and f'"{code.removeprefix("ledger.")}"' not in sources
    }
    assert missing == set()
