"""Attacks 19 and 20: a production key that would pass for a laboratory's, so that it may meet simulated evidence."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from attestation import strictjson
from attestation.errors import SignatureRefused
from provisioning.keystore import PassphraseCost
from provisioning.ownerkey import KIND, PUBLIC_FILE, OwnerKey, OwnerSigner
from provisioning.secret import SecretBytes
from tests.sim.times import NOW

CHEAP = PassphraseCost(memory_kib=64, iterations=1, lanes=1)


def test_19_a_production_key_gives_itself_no_second_purpose() -> None:
    # The general call to sign took this kind too, and its envelope was read as a laboratory key with the same id.
    with OwnerSigner.generate("owner", "production", at=NOW) as signer:
        payload = strictjson.dumps(signer.owner.as_payload() | {"purpose": "lab"})
        with pytest.raises(ValueError, match="once"):
            signer.sign(KIND, payload, policy=None)


def test_20_the_purpose_in_a_public_key_cannot_be_edited(tmp_path: Path) -> None:
    with OwnerSigner.generate("owner", "production", at=NOW) as signer, SecretBytes.random(8) as passphrase:
        signer.save(tmp_path / "keys", passphrase, cost=CHEAP)
    envelope = json.loads((tmp_path / "keys" / PUBLIC_FILE).read_bytes())
    payload = json.loads(base64.b64decode(envelope["payload"])) | {"purpose": "lab"}
    envelope["payload"] = base64.b64encode(strictjson.dumps(payload)).decode()
    with pytest.raises(SignatureRefused):
        OwnerKey.read(json.dumps(envelope).encode())
