"""A laboratory: the root of trust and the simulated machine that it certifies, as files in one directory.

Whoever can read the directory can forge this laboratory's evidence; that is why a result from it is never more than
``lab``. ``machine.json`` is meant to be edited: an older ``tcb``, ``debug`` on or another ``cc_mode`` drill the
refusals of a policy without hardware.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from attestation import dsse, strictjson
from attestation.errors import EvidenceNotGenuine, FormatError, LetheError, reason_of
from attestation.evidence import MAX_DEVICES
from attestation.rule import MAX_INTEGER
from attestation.signature import PrivateKeys
from attestation.simulated import abi
from attestation.simulated.rules import DIGEST_BYTES, IDENTITY_BYTES
from attestation.strictjson import Fields, b64

ROOT_FILE: Final = "root.pub.json"
ROOT_KEY_FILE: Final = "root.key.json"
CPU_KEY_FILE: Final = "cpu.key.json"
CPU_CERTIFICATE_FILE: Final = "cpu.cert.dsse.json"
MACHINE_FILE: Final = "machine.json"

DEFAULT_MODEL: Final = "simulated-cpu-slot"
DEFAULT_TCB: Final = 3
DEVICE_FIRMWARE: Final = hashlib.sha384(b"lethe/simulated-device-firmware/v1").digest()

# Certificates begin a day early: the owner's and the node's clocks differ, and no rule turns on the exact second.
_BACKDATE: Final = timedelta(days=1)
_VALIDITY: Final = timedelta(days=3650)
_MAX_FILE: Final = 64 << 10

_Read = TypeVar("_Read")


class LaboratoryInvalid(LetheError):
    """The laboratory's directory cannot be made or used."""

    exit_status = 78


@dataclass(frozen=True, slots=True)
class LabRoot:
    """A laboratory's root of trust.

    Attributes:
        directory: where the laboratory lies.
        root_digest: SHA-384 of the root's public keys, 96 hex digits; what a policy pins.
    """

    directory: Path
    root_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDevice:
    """What one device will say of itself; fields as in :class:`attestation.simulated.abi.DeviceReport`."""

    model: str
    device_id: bytes
    cc_mode: str
    measurement: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the simulated machine will say of itself; fields as in :class:`attestation.simulated.abi.CpuReport`."""

    chip_id: bytes
    tcb: int
    debug: bool
    devices: tuple[SimulatedDevice, ...]

    def as_payload(self) -> dict[str, Any]:
        """Give the machine as the members of ``machine.json``."""
        return {
            "type": "simulated-machine",
            "version": 1,
            "chip_id": self.chip_id.hex(),
            "tcb": self.tcb,
            "debug": self.debug,
            "devices": [
                {
                    "model": device.model,
                    "device_id": device.device_id.hex(),
                    "cc_mode": device.cc_mode,
                    "measurement": device.measurement.hex(),
                }
                for device in self.devices
            ],
        }


@dataclass(frozen=True, slots=True)
class Signer:
    """A certified key of the laboratory and its certificate's envelope."""

    keys: PrivateKeys
    certificate: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Laboratory:
    """A laboratory that was read from its directory; ``devices`` has one signer for each of ``machine.devices``."""

    root: bytes
    machine: Machine
    cpu: Signer
    devices: tuple[Signer, ...]


def device_key_file(ordinal: int) -> str:
    """Name the key file of the device at ``ordinal``."""
    return f"device-{ordinal}.key.json"


def device_certificate_file(ordinal: int) -> str:
    """Name the certificate file of the device at ``ordinal``."""
    return f"device-{ordinal}.cert.dsse.json"


def create(directory: Path, *, devices: int, at: datetime) -> LabRoot:
    """Make a laboratory: a root, a machine with random identities, and their keys.

    The directory (mode 0700, files 0600) appears only when it is complete.

    Args:
        directory: must not exist, or be empty.
        devices: how many devices the machine has, 0 to 32.
        at: now, UTC.

    Raises:
        LaboratoryInvalid: ``simulated.lab.devices``, ``simulated.lab.exists`` or ``simulated.lab.write``.
    """
    if not 0 <= devices <= MAX_DEVICES:
        _refuse("devices", f"{devices} devices", f"0 to {MAX_DEVICES}", "ask for fewer devices")
    machine = Machine(
        chip_id=secrets.token_bytes(IDENTITY_BYTES),
        tcb=DEFAULT_TCB,
        debug=False,
        devices=tuple(
            SimulatedDevice(
                model=DEFAULT_MODEL,
                device_id=secrets.token_bytes(IDENTITY_BYTES),
                cc_mode="on",
                measurement=DEVICE_FIRMWARE,
            )
            for _ in range(devices)
        ),
    )
    root = PrivateKeys.generate()
    files = {
        ROOT_FILE: abi.write_root(root.public),
        ROOT_KEY_FILE: _write_keys(root),
        MACHINE_FILE: write_machine(machine),
    }
    files |= _certified(root, "cpu", machine.chip_id, at, CPU_KEY_FILE, CPU_CERTIFICATE_FILE)
    for ordinal, device in enumerate(machine.devices):
        names = device_key_file(ordinal), device_certificate_file(ordinal)
        files |= _certified(root, "device", device.device_id, at, *names)
    _write_directory(directory, files)
    return LabRoot(directory, hashlib.sha384(files[ROOT_FILE]).hexdigest())


