"""Keep the index of one dataset: reuse it if it is still valid, else update it or build it.

An index is built under a lock of its folder. A process that waited for the lock uses the index that
the other process built. Every candidate is checked once; facts are written by shard, and the
manifest last.
"""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.cache import DatasetError, DatasetNotFoundError, IndexChangedError, log, ordered
from penstock.readers.fieldtypes import Settling, image_fields
from penstock.readers.files import ProgressReporter, locked, make_folder, printable, write_bytes
from penstock.readers.formats import Snapshot, make_chunked_sidecar, make_sidecar
from penstock.readers.index.index_folders import Sidecars, check_arrangement, read_index
from penstock.readers.index.manifest import (
    MANIFEST,
    SIDECARS,
    is_sidecar_name,
    join_manifest,
    write_manifest,
)
from penstock.readers.origin import (
    QUARANTINE,
    QuarantineEntry,
    count_left_out,
    joined_left_out,
    no_good_sample_message,
    quarantine_lines,
)
from penstock.readers.types import Facts, Ints, Rejection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.readers.formats import (
        Candidates,
        Format,
        Listing,
        SampleLayout,
        ShardSummary,
        Sidecar,
    )
    from penstock.readers.index.candidate_checks import Results
    from penstock.readers.index.dataset_description import BuildOptions
    from penstock.readers.index.index_folders import IndexPlaces
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.index.shared_build import BuildReport, SharedBuild
    from penstock.readers.origin import LeftOut

    _Found = tuple[Manifest, bytes]
    _Part = tuple[Sidecar, ShardSummary]


_WRITERS = 8
_MOST_LEFT_OUT = 1000  # columns that are no field, and characters of a reason


