"""Keep the index of one dataset: reuse it if it is still valid, else update it or build it.

An index is built under a lock of its folder. A process that waited for the lock uses the index that
the other process built.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.cache import DatasetError, IndexChangedError
from penstock.cache.base import read_error
from penstock.readers.files import locked, printable
from penstock.readers.formats import MISSING, Snapshot
from penstock.readers.index.building import IndexBuilder, PriorFacts
from penstock.readers.index.index_folders import check_arrangement, read_index
from penstock.readers.index.sidecars import Sidecars
from penstock.readers.types import Facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from penstock.readers.fieldtypes import FieldType, Schema
    from penstock.readers.formats import Candidates, Listing, Sidecar
    from penstock.readers.index.index_folders import IndexPlaces
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.index.shared_build import BuildReport, SharedBuild
    from penstock.readers.origin import Entry, Origin

    _Span = tuple[Entry, int, int]
    _Earlier = dict[str, tuple[Entry, Facts]]

_log = logging.getLogger("penstock")


@dataclass(slots=True, kw_only=True)
class IndexMaintenance:
    """Keep the index of one dataset in the local folders that may hold it."""

    builder: IndexBuilder
    places: IndexPlaces
    _listed: Listing | None = None

    @property
    def origin(self) -> Origin:
        """Return the place of the dataset's files."""
        return self.builder.origin

    def open(self) -> tuple[Manifest, bytes]:
        """Find or build the index. Return its manifest and its folder. Raises the same errors as
        `open_index`."""
        found = self._valid_index()
        if found is None and (job := self._shared_build()) is not None:
            found = self._build_in_job(job)
        return found or self.build()

    def _valid_index(self) -> tuple[Manifest, bytes] | None:
        """Return an existing index that is still valid, or None."""
        for place in self.places.candidates():
            if (manifest := self._valid(place)) is not None:
                return manifest, place
        return None

    def _shared_build(self) -> SharedBuild | None:
        """Return the job's shared build of this index, or None outside of a job."""
        if "torch.distributed" not in sys.modules:
            return None
        from penstock.readers.index.shared_build import SharedBuild

        named = f"{self.origin.key}\0{self.builder.format.name}\0{self.places.index}"
        return SharedBuild.of_job(named, self.origin.url, self.builder.progress)

    def _build_in_job(self, job: SharedBuild) -> tuple[Manifest, bytes] | None:
        """Let one process of the job build, and use its index in the others. Return None if this
        node must build its own."""
        if job.claim():
            self.builder = replace(self.builder, progress=job.report_progress)
            with job.building():
                manifest, place = self.build()
                job.publish(manifest, place, is_own=self.places.is_own(place))
            return manifest, place
        report = job.wait()
        found = self._valid_index() or self._receive(job, report)
        job.leave(report)
        return found

    def _receive(self, job: SharedBuild, report: BuildReport) -> tuple[Manifest, bytes] | None:
        """Store the index that another node built in this node's place. Return None if this node
        must build its own."""
        place = self.places.make()
        with locked(place):
            known = self._valid(place)  # another process of this node may have stored it
            if known is None and job.receive(report, place):
                known = self._valid(place)
        if known is not None:
            return known, place
        _log.warning(
            "%s: %s has built the index in %s, a folder that this node doesn't see, and the index "
            "is too large to be sent: this node builds its own. To avoid this, run `penstock "
            "index` with --out FOLDER, a folder that all nodes see.",
            self.origin.url,
            report.builder,
            report.place,
        )
        return None

    def build(self, *, reuse: bool = True) -> tuple[Manifest, bytes]:
        """Build the index in this process. Return its manifest and its folder. reuse: False checks
        all samples again, even if there is a valid index. Raises the same errors as `index`."""
        listing, workers = self._listing(), self.builder.workers
        place, snapshot = self._make_place(listing)
        with locked(place):
            known = self._read(place) if reuse else None
            if known is not None and self._is_valid(known, place):
                return known, place  # the previous holder of the lock has built it
            candidates = listing.candidates(workers=workers)
            prior = None if known is None else self._known_facts(known, place, candidates)
            if prior is None and not candidates.chunked:
                _log.info(
                    "Indexing %s: checking each of %d samples once",
                    self.origin.url,
                    len(candidates),
                )
            return self.builder.build(candidates, snapshot, place, prior=prior), place

    def _listing(self) -> Listing:
        if self._listed is None:
            self._listed = self.builder.format.list(self.origin)
        return self._listed

    def _valid(self, place: bytes) -> Manifest | None:
        """Read the index in a folder; None if there is none that is still valid."""
        manifest = self._read(place)
        return manifest if manifest is not None and self._is_valid(manifest, place) else None

    def _read(self, place: bytes) -> Manifest | None:
        """Read the index in a folder if it is of this format and arrangement; see `read_index`."""
        manifest = read_index(place)
        if manifest is None or manifest.about.kind != self.builder.format.name:
            return None
        if self.places.index is not None:
            check_arrangement(manifest, self.origin, shown=printable(place))
        is_ours = manifest.about.arrangement == self.origin.variant
        return manifest if is_ours else None

    def _is_valid(self, manifest: Manifest, place: bytes) -> bool:
        """Return True if an index is still valid. Remote data isn't listed for this check, because
        stores list a page at a time. The exception is an index in the user's cache directory, which
        nobody asked for."""
        if not self.origin.is_local and place != self.places.home():
            return True
        about = manifest.about
        snapshot = Snapshot(
            fingerprint=about.listing,
            directories={os.fsencode(name): ns for name, ns in about.directories},
        )
        if self.builder.format.is_current(self.origin, snapshot, self._listing):
            return True
        is_other = about.source and about.source != self.origin.url
        if is_other and self.places.index is not None:
            raise IndexChangedError(
                f"{printable(place)}: this is the index of {about.source}, not of "
                f"{self.origin.url}. Give the folder of that dataset's index as index=, or an "
                "empty folder."
            )
        return False

    def _make_place(self, listing: Listing) -> tuple[bytes, Snapshot]:
        """Make the first writable folder. Return it with the snapshot, in which the root's time is
        the one after that."""
        origin, snapshot = self.origin, listing.snapshot()
        root = origin.folder
        if root is None or b"" not in snapshot.directories:
            return self.places.make(), snapshot
        before = _mtime_ns(root)
        place = self.places.make()
        if snapshot.directories[b""] == before:  # else files were added: update at next opening
            times = {**snapshot.directories, b"": _mtime_ns(root)}
            snapshot = replace(snapshot, directories=times)
        return place, snapshot

    def _known_facts(
        self, manifest: Manifest, place: bytes, candidates: Candidates
    ) -> PriorFacts | None:
        """Return the facts of an existing index about the candidates, or None if none can be
        reused. Raises IndexChangedError if the user gave the index of another dataset."""
        if not self.builder.format.keeps_facts:
            return None
        sidecars = Sidecars(manifest, place)
        try:
            prior = _prior_facts(candidates, map(sidecars.read, range(len(manifest.names))))
        except DatasetError:
            _log.warning(
                "%s: parts of the index are damaged; the index is rebuilt", printable(place)
            )
            return None
        if self.places.index is not None and not prior.shared:
            raise IndexChangedError(
                f"{printable(place)}: this index contains none of the files in {self.origin.url}; "
                "it is of another dataset. Give the folder of that dataset's index as index=, or "
                "an empty folder."
            )
        _log.info(
            "The folder changed: %d files are unchanged, %d are new or changed, %d are gone",
            len(prior.same),
            len(candidates) - len(prior.same),
            prior.gone,
        )
        return prior


