"""SealedLoader: from a grant and an open bundle to a model in device memory, or to nothing at all.

Theory of operation: the catalog is opened first, with the same ring, and says what the model is; the caller builds the
empty model; then one pass of the pipeline (appliance/stream.py) opens every segment of this rank's streams and copies
it to the model's tensors. Whatever goes wrong, destinations and ring are overwritten and the key is wiped before the
error is raised. When all goes well the key is wiped as well: a grant is good for one load.

Invariant: plaintext weights are in the ring or on the device; the ring's peak is part of the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from appliance import budget, placement
from appliance._seal import MINT
from appliance.account import Account
from appliance.budget import Budget, cell_bytes
from appliance.devicecipher.choice import Choosing
from appliance.deviceopen import DeviceWay, check_choice
from appliance.engine.model import Decoder
from appliance.errors import ConfigError
from appliance.faults import located
from appliance.hostopen import MemoryWay, StagedWay, Way
from appliance.reader import Reader
from appliance.resident import ResidentModel
from appliance.ring import Cell, Ring, Tally
from appliance.runs import plan_runs
from appliance.slot import Slot
from appliance.stream import Pipeline, Report, Run
from appliance.unseal import Unsealer
from attestation.clock import Clock, SystemClock
from provisioning import shares
from provisioning.bundle import Bundle
from provisioning.catalog import Catalog
from provisioning.collector import resting
from provisioning.errors import BundleDamaged
from provisioning.geometry import CATALOG_STREAM, Section
from provisioning.grant import Grant
from provisioning.layout import descriptor_digest

# How much of a mapped file one opener takes at a time.
_WINDOW = 16 << 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load did.

    Attributes:
        weight_bytes: bytes of the destinations.
        opened_bytes: bytes of ciphertext opened, the catalog not counted.
        segments: segments opened, each once, the catalog's included.
        seconds: time from the first read to the last byte on the device.
        ring_bytes: host staging memory.
        peak_plaintext_bytes: most plaintext that was in the ring at once.
        plaintext_bytes: what is left of it there; 0.
        direct_files: data files that were read past the page cache.
        mapped_files: data files that were opened from a mapping.
    """

    weight_bytes: int
    opened_bytes: int
    segments: int
    seconds: float
    ring_bytes: int
    peak_plaintext_bytes: int
    plaintext_bytes: int
    direct_files: int
    mapped_files: int


