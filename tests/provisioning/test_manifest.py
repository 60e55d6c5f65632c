"""The manifest: only a configured owner's word counts, and a production owner's only without simulated evidence."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attestation import dsse, strictjson
from attestation.errors import FormatError, LetheError, SignatureRefused
from attestation.policy import AppraisalPolicy
from attestation.strictjson import b64
from provisioning.errors import ExchangeRefused, KeyRefused
from provisioning.geometry import Geometry
from provisioning.manifest import KIND, MAX_PAYLOAD_BYTES, Manifest, SignedManifest, check_name
from provisioning.ownerkey import OwnerKey, OwnerSigner
from provisioning.segment import SUITE

SEGMENT = 256 << 10
GEOMETRY = Geometry(segment_size=SEGMENT, section_bytes=SEGMENT, file_bytes=SEGMENT, streams=(1, 2, 3))


@pytest.fixture
def manifest(lab_signer: OwnerSigner, lab_policy: AppraisalPolicy) -> Manifest:
    return Manifest(
        bundle_id=bytes(range(16)),
        name="a model",
        purpose="lab",
        owner=lab_signer.key_id,
        epoch=lab_policy.epoch,
        issued_at=datetime(2026, 11, 30, 12, 0, tzinfo=UTC),
        geometry=GEOMETRY,
        table_sha384=hashlib.sha384(b"table").digest(),
        key_commitment=bytes(48),
        policy=lab_policy,
    )


def envelope_of(members: dict[str, Any], signer: OwnerSigner, kind: str = KIND) -> bytes:
    """Sign any members, as a careless or hostile tool that holds the keys could."""
    return dsse.sign(kind, strictjson.dumps(members), [signer._keys])


def refusal(envelope: bytes, *owners: OwnerKey) -> LetheError:
    with pytest.raises(LetheError) as refused:
        SignedManifest.read(envelope, owners)
    return refused.value


def test_reads_back_what_was_signed(manifest: Manifest, lab_signer: OwnerSigner) -> None:
    signed = SignedManifest.read(manifest.sign(lab_signer), [lab_signer.owner])
    assert signed.manifest == manifest
    assert signed.digest == manifest.digest == hashlib.sha384(manifest.encode()).digest()
    assert signed.bundle_id == manifest.bundle_id
    assert (signed.name, signed.purpose, signed.epoch) == ("a model", "lab", 7)
    assert signed.issued_at == manifest.issued_at
    assert (signed.segment_size, signed.tiles) == (SEGMENT, 1)
    assert signed.sections == GEOMETRY.sections
    assert signed.files == GEOMETRY.files
    assert signed.geometry == GEOMETRY
    assert signed.policy == manifest.policy
    assert signed.policy.serving.max_context == 256
    assert signed.table_sha384 == manifest.table_sha384
    assert signed.key_commitment == bytes(48)


def test_what_parses_encodes_back_to_the_same_bytes(manifest: Manifest) -> None:
    assert Manifest.parse(manifest.encode()).encode() == manifest.encode()


def test_refuses_a_manifest_of_an_owner_who_is_not_configured(manifest: Manifest, lab_signer: OwnerSigner) -> None:
    with OwnerSigner.generate("someone", "lab") as other:
        error = refusal(manifest.sign(lab_signer), other.owner)
    assert (error.code, error.exit_status) == ("signature.unknown", 6)
    assert refusal(manifest.sign(lab_signer)).code == "signature.unknown"


def test_refuses_a_manifest_that_names_another_owner_than_its_signer(
    manifest: Manifest, lab_signer: OwnerSigner
) -> None:
    with OwnerSigner.generate("someone", "lab") as other:
        members = {**manifest.as_payload(), "owner": other.key_id}
        error = refusal(envelope_of(members, lab_signer), lab_signer.owner, other.owner)
    assert (error.code, error.exit_status) == ("manifest.owner", 6)


def test_refuses_every_flipped_bit_of_the_payload(manifest: Manifest, lab_signer: OwnerSigner) -> None:
    envelope = json.loads(manifest.sign(lab_signer))
    payload = manifest.encode()
    for place in range(0, len(payload), 97):
        changed = bytearray(payload)
        changed[place] ^= 1
        broken = strictjson.dumps({**envelope, "payload": b64(bytes(changed))})
        assert refusal(broken, lab_signer.owner).code == "signature.wrong"


def test_refuses_a_manifest_with_half_a_signature(manifest: Manifest, lab_signer: OwnerSigner) -> None:
    envelope = json.loads(manifest.sign(lab_signer))
    for kept in range(2):
        broken = strictjson.dumps({**envelope, "signatures": [envelope["signatures"][kept]]})
        error = refusal(broken, lab_signer.owner)
        assert isinstance(error, SignatureRefused)
        assert error.code == "signature.half"


def test_refuses_another_kind_of_object_signed_by_the_owner(manifest: Manifest, lab_signer: OwnerSigner) -> None:
    assert (
        refusal(envelope_of(manifest.as_payload(), lab_signer, "challenge"), lab_signer.owner).code == "envelope.type"
    )
    renamed = {**manifest.as_payload(), "type": "challenge"}
    assert refusal(envelope_of(renamed, lab_signer), lab_signer.owner).code == "object.type"


def test_a_production_key_refuses_to_sign_a_policy_that_accepts_simulated(manifest: Manifest) -> None:
    with OwnerSigner.generate("owner", "production") as signer, pytest.raises(KeyRefused) as refused:
        replace(manifest, purpose="production", owner=signer.key_id).sign(signer)
    assert refused.value.code == "owner.purpose"


def test_reading_refuses_a_production_manifest_that_accepts_simulated_whoever_signed_it(manifest: Manifest) -> None:
    with OwnerSigner.generate("owner", "production") as signer:
        members = replace(manifest, purpose="production", owner=signer.key_id).as_payload()
        error = refusal(envelope_of(members, signer), signer.owner)
    assert isinstance(error, ExchangeRefused)
    assert error.code == "manifest.purpose"


@pytest.mark.parametrize(("claimed", "real"), [("production", "lab"), ("lab", "production")])
def test_reading_refuses_another_purpose_than_the_keys(manifest: Manifest, claimed: Any, real: Any) -> None:
    with OwnerSigner.generate("owner", real) as signer:
        members = replace(manifest, purpose=claimed, owner=signer.key_id).as_payload()
        assert refusal(envelope_of(members, signer), signer.owner).code == "manifest.purpose"


MEMBERS = [
    "bundle_id",
    "epoch",
    "file_bytes",
    "issued_at",
    "key_commitment",
    "name",
    "owner",
    "policy",
    "purpose",
    "section_bytes",
    "segment_size",
    "streams",
    "suite",
    "table_sha384",
    "type",
    "version",
]


def test_has_just_the_members_that_an_outsider_may_see(manifest: Manifest) -> None:
    assert sorted(manifest.as_payload()) == MEMBERS


@pytest.mark.parametrize("name", MEMBERS)
def test_refuses_a_manifest_without_one_of_its_members(manifest: Manifest, lab_signer: OwnerSigner, name: str) -> None:
    members = manifest.as_payload()
    del members[name]
    assert refusal(envelope_of(members, lab_signer), lab_signer.owner).code == "json.missing"


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown member": ({"layers": 30}, "json.unknown"),
    "newer version": ({"version": 2}, "object.version"),
    "another cipher": ({"suite": "AES-128-GCM/HKDF-SHA256"}, "manifest.suite"),
    "short bundle id": ({"bundle_id": b64(bytes(15))}, "json.base64"),
    "short table digest": ({"table_sha384": b64(bytes(32))}, "json.base64"),
    "short commitment": ({"key_commitment": b64(bytes(32))}, "json.base64"),
    "empty name": ({"name": "  "}, "manifest.name"),
    "name with a line end": ({"name": "a\nb"}, "json.text"),
    "unknown purpose": ({"purpose": "test"}, "owner.purpose.unknown"),
    "owner that is no id": ({"owner": "Z" * 96}, "manifest.owner"),
    "short owner id": ({"owner": "ab"}, "manifest.owner"),
    "segments too small": ({"segment_size": 4096}, "manifest.geometry"),
    "segments too large": ({"segment_size": 1 << 30}, "json.range"),
    "sections in pieces": ({"section_bytes": SEGMENT + 1}, "manifest.geometry"),
    "no catalog": ({"streams": [0, 1, 1]}, "manifest.geometry"),
    "catalog beyond any": ({"streams": [385 << 20 >> 18, 1, 1]}, "manifest.geometry"),
    "catalog at the edge of integers": ({"streams": [2**63 - 1, 1, 1]}, "manifest.geometry"),
    "three columns": ({"streams": [1, 1, 1, 1, 1]}, "manifest.geometry"),
    "count that is text": ({"streams": [1, "1", 1]}, "manifest.geometry"),
    "count that is true": ({"streams": [1, True, 1]}, "manifest.geometry"),
    "negative count": ({"streams": [1, -1, 1]}, "manifest.geometry"),
    "too many streams": ({"streams": [1] * 67}, "json.range"),
    "policy that is open": ({"policy": {"version": 1}}, "manifest.policy"),
    "another epoch than the policy's": ({"epoch": 8}, "manifest.epoch"),
    "local time": ({"issued_at": "2026-11-30T12:00:00+01:00"}, "json.text"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_refuses_a_signed_manifest_that_says_something_impossible(
    manifest: Manifest, lab_signer: OwnerSigner, change: str
) -> None:
    members, code = CHANGES[change]
    error = refusal(envelope_of({**manifest.as_payload(), **members}, lab_signer), lab_signer.owner)
    assert isinstance(error, FormatError)
    assert (error.code, error.exit_status) == (code, 6)


@pytest.mark.parametrize("form", ["spaces", "order", "escapes"])
def test_refuses_a_manifest_in_another_form(manifest: Manifest, lab_signer: OwnerSigner, form: str) -> None:
    members = manifest.as_payload()
    if form == "spaces":
        payload = json.dumps(members, sort_keys=True).encode()
    elif form == "order":
        payload = json.dumps(dict(sorted(members.items(), reverse=True)), separators=(",", ":")).encode()
    else:
        payload = manifest.encode().replace(b'"type"', b'"\\u0074ype"')
    envelope = lab_signer.sign(KIND, payload, policy=manifest.policy)
    assert refusal(envelope, lab_signer.owner).code == "manifest.form"


def test_the_largest_catalog_is_within_the_bound(manifest: Manifest) -> None:
    streams = ((384 << 20 >> 18) + 1, 1, 1)
    at_most = replace(manifest, geometry=replace(manifest.geometry, segment_size=256 << 10, streams=streams))
    assert Manifest.parse(at_most.encode()) == at_most


def test_refuses_a_manifest_beyond_the_bound(manifest: Manifest, lab_signer: OwnerSigner) -> None:
    members = {**manifest.as_payload(), "name": "x" * MAX_PAYLOAD_BYTES}
    assert refusal(envelope_of(members, lab_signer), lab_signer.owner).code in {"json.base64", "json.size"}


def test_finds_the_owner_among_several(manifest: Manifest, lab_signer: OwnerSigner) -> None:
    with OwnerSigner.generate("someone", "production") as other:
        signed = SignedManifest.read(manifest.sign(lab_signer), [other.owner, lab_signer.owner])
    assert signed.manifest.owner == lab_signer.key_id


def test_payload_can_be_looked_at_without_a_key_but_is_no_proof(manifest: Manifest, lab_signer: OwnerSigner) -> None:
    parsed = Manifest.parse(dsse.unverified_payload(manifest.sign(lab_signer), KIND, limit=MAX_PAYLOAD_BYTES))
    assert parsed == manifest
    assert type(parsed) is Manifest


def test_a_signed_manifest_is_made_by_its_reader_only(manifest: Manifest) -> None:
    with pytest.raises(TypeError):
        SignedManifest(object(), manifest, manifest.encode())


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_signed_manifest_is_not_copied_or_pickled(
    manifest: Manifest, lab_signer: OwnerSigner, act: Callable[[object], object]
) -> None:
    signed = SignedManifest.read(manifest.sign(lab_signer), [lab_signer.owner])
    with pytest.raises(TypeError):
        act(signed)


@pytest.mark.parametrize("name", ["", " ", "a\tb", "x" * 129])
def test_refuses_names_that_cannot_be_shown(name: str) -> None:
    with pytest.raises(FormatError) as refused:
        check_name(name)
    assert refused.value.code == "manifest.name"


def test_names_its_suite() -> None:
    assert SUITE == "AES-256-GCM/HKDF-SHA384"


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_changed_payload_is_a_manifest_or_refused_as_malformed(
    manifest: Manifest, changes: list[tuple[int, int]]
) -> None:
    # Invariant: any bytes give a manifest or FormatError, never another error; the signature has been checked before.
    payload = bytearray(manifest.encode())
    for place, value in changes:
        payload[place % len(payload)] = value
    with contextlib.suppress(FormatError):
        Manifest.parse(bytes(payload))
