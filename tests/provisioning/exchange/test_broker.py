from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from attestation.result import AppraisalRefused
from attestation.simulated import lab
from provisioning import broker, challenge, request
from provisioning.errors import ExchangeRefused, KeyRefused, LedgerError
from provisioning.ledger import read_ledger
from provisioning.manifest import SignedManifest
from provisioning.ownerkey import OwnerSigner
from provisioning.secret import SecretBytes
from provisioning.session import Session


def _refusal(exchange: Any, asked: bytes | request.KeyRequest, **changes: Any) -> str:
    with pytest.raises(ExchangeRefused) as caught:
        exchange.grant(asked, **changes)
    assert caught.value.exit_status == 6
    return caught.value.code


def test_a_grant_is_in_the_ledger(exchange: Any, session: Session) -> None:
    asked = request.read(exchange.request(session))
    exchange.grant(asked)
    last = read_ledger(exchange.ledger_path)[-1]
    assert last.event == "grant.given"
    assert last.detail["request"] == asked.digest.hex()
    assert (last.detail["node"], last.detail["assurance"]) == ("node-1", "lab")


def test_a_challenge_answers_one_grant(exchange: Any, session: Session) -> None:
    asked = exchange.request(session)
    exchange.grant(asked)
    assert _refusal(exchange, asked) == "challenge.used"


def test_a_second_request_for_an_answered_challenge_is_refused(exchange: Any, session: Session) -> None:
    challenged = exchange.challenge()
    exchange.grant(exchange.request(session, challenged))
    assert _refusal(exchange, exchange.request(session, challenged)) == "challenge.used"


def test_two_challenges_answer_two_grants(exchange: Any, session: Session) -> None:
    for _ in range(2):
        exchange.open(session, exchange.grant(exchange.request(session))).close()


def test_refuses_an_unknown_challenge(exchange: Any, session: Session) -> None:
    asked = exchange.request(session)
    exchange.ledger_path.unlink()
    assert _refusal(exchange, asked) == "challenge.unknown"


def test_grants_until_the_last_second_of_a_challenge(exchange: Any, session: Session) -> None:
    asked = exchange.request(session)
    exchange.clock.pass_seconds(3600)
    assert exchange.grant(asked)


def test_refuses_a_stale_challenge(exchange: Any, session: Session) -> None:
    asked = exchange.request(session)
    exchange.clock.pass_seconds(3601)
    assert _refusal(exchange, asked) == "challenge.stale"


def test_a_clock_set_back_does_not_refresh_a_challenge(exchange: Any, session: Session) -> None:
    asked = exchange.request(session)
    with pytest.raises(LedgerError) as caught:
        exchange.grant(asked, at=exchange.clock.now() - timedelta(seconds=1))
    assert caught.value.code == "ledger.clock"


def test_refuses_a_challenge_for_another_bundle(
    exchange: Any, session: Session, make_manifest: Callable[..., bytes]
) -> None:
    # The machine answers for the bundle it has, with a challenge that was made for another one.
    other = SignedManifest.read(make_manifest(exchange.signer, SecretBytes.random(32)), [exchange.signer.owner])
    with exchange.ledger() as ledger:
        foreign = challenge.issue(signer=exchange.signer, manifest=other, ledger=ledger, at=exchange.clock.now())
    asked = challenge.read(foreign, exchange.signer.owner)
    own = request.read(exchange.request(session))
    forged = _with(own, challenge_digest=asked.digest)
    with pytest.raises(ExchangeRefused) as caught:
        exchange.grant(forged)
    assert caught.value.code == "challenge.manifest"


def test_refuses_evidence_for_another_nonce_than_the_challenges(exchange: Any, session: Session) -> None:
    fresh = challenge.read(exchange.challenge(), exchange.signer.owner)
    old = request.read(exchange.request(session))
    with pytest.raises(ExchangeRefused) as caught:
        exchange.grant(_with(old, challenge_digest=fresh.digest))
    assert caught.value.code == "challenge.nonce"


def _with(asked: request.KeyRequest, **changes: Any) -> request.KeyRequest:
    return dataclasses.replace(asked, **changes)


def test_refuses_a_request_for_another_bundle(
    exchange: Any, session: Session, make_manifest: Callable[..., bytes]
) -> None:
    asked = exchange.request(session)
    other = SignedManifest.read(make_manifest(exchange.signer, SecretBytes.random(32)), [exchange.signer.owner])
    assert _refusal(exchange, asked, manifest=other) == "challenge.manifest"


def test_appraising_alone_refuses_a_request_for_another_bundle(
    exchange: Any, session: Session, make_manifest: Callable[..., bytes]
) -> None:
    asked = request.read(exchange.request(session))
    other = SignedManifest.read(make_manifest(exchange.signer, SecretBytes.random(32)), [exchange.signer.owner])
    with pytest.raises(ExchangeRefused) as caught:
        broker.appraise_request(asked, manifest=other, at=exchange.clock.now())
    assert caught.value.code == "request.manifest"