def _prior_facts(candidates: Candidates, sidecars: Iterable[Sidecar]) -> PriorFacts:
    """Match the facts in all sidecars of an earlier index with the candidates. Raises the errors of
    reading them."""
    earlier: dict[bytes, _Earlier] = {}
    for sidecar in sidecars:
        earlier |= _samples(sidecar, candidates.schema)
    same: dict[int, Mapping[str, Facts]] = {}
    before: dict[int, Mapping[str, Facts]] = {}
    shared = 0
    for position, name in enumerate(candidates.names):
        if name not in earlier:
            continue
        shared += 1
        known, today = earlier[name], _spans(candidates, position)
        facts = _facts(known, today)
        if facts is None:
            continue
        if all(known[field][0] == entry for field, (entry, _, _) in today.items()):
            same[position] = facts
        if not any(each.start for each in facts.values()):  # a header has no CRC
            before[position] = facts
    return PriorFacts(same=same, before=before, shared=shared, gone=len(earlier) - shared)


def _samples(sidecar: Sidecar, schema: Schema) -> Iterator[tuple[bytes, _Earlier]]:
    """Yield the name of each sample in a sidecar, with the file and the facts of each of its
    fields."""
    files = list(sidecar.files.entries())
    columns = {
        name: _rows(sidecar, name)
        for name in sidecar.spans
        if name in schema and _is_alike(sidecar.layout.schema[name], schema[name])
    }
    for row, name in enumerate(sidecar.names):
        facts = {field: each for field, rows in columns.items() if (each := rows[row]) is not None}
        yield name, {field: (files[number], each) for field, (number, each) in facts.items()}


def _is_alike(was: FieldType, now: FieldType) -> bool:
    """Return True if the facts about a field of one type hold for the other. An image isn't decoded
    like a mask, for instance."""
    return type(was) is type(now) and was.reference == now.reference


def _rows(sidecar: Sidecar, name: str) -> list[tuple[int, Facts] | None]:
    notes = sidecar.spans[name]
    shapes = [()] * sidecar.samples if notes.shapes is None else notes.shapes.tolist()
    columns = (notes.files, notes.crcs, notes.starts, notes.sizes)
    rows = zip(*(column.tolist() for column in columns), shapes, notes.codecs, strict=True)
    return [
        None if file == MISSING else (file, Facts(crc, start, size, tuple(shape), codec))
        for file, crc, start, size, shape, codec in rows
    ]


def _spans(candidates: Candidates, position: int) -> dict[str, _Span]:
    """Return the current file, first byte and size of each field of a candidate."""
    found = {}
    for name, spans in candidates.spans.items():
        number = int(spans.files[position])
        if number != MISSING:
            entry = candidates.files[number]
            found[name] = entry, int(spans.starts[position]), int(spans.sizes[position])
    return found


def _facts(known: _Earlier, today: Mapping[str, _Span]) -> Mapping[str, Facts] | None:
    """Return the facts relative to the current spans. Return None if the fields or their sizes have
    changed."""
    if set(known) != set(today):
        return None
    facts = {}
    for field, (entry, start, size) in today.items():
        earlier, was = known[field]
        skipped = was.start - start
        if earlier.size_bytes != entry.size_bytes or skipped < 0 or skipped + was.size != size:
            return None
        facts[field] = Facts(was.crc32c, skipped, was.size, was.shape, was.codec)
    return facts


def _mtime_ns(folder: bytes) -> int:
    """Return the modification time of a folder. Raises ReadError."""
    try:
        return os.stat(folder).st_mtime_ns
    except OSError as error:
        raise read_error(printable(folder), error) from error
