"""The owner's keys at rest: under a passphrase, and bundle keys under the owner's key-encryption key.

Everything here is a small JSON file whose one secret member, ``sealed``, is AES-256-GCM ciphertext; all other members
are its associated data, so none of them can be exchanged. Plaintext goes from and to SecretBytes only.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

from attestation import strictjson
from attestation.strictjson import Fields, b64
from provisioning.errors import InputFailed, KeyRefused
from provisioning.files import make_private_directory, read_bounded, reading, write_new
from provisioning.secret import SecretBytes
from provisioning.segment import BUNDLE_KEY_BYTES

KEY_ENCRYPTION_KEY_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16
_SALT_BYTES = 16
_FILE_LIMIT = 1 << 16
_BUNDLES = "bundles"


@dataclass(frozen=True, slots=True)
class PassphraseCost:
    """How dear each guess of a passphrase is (Argon2id, RFC 9106).

    Attributes:
        memory_kib: memory of one derivation, KiB.
        iterations: passes over that memory.
        lanes: how many threads can share one derivation.
    """

    memory_kib: int
    iterations: int
    lanes: int


# RFC 9106, section 4 gives 64 MiB and 3 passes as the least for a machine short of memory; an owner's is not.
STRONG = PassphraseCost(memory_kib=262_144, iterations=4, lanes=4)

# A key file from elsewhere must not be able to take the machine's memory or a day of its time.
_MOST = PassphraseCost(memory_kib=4_194_304, iterations=64, lanes=16)


def _seal(key: memoryview, plaintext: SecretBytes, members: dict[str, Any]) -> bytes:
    """Encrypt under a fresh random nonce; 96 random bits are enough for the few files of one key."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    open_members = {**members, "nonce": b64(nonce)}
    with plaintext.expose() as view:
        sealed = AESGCM(key).encrypt(nonce, view, strictjson.dumps(open_members))
    return strictjson.dumps({**open_members, "sealed": b64(sealed)})


def _open(key: memoryview, members: dict[str, Any]) -> SecretBytes:
    """Decrypt into protected memory.

    Raises:
        InvalidTag: the key is another, or a member was changed.
    """
    open_members = {name: value for name, value in members.items() if name != "sealed"}
    fields = Fields(members, "key file")
    nonce = fields.blob("nonce", size=_NONCE_BYTES)
    sealed = fields.blob("sealed", limit=_FILE_LIMIT)
    if len(sealed) <= _TAG_BYTES:
        raise InvalidTag
    plaintext = SecretBytes(len(sealed) - _TAG_BYTES)
    try:
        with plaintext.expose() as view:
            AESGCM(key).decrypt_into(nonce, sealed, strictjson.dumps(open_members), view)
    except InvalidTag:
        # After a wrong tag the buffer holds the unauthenticated plaintext.
        plaintext.close()
        raise
    return plaintext


def _derive(passphrase: SecretBytes, salt: bytes, cost: PassphraseCost) -> SecretBytes:
    key = SecretBytes(32)
    kdf = Argon2id(salt=salt, length=32, iterations=cost.iterations, lanes=cost.lanes, memory_cost=cost.memory_kib)
    with passphrase.expose() as source, key.expose() as target:
        kdf.derive_into(source, target)  # type: ignore[arg-type]  # the stub says bytes; any buffer is taken
    return key


def seal_with_passphrase(
    plaintext: SecretBytes, passphrase: SecretBytes, *, members: dict[str, Any], cost: PassphraseCost
) -> bytes:
    """Give a key file that only the passphrase opens.

    Args:
        plaintext: what to seal.
        passphrase: at least one byte.
        members: public members of the file, bound to the ciphertext.
        cost: stored in the file, so that it can grow with the years.
    """
    salt = secrets.token_bytes(_SALT_BYTES)
    kdf = {
        "name": "argon2id",
        "memory_kib": cost.memory_kib,
        "iterations": cost.iterations,
        "lanes": cost.lanes,
        "salt": b64(salt),
    }
    with _derive(passphrase, salt, cost) as key, key.expose() as view:
        return _seal(view, plaintext, {**members, "kdf": kdf})