def test_refuses_evidence_bound_to_another_policy(exchange: Any, session: Session) -> None:
    asked = request.read(exchange.request(session))
    binding = dataclasses.replace(asked.binding, policy_digest=bytes(48))
    assert _refusal(exchange, _with(asked, binding=binding)) == "request.policy"


def test_refuses_a_withdrawn_epoch(exchange: Any, session: Session) -> None:
    asked = exchange.request(session)
    assert _refusal(exchange, asked, epoch_floor=exchange.manifest.epoch + 1) == "grant.epoch"


def test_refuses_evidence_below_the_policy_and_records_the_refusal(
    make_exchange: Callable[..., Any], session: Session
) -> None:
    exchange = make_exchange(tcb=99)
    asked = exchange.request(session)
    with pytest.raises(AppraisalRefused) as caught:
        exchange.grant(asked)
    assert (caught.value.code, caught.value.exit_status) == ("simulated.tcb", 4)
    last = read_ledger(exchange.ledger_path)[-1]
    assert (last.event, last.detail["code"]) == ("request.refused", "simulated.tcb")


def test_a_refused_request_leaves_its_challenge_open(make_exchange: Callable[..., Any], session: Session) -> None:
    exchange = make_exchange(tcb=99)
    asked = exchange.request(session)
    with pytest.raises(AppraisalRefused):
        exchange.grant(asked)
    with exchange.ledger() as ledger:
        known = ledger.challenge(request.read(asked).challenge_digest)
    assert known is not None
    assert not known.answered


def test_refuses_evidence_of_another_laboratory(exchange: Any, session: Session, tmp_path: Path) -> None:
    exchange.laboratory = lab.create(tmp_path / "other", devices=1, at=exchange.clock.now()).directory
    with pytest.raises(AppraisalRefused) as caught:
        exchange.grant(exchange.request(session))
    assert caught.value.exit_status == 3


def test_refuses_a_production_key_for_a_laboratory_bundle(exchange: Any, session: Session) -> None:
    production = OwnerSigner.generate("acme", "production")
    asked = exchange.request(session)
    with pytest.raises(KeyRefused) as caught:
        exchange.grant(asked, signer=production)
    assert caught.value.code == "owner.purpose"


def test_refuses_to_seal_the_key_of_another_bundle(exchange: Any, session: Session) -> None:
    asked = exchange.request(session)
    with pytest.raises(KeyRefused) as caught:
        exchange.grant(asked, bundle_key=SecretBytes.random(32))
    assert caught.value.code == "bundle.key"


def test_no_grant_leaves_a_broker_that_cannot_write_its_ledger(
    exchange: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request.read(exchange.request(session))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with exchange.ledger() as ledger:
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(LedgerError) as caught:
            broker.grant(
                asked,
                signer=exchange.signer,
                bundle_key=exchange.bundle_key,
                manifest=exchange.manifest,
                ledger=ledger,
                at=exchange.clock.now(),
            )
    assert caught.value.code == "ledger.write"


KILLED_AFTER_THE_LEDGER = """
import os, signal, sys
from datetime import datetime, UTC
from pathlib import Path
from provisioning import broker, request
from provisioning.ledger import Ledger
from provisioning.manifest import SignedManifest
from provisioning.ownerkey import OwnerSigner
from provisioning.secret import SecretBytes

directory = Path(sys.argv[1])
signer = OwnerSigner.load(directory / "keys", SecretBytes.take(bytearray(b"correct horse battery")))
manifest = SignedManifest.read((directory / "manifest").read_bytes(), [signer.owner])
key = signer.bundle_key(directory / "keys", manifest.bundle_id)
at = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
ledger = Ledger(directory / "ledger.jsonl", owner=signer.key_id, at=at)
append = ledger.append
def die(*arguments, **named):
    append(*arguments, **named)
    os.kill(os.getpid(), signal.SIGKILL)
ledger.append = die
envelope = broker.grant(
    request.read((directory / "request").read_bytes()),
    signer=signer, bundle_key=key, manifest=manifest, ledger=ledger, at=at,
)
(directory / "grant").write_bytes(envelope)
"""


def test_a_broker_killed_after_its_ledger_entry_grants_nothing_twice(
    exchange: Any, session: Session, key_directory: Path
) -> None:
    asked = exchange.request(session)
    (exchange.directory / "request").write_bytes(asked)
    (exchange.directory / "manifest").write_bytes(exchange.manifest_envelope)
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AFTER_THE_LEDGER, str(exchange.directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    assert not (exchange.directory / "grant").exists()
    assert read_ledger(exchange.ledger_path)[-1].event == "grant.given"
    assert _refusal(exchange, asked) == "challenge.used"
