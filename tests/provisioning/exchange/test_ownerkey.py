from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from attestation import dsse, strictjson
from attestation.errors import FormatError, LetheError, SignatureRefused
from attestation.policy import AppraisalPolicy
from attestation.signature import PrivateKeys
from provisioning.errors import KeyRefused, OutputFailed
from provisioning.keystore import PassphraseCost
from provisioning.ownerkey import KIND, PRIVATE_FILE, PUBLIC_FILE, OwnerKey, OwnerSigner
from provisioning.secret import SecretBytes


@pytest.fixture
def saved(tmp_path: Path, signer: OwnerSigner, passphrase: SecretBytes, cheap: PassphraseCost) -> Path:
    signer.save(tmp_path / "keys", passphrase, cost=cheap)
    return tmp_path / "keys"


def _secret(text: bytes) -> SecretBytes:
    return SecretBytes.take(bytearray(text))


def test_a_saved_key_signs_the_same_after_loading(saved: Path, signer: OwnerSigner, passphrase: SecretBytes) -> None:
    loaded = OwnerSigner.load(saved, passphrase)
    envelope = loaded.sign("wipe-record", b"{}", policy=None)
    assert loaded.owner == signer.owner
    assert dsse.verify(envelope, "wipe-record", [signer.owner.keys], limit=100) == b"{}"


def test_the_public_file_says_name_purpose_and_keys(saved: Path, signer: OwnerSigner) -> None:
    read = OwnerKey.load(saved)
    assert (read.name, read.purpose, read.key_id) == ("acme", "lab", signer.key_id)


def test_private_files_are_for_their_owner_only(saved: Path) -> None:
    assert stat.S_IMODE(saved.stat().st_mode) == 0o700
    assert stat.S_IMODE((saved / PRIVATE_FILE).stat().st_mode) == 0o600


def test_the_private_file_holds_no_plaintext_of_the_keys(saved: Path, signer: OwnerSigner) -> None:
    seed, der = signer._keys.private_parts()
    data = (saved / PRIVATE_FILE).read_bytes()
    for needle in (seed, der[-48:]):
        assert needle not in data
        assert strictjson.b64(needle)[:24].encode() not in data


def test_refuses_a_wrong_passphrase(saved: Path) -> None:
    with pytest.raises(KeyRefused) as caught:
        OwnerSigner.load(saved, _secret(b"incorrect horse battery"))
    assert (caught.value.code, caught.value.exit_status) == ("owner.passphrase", 6)


@pytest.mark.parametrize("member", ["purpose", "key_id", "sealed", "nonce"])
def test_refuses_a_private_file_with_a_changed_member(saved: Path, passphrase: SecretBytes, member: str) -> None:
    path = saved / PRIVATE_FILE
    members = json.loads(path.read_bytes())
    other = ("A" if members[member][0] != "A" else "B") + members[member][1:]
    members[member] = {"purpose": "production", "key_id": "0" * 96}.get(member) or other
    path.write_bytes(strictjson.dumps(members))
    with pytest.raises(KeyRefused) as caught:
        OwnerSigner.load(saved, passphrase)
    assert caught.value.code == "owner.passphrase"


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("memory_kib", 1 << 30, "json.range"),
        ("memory_kib", 1, "json.range"),
        ("iterations", 1_000_000, "json.range"),
        ("lanes", 0, "json.range"),
        ("name", "pbkdf2", "owner.kdf"),
    ],
)
def test_refuses_absurd_costs_before_it_pays_them(
    saved: Path, passphrase: SecretBytes, name: str, value: object, code: str
) -> None:
    path = saved / PRIVATE_FILE
    members = json.loads(path.read_bytes())
    members["kdf"][name] = value
    path.write_bytes(strictjson.dumps(members))
    with pytest.raises(LetheError) as caught:
        OwnerSigner.load(saved, passphrase)
    assert caught.value.code == code


