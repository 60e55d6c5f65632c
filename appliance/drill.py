"""The zeroize drill across the processes of the appliance.

Order: keys, admission, device memory, staging, processes, record. The cheap and irreversible step comes first: without
its key the bundle on the disk is noise, whatever else fails after. No step waits for the one before it to succeed, and
a step that cannot be shown to have worked makes the drill incomplete; it never stops it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from appliance.apilink import ApiLink
from appliance.custody import Custody
from appliance.errors import Unrecorded, ZeroizeIncomplete
from appliance.journal import Journal
from appliance.protocol import Exit, Wiped, Zeroize
from appliance.ranklink import RankLink
from attestation.clock import SystemClock
from attestation.errors import LetheError
from provisioning.files import write_new
from provisioning.wiperecord import DeviceWipe, WipeRecord

# A hung disk may delay the record, never the wipe.
_JOURNAL_SECONDS = 0.25
_WIPE_SECONDS = 120.0
_LEAVE_SECONDS = 10.0


class Drill:
    """One wipe of everything that this agent holds.

    Args:
        node: the node's name.
        reason: why, for the journal and the record.
        records: directory for the signed wipe record.
        journal, clock, custody, api, ranks: the agent's.

    Attributes:
        wiped: set when all overwriting is done and the processes still live.
        release: set to end the hold early.
        record_path: the signed record, once written.
    """

    def __init__(
        self,
        *,
        node: str,
        reason: str,
        records: Path,
        journal: Journal,
        clock: SystemClock,
        custody: Custody,
        api: ApiLink | None,
        ranks: Sequence[RankLink],
    ) -> None:
        self._node = node
        self._reason = reason
        self._records = records
        self._journal = journal
        self._clock = clock
        self._custody = custody
        self._api = api
        self._ranks = ranks
        self.wiped = asyncio.Event()
        self.release = asyncio.Event()
        self.record_path: Path | None = None

    async def run(self, *, hold_seconds: float) -> LetheError | None:
        """Do the drill.

        Args:
            hold_seconds: how long the wiped processes stay alive, so that an auditor can search their memory.

        Returns:
            None when everything was shown to be zero and the record is written; else what is wrong.
        """
        began = self._clock.monotonic()
        self._custody.session.drop_opening_key()
        await self._note("zeroize.begin", reason=self._reason)
        if self._api is not None:
            await self._api.close_admission()
        results = await asyncio.gather(*(self._wipe(rank) for rank in self._ranks))
        seconds = self._clock.monotonic() - began
        self.wiped.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.release.wait(), hold_seconds)
        left = await self._end_processes()
        devices = tuple(_device_wipe(rank.device, result) for rank, result in zip(self._ranks, results, strict=True))
        complete = left and all(device.shown for device in devices)
        recorded = await self._record(devices, milliseconds=round(seconds * 1000), complete=complete)
        self._custody.session.wipe()
        if not complete:
            return _unshown(devices)
        return None if recorded else _unrecorded(self._records)

    async def _wipe(self, rank: RankLink) -> Wiped | None:
        """Tell one rank to wipe; None when it did not answer in time or is gone."""
        try:
            await rank.child.channel.send(Zeroize())
            return await asyncio.wait_for(asyncio.shield(rank.wiped), _WIPE_SECONDS)
        except (OSError, TimeoutError, LetheError):
            return None

    async def _end_processes(self) -> bool:
        """End all children; says whether none had to be killed."""
        left = await self._api.end() if self._api is not None else True
        for rank in self._ranks:
            with suppress(OSError):
                await rank.child.channel.send(Exit())
        return all(await asyncio.gather(*(rank.end(_LEAVE_SECONDS) for rank in self._ranks))) and left

    async def _record(self, devices: tuple[DeviceWipe, ...], *, milliseconds: int, complete: bool) -> bool:
        """Sign and write the record, print it to the journal; says whether both are on the disk."""
        record = WipeRecord(
            node=self._node,
            boot_id=self._custody.boot_id,
            reason=self._reason,
            session_digest=self._custody.session.digest,
            manifest_digest=self._custody.manifest.digest,
            epoch=self._custody.manifest.epoch,
            devices=devices,
            milliseconds=milliseconds,
            complete=complete,
            at=self._clock.now(),
        )
        path = self._records / f"wipe-{record.at:%Y%m%dT%H%M%SZ}-{self._custody.session.digest.hex()[:8]}.dsse.json"
        try:
            await asyncio.to_thread(write_new, path, record.sign(self._custody.session), mode=0o644)
            self.record_path = path
        except LetheError as error:
            await self._note("zeroize.unrecorded", outcome="failed", error=error.code)
            return False
        return await self._note(
            "zeroize.done" if complete else "zeroize.incomplete",
            outcome="ok" if complete else "failed",
            record=path.name,
            milliseconds=milliseconds,
            overwritten_bytes=sum(device.overwritten_bytes for device in devices),
            nonzero_bytes=sum(device.nonzero_bytes for device in devices),
        )

    async def _note(self, event: str, *, outcome: str = "ok", **detail: str | int) -> bool:
        """Write to the journal within a bound; says whether it is durable."""
        try:
            await asyncio.wait_for(
                asyncio.to_thread(self._journal.record, event, outcome=outcome, **detail), _JOURNAL_SECONDS
            )
        except (TimeoutError, LetheError):
            return False
        return True


def _unshown(devices: tuple[DeviceWipe, ...]) -> ZeroizeIncomplete:
    unshown = ", ".join(device.device for device in devices if not device.shown)
    return ZeroizeIncomplete(
        "zeroize.unshown",
        found=f"{unshown} not shown to be zero" if unshown else "a process that had to be killed",
        expected="every device read back as zero, and every process gone by itself",
        hint="power the machine off, and keep it off for some minutes",
    )


def _unrecorded(records: Path) -> Unrecorded:
    return Unrecorded(
        "zeroize.unrecorded",
        found=f"a wipe that was shown, but not recorded in {records}",
        expected="a signed record and a line in the journal",
        hint="nothing is left in memory; free space or mend permissions before the next start",
    )


def _device_wipe(device: str, result: Wiped | None) -> DeviceWipe:
    """Judge one rank's answer; a rank that gave none has shown nothing."""
    if result is None:
        return DeviceWipe(device, 0, 0, 0, 0, shown=False)
    return DeviceWipe(
        device=device,
        overwritten_bytes=result.overwritten_bytes,
        read_back_bytes=result.read_back_bytes,
        nonzero_bytes=result.nonzero_bytes,
        staging_bytes=result.staging_bytes,
        shown=result.nonzero_bytes == 0 and result.read_back_bytes >= result.overwritten_bytes,
    )