class IndexBuilder:
    """Find, build, update and repair the index of a dataset that doesn't carry one."""

    def __init__(self, places: IndexPlaces, format: Format, options: BuildOptions) -> None:
        """places: the dataset's files, and the folders that may hold the index. format: of the
        dataset."""
        self.places, self.format, self.options = places, format, options
        self.origin, self.progress = places.origin, options.progress
        self._listed: Listing | None = None

    # -- the index in the local folders that may hold it

    def open(self) -> _Found:
        """Find or build the index. Return its manifest and its folder. Raises the same errors as
        `open_index`."""
        found = self._valid(self.places.candidates())
        if found is None and (job := self._shared_build()) is not None:
            found = self._build_in_job(job)
        return found or self.build()

    def build(self, *, reuse: bool = True) -> _Found:
        """Build the index in this process. Return its manifest and its folder. reuse: False checks
        all samples again, even if there is a valid index. Raises the same errors as `index`."""
        listing = self._listing()
        snapshot, place = listing.snapshot(), self.places.make()
        with locked(place):
            known = self._read(place) if reuse else None
            if known is not None and self._is_valid(known, place):
                return known, place  # the previous holder of the lock has built it
            candidates = listing.candidates(workers=self.options.workers)
            facts = None if known is None else self._facts(known, place, candidates)
            if facts is None and not candidates.chunked:
                text = "Indexing %s: checking each of %d samples once"
                log.info(text, self.origin.url, len(candidates))
            return self.write(candidates, snapshot, place, known=facts or {}), place

    def _listing(self) -> Listing:
        self._listed = self._listed or self.format.list(self.origin)
        return self._listed

    def _valid(self, places: Iterable[bytes]) -> _Found | None:
        """Return the first index in these folders that is still valid, or None."""
        for place in places:
            manifest = self._read(place)
            if manifest is not None and self._is_valid(manifest, place):
                return manifest, place
        return None

    def _read(self, place: bytes) -> Manifest | None:
        """Read the index in a folder if it is of this format and arrangement; see `read_index`."""
        manifest = read_index(place)
        if manifest is None or manifest.about.kind != self.format.name:
            return None
        if self.places.index is not None:
            check_arrangement(manifest, self.origin, shown=printable(place))
        return manifest if manifest.about.arrangement == self.origin.variant else None

    def _is_valid(self, manifest: Manifest, place: bytes) -> bool:
        """Return True if an index is still valid. Remote data isn't listed for this check, because
        stores list a page at a time. The exception is an index in the user's cache directory, which
        nobody asked for."""
        if not self.origin.is_local and place != self.places.home():
            self.check_source(manifest, shown=printable(place))
            return True
        if self._is_current(manifest):
            return True
        known = "", self.origin.url, self.origin.source
        if self.places.index is not None and manifest.about.source not in known:
            raise self._foreign(printable(place), f"this is the index of {manifest.about.source}")
        return False

    def check_source(self, manifest: Manifest, *, shown: str) -> None:
        """Raise IndexChangedError if the user gave the index of other remote files. They are listed
        only if the index names another source: it may be another URL of the same files. shown: the
        index's place, for messages."""
        source = manifest.about.source
        if self.places.index is None or source in ("", self.origin.source):
            return
        try:
            is_current = self._is_current(manifest)
        except DatasetNotFoundError:  # it has no file of this format
            if self.origin.selection is not None:
                raise
            is_current = False
        if not is_current:
            raise self._foreign(shown, f"this is the index of {source}")

    def _is_current(self, manifest: Manifest) -> bool:
        """Return True if the files are those that were indexed."""
        times = {os.fsencode(name): ns for name, ns in manifest.about.directories}
        snapshot = Snapshot(fingerprint=manifest.about.listing, directories=times)
        return self.format.is_current(self.origin, snapshot, self._listing)

    def _foreign(self, shown: str, what: str) -> IndexChangedError:
        origin = self.origin
        remedy = (
            "that dataset's index as index=, or an empty folder."
            if origin.is_local
            else "the index of these files as index=, or build it for the same selection: "
            f"penstock index {origin.argument} --out PLACE, and pass that PLACE as index=."
        )
        return IndexChangedError(
            f"{shown}: {what}, not of {origin.url}. Give the folder of {remedy}"
        )

    def _facts(
        self, manifest: Manifest, place: bytes, candidates: Candidates
    ) -> Mapping[int, Mapping[str, Facts]] | None:
        """Return the facts of an existing index about unchanged candidates, by position; None if
        none can be reused. Raises IndexChangedError if the user gave the index of another
        dataset."""
        if not self.format.keeps_facts:
            return None
        from penstock.readers.index.candidate_checks import earlier_facts

        sidecars = map(Sidecars(manifest, place).read, range(len(manifest.names)))
        try:
            same, shared = earlier_facts(candidates, sidecars)
        except DatasetError:
            log.warning("%s: parts of the index are damaged; it is rebuilt", printable(place))
            return None
        if self.places.index is not None and not shared:
            raise self._foreign(printable(place), "this is the index of another dataset")
        log.info(
            "The folder changed: %d files are unchanged, %d are new or changed, %d are gone",
            len(same),
            len(candidates) - len(same),
            manifest.about.samples - shared,
        )
        return same

    # -- several processes of a job

    def _shared_build(self) -> SharedBuild | None:
        """Return the job's shared build of this index, or None outside of a job."""
        if "torch.distributed" not in sys.modules:
            return None
        from penstock.readers.index.shared_build import SharedBuild

        named = f"{self.origin.key}\0{self.format.name}\0{self.places.index}"
        return SharedBuild.of_job(named, self.origin.url, self.progress)

    def _build_in_job(self, job: SharedBuild) -> _Found | None:
        """Let one process of the job build, and use its index in the others. Return None if this
        node must build its own."""
        if job.claim():
            self.progress = job.report_progress
            with job.building():
                manifest, place = self.build()
                is_shared = self.places.index is not None or place in self.origin.index_folders()
                job.publish(manifest, place, is_own=not is_shared)
            return manifest, place
        report = job.wait()
        found = self._valid(self.places.candidates()) or self._receive(job, report)
        job.leave(report)
        return found

    def _receive(self, job: SharedBuild, report: BuildReport) -> _Found | None:
        """Store the index that another node built in this node's place. Return None if this node
        must build its own."""
        place = self.places.make()
        with locked(place):
            found = self._valid([place])  # another process of this node may have stored it
            if found is None and job.receive(report, place):
                found = self._valid([place])
        if found is None:
            log.warning(
                "%s: %s has built the index in %s, a folder that this node doesn't see, and the "
                "index is too large to be sent: this node builds its own. To avoid this, run "
                "`penstock index` with --out FOLDER, a folder that all nodes see.",
                self.origin.url,
                report.builder,
                report.place,
            )
        return found

    # -- its parts

    def write(
        self,
        candidates: Candidates,
        snapshot: Snapshot,
        folder: bytes,
        *,
        known: Mapping[int, Mapping[str, Facts]] | None = None,
    ) -> Manifest:
        """Check every candidate, then write sidecars, quarantine and finally the manifest into a
        folder.

        snapshot: of the listing of the candidates. known: facts of an earlier index about unchanged
        ones, by position.
        Raises DatasetNotFoundError if no sample is good, WriteError, and errors of reading.
        """
        url = self.origin.url
        make_folder(os.path.join(folder, SIDECARS))
        reporter = ProgressReporter(
            f"Indexing {url}",
            total=len(candidates),
            progress=self.progress,
            remedy="This is done once; `penstock index` does it before the job.",
        )
        from penstock.readers.index.candidate_checks import PARTS, check_units, reusable_facts

        bad: list[QuarantineEntry] = []
        check_units(candidates)
        settling = Settling(candidates.schema)
        shards = unread = candidates.shards
        facts = {p: reusable_facts(candidates, p, each) for p, each in (known or {}).items()}
        if facts:
            unread = [each[[p not in facts for p in each.tolist()]] for each in shards]
            reporter.done(len(facts), 0)
        if (check_by_workers := self.options.check_by_workers) is None:
            found = self._check(candidates, unread, reporter=reporter)
        else:
            key = f"{snapshot.fingerprint}{self.origin.variant}"
            found = check_by_workers(candidates, unread, key=key, folder=folder, reporter=reporter)

        def parts() -> Iterator[_Part]:
            """Yield the sidecar and the facts of each shard that has a good sample."""
            for positions, read in zip(shards, found, strict=True):
                rest = iter(read)
                results = [facts[p] if p in facts else next(rest) for p in positions.tolist()]
                for position, result in zip(positions.tolist(), results, strict=True):
                    name = candidates.names[position]
                    if isinstance(result, Rejection):
                        bad.append(QuarantineEntry(name=name, reason=result.reason))
                    else:
                        settling.add(result, sample=printable(name))
                part = self._part(candidates, positions, results, candidates.layout)
                if part is not None:
                    yield part
            for number in range(len(candidates.chunked)):
                yield _chunked_part(candidates, number, candidates.layout)

        def write(numbered: tuple[int, _Part]) -> tuple[bytes, str, ShardSummary]:
            number, (sidecar, summary) = numbered
            name = sidecar_name(snapshot.fingerprint, number, sidecar.suffix)
            return name, sidecar.write(os.path.join(folder, name)), summary

        # Several are written at the same time, because each waits for the disk.
        written = list(
            ordered(write, enumerate(parts()), workers=_WRITERS, ahead=2 * _WRITERS, name="write")
        )
        manifest = complete_index(
            folder,
            [name for name, _, _ in written],
            [summary for _, _, summary in written],
            url=url,
            quarantined=[*candidates.quarantined, *bad],
            samples_left_out=candidates.unnamed,
            etags=[etag for _, etag, _ in written],
            kind=self.format.name,
            schema=settling.schema(),
            # If facts of local files are kept, the names of the files identify the dataset.
            source="" if self.format.keeps_facts and self.origin.is_local else self.origin.source,
            arrangement=self.origin.variant,
            directories=tuple((os.fsdecode(k), v) for k, v in sorted(snapshot.directories.items())),
            listing=snapshot.fingerprint,
            passed_over=candidates.passed_over,
            left_out={  # a file may have any number of columns
                name[:_MOST_LEFT_OUT]: reason[:_MOST_LEFT_OUT]
                for name, reason in list(candidates.left_out.items())[:_MOST_LEFT_OUT]
            },
        )
        sweep_sidecars(folder, keep=set(manifest.names))
        shutil.rmtree(os.path.join(folder, PARTS), ignore_errors=True)
        log.info(
            "Indexed %s: %d samples in %d shards, %d quarantined, %.1f s",
            url,
            manifest.about.samples,
            len(manifest.names),
            manifest.about.quarantined,
            reporter.seconds,
        )
        if bad:
            log.info(
                "%s: %d samples are left out because they failed the check, such as %s: %s. The "
                "index's quarantine.jsonl lists all of them.",
                url,
                len(bad),
                printable(bad[0].name),
                bad[0].reason,
            )
        return manifest

    def rebuild_shard(
        self, candidates: Candidates, number: int, *, layout: SampleLayout | None = None
    ) -> _Part | None:
        """Rebuild one shard's sidecar as `write` makes it from these candidates; None if no sample
        is good. layout: of the index that it is a part of. Raises errors of reading."""
        layout = layout or candidates.layout
        if candidates.chunked:
            return _chunked_part(candidates, number, layout)
        positions = candidates.shards[number]
        (checked,) = self._check(candidates, [positions])
        return self._part(candidates, positions, checked, layout)

    def rebuild(self, manifest: Manifest, shard: int) -> Sidecar | None:
        """Rebuild the sidecar of a shard of an open index from the current files; None if they have
        changed. Raises IndexChangedError too, and errors of reading."""
        wanted = manifest.samples[shard], manifest.shard_bytes[shard], manifest.sums(shard)
        name, total = manifest.names[shard], len(manifest.names)
        for is_last in (False, True):
            try:
                for candidates, number in self._listing().counterparts(
                    shard, name, total=total, workers=self.options.workers
                ):
                    if not _are_alike(candidates, manifest):
                        continue
                    found = self.rebuild_shard(candidates, number, layout=manifest.about.layout)
                    if found is None:
                        continue
                    sidecar, summary = found
                    if (summary.samples, summary.size_bytes, summary.sums) == wanted:
                        return sidecar
                return None
            except IndexChangedError:  # the data changed after the listing
                self._listed = None
                if is_last:
                    raise
        return None

    @property
    def _check(self) -> Callable[..., Iterator[Results]]:
        """Return `check_here` for this dataset."""
        from penstock.readers.index.candidate_checks import check_here  # not to open an index

        options = self.options
        return partial(check_here, self.origin, verify=options.verify, workers=options.workers)

    def _part(
        self, candidates: Candidates, positions: Ints, results: Results, layout: SampleLayout
    ) -> _Part | None:
        """Make the sidecar of a shard and summarise it; None if no sample is good."""
        facts = [each for each in results if not isinstance(each, Rejection)]
        if not facts:
            return None
        good = positions[[not isinstance(each, Rejection) for each in results]]
        is_split = self.format.is_file_per_sample
        sidecar = make_sidecar(candidates, good, facts, layout=layout, is_file_per_sample=is_split)
        if self.format.keeps_facts:  # facts of an earlier index don't have it
            return sidecar, sidecar.summary()
        progressive = {
            name: sum(each[name].is_progressive for each in facts if name in each)
            for name in image_fields(layout.schema, layout.schema)
        }
        return sidecar, sidecar.summary(progressive=progressive)


