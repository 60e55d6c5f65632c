"""Collect simulated evidence: the only module of this platform that a machine's agent needs.

It stands where, on hardware, the calls to the processor and to the devices are; the laboratory signs instead.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import attestation
from attestation import dsse, strictjson
from attestation.binding import Binding, device_evidence_digest, frame
from attestation.evidence import Evidence, EvidenceSet
from attestation.simulated import abi, lab
from attestation.simulated.rules import PLATFORM

MEASUREMENT_LABEL = b"lethe/measurement/v1"
_PACKAGES = ("appliance", "attestation", "provisioning")


def installed_packages() -> tuple[Path, ...]:
    """Give the directories of the product's packages that are installed beside this one."""
    site = Path(attestation.__path__[0]).parent
    return tuple(site / name for name in _PACKAGES if (site / name).is_dir())


def measure_installation(roots: Sequence[Path]) -> bytes:
    """Give SHA-384 over all ``.py`` files under some package directories, 48 bytes.

    A file counts under its package's name, so the place of the installation does not matter; its name and the SHA-384
    of its content are framed, and files are sorted by name as bytes.

    Args:
        roots: package directories, such as :func:`installed_packages`.
    """
    files: dict[bytes, bytes] = {}
    for root in roots:
        for parent, _, names in os.walk(root):
            for name in names:
                if name.endswith(".py"):
                    path = Path(parent, name)
                    label = os.fsencode((Path(root.name) / path.relative_to(root)).as_posix())
                    files[label] = hashlib.sha384(path.read_bytes()).digest()
    return hashlib.sha384(frame([(b"protocol", MEASUREMENT_LABEL), *sorted(files.items())])).digest()


def collect(directory: Path, binding: Binding) -> EvidenceSet:
    """Give the evidence of a laboratory's machine, bound to one session.

    Args:
        directory: the laboratory.
        binding: the session's values; devices answer its nonces, the processor signs its report data.

    Raises:
        LaboratoryInvalid: ``simulated.lab.*``.
    """
    laboratory = lab.load(directory)
    machine = laboratory.machine
    devices = tuple(
        _sign(
            laboratory.root,
            signer,
            "device",
            abi.DeviceReport(
                model=device.model,
                device_id=device.device_id,
                nonce=binding.device_nonce(ordinal),
                cc_mode=device.cc_mode,
                measurement=device.measurement,
            ),
        )
        for ordinal, (device, signer) in enumerate(zip(machine.devices, laboratory.devices, strict=True))
    )
    report = abi.CpuReport(
        chip_id=machine.chip_id,
        measurement=measure_installation(installed_packages()),
        tcb=machine.tcb,
        debug=machine.debug,
        report_data=binding.report_data(device_evidence_digest(devices)),
    )
    return EvidenceSet(_sign(laboratory.root, laboratory.cpu, "cpu", report), devices)


def _sign(root: bytes, signer: lab.Signer, role: abi.Role, report: abi.CpuReport | abi.DeviceReport) -> Evidence:
    envelope = dsse.sign(abi.REPORT_KINDS[role], strictjson.dumps(report.as_payload()), [signer.keys])
    return Evidence(PLATFORM, abi.write_body(abi.Body(root, signer.certificate, envelope), role))
