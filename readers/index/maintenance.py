"""Keep the index of one dataset: reuse it while it is true, else update it or build it.

An index is built under a lock of its folder; a process that waited for the lock uses what the other
built.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cache import DatasetError, IndexChangedError, PenstockWarning
from penstock.readers.fields import verify_for
from penstock.readers.files import is_passed_over, locked, printable
from penstock.readers.formats import MISSING, Snapshot
from penstock.readers.index.building import Checker, IndexBuilder, PriorFacts, noted_directories
from penstock.readers.index.index import Sidecars
from penstock.readers.index.index_folders import check_arrangement, read_index
from penstock.readers.index.manifest_file import MANIFEST, write_manifest
from penstock.readers.origin import LocalFolder
from penstock.readers.types import Facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from penstock.readers.fields import FieldType, Schema
    from penstock.readers.formats import Candidates, Format, Indexing, Listing, Sidecar
    from penstock.readers.index.index_folders import IndexPlaces
    from penstock.readers.index.manifest import Manifest, ManifestHeader
    from penstock.readers.index.shared_build import BuildReport, SharedBuild
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Progress, Verify

    _Span = tuple[Entry, int, int]
    _Earlier = dict[str, tuple[Entry, Facts]]

_log = logging.getLogger("penstock")


class IndexMaintenance:
    """Keeps the index of one dataset, in the local folders that may hold it.

    format, indexing: of the dataset, one that doesn't carry its index; places: those folders.
    verify: decodes images, None finds the installed one; workers: threads for that.
    checker: who checks samples in this process's place.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        format: Format,
        indexing: Indexing,
        places: IndexPlaces,
        verify: Verify | None,
        workers: int,
        progress: Progress | None = None,
        checker: Checker | None = None,
    ) -> None:
        self._origin, self._format, self._indexing, self._places = origin, format, indexing, places
        self._verify, self._workers, self._progress = verify, workers, progress
        self._checker = checker
        self._listed: Listing | None = None

    def open(self) -> tuple[Manifest, bytes]:
        """Find or make the index; returns its manifest and folder. Raises as open_index does."""
        found = self._found()
        if found is None and (job := self._first_use()) is not None:
            found = self._with_job(job)
        return found or self._made()

    def _found(self) -> tuple[Manifest, bytes] | None:
        """An index that stands already."""
        for place in self._places.candidates():
            manifest = self._read(place)
            if manifest is not None and self._stands(manifest, place):
                self._warn_of_empty_classes(manifest.about)
                return manifest, place
        return None

    def _warn_of_empty_classes(self, about: ManifestHeader) -> None:
        """Warn of an index of an earlier version, which gave a class folder without samples no
        number. Its labels stay while it stands: jobs may have begun with them."""
        if about.arrangement or not about.classes or not isinstance(self._origin, LocalFolder):
            return
        noted = [os.fsencode(name) for name, _ in about.directories]
        tops = [
            name
            for name in noted
            if name
            and b"/" not in name
            and not is_passed_over(name)
            and os.path.isdir(os.path.join(self._origin.root, name))  # tables are noted too
        ]
        classes = {os.fsencode(name) for name in about.classes}
        empty = [printable(name) for name in tops if name not in classes]
        # Classes of a table have other names than folders.
        if empty and classes.issubset(tops):
            warnings.warn(
                f"{self._origin.url}: the folder {empty[0]!r} held no sample when its index was "
                f"built, and has no class number: there are {len(classes):,} classes, and "
                f"torchvision counts {len(tops):,}. Remove the folder, or pass allow_empty=True, "
                "which numbers it too.",
                PenstockWarning,
                stacklevel=7,
            )

    def _first_use(self) -> SharedBuild | None:
        """The agreement with the other processes of a job; None where there are none."""
        if "torch.distributed" not in sys.modules:
            return None
        # Others start without it.
        from penstock.readers.index.shared_build import SharedBuild

        named = f"{self._origin.key}\0{self._format.name}\0{self._places.index}"
        return SharedBuild.of_job(named, self._origin.url, self._progress)

    def _with_job(self, job: SharedBuild) -> tuple[Manifest, bytes] | None:
        """One process of the job builds, the others get what it built; None where this node has to
        build its own."""
        if job.claim():
            self._progress = job.told
            with job.building():
                manifest, place = self._made()
                job.publish(manifest, place, is_own=self._places.is_own(place))
            return manifest, place
        report = job.wait()
        found = self._found() or self._received(job, report)
        job.leave(report)
        return found

    def _received(self, job: SharedBuild, report: BuildReport) -> tuple[Manifest, bytes] | None:
        """The index that another node built, put where this node has its own; None where it has to
        build one."""
        place = self._places.make()
        with locked(place):
            known = self._read(place)  # another process of this node has put it there
            if known is None or not self._stands(known, place):
                known = self._read(place) if job.receive(report, place) else None
            if known is not None and self._stands(known, place):
                return known, place
        _log.warning(
            "%s: %s has built the index in %s, which isn't seen here, and it is too large to be "
            "handed on: this node builds its own. `penstock index` with --out FOLDER, one that all "
            "nodes see, saves that.",
            self._origin.url,
            report.builder,
            report.place,
        )
        return None

    def _made(self) -> tuple[Manifest, bytes]:
        """Build the index, or bring it up to date, in this process."""
        listing = self._listing()
        place, snapshot = self._make_place(listing)
        with locked(place):
            manifest = self._read(place)  # who held the lock before may have built it
            if manifest is None:
                manifest = self._build(place, listing.candidates(workers=self._workers), snapshot)
            elif not self._stands(manifest, place):
                manifest = self._update(manifest, place, listing, snapshot)
            return manifest, place

    def rebuild(self) -> tuple[Manifest, bytes]:
        """Build the index anew, whatever is there. Raises as `index` does."""
        listing = self._listing()
        place, snapshot = self._make_place(listing)
        with locked(place):
            candidates = listing.candidates(workers=self._workers)
            return self._build(place, candidates, snapshot), place

    def _listing(self) -> Listing:
        """Listed once."""
        if self._listed is None:
            self._listed = self._indexing.list(self._origin)
        return self._listed

    def _read(self, place: bytes) -> Manifest | None:
        """The index in a folder, if it is of this format; see `read_index`."""
        manifest = read_index(place)
        if manifest is None or manifest.about.kind != self._format.name:
            return None
        if self._places.index is not None:
            check_arrangement(manifest, self._origin, shown=printable(place))
        is_ours = manifest.about.arrangement == self._origin.variant
        return manifest if is_ours else None

    def _stands(self, manifest: Manifest, place: bytes) -> bool:
        """Whether an index is still true. Remote data isn't listed for that (stores list a page at
        a time) but where nobody said that the index shall stand: in the user's cache directory."""
        if not self._origin.is_local and place != self._places.home():
            return True
        about = manifest.about
        snapshot = Snapshot(
            fingerprint=about.listing,
            directories={os.fsencode(name): ns for name, ns in about.directories},
        )
        if self._indexing.is_current(self._origin, snapshot, self._listing):
            return True
        is_other = about.source and about.source != self._origin.url
        if is_other and self._places.index is not None:
            raise IndexChangedError(
                f"{printable(place)}: this index is of {about.source}, and doesn't fit "
                f"{self._origin.url}. Give that dataset's own folder as index=, or an empty one."
            )
        return False

    def _make_place(self, listing: Listing) -> tuple[bytes, Snapshot]:
        """The first place that can be written; the snapshot with the root's time after that."""
        origin, snapshot = self._origin, listing.snapshot()
        if not isinstance(origin, LocalFolder) or b"" not in snapshot.directories:
            return self._places.make(), snapshot
        before = os.stat(origin.root).st_mtime_ns
        place = self._places.make()
        if snapshot.directories[b""] == before:  # else files came meanwhile: stale at next opening
            times = {**snapshot.directories, b"": os.stat(origin.root).st_mtime_ns}
            snapshot = replace(snapshot, directories=times)
        return place, snapshot

    def _update(
        self, manifest: Manifest, place: bytes, listing: Listing, snapshot: Snapshot
    ) -> Manifest:
        candidates = listing.candidates(workers=self._workers)
        prior = self._known_facts(manifest, place, candidates)
        if prior is None:
            return self._build(place, candidates, snapshot)
        if self._places.index is not None and not prior.shared:
            raise IndexChangedError(
                f"{printable(place)}: this index knows none of the files in {self._origin.url}; it "
                "is of another dataset. Give that dataset's own folder as index=, or an empty one."
            )
        is_as_before = len(prior.same) == len(candidates) and not prior.gone
        # The listing too: a table that says other values changes no file that is a sample's.
        is_as_before = is_as_before and snapshot.fingerprint == manifest.about.listing
        if is_as_before and len(candidates.quarantined) == manifest.about.quarantined:
            return self._refresh(manifest, place, snapshot)
        _log.info(
            "The folder changed: %d files as before, %d new or changed, %d gone",
            len(prior.same),
            len(candidates) - len(prior.same),
            prior.gone,
        )
        return self._build(place, candidates, snapshot, prior=prior)

    def _known_facts(
        self, manifest: Manifest, place: bytes, candidates: Candidates
    ) -> PriorFacts | None:
        """What the index says of the candidates; None where nothing of it is taken over."""
        if not self._indexing.keeps_facts:
            return None
        sidecars = Sidecars(manifest, place)
        try:
            return _prior_facts(candidates, map(sidecars.read, range(len(manifest.names))))
        except DatasetError:
            _log.warning("%s: parts of the index are damaged; it is rebuilt", printable(place))
            return None

    def _refresh(self, manifest: Manifest, place: bytes, snapshot: Snapshot) -> Manifest:
        """The same index with the folders' new times: nothing that counts had changed."""
        about = replace(
            manifest.about, directories=noted_directories(snapshot), listing=snapshot.fingerprint
        )
        fresh = replace(manifest, about=about)
        write_manifest(os.path.join(place, MANIFEST), fresh)
        return fresh

    def _build(
        self,
        place: bytes,
        candidates: Candidates,
        snapshot: Snapshot,
        *,
        prior: PriorFacts | None = None,
    ) -> Manifest:
        if prior is None and not candidates.chunked:
            _log.info(
                "Indexing %s: each of %d samples is checked once", self._origin.url, len(candidates)
            )
        builder = IndexBuilder(
            origin=self._origin,
            format=self._format,
            # Of chunks no sample is looked at; workers have a decoder of their own.
            verify=None
            if candidates.chunked or self._checker is not None
            else verify_for(
                candidates.schema,
                self._verify,
                workers=self._workers,
                max_pixels=self._origin.arrangement.max_pixels,
            ),
            workers=self._workers,
            progress=self._progress,
            checker=self._checker,
        )
        return builder.build(candidates, snapshot, place, prior=prior)


def _prior_facts(candidates: Candidates, sidecars: Iterable[Sidecar]) -> PriorFacts:
    """What all sidecars of an earlier index say. Raises what reading them raises."""
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
    """Whether what a check told of a type holds for another: a picture's decoder isn't a mask's."""
    return type(was) is type(now) and getattr(was, "of", None) == getattr(now, "of", None)


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
    """Where one candidate's fields lie today."""
    found = {}
    for name, spans in candidates.spans.items():
        number = int(spans.files[position])
        if number != MISSING:
            entry = candidates.files[number]
            found[name] = entry, int(spans.starts[position]), int(spans.sizes[position])
    return found


def _facts(known: _Earlier, today: Mapping[str, _Span]) -> Mapping[str, Facts] | None:
    """The facts as an examination of today's spans gives them; None where fields or sizes are
    others."""
    if set(known) != set(today):
        return None
    facts = {}
    for field, (entry, start, size) in today.items():
        earlier, was = known[field]
        begun = was.start - start
        if earlier.size_bytes != entry.size_bytes or begun < 0 or begun + was.size != size:
            return None
        facts[field] = Facts(was.crc32c, begun, was.size, was.shape, was.codec)
    return facts