class SealedLoader:
    """Loads one bundle into one slot, once. A context manager: the grant is spent at its end.

    Args:
        grant: opened; the loader closes it.
        bundle: opened; stays the caller's.
        slot: the device.
        ring_bytes: bound on plaintext in host memory; 0, here and below, chooses (appliance/budget.py).
        reader_threads: threads that read.
        opener_threads: threads that decrypt and copy.
        rank: which part of the model.
        world: of how many; a divisor of the bundle's number of tiles.
        open_on: who decrypts weights, ``host``, or ``device`` where that has memory of its own; the catalog always is
            for the host.
        clock: for the time taken.

    Raises:
        ConfigError: ``rank.world``, ``ring.size``, ``ring.memlock``, ``loading.open_on``.
    """

    def __init__(
        self,
        grant: Grant,
        bundle: Bundle,
        slot: Slot,
        *,
        ring_bytes: int,
        reader_threads: int,
        opener_threads: int,
        rank: int,
        world: int,
        open_on: str = "host",
        clock: Clock | None = None,
    ) -> None:
        self._grant = grant
        self._bundle = bundle
        self._manifest = bundle.manifest
        self._slot = slot
        self._rank = rank
        self._world = world
        self._clock = clock or SystemClock()
        self._catalog: Catalog | None = None
        self._open_on = open_on
        _check_rank(rank, world, bundle.manifest.tiles)
        check_choice(open_on, slot)
        ring_bytes = budget.useful_ring(ring_bytes, data_bytes=bundle.manifest.geometry.data_bytes)
        self._budget = budget.for_slot(Budget(ring_bytes, reader_threads, opener_threads), slot, ranks=world)
        cell = cell_bytes(self._budget, segment=bundle.manifest.segment_size, copy_bytes=slot.copy_bytes)
        self._ring = Ring(slot, ring_bytes=self._budget.ring_bytes, cell_bytes=cell)
        # Last, when nothing can be refused any more. The device's cipher may have to be compiled, which goes on while
        # the catalog is opened and the model is built.
        self._choosing = Choosing(slot) if open_on == "device" else None

    @property
    def plaintext(self) -> Tally:
        """Count of the plaintext bytes on the host, now and at most; destinations of a host device not included."""
        return self._ring.tally

    def catalog(self) -> Catalog:
        """Open the sealed catalog; further calls give the same one.

        Raises:
            BundleDamaged: a segment or the catalog is damaged.
            ExchangeRefused: the grant is spent.
        """
        if self._catalog is None:
            try:
                self._catalog = self._open_catalog()
            except BaseException:
                self.close()
                raise
        return self._catalog

    def _open_catalog(self) -> Catalog:
        geometry = self._manifest.geometry
        # The manifest's parser bounds it.
        nbytes = geometry.streams[CATALOG_STREAM] * geometry.segment_size
        sections = geometry.sections_of(CATALOG_STREAM)
        plain = bytearray(nbytes)
        cell = self._ring.cells[0]
        try:
            account = Account(geometry.segments)
            descriptors = {section: descriptor_digest(()) for section in sections}
            with self._unsealer(descriptors, account) as unsealer, self._reader([CATALOG_STREAM]) as reader:
                for run in self._plan([CATALOG_STREAM], reader):
                    try:
                        reader.fill(run, cell)
                        self._open_whole(unsealer, run, cell)
                    except BundleDamaged as error:
                        raise located(error, run, device=self._slot.name) from None
                    plain[run.start : run.start + run.length] = cell.view[: run.length]
                    cell.wipe()
            account.settle(sections)
            return Catalog.decode(plain, geometry=geometry)
        except BaseException:
            self._ring.wipe()
            raise
        finally:
            plain[:] = bytes(nbytes)

    def _open_whole(self, unsealer: Unsealer, run: Run, cell: Cell) -> None:
        size = self._manifest.segment_size
        plain = cell.expose(0, run.length)
        for index in range(run.count):
            unsealer.open(run, index, cell.view, (plain[index * size : (index + 1) * size],))

    def load(
        self, destinations: Mapping[str, torch.Tensor], *, skip: Callable[[str], bool], on_progress: Report
    ) -> Loaded:
        """Fill the destinations from the bundle.

        Args:
            destinations: tensor name to the rank's tensor, in the checkpoint's local shape; the type may differ.
            skip: says of a tensor of the bundle that the model does not need it.
            on_progress: called with (bytes opened, bytes in all), many times a second also when nothing moves. An
                error that it raises stops the load.

        Raises:
            ModelUnsupported: ``load.tensor.*``.
            BundleDamaged: ``segment.tag``, ``bundle.*``, ``load.account``. All destinations are zeros then.
        """
        try:
            # The collector would look at everything again and again while a load makes many small objects.
            with resting():
                return self._load(destinations, skip, on_progress)
        except BaseException:
            for tensor in destinations.values():
                # A device that has failed must not keep the rest, or the ring, from being overwritten.
                with contextlib.suppress(RuntimeError):
                    tensor.zero_()
            self._ring.wipe()
            raise
        finally:
            self.close()

    def _load(self, destinations: Mapping[str, torch.Tensor], skip: Callable[[str], bool], report: Report) -> Loaded:
        catalog = self.catalog()
        layout = catalog.layout
        targets = placement.plan(layout, rank=self._rank, world=self._world, destinations=destinations, skip=skip)
        size = self._manifest.segment_size
        # From the manifest, not from the targets: a fault in either shows in the account.
        sections = shares.sections(self._manifest.geometry, rank=self._rank, world=self._world)
        descriptors = {section: layout.descriptor_digest(section, size) for section in sections}
        account = Account(self._manifest.geometry.segments)
        begin = self._clock.monotonic()
        with self._reader(targets) as reader, self._way(descriptors, account, reader, targets, report) as way:
            Pipeline(
                ring=self._ring,
                slot=self._slot,
                read=reader.fill,
                bring=way.bring,
                locate=partial(located, device=self._slot.name),
                readers=self._budget.readers,
                openers=self._budget.openers,
                on_progress=report,
            ).run(self._plan(targets, reader))
        segments = account.settle(sections)
        return Loaded(
            weight_bytes=sum(tensor.numel() * tensor.element_size() for tensor in destinations.values()),
            opened_bytes=segments * size,
            segments=segments + self._manifest.geometry.streams[CATALOG_STREAM],
            seconds=self._clock.monotonic() - begin,
            ring_bytes=self._ring.bytes,
            peak_plaintext_bytes=self._ring.peak_bytes,
            plaintext_bytes=self._ring.alive_bytes,
            direct_files=reader.direct_files,
            mapped_files=reader.mapped_files,
        )

    def make_resident(self, model: Decoder, *, on_progress: Report) -> ResidentModel:
        """Fill a model's tensors; see :meth:`load`."""
        done = self.load(model.destinations(), skip=model.skips, on_progress=on_progress)
        return ResidentModel(
            MINT,
            model=model,
            slot=self._slot,
            weight_bytes=done.weight_bytes,
            segments=done.segments,
            seconds=done.seconds,
            ring_bytes=done.ring_bytes,
            peak_plaintext_bytes=done.peak_plaintext_bytes,
        )

    def _unsealer(self, descriptors: Mapping[Section, bytes], account: Account) -> Unsealer:
        with self._grant.bundle_key() as key:
            return Unsealer(
                key, manifest=self._manifest, table=self._bundle.table, descriptors=descriptors, account=account
            )

    def _way(
        self,
        descriptors: Mapping[Section, bytes],
        account: Account,
        reader: Reader,
        targets: Mapping[int, tuple[placement.Target, ...]],
        report: Report,
    ) -> Way:
        """Choose how runs are opened on this slot."""
        if self._choosing is not None:
            total = sum(section.segments for section in descriptors) * self._manifest.segment_size
            choice = self._choosing.wait(lambda: report(0, total))
            with self._grant.bundle_key() as key:
                return DeviceWay(
                    key,
                    slot=self._slot,
                    choice=choice,
                    manifest=self._manifest,
                    table=self._bundle.table,
                    descriptors=descriptors,
                    account=account,
                    targets=targets,
                )
        kind = MemoryWay if self._slot.in_host_memory else StagedWay
        return kind(self._unsealer(descriptors, account), reader=reader, targets=targets)

    def _plan(self, streams: Iterable[int], reader: Reader) -> list[Run]:
        cell = self._ring.cell_bytes
        mapped = _WINDOW if self._slot.in_host_memory else cell
        return list(
            plan_runs(self._manifest.geometry, streams, lambda file: mapped if reader.is_mapped(file) else cell)
        )

    def _reader(self, streams: Collection[int]) -> Reader:
        sections = {section.number for section in self._manifest.sections if section.stream in streams}
        files = [number for number, file in enumerate(self._manifest.files) if file.section in sections]
        return Reader(
            {number: self._bundle.open_file(number) for number in files},
            # A device reads cells, and what it decrypts must be what was authenticated, which a mapping may not be.
            mapping=CATALOG_STREAM not in streams and self._open_on == "host",
        )

    def close(self) -> None:
        """Wipe the key; the loader can do nothing more. May be called again."""
        self._grant.close()

    def __enter__(self) -> SealedLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_rank(rank: int, world: int, tiles: int) -> None:
    if world < 1 or tiles % world or not 0 <= rank < world:
        raise ConfigError(
            "rank.world",
            found=f"rank {rank} of {world}",
            expected=f"a number of ranks that divides the bundle's {tiles} tiles",
            hint="change devices.slots",
        )
