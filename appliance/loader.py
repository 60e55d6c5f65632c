"""SealedLoader: from a grant and an open bundle to a model in device memory, or to nothing at all.

Theory of operation: the catalog is opened first, with the same ring, and says what the model is; the caller builds the
empty model; then one pass of the pipeline (appliance/stream.py) opens every segment of this rank's streams and copies
it to the model's tensors. Whatever goes wrong, destinations and ring are overwritten and the key is wiped before the
error is raised. When all goes well the key is wiped as well: a grant is good for one load.

Invariant: plaintext weights are in the ring or on the device; the ring's peak is part of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from appliance import placement
from appliance._seal import MINT
from appliance.engine.model import Decoder
from appliance.errors import ConfigError
from appliance.reader import Reader
from appliance.resident import ResidentModel
from appliance.ring import Cell, Ring
from appliance.slot import Lane, Slot, Ticket
from appliance.stream import Pipeline, Report, Run
from appliance.unseal import Unsealer, plan_runs
from attestation.clock import Clock, SystemClock
from provisioning.bundle import Bundle
from provisioning.catalog import MAX_FILES_BYTES, MAX_HEADER_BYTES, Catalog
from provisioning.errors import BundleDamaged
from provisioning.geometry import CATALOG_STREAM, Section
from provisioning.grant import Grant
from provisioning.layout import descriptor_digest


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
        direct_files: data files that were read past the page cache.
    """

    weight_bytes: int
    opened_bytes: int
    segments: int
    seconds: float
    ring_bytes: int
    peak_plaintext_bytes: int
    direct_files: int


class SealedLoader:
    """Loads one bundle into one slot, once. A context manager: the grant is spent at its end.

    Args:
        grant: opened; the loader closes it.
        bundle: opened; stays the caller's.
        slot: the device.
        ring_bytes: bound on plaintext in host memory.
        reader_threads: threads that read.
        opener_threads: threads that decrypt and copy.
        rank: which part of the model.
        world: of how many; a divisor of the bundle's number of tiles.
        clock: for the time taken.

    Raises:
        ConfigError: ``rank.world``, ``ring.size``, ``ring.memlock``.
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
        clock: Clock | None = None,
    ) -> None:
        self._grant = grant
        self._bundle = bundle
        self._manifest = bundle.manifest
        self._slot = slot
        self._readers = reader_threads
        self._openers = opener_threads
        self._rank = rank
        self._world = world
        self._clock = clock or SystemClock()
        self._catalog: Catalog | None = None
        _check_rank(rank, world, bundle.manifest.tiles)
        self._ring = Ring(slot, ring_bytes=ring_bytes, cell_bytes=self._cell_bytes(ring_bytes))

    def _cell_bytes(self, ring_bytes: int) -> int:
        """Choose how much is read, opened and copied at once: whole segments, and cells enough to keep all busy."""
        size = self._manifest.segment_size
        # Each reader fills one cell, each opener holds one and may have one more under way to the device.
        share = ring_bytes // (self._readers + 2 * self._openers)
        return max(1, min(self._slot.copy_bytes, share) // size) * size

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
        nbytes = geometry.streams[CATALOG_STREAM] * geometry.segment_size
        if nbytes > MAX_HEADER_BYTES + MAX_FILES_BYTES + geometry.segment_size:
            raise BundleDamaged(
                "catalog.size",
                found=f"a catalog of {nbytes} bytes",
                expected=f"at most {MAX_HEADER_BYTES + MAX_FILES_BYTES}",
                hint="ask the owner for a sound bundle",
            )
        sections = geometry.sections_of(CATALOG_STREAM)
        plain = bytearray(nbytes)
        cell = self._ring.cells[0]
        try:
            with self._unsealer({section: descriptor_digest(()) for section in sections}) as unsealer:
                runs = self._plan([CATALOG_STREAM])
                with Reader(self._descriptors(runs)) as reader:
                    for run in runs:
                        reader.read(run.file, run.offset, cell.view, run.length)
                        unsealer.open_run(run, cell)
                        plain[run.start : run.start + run.length] = cell.view[: run.length]
                        cell.wipe()
                unsealer.settle(sections)
            return Catalog.decode(plain, geometry=geometry)
        finally:
            self._ring.wipe()
            plain[:] = bytes(nbytes)

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
            return self._load(destinations, skip, on_progress)
        except BaseException:
            for tensor in destinations.values():
                tensor.zero_()
            raise
        finally:
            self._ring.wipe()
            self.close()

    def _load(self, destinations: Mapping[str, torch.Tensor], skip: Callable[[str], bool], report: Report) -> Loaded:
        catalog = self.catalog()
        layout = catalog.layout
        targets = placement.plan(layout, rank=self._rank, world=self._world, destinations=destinations, skip=skip)
        size = self._manifest.segment_size
        sections = [section for section in self._manifest.sections if section.stream in targets]
        runs = self._plan(targets)
        begin = self._clock.monotonic()
        with (
            self._unsealer({section: layout.descriptor_digest(section, size) for section in sections}) as unsealer,
            Reader(self._descriptors(runs)) as reader,
        ):
            Pipeline(
                ring=self._ring,
                slot=self._slot,
                read=partial(_read, reader),
                bring=partial(_bring, unsealer, targets),
                readers=self._readers,
                openers=self._openers,
                on_progress=report,
            ).run(runs)
            segments = unsealer.settle(sections)
        return Loaded(
            weight_bytes=sum(tensor.numel() * tensor.element_size() for tensor in destinations.values()),
            opened_bytes=segments * size,
            segments=segments + self._manifest.geometry.streams[CATALOG_STREAM],
            seconds=self._clock.monotonic() - begin,
            ring_bytes=self._ring.bytes,
            peak_plaintext_bytes=self._ring.peak_bytes,
            direct_files=reader.direct_files,
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

    def _unsealer(self, descriptors: Mapping[Section, bytes]) -> Unsealer:
        with self._grant.bundle_key() as key:
            return Unsealer(key, manifest=self._manifest, table=self._bundle.table, descriptors=descriptors)

    def _plan(self, streams: Iterable[int]) -> list[Run]:
        return list(plan_runs(self._manifest, self._bundle.table, streams, self._ring.cell_bytes))

    def _descriptors(self, runs: Iterable[Run]) -> dict[int, int]:
        return {number: self._bundle.open_file(number) for number in sorted({run.file for run in runs})}

    def close(self) -> None:
        """Wipe the key; the loader can do nothing more. May be called again."""
        self._grant.close()

    def __enter__(self) -> SealedLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(reader: Reader, run: Run, cell: Cell) -> None:
    reader.read(run.file, run.offset, cell.view, run.length)


def _bring(
    unsealer: Unsealer, targets: Mapping[int, tuple[placement.Target, ...]], run: Run, cell: Cell, lane: Lane
) -> Ticket:
    """Open a run in its cell and let the lane spread it; see :data:`appliance.stream.Bring`."""
    unsealer.open_run(run, cell)
    return lane.deliver(cell.staged[: run.length], lambda plain: placement.place(targets[run.stream], run.start, plain))


def _check_rank(rank: int, world: int, tiles: int) -> None:
    if world < 1 or tiles % world or not 0 <= rank < world:
        raise ConfigError(
            "rank.world",
            found=f"rank {rank} of {world}",
            expected=f"a number of ranks that divides the bundle's {tiles} tiles",
            hint="change devices.slots",
        )
