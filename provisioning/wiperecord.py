"""The wipe record: what a session overwrote when it ended, signed by the keys that asked for the grant.

It is the statement of the machine's own software: as good as the evidence that bound those keys, and no better. It
says what was overwritten and what reading back showed, never that no copy exists anywhere (docs/limitations.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn

from attestation import strictjson
from attestation.binding import BOOT_ID_BYTES, DIGEST_BYTES
from attestation.clock import format_time
from attestation.strictjson import Fields, b64
from provisioning.errors import ExchangeRefused
from provisioning.fingerprint import fingerprint
from provisioning.request import KeyRequest
from provisioning.selfsigned import open_self_signed
from provisioning.session import Session
from provisioning.sessionkeys import SessionKeys, record_keys

KIND: Final = "wipe-record"
LIMIT: Final = 1 << 16
MAX_DEVICES: Final = 64


@dataclass(frozen=True, slots=True)
class DeviceWipe:
    """One device.

    Attributes:
        device: its name on the machine, such as ``cuda:0``.
        overwritten_bytes: device memory filled with zeros.
        read_back_bytes: device memory read again after the fill.
        nonzero_bytes: bytes that were not zero on reading back.
        staging_bytes: host memory of the loader, overwritten.
        shown: the device answered, everything overwritten was read back, and all of it was zero.
    """

    device: str
    overwritten_bytes: int
    read_back_bytes: int
    nonzero_bytes: int
    staging_bytes: int
    shown: bool

    @property
    def consistent(self) -> bool:
        """Say whether ``shown`` does not claim more than the numbers do."""
        return not self.shown or (self.nonzero_bytes == 0 and self.read_back_bytes >= self.overwritten_bytes)

    def as_payload(self) -> dict[str, Any]:
        """Give the device as JSON members."""
        return {
            "device": self.device,
            "overwritten_bytes": self.overwritten_bytes,
            "read_back_bytes": self.read_back_bytes,
            "nonzero_bytes": self.nonzero_bytes,
            "staging_bytes": self.staging_bytes,
            "shown": self.shown,
        }

    @classmethod
    def from_payload(cls, members: dict[str, Any], where: str) -> DeviceWipe:
        """Read it back.

        Raises:
            FormatError: ``json.*``.
        """
        fields = Fields(members, where)
        wipe = cls(
            device=fields.text("device", limit=64),
            overwritten_bytes=fields.integer("overwritten_bytes"),
            read_back_bytes=fields.integer("read_back_bytes"),
            nonzero_bytes=fields.integer("nonzero_bytes"),
            staging_bytes=fields.integer("staging_bytes"),
            shown=fields.flag("shown"),
        )
        fields.end()
        return wipe


@dataclass(frozen=True, slots=True, kw_only=True)
class WipeRecord:
    """What was wiped.

    Attributes:
        node: the machine's name, for people.
        boot_id: the boot it happened in, 16 bytes; evidence of the request binds the same.
        reason: why, such as ``operator 1000`` or ``SIGTERM``.
        session_digest: the session whose keys are gone, 48 bytes.
        manifest_digest: the bundle that was configured, 48 bytes.
        epoch: of that bundle.
        devices: one for each rank; empty when nothing was loaded.
        milliseconds: from the wipe of the keys to the last device's answer.
        complete: every device was shown to be zero, and every process ended by itself.
        at: by the machine's own clock.
    """

    node: str
    boot_id: bytes
    reason: str
    session_digest: bytes
    manifest_digest: bytes
    epoch: int
    devices: tuple[DeviceWipe, ...]
    milliseconds: int
    complete: bool
    at: datetime

    def as_payload(self) -> dict[str, Any]:
        """Give the record as JSON members."""
        return {
            **strictjson.header(KIND, epoch=self.epoch, issued_at=format_time(self.at)),
            "node": self.node,
            "boot_id": b64(self.boot_id),
            "reason": self.reason,
            "session_digest": b64(self.session_digest),
            "manifest_digest": b64(self.manifest_digest),
            "devices": [device.as_payload() for device in self.devices],
            "milliseconds": self.milliseconds,
            "complete": self.complete,
        }

    def sign(self, session: Session) -> bytes:
        """Sign with the session's record keys; the keys travel in the record.

        Raises:
            ExchangeRefused: ``session.wiped``, or ``wipe.session`` when the record is of another session.
        """
        if self.session_digest != session.digest:
            _refuse("wipe.session", "a record of another session", "the session that signs", "report this as a fault")
        payload = {**self.as_payload(), "session": session.public_payload()}
        return session.sign(KIND, strictjson.dumps(payload))


def read_and_verify(envelope: bytes, *, request: KeyRequest | None) -> WipeRecord:
    """Read a wipe record.

    Args:
        envelope: the whole file.
        request: the key request of the same session. Without it the record proves only that it was not changed since
            some session signed it.

    Raises:
        FormatError, SignatureRefused: it is damaged, or not signed by the session keys inside it.
        ExchangeRefused: ``wipe.session``, ``wipe.boot`` or ``wipe.manifest`` when it is not of the request's session,
            boot and bundle; ``wipe.contradiction`` when it claims more than its numbers show.
    """
    payload = open_self_signed(envelope, KIND, keys_of=record_keys, limit=LIMIT)
    fields = Fields(strictjson.loads(payload, limit=LIMIT), KIND)
    epoch, at = strictjson.read_header(fields, KIND)
    session = SessionKeys.read(fields, KIND)
    record = WipeRecord(
        node=fields.text("node", limit=64),
        boot_id=fields.blob("boot_id", size=BOOT_ID_BYTES),
        reason=fields.text("reason", limit=256),
        session_digest=fields.blob("session_digest", size=DIGEST_BYTES),
        manifest_digest=fields.blob("manifest_digest", size=DIGEST_BYTES),
        epoch=epoch,
        devices=tuple(
            DeviceWipe.from_payload(item, f"{KIND}.devices[{ordinal}]")
            for ordinal, item in enumerate(fields.mappings("devices", limit=MAX_DEVICES))
        ),
        milliseconds=fields.integer("milliseconds"),
        complete=fields.flag("complete"),
        at=at,
    )
    fields.end()
    if record.session_digest != session.digest:
        _refuse(
            "wipe.session", "a record of another session", "the session that signed it", "get the file from the machine"
        )
    _require_consistent(record)
    if request is not None:
        _match(record, request)
    return record


def _require_consistent(record: WipeRecord) -> None:
    shown = all(device.shown for device in record.devices)
    if not all(device.consistent for device in record.devices) or (record.complete and not shown):
        _refuse(
            "wipe.contradiction",
            "a record that claims more than its numbers show",
            "zero bytes read back from all that was overwritten",
            "treat the machine as not wiped: power it off, and keep it off for some minutes",
        )


def _match(record: WipeRecord, request: KeyRequest) -> None:
    if record.session_digest != request.session.digest:
        _refuse(
            "wipe.session",
            f"a record of session {fingerprint(record.session_digest)}",
            f"one of {fingerprint(request.session.digest)}, that of the request",
            "give the request that this session made",
        )
    if record.boot_id != request.binding.boot_id:
        _refuse("wipe.boot", "a record of another boot", "the boot of the request", "report this as a fault")
    if record.manifest_digest != request.binding.manifest_digest:
        _refuse("wipe.manifest", "a record for another bundle", "the bundle of the request", "report this as a fault")


def _refuse(code: str, found: str, expected: str, hint: str) -> NoReturn:
    raise ExchangeRefused(code, found=found, expected=expected, hint=hint)