def test_refuses_files_of_two_keys(
    saved: Path, tmp_path: Path, stranger: OwnerSigner, passphrase: SecretBytes, cheap: PassphraseCost
) -> None:
    stranger.save(tmp_path / "other", passphrase, cost=cheap)
    (saved / PUBLIC_FILE).write_bytes((tmp_path / "other" / PUBLIC_FILE).read_bytes())
    with pytest.raises(KeyRefused) as caught:
        OwnerSigner.load(saved, passphrase)
    assert caught.value.code == "owner.files"


def test_never_overwrites_keys(saved: Path, stranger: OwnerSigner, passphrase: SecretBytes) -> None:
    before = (saved / PRIVATE_FILE).read_bytes()
    with pytest.raises(OutputFailed) as caught:
        stranger.save(saved, passphrase)
    assert caught.value.code == "output.exists"
    assert (saved / PRIVATE_FILE).read_bytes() == before


def test_refuses_a_directory_that_others_can_enter(
    tmp_path: Path, signer: OwnerSigner, passphrase: SecretBytes, cheap: PassphraseCost
) -> None:
    open_directory = tmp_path / "open"
    open_directory.mkdir(mode=0o755)
    with pytest.raises(OutputFailed) as caught:
        signer.save(open_directory, passphrase, cost=cheap)
    assert caught.value.code == "output.mode"


def test_refuses_a_public_file_signed_by_another_key(signer: OwnerSigner) -> None:
    envelope = dsse.sign(KIND, strictjson.dumps(signer.owner.as_payload()), [PrivateKeys.generate()])
    with pytest.raises(SignatureRefused) as caught:
        OwnerKey.read(envelope)
    assert caught.value.code == "signature.unknown"


def test_refuses_a_public_file_whose_purpose_was_changed(signer: OwnerSigner) -> None:
    members = json.loads(signer._public_envelope())
    payload = dict(signer.owner.as_payload(), purpose="production")
    members["payload"] = strictjson.b64(strictjson.dumps(payload))
    with pytest.raises(SignatureRefused) as caught:
        OwnerKey.read(strictjson.dumps(members))
    assert caught.value.code == "signature.wrong"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"purpose": "demo"}, "owner.purpose.unknown"),
        ({"name": "  "}, "owner.name"),
        ({"name": "x" * 65}, "json.text"),
        ({"type": "grant"}, "object.type"),
        ({"version": 2}, "object.version"),
        ({"extra": 1}, "json.unknown"),
    ],
)
def test_refuses_malformed_public_files(signer: OwnerSigner, change: dict[str, object], code: str) -> None:
    payload = strictjson.dumps(signer.owner.as_payload() | change)
    with pytest.raises(FormatError) as caught:
        OwnerKey.read(dsse.sign(KIND, payload, [signer._keys]))
    assert caught.value.code == code


def test_a_name_that_could_not_be_read_back_is_not_written() -> None:
    with pytest.raises(FormatError) as caught:
        OwnerSigner.generate("bell\a", "lab")
    assert caught.value.code == "json.text"


@pytest.mark.parametrize("kind", ["manifest", "challenge", "grant"])
def test_a_production_key_refuses_to_sign_for_simulated_evidence(
    kind: str, make_policy: Callable[..., AppraisalPolicy]
) -> None:
    signer = OwnerSigner.generate("acme", "production")
    with pytest.raises(KeyRefused) as caught:
        signer.sign(kind, b"{}", policy=make_policy())
    assert (caught.value.code, caught.value.exit_status) == ("owner.purpose", 6)


def test_nothing_that_binds_a_machine_is_signed_without_a_policy(signer: OwnerSigner) -> None:
    with pytest.raises(ValueError, match="bound to a policy"):
        signer.sign("grant", b"{}", policy=None)


def test_a_key_with_ed25519_saves_and_loads(tmp_path: Path, passphrase: SecretBytes, cheap: PassphraseCost) -> None:
    signer = OwnerSigner.generate("acme", "lab", algorithm="ed25519")
    signer.save(tmp_path / "keys", passphrase, cost=cheap)
    assert OwnerSigner.load(tmp_path / "keys", passphrase).owner.keys.algorithm == "ed25519"


