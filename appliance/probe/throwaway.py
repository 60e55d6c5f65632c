"""A sealed bundle that exists for one measurement: fresh keys, random weights, removed at the end.

It lies in a hidden directory on the medium that is measured. The directory is locked while its process lives, so what a
killed run left behind is known, and removed by the next one. The bundle key is made by the packer as for any bundle and
goes into the load through a pipe, as it goes into a rank; the owner key that wraps it is in memory only.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import torch

from appliance.config import Loading
from appliance.loader import SealedLoader
from appliance.probe import cache, model
from appliance.probe.findings import LoadRate
from appliance.slot import Slot
from attestation.errors import reason_of
from attestation.policy import AppraisalPolicy
from provisioning.bundle import Bundle
from provisioning.errors import OutputFailed
from provisioning.grant import Grant
from provisioning.ownerkey import OwnerSigner
from provisioning.pack import pack

Progress = Callable[[str, int, int], None]

_PREFIX = ".lethe-bench-"
# Beside the model in plain and sealed: table, manifest, the fill of the last segments, and what a file system needs.
_MARGIN = 64 << 20

# A laboratory's, because nothing is ever attested for this bundle: its key never leaves this machine.
_POLICY = """
version = 1
name = "bench"
epoch = 1
accept = ["simulated"]
challenge_seconds = 60

[simulated]
root = { equals = "<none>" }
chip_id = { unchecked = "no evidence is appraised for a measurement" }
measurement = { unchecked = "no evidence is appraised for a measurement" }
tcb = { unchecked = "no evidence is appraised for a measurement" }
debug = { unchecked = "no evidence is appraised for a measurement" }
devices = { equals = 1 }
device_model = { unchecked = "no evidence is appraised for a measurement" }
device_measurement = { unchecked = "no evidence is appraised for a measurement" }
cc_mode = { unchecked = "no evidence is appraised for a measurement" }

[serving]
max_context = 1
max_output_tokens = 1
max_concurrent = 1

[grant]
loads = 1
seconds = 60
reboot = "courier"
""".replace("<none>", "0" * 96)


class Throwaway:
    """A bundle for one measurement. A context manager: nothing of it is left at its end, whatever happened.

    Args:
        directory: on the medium; must be writable.
        nbytes: about how large the weights are.

    Raises:
        OutputFailed: ``bench.directory``, ``bench.disk.full``; nothing is left behind.
    """

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._plan = model.shapes(nbytes)
        self._bytes = model.size(self._plan)
        try:
            _remove_abandoned(directory)
            _require_room(directory, 2 * self._bytes + _MARGIN)
            self._work = directory / (_PREFIX + secrets.token_hex(8))
            self._work.mkdir(mode=0o700)
        except OSError as error:
            _unusable(directory, error)
        self._lock = os.open(self._work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._signer = OwnerSigner.generate("bench", "lab")

    @property
    def files(self) -> list[Path]:
        """The files of ciphertext."""
        return sorted((self._work / "bundle").glob("data-*.seal"))

    def seal(self, progress: Progress) -> None:
        """Write random weights, pack them, and remove them again.

        Raises:
            OutputFailed: ``bench.directory``, ``pack.*``.
        """
        source = self._work / "model"
        try:
            model.write(source, self._plan, progress=lambda done, total: progress("writing weights", done, total))
        except OSError as error:
            _unusable(self._work.parent, error)
        keys = self._work / "keys"
        keys.mkdir(mode=0o700)
        report = pack(
            source,
            signer=self._signer,
            key_dir=keys,
            policy=AppraisalPolicy.from_toml(_POLICY),
            name="bench",
            out=self._work / "bundle",
            progress=lambda done, total: progress("packing", done, total),
        )
        self._bundle_id = bytes.fromhex(report.bundle_id)
        shutil.rmtree(source)

    def destinations(self, slot: Slot) -> dict[str, torch.Tensor]:
        """Give the model's tensors on a device, touched.

        Raises:
            DeviceFault: ``slot.memory``.
        """
        made = {name: slot.empty(shape, torch.bfloat16) for name, shape in self._plan.items()}
        for tensor in made.values():
            tensor.zero_()
        return made

    def load(
        self,
        slot: Slot,
        destinations: Mapping[str, torch.Tensor],
        loading: Loading,
        progress: Progress,
    ) -> LoadRate:
        """Load the bundle once, from opening its directory to the last byte on the device.

        Args:
            slot: the device.
            destinations: of :meth:`destinations`.
            loading: threads, ring, and who decrypts; 0 lets the loader choose.
            progress: told ("loading", bytes opened, bytes in all).

        Raises:
            LetheError: as :class:`appliance.loader.SealedLoader`.
        """
        readable, writable = os.pipe2(os.O_CLOEXEC)
        with self._signer.bundle_key(self._work / "keys", self._bundle_id) as key, key.expose() as view:
            os.writev(writable, [view])
        os.close(writable)
        begin = time.perf_counter()
        with Bundle.open(self._work / "bundle", [self._signer.owner]) as bundle:
            grant = Grant.inherit(readable, bundle.manifest)
            with SealedLoader(
                grant,
                bundle,
                slot,
                ring_bytes=loading.ring_mib << 20,
                reader_threads=loading.readers,
                opener_threads=loading.openers,
                rank=0,
                world=1,
                open_on=loading.open_on,
            ) as loader:
                done = loader.load(
                    destinations,
                    skip=lambda _: False,
                    on_progress=lambda opened, total: progress("loading", opened, total),
                )
        milliseconds = max(1, round((time.perf_counter() - begin) * 1000))
        return LoadRate(done.opened_bytes, milliseconds, done.ring_bytes, done.peak_plaintext_bytes)

    def chill(self) -> float:
        """Take the bundle out of the page cache; gives the share that stayed."""
        cache.evict(self.files)
        return cache.share(self.files)

    def warm(self) -> None:
        """Put the bundle into the page cache."""
        cache.fill(self.files)

    def close(self) -> None:
        """Remove everything."""
        self._signer.close()
        shutil.rmtree(self._work, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> Throwaway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_room(directory: Path, needed: int) -> None:
    state = os.statvfs(directory)
    free = state.f_bavail * state.f_frsize
    if free < needed:
        raise OutputFailed(
            "bench.disk.full",
            found=f"{free} bytes free in {directory}",
            expected=f"{needed} bytes for the weights, plain and sealed",
            hint="free space, name another --dir, or give a smaller --gb",
        )


def _remove_abandoned(directory: Path) -> None:
    """Remove what a killed run left: ciphertext whose key died with it."""
    for path in directory.iterdir():
        if not path.name.startswith(_PREFIX) or path.is_symlink() or not path.is_dir():
            continue
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue  # another measurement is under way
        finally:
            os.close(descriptor)


def _unusable(directory: Path, error: OSError) -> NoReturn:
    raise OutputFailed(
        "bench.directory",
        found=f"{directory}: {reason_of(error)}",
        expected="a directory that can be written, on the medium to measure",
        hint="name one with --dir; a medium that is mounted read-only cannot be measured",
    ) from None
