"""The owner's identity: a named hybrid key pair with a purpose, ``lab`` or ``production``, that its own key signs.

The purpose is part of the key, not of a command line: a production key refuses to sign anything that accepts simulated
evidence, and no option changes that (docs/threat-model.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from attestation import dsse, strictjson
from attestation.clock import format_time
from attestation.errors import FormatError
from attestation.policy import AppraisalPolicy
from attestation.signature import Classical, PrivateKeys, PublicKeys
from attestation.strictjson import Fields
from provisioning import keystore
from provisioning.errors import KeyRefused
from provisioning.files import make_private_directory, read_bounded, reading, refuse_existing, write_new
from provisioning.keystore import KEY_ENCRYPTION_KEY_BYTES, STRONG, PassphraseCost
from provisioning.secret import SecretBytes
from provisioning.selfsigned import open_self_signed

Purpose = Literal["lab", "production"]

KIND: Final = "owner-key"
PUBLIC_FILE: Final = "owner.pub.json"
PRIVATE_FILE: Final = "owner.key"
# A public key file is about 13 KiB.
MAX_PUBLIC_FILE: Final = 64 << 10
_LIMIT: Final = 1 << 14
_SEED_BYTES: Final = 32

# What binds a machine: each of these names a policy, and the policy is looked at before the signature is made.
_BINDING_KINDS: Final = frozenset({"manifest", "challenge", "grant"})


def read_purpose(fields: Fields) -> Purpose:
    """Read a ``purpose`` member.

    Raises:
        FormatError: ``owner.purpose.unknown``.
    """
    found = fields.text("purpose", limit=16)
    if found == "lab":
        return "lab"
    if found == "production":
        return "production"
    raise FormatError(
        "owner.purpose.unknown",
        found=found,
        expected="lab or production",
        hint="use the version of Lethe that made this file",
    )


def read_name(fields: Fields) -> str:
    """Read a ``name`` member: 1 to 64 printable characters.

    Raises:
        FormatError: ``owner.name`` when it is empty, or ``json.*``.
    """
    name = fields.text("name", limit=64)
    if not name.strip():
        raise FormatError("owner.name", found="an empty name", expected="a name", hint="give the owner key a name")
    return name


@dataclass(frozen=True, slots=True)
class OwnerKey:
    """An owner's public key, as configured on an appliance.

    Attributes:
        name: chosen by the owner; for people, never for decisions.
        purpose: what the key may sign.
        keys: the public halves.
        issued_at: when it was made.
    """

    name: str
    purpose: Purpose
    keys: PublicKeys
    issued_at: datetime

    @property
    def key_id(self) -> str:
        """The id that other objects name the key by, 96 hex digits."""
        return self.keys.key_id

    @classmethod
    def read(cls, envelope: bytes) -> OwnerKey:
        """Read ``owner.pub.json``.

        The self-signature shows that the name and the purpose were chosen by who holds the key. Trust comes from where
        the file was got, so compare its key id with the owner by another way.

        Raises:
            FormatError, SignatureRefused: the file is damaged or not signed by its own key.
        """
        payload = open_self_signed(
            envelope,
            KIND,
            keys_of=lambda members: PublicKeys.from_payload(Fields(members, KIND).mapping("keys"), f"{KIND}.keys"),
            limit=_LIMIT,
        )
        fields = Fields(strictjson.loads(payload, limit=_LIMIT), KIND)
        _, issued_at = strictjson.read_header(fields, KIND)
        key = cls(
            read_name(fields),
            read_purpose(fields),
            PublicKeys.from_payload(fields.mapping("keys"), f"{KIND}.keys"),
            issued_at,
        )
        fields.end()
        return key

    @classmethod
    def read_file(cls, path: Path) -> OwnerKey:
        """Read a public key file; see :meth:`read`."""
        envelope = read_bounded(path, limit=MAX_PUBLIC_FILE)
        with reading(path):
            return cls.read(envelope)

    @classmethod
    def load(cls, directory: Path) -> OwnerKey:
        """Read the public key of a key directory."""
        return cls.read_file(directory / PUBLIC_FILE)

    def as_payload(self) -> dict[str, Any]:
        """Give the signed members of ``owner.pub.json``."""
        return {
            **strictjson.header(KIND, epoch=0, issued_at=format_time(self.issued_at)),
            "name": self.name,
            "purpose": self.purpose,
            "keys": self.keys.as_payload(),
        }


def public_keys(owners: Sequence[OwnerKey]) -> list[PublicKeys]:
    """Give what :func:`attestation.dsse.verify` needs of configured owners."""
    return [owner.keys for owner in owners]


class OwnerSigner:
    """An owner's private keys, open for use: sign, and wrap bundle keys.

    Attributes:
        owner: the public side.
    """

    __slots__ = ("_keys", "_wrapping_key", "owner")

    def __init__(self, owner: OwnerKey, keys: PrivateKeys, wrapping_key: SecretBytes) -> None:
        self.owner = owner
        self._keys = keys
        self._wrapping_key = wrapping_key

    @classmethod
    def generate(
        cls, name: str, purpose: Purpose, *, at: datetime | None = None, algorithm: Classical = "ecdsa-p384"
    ) -> OwnerSigner:
        """Make fresh keys.

        Args:
            name: 1 to 64 printable characters.
            purpose: ``lab`` or ``production``, for ever.
            at: issue time; the system's clock when not given.
            algorithm: the classical half.
        """
        issued_at = (at or datetime.now(UTC)).replace(microsecond=0)
        read_name(Fields({"name": name}, KIND))
        keys = PrivateKeys.generate(algorithm)
        owner = OwnerKey(name, purpose, keys.public, issued_at)
        return cls(owner, keys, SecretBytes.random(KEY_ENCRYPTION_KEY_BYTES))

    @property
    def key_id(self) -> str:
        """Id of the public key, 96 hex digits."""
        return self.owner.key_id

    @property
    def purpose(self) -> Purpose:
        """What these keys may sign."""
        return self.owner.purpose

    def save(self, directory: Path, passphrase: SecretBytes, *, cost: PassphraseCost = STRONG) -> None:
        """Write ``owner.key`` (encrypted) and ``owner.pub.json`` into a directory of mode 0700.

        Args:
            directory: made if absent; refused if others can enter it.
            passphrase: opens ``owner.key`` again.
            cost: of one guess; tests take less.

        Raises:
            OutputFailed: a file is there already or cannot be written.
        """
        make_private_directory(directory)
        private, public = directory / PRIVATE_FILE, directory / PUBLIC_FILE
        refuse_existing(private)
        refuse_existing(public)
        seed, der = self._keys.private_parts()
        members = {"type": "owner-private-key", "version": 1, "key_id": self.key_id, "purpose": self.purpose}
        with SecretBytes(KEY_ENCRYPTION_KEY_BYTES + len(seed) + len(der)) as plaintext:
            with plaintext.expose() as view, self._wrapping_key.expose() as wrapping_key:
                view[:KEY_ENCRYPTION_KEY_BYTES] = wrapping_key
                view[KEY_ENCRYPTION_KEY_BYTES:] = seed + der
            data = keystore.seal_with_passphrase(plaintext, passphrase, members=members, cost=cost)
        write_new(private, data, mode=0o600)
        write_new(public, self._public_envelope())

    def _public_envelope(self) -> bytes:
        return dsse.sign(KIND, strictjson.dumps(self.owner.as_payload()), [self._keys])

    @classmethod
    def load(cls, directory: Path, passphrase: SecretBytes) -> OwnerSigner:
        """Open the keys of a directory.

        Raises:
            KeyRefused: ``owner.passphrase``, or ``owner.files`` when the two files are not of one key.
            InputFailed, FormatError, SignatureRefused: a file is missing or damaged.
        """
        owner = OwnerKey.load(directory)
        private = directory / PRIVATE_FILE
        sealed = read_bounded(private, limit=1 << 16)
        with reading(private):
            plaintext, members = keystore.open_with_passphrase(sealed, passphrase)
        with plaintext, plaintext.expose() as view:
            split = KEY_ENCRYPTION_KEY_BYTES + _SEED_BYTES
            wrapping_key = SecretBytes.take(view[:KEY_ENCRYPTION_KEY_BYTES])
            keys = PrivateKeys.from_private_parts(view[KEY_ENCRYPTION_KEY_BYTES:split], view[split:])
        if keys.public != owner.keys or members.get("purpose") != owner.purpose:
            raise KeyRefused(
                "owner.files",
                found=f"{PRIVATE_FILE} of key {keys.public.key_id[:16]}, {PUBLIC_FILE} of {owner.key_id[:16]}",
                expected="both files of one key",
                hint="restore the key directory from its backup",
            )
        return cls(owner, keys, wrapping_key)

    def sign(self, kind: str, payload: bytes, *, policy: AppraisalPolicy | None) -> bytes:
        """Sign one object.

        Args:
            kind: such as ``manifest``.
            payload: the exact bytes.
            policy: the appraisal policy that the object is bound to; None only for kinds that have none.

        Raises:
            KeyRefused: ``owner.purpose`` when a production key is asked to sign for simulated evidence.
        """
        if kind == KIND:
            # Else the key could certify itself once more, with another purpose.
            raise ValueError("an owner key certifies itself once, when it is saved")
        if policy is None and kind in _BINDING_KINDS:
            raise ValueError(f"a {kind} is bound to a policy")
        if policy is not None:
            self.require_purpose(policy)
        return dsse.sign(kind, payload, [self._keys])

    def require_purpose(self, policy: AppraisalPolicy) -> None:
        """Refuse a policy that these keys must not sign for.

        Raises:
            KeyRefused: ``owner.purpose``.
        """
        if self.purpose == "production" and policy.accepts_simulated:
            raise KeyRefused(
                "owner.purpose",
                found=f"policy {policy.name} accepts simulated evidence",
                expected="a policy of hardware platforms only, for a production key",
                hint="sign with a lab key, or take simulated out of the policy",
            )

    def store_bundle_key(self, directory: Path, bundle_id: bytes, key: SecretBytes) -> None:
        """Keep a bundle key, wrapped, in the key directory; see :func:`provisioning.keystore.store_bundle_key`."""
        keystore.store_bundle_key(
            directory, owner=self.key_id, wrapping_key=self._wrapping_key, bundle_id=bundle_id, key=key
        )

    def bundle_key(self, directory: Path, bundle_id: bytes) -> SecretBytes:
        """Give the key of a bundle that this owner packed; see :func:`provisioning.keystore.load_bundle_key`."""
        return keystore.load_bundle_key(
            directory, owner=self.key_id, wrapping_key=self._wrapping_key, bundle_id=bundle_id
        )

    def close(self) -> None:
        """Wipe the key-encryption key."""
        self._wrapping_key.close()

    def __enter__(self) -> OwnerSigner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