def complete_index(
    folder: bytes,
    names: Sequence[bytes],
    shards: Sequence[ShardSummary],
    *,
    url: str,
    quarantined: Sequence[QuarantineEntry],
    samples_left_out: Mapping[str, LeftOut],
    **facts: Any,
) -> Manifest:
    """Write the quarantine and, last, the manifest of an index or a pack into a folder.

    names, shards: of the files that exist. url: of the data. quarantined, samples_left_out: the
    samples that are left out, with an entry or only counted. facts: for `join_manifest`. Raises
    DatasetNotFoundError if no sample is good, DatasetError, and WriteError.
    """
    write_bytes(os.path.join(folder, QUARANTINE), quarantine_lines(quarantined))
    if not names:
        raise DatasetNotFoundError(no_good_sample_message(url, quarantined))
    manifest = join_manifest(
        names,
        shards,
        quarantined=len(quarantined),
        samples_left_out=joined_left_out([count_left_out(quarantined), samples_left_out]),
        **facts,
    )
    write_manifest(os.path.join(folder, MANIFEST), manifest)
    return manifest


def _chunked_part(candidates: Candidates, number: int, layout: SampleLayout) -> _Part:
    shard = candidates.chunked[number]
    return make_chunked_sidecar(shard, layout=layout), shard.summary(candidates.schema)