# --- bundle keys -------------------------------------------------------------------------------------------------

BUNDLE = bytes(range(16))


def test_a_bundle_key_comes_back_after_a_reload(saved: Path, signer: OwnerSigner, passphrase: SecretBytes) -> None:
    with SecretBytes.random(32) as key:
        signer.store_bundle_key(saved, BUNDLE, key)
        with (
            OwnerSigner.load(saved, passphrase) as again,
            again.bundle_key(saved, BUNDLE) as back,
            key.expose() as one,
            back.expose() as two,
        ):
            assert bytes(one) == bytes(two)


def test_a_bundle_key_file_holds_no_plaintext_of_the_key(saved: Path, signer: OwnerSigner) -> None:
    signer.store_bundle_key(saved, BUNDLE, _secret(b"K" * 32))
    path = saved / "bundles" / f"{BUNDLE.hex()}.key"
    assert b"KKKK" not in path.read_bytes()
    assert strictjson.b64(b"K" * 32).encode()[:12] not in path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_refuses_a_bundle_that_was_never_packed_here(saved: Path, signer: OwnerSigner) -> None:
    with pytest.raises(KeyRefused) as caught:
        signer.bundle_key(saved, BUNDLE)
    assert caught.value.code == "owner.bundle.unknown"


def test_refuses_the_key_file_of_another_bundle(saved: Path, signer: OwnerSigner) -> None:
    signer.store_bundle_key(saved, BUNDLE, _secret(b"K" * 32))
    stored = saved / "bundles"
    (stored / f"{BUNDLE.hex()}.key").rename(stored / f"{bytes(16).hex()}.key")
    with pytest.raises(KeyRefused) as caught:
        signer.bundle_key(saved, bytes(16))
    assert caught.value.code == "owner.bundle.damaged"


def test_refuses_a_bundle_key_of_another_owner(saved: Path, signer: OwnerSigner, stranger: OwnerSigner) -> None:
    stranger.store_bundle_key(saved, BUNDLE, _secret(b"K" * 32))
    with pytest.raises(KeyRefused) as caught:
        signer.bundle_key(saved, BUNDLE)
    assert caught.value.code == "owner.bundle.damaged"


def test_refuses_a_bundle_key_file_with_one_flipped_bit(saved: Path, signer: OwnerSigner) -> None:
    signer.store_bundle_key(saved, BUNDLE, _secret(b"K" * 32))
    path = saved / "bundles" / f"{BUNDLE.hex()}.key"
    members = json.loads(path.read_bytes())
    members["sealed"] = ("A" if members["sealed"][0] != "A" else "B") + members["sealed"][1:]
    path.write_bytes(strictjson.dumps(members))
    with pytest.raises(KeyRefused) as caught:
        signer.bundle_key(saved, BUNDLE)
    assert caught.value.code == "owner.bundle.damaged"


def test_refuses_a_bundle_key_file_too_short_for_a_key(saved: Path, signer: OwnerSigner) -> None:
    signer.store_bundle_key(saved, BUNDLE, _secret(b"K" * 32))
    path = saved / "bundles" / f"{BUNDLE.hex()}.key"
    members = json.loads(path.read_bytes()) | {"sealed": strictjson.b64(bytes(16))}
    path.write_bytes(strictjson.dumps(members))
    with pytest.raises(KeyRefused) as caught:
        signer.bundle_key(saved, BUNDLE)
    assert caught.value.code == "owner.bundle.damaged"


def test_a_bundle_key_is_never_overwritten(saved: Path, signer: OwnerSigner) -> None:
    signer.store_bundle_key(saved, BUNDLE, _secret(b"K" * 32))
    with pytest.raises(OutputFailed) as caught:
        signer.store_bundle_key(saved, BUNDLE, _secret(b"L" * 32))
    assert caught.value.code == "output.exists"