def open_with_passphrase(data: bytes, passphrase: SecretBytes) -> tuple[SecretBytes, dict[str, Any]]:
    """Open a key file; gives the plaintext and the authenticated public members.

    Raises:
        FormatError: the file is malformed.
        KeyRefused: ``owner.passphrase``.
    """
    members = strictjson.loads(data, limit=_FILE_LIMIT)
    kdf = Fields(members, "key file").fields("kdf")
    name = kdf.text("name", limit=16)
    if name != "argon2id":
        raise KeyRefused(
            "owner.kdf", found=name, expected="argon2id", hint="use the version of lethe-owner that made this file"
        )
    lanes = kdf.integer("lanes", low=1, high=_MOST.lanes)
    cost = PassphraseCost(
        # Argon2 itself needs eight blocks of 1 KiB per lane (RFC 9106, section 3.1).
        memory_kib=kdf.integer("memory_kib", low=8 * lanes, high=_MOST.memory_kib),
        iterations=kdf.integer("iterations", low=1, high=_MOST.iterations),
        lanes=lanes,
    )
    salt = kdf.blob("salt", size=_SALT_BYTES)
    kdf.end()
    try:
        with _derive(passphrase, salt, cost) as key, key.expose() as view:
            plaintext = _open(view, members)
    except InvalidTag:
        raise KeyRefused(
            "owner.passphrase",
            found="a passphrase that does not open the key file",
            expected="the passphrase given to keygen",
            hint="try again; if it is surely right, the file is damaged: restore it from its backup",
        ) from None
    return plaintext, {name: members[name] for name in members.keys() - {"kdf", "nonce", "sealed"}}


def _path(directory: Path, bundle_id: bytes) -> Path:
    return directory / _BUNDLES / f"{bundle_id.hex()}.key"


def _members(owner: str, bundle_id: bytes) -> dict[str, Any]:
    return {"type": "bundle-key", "version": 1, "owner": owner, "bundle_id": bundle_id.hex()}


def store_bundle_key(
    directory: Path, *, owner: str, wrapping_key: SecretBytes, bundle_id: bytes, key: SecretBytes
) -> None:
    """Write a bundle key, wrapped, into the owner's key directory. It is durable when this returns.

    Args:
        directory: the owner's key directory.
        owner: key id of the owner.
        wrapping_key: the owner's key-encryption key, 32 bytes.
        bundle_id: 16 bytes.
        key: the bundle key, 32 bytes; it stays the caller's to wipe.

    Raises:
        OutputFailed: the file is there already or cannot be written.
    """
    path = _path(directory, bundle_id)
    make_private_directory(path.parent)
    with wrapping_key.expose() as view:
        data = _seal(view, key, _members(owner, bundle_id))
    write_new(path, data, mode=0o600)


def load_bundle_key(directory: Path, *, owner: str, wrapping_key: SecretBytes, bundle_id: bytes) -> SecretBytes:
    """Read a bundle key back; the caller wipes it.

    Raises:
        KeyRefused: ``owner.bundle.unknown`` when this owner never packed that bundle, ``owner.bundle.damaged``.
    """
    path = _path(directory, bundle_id)
    try:
        data = read_bounded(path, limit=_FILE_LIMIT)
    except InputFailed as error:
        raise KeyRefused(
            "owner.bundle.unknown",
            found=error.found,
            expected=f"the key of bundle {bundle_id.hex()}",
            hint="use the key directory that the bundle was packed with",
        ) from None
    with reading(path):
        members = strictjson.loads(data, limit=_FILE_LIMIT)
    expected = _members(owner, bundle_id)
    key: SecretBytes | None = None
    if {name: members.get(name) for name in expected} == expected:
        try:
            with wrapping_key.expose() as view:
                key = _open(view, members)
        except InvalidTag:
            key = None
    if key is None or len(key) != BUNDLE_KEY_BYTES:
        raise KeyRefused(
            "owner.bundle.damaged",
            found=f"a key file of bundle {bundle_id.hex()} that does not open",
            expected="the file as pack wrote it",
            hint="restore the key directory from its backup",
        )
    return key