def _are_alike(candidates: Candidates, manifest: Manifest) -> bool:
    """Return True if candidates have the fields of an index, as far as that is known before they
    are read."""
    open, wanted = candidates.schema.unsettled, manifest.about.layout
    return candidates.layout.storage == wanted.storage and all(
        type == wanted.schema[name] for name, type in candidates.schema.items() if name not in open
    )


_GENERATION_DIGITS = 16


def sidecar_name(fingerprint: str, number: int, suffix: bytes) -> bytes:
    """Return the name of a sidecar, relative to the index's folder. Each generation has its own
    names, so that a process with the old manifest open never reads new sidecars as old ones.

    fingerprint: of the listing that is indexed. suffix: see `Sidecar`.
    """
    generation = fingerprint[:_GENERATION_DIGITS].encode()
    return b"%s/%s-%06d%s.arrow" % (SIDECARS, generation, number, suffix)


def sweep_sidecars(folder: bytes, *, keep: set[bytes]) -> None:
    """Remove the sidecars of earlier generations and the leftovers of a killed build. folder: the
    index's."""
    for file in os.listdir(os.path.join(folder, SIDECARS)):
        name = b"%s/%s" % (SIDECARS, file)
        is_ours = is_sidecar_name(name.replace(b"/.", b"/").removesuffix(b".tmp"))
        if is_ours and name not in keep:
            os.unlink(os.path.join(folder, name))