def _certified(
    root: PrivateKeys, role: abi.Role, identity: bytes, at: datetime, key_name: str, certificate_name: str
) -> dict[str, bytes]:
    keys = PrivateKeys.generate()
    certificate = abi.Certificate(
        role=role, identity=identity, keys=keys.public, not_before=at - _BACKDATE, not_after=at + _VALIDITY
    )
    envelope = dsse.sign(abi.CERTIFICATE_KIND, strictjson.dumps(certificate.as_payload()), [root])
    return {key_name: _write_keys(keys), certificate_name: envelope}


def write_machine(machine: Machine) -> bytes:
    """Give the bytes of ``machine.json``."""
    return strictjson.dumps(machine.as_payload())


def _write_keys(keys: PrivateKeys) -> bytes:
    seed, classical = keys.private_parts()
    return strictjson.dumps({"type": "simulated-key", "version": 1, "seed": b64(seed), "classical": b64(classical)})


def _write_directory(directory: Path, files: dict[str, bytes]) -> None:
    if directory.is_symlink() or (directory.exists() and (not directory.is_dir() or any(directory.iterdir()))):
        _refuse("exists", str(directory), "a directory that does not exist yet", "name another directory")
    partial = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}.part")
    try:
        partial.mkdir(mode=0o700, parents=True)
        for name, content in files.items():
            descriptor = os.open(partial / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(content)
        partial.rename(directory)
    except OSError as error:
        if partial.is_dir():
            for name in files:
                (partial / name).unlink(missing_ok=True)
            partial.rmdir()
        _refuse("write", f"{directory}: {reason_of(error)}", "a directory that can be written", "check path and space")


def read_root(directory: Path) -> LabRoot:
    """Give the root of an existing laboratory.

    Raises:
        LaboratoryInvalid: ``simulated.lab.*``.
    """
    content = _read_file(directory / ROOT_FILE)
    _readable(lambda: abi.read_root(content), ROOT_FILE)
    return LabRoot(directory, hashlib.sha384(content).hexdigest())


def load(directory: Path) -> Laboratory:
    """Read a laboratory with the keys of its machine.

    Raises:
        LaboratoryInvalid: ``simulated.lab.missing``, ``simulated.lab.mode`` or ``simulated.lab.form``.
    """
    root = _read_file(directory / ROOT_FILE)
    written = _read_file(directory / MACHINE_FILE)
    machine = _readable(lambda: read_machine(written), MACHINE_FILE)
    return Laboratory(
        root=root,
        machine=machine,
        cpu=_read_signer(directory, CPU_KEY_FILE, CPU_CERTIFICATE_FILE),
        devices=tuple(
            _read_signer(directory, device_key_file(ordinal), device_certificate_file(ordinal))
            for ordinal in range(len(machine.devices))
        ),
    )


def read_machine(data: bytes) -> Machine:
    """Read ``machine.json``.

    Raises:
        FormatError: it is malformed.
        EvidenceNotGenuine: an identity, digest or mode in it is none.
    """
    fields = Fields(strictjson.loads(data, limit=_MAX_FILE), "machine")
    _expect(fields, "simulated-machine")
    machine = Machine(
        chip_id=abi.read_hex(fields, "chip_id", IDENTITY_BYTES),
        tcb=fields.integer("tcb", high=MAX_INTEGER),
        debug=fields.flag("debug"),
        devices=tuple(
            _read_device(Fields(item, f"machine.devices[{ordinal}]"))
            for ordinal, item in enumerate(fields.mappings("devices", limit=MAX_DEVICES))
        ),
    )
    fields.end()
    return machine


def _read_device(fields: Fields) -> SimulatedDevice:
    device = SimulatedDevice(
        model=fields.text("model", limit=64),
        device_id=abi.read_hex(fields, "device_id", IDENTITY_BYTES),
        cc_mode=abi.read_cc_mode(fields),
        measurement=abi.read_hex(fields, "measurement", DIGEST_BYTES),
    )
    fields.end()
    return device


def _expect(fields: Fields, kind: str) -> None:
    found = fields.text("type", limit=64), fields.integer("version", high=1 << 16)
    if found != (kind, 1):
        raise FormatError(
            "simulated.lab.form",
            found=f"{found[0]} version {found[1]}",
            expected=f"{kind} version 1",
            hint="make it again",
        )


def _read_signer(directory: Path, key_name: str, certificate_name: str) -> Signer:
    written = _read_file(directory / key_name, private=True)

    def read() -> PrivateKeys:
        fields = Fields(strictjson.loads(written, limit=_MAX_FILE), "key")
        _expect(fields, "simulated-key")
        keys = PrivateKeys.from_private_parts(fields.blob("seed", size=32), fields.blob("classical", limit=1024))
        fields.end()
        return keys

    return Signer(_readable(read, key_name), _read_file(directory / certificate_name))


def _readable(read: Callable[[], _Read], name: str) -> _Read:
    try:
        return read()
    except (FormatError, EvidenceNotGenuine) as error:
        _refuse("form", f"{name} with {error.found}", error.expected, "correct the file, or make a new laboratory")


def _read_file(path: Path, *, private: bool = False) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            content = file.read(_MAX_FILE + 1)
    except OSError as error:
        _refuse(
            "missing", f"{path}: {reason_of(error)}", "a laboratory", "check platform.lab_dir, or make a laboratory"
        )
    if private and mode & 0o077:
        _refuse("mode", f"{path} with mode {mode:04o}", "mode 0600", f"chmod 600 {path}")
    if len(content) > _MAX_FILE:
        _refuse("form", f"{path} of more than {_MAX_FILE} bytes", f"at most {_MAX_FILE}", "make a new laboratory")
    return content


def _refuse(code: str, found: str, expected: str, hint: str) -> NoReturn:
    raise LaboratoryInvalid(f"simulated.lab.{code}", found=found, expected=expected, hint=hint)
