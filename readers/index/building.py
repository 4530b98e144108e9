"""Build an index: read and check every candidate once, write facts by shard, and the manifest last.

`IndexRepair` rebuilds damaged or missing parts of an index in a cache folder. Such an index is only
a copy of facts about the data, so damage to it must not end a job: the shard's files or archive are
listed and decoded again. The result must equal the facts in the manifest that the job has in
memory. Then ids and bytes are those that the job started with. The part is written back if the
folder still holds this index; else it stays in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import threading
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from crc32c import crc32c

from penstock.cache import (
    CorruptShardError,
    DatasetError,
    DatasetNotFoundError,
    DestinationError,
    IndexChangedError,
    WriteError,
    ordered,
)
from penstock.readers.fieldtypes import (
    Settling,
    check_noted,
    image_fields,
    is_progressive,
    verify_for,
)
from penstock.readers.files import (
    ProgressReporter,
    below,
    locked,
    make_folder,
    printable,
    write_bytes,
)
from penstock.readers.formats import (
    REINDEX,
    FieldSummary,
    indexing_of,
    join_ranges,
    make_chunked_sidecar,
    make_sidecar,
)
from penstock.readers.index.candidate_reading import (
    check_units,
    noted_values,
    read_candidate_batches,
)
from penstock.readers.index.index_folders import warn_of_damage
from penstock.readers.index.manifest import SIDECARS, Manifest, ManifestHeader, check_manifest
from penstock.readers.index.manifest_file import MANIFEST, read_manifest, write_manifest
from penstock.readers.origin import (
    QUARANTINE,
    QuarantineEntry,
    count_left_out,
    joined_left_out,
    no_good_sample_message,
    quarantine_lines,
)
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Schema
    from penstock.readers.formats import (
        Candidates,
        ChunkedShard,
        Format,
        Listing,
        SampleLayout,
        ShardSummary,
        Sidecar,
        Snapshot,
    )
    from penstock.readers.index.candidate_reading import CandidateBatch
    from penstock.readers.origin import Origin
    from penstock.readers.types import Facts, Progress, Verify

    Ints = NDArray[np.int64]

_log = logging.getLogger("penstock")

_WRITERS = 8
_MOST_LEFT_OUT = 1000  # columns that are no field, and characters of a reason


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardResults:
    """The results of checking one shard. positions: int64, shape (n,). results: one for each
    position. progressive: the number of progressive JPEGs by field, if they were counted."""

    positions: Ints
    results: list[Mapping[str, Facts] | Rejection]
    progressive: Mapping[str, int]

    def good(self) -> Iterator[tuple[int, Mapping[str, Facts]]]:
        """Yield the positions and facts of the good samples."""
        for position, result in zip(self.positions.tolist(), self.results, strict=True):
            if not isinstance(result, Rejection):
                yield position, result

    def rejected(self, candidates: Candidates) -> Iterator[QuarantineEntry]:
        """Yield the quarantine entries of the bad samples."""
        for position, result in zip(self.positions.tolist(), self.results, strict=True):
            if isinstance(result, Rejection):
                yield QuarantineEntry(name=candidates.names[position], reason=result.reason)


Checked = tuple[dict[int, "Mapping[str, Facts] | Rejection"], "Mapping[str, int]"]
"""The results of checking one shard: facts or a rejection by position, and progressive JPEGs by
field."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckList:
    """The candidates to check. positions: of the candidates, by shard. before: facts of an earlier
    index about some of them, by position."""

    candidates: Candidates
    positions: Sequence[Ints]
    before: Mapping[int, Mapping[str, Facts]]


class Checker(Protocol):
    """Check candidates in place of a builder, such as on the workers of an executor."""

    def check(
        self,
        wanted: CheckList,
        *,
        format: str,
        listing: str,
        folder: bytes,
        reporter: ProgressReporter,
    ) -> Iterator[Checked]:
        """Yield the results of each shard, in order. format: its name. listing: a fingerprint of
        the listing and of the arguments that it is read with. folder: of the index."""

    def finish(self, folder: bytes) -> None:
        """Clean up after the index is complete."""


class _IndexDraft:
    """The sidecars of an index that is being built, and the rows of its manifest."""

    def __init__(self, folder: bytes, fingerprint: str) -> None:
        self._folder, self._fingerprint = folder, fingerprint
        self.names: list[bytes] = []
        self.etags: list[str] = []
        self.summaries: list[ShardSummary] = []

    def add(self, sidecar: Sidecar, *, progressive: Mapping[str, int]) -> None:
        """Write one more sidecar."""
        summary = sidecar.summary(progressive=progressive)
        self._append(*self._write(len(self.names), sidecar), summary)

    def add_chunked(self, candidates: Candidates) -> None:
        """Write the sidecars of shards of chunks. Several are written at the same time, because
        each waits for the disk."""
        first, layout = len(self.names), candidates.layout

        def write(numbered: tuple[int, ChunkedShard]) -> tuple[bytes, str, ShardSummary]:
            number, chunked = numbered
            sidecar = make_chunked_sidecar(chunked, layout=layout)
            return *self._write(number, sidecar), chunked.summary(candidates.schema)

        shards = enumerate(candidates.chunked, first)
        ahead = 2 * _WRITERS
        for row in ordered(write, shards, workers=_WRITERS, ahead=ahead, name="write"):
            self._append(*row)

    def _write(self, number: int, sidecar: Sidecar) -> tuple[bytes, str]:
        name = sidecar_name(self._fingerprint, number, sidecar.suffix)
        return name, sidecar.write(os.path.join(self._folder, name))

    def _append(self, name: bytes, etag: str, summary: ShardSummary) -> None:
        self.names.append(name)
        self.etags.append(etag)
        self.summaries.append(summary)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorFacts:
    """Facts of an earlier index about the current candidates, by position.

    same: of candidates whose files have the same listing, which needn't be read. before: of all
    candidates whose files have the same size; the facts hold if the bytes have the same CRC-32Cs.
    shared, gone: the number of samples of that index whose names still exist, or don't.
    """

    same: Mapping[int, Mapping[str, Facts]]
    before: Mapping[int, Mapping[str, Facts]]
    shared: int
    gone: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexBuilder:
    """Build the index of one dataset, or rebuild a single shard of it.

    format: of a dataset that doesn't carry its index. verify: decodes images; None if there are
    none. workers: threads that read. checker: checks the samples; None means this process.
    """

    origin: Origin
    format: Format
    verify: Verify | None
    workers: int
    progress: Progress | None = None
    checker: Checker | None = None

    @property
    def _keeps_facts(self) -> bool:
        return self.format.indexing is not None and self.format.indexing.keeps_facts

    def build(
        self,
        candidates: Candidates,
        snapshot: Snapshot,
        folder: bytes,
        *,
        prior: PriorFacts | None = None,
    ) -> Manifest:
        """Check every candidate, then write sidecars, quarantine and finally the manifest into a
        folder.

        snapshot: of the listing of the candidates. prior: facts of an earlier index about them.
        Raises DatasetNotFoundError if no sample is good, WriteError, and errors of reading.
        """
        candidates = self._limited(candidates)
        make_folder(os.path.join(folder, SIDECARS))
        reporter = ProgressReporter(
            f"Indexing {self.origin.url}",
            total=len(candidates),
            progress=self.progress,
            remedy="This is done once; `penstock index` does it before the job.",
        )
        quarantined = list(candidates.quarantined)
        check_units(candidates)
        settling, draft = Settling(candidates.schema), _IndexDraft(folder, snapshot.fingerprint)
        for shard in self._results(candidates, prior, reporter, folder, snapshot.fingerprint):
            quarantined += shard.rejected(candidates)
            if not settling.is_done:
                for position, facts in shard.good():
                    settling.add(facts, sample=printable(candidates.names[position]))
            sidecar = self._sidecar(shard, candidates, candidates.layout)
            if sidecar is not None:
                draft.add(sidecar, progressive=shard.progressive)
        draft.add_chunked(candidates)
        write_bytes(os.path.join(folder, QUARANTINE), quarantine_lines(quarantined))
        if not draft.names:
            raise DatasetNotFoundError(no_good_sample_message(self.origin.url, quarantined))
        if not self.origin.is_local and not all(each.files for each in draft.summaries):
            raise DatasetError(
                f"{self.origin.url}: a shard of it has samples without a file, because their "
                "values are in a table. Such samples are read from local folders only. Copy the "
                "dataset to a local folder."
            )
        manifest = join_manifest(
            draft.names,
            draft.summaries,
            etags=draft.etags,
            kind=self.format.name,
            schema=settling.schema(),
            quarantined=len(quarantined),
            # If facts of files are kept, the names of the files identify the dataset.
            source="" if self._keeps_facts else self.origin.url,
            arrangement=self.origin.variant,
            directories=noted_directories(snapshot),
            listing=snapshot.fingerprint,
            passed_over=candidates.passed_over,
            left_out={  # a file may have any number of columns
                name[:_MOST_LEFT_OUT]: reason[:_MOST_LEFT_OUT]
                for name, reason in list(candidates.left_out.items())[:_MOST_LEFT_OUT]
            },
            samples_left_out=joined_left_out(
                [
                    count_left_out(quarantined, has_stray_files=candidates.has_stray_files),
                    candidates.unnamed,
                ]
            )
            or None,
        )
        write_manifest(os.path.join(folder, MANIFEST), manifest)
        sweep_sidecars(folder, keep=set(draft.names))
        if self.checker is not None:
            self.checker.finish(folder)
        bad = quarantined[len(candidates.quarantined) :]
        _log.info(
            "Indexed %s: %d samples in %d shards, %d quarantined, %.1f s",
            self.origin.url,
            manifest.about.samples,
            len(manifest.names),
            manifest.about.quarantined,
            reporter.seconds,
        )
        if bad:
            _log.warning(
                "%s: %d samples are left out because they failed the check, such as %s: %s. The "
                "index's quarantine.jsonl lists all of them.",
                self.origin.url,
                len(bad),
                printable(bad[0].name),
                bad[0].reason,
            )
        return manifest

    def _limited(self, candidates: Candidates) -> Candidates:
        most = self.origin.arrangement.max_pixels
        return candidates if most is None else replace(candidates, max_pixels=most)

    def _sidecar(
        self, shard: _ShardResults, candidates: Candidates, layout: SampleLayout
    ) -> Sidecar | None:
        """Make the sidecar of the good samples of a shard; None if there are none."""
        good = list(shard.good())
        if not good:
            return None
        return make_sidecar(
            candidates,
            np.array([position for position, _ in good], np.int64),
            [facts for _, facts in good],
            layout=layout,
            is_file_per_sample=self.format.is_file_per_sample,
        )

    def rebuild_shard(
        self, candidates: Candidates, number: int, *, layout: SampleLayout | None = None
    ) -> tuple[Sidecar, ShardSummary] | None:
        """Rebuild one shard's sidecar as `build` makes it from these candidates; None if no sample
        is good. layout: of the index that it is a part of. Raises errors of reading."""
        if candidates.chunked:
            chunked = candidates.chunked[number]
            sidecar = make_chunked_sidecar(chunked, layout=layout or candidates.layout)
            return sidecar, chunked.summary(candidates.schema)
        candidates = self._limited(candidates)
        positions = candidates.shards.positions(number)
        results: list[Mapping[str, Facts] | Rejection] = []
        shards = iter([(number, positions)])
        for chunk in read_candidate_batches(self.origin, candidates, shards, workers=self.workers):
            results += chunk.examine(candidates, self.verify)
        shard = _ShardResults(positions=positions, results=results, progressive={})
        made = self._sidecar(shard, candidates, layout or candidates.layout)
        return None if made is None else (made, made.summary())

    def _results(
        self,
        candidates: Candidates,
        prior: PriorFacts | None,
        reporter: ProgressReporter,
        folder: bytes,
        listing: str,
    ) -> Iterator[_ShardResults]:
        """Yield the results of each shard, in order."""
        shards = candidates.shards
        same: Mapping[int, Mapping[str, Facts]] = {} if prior is None else prior.same
        before: Mapping[int, Mapping[str, Facts]] = {} if prior is None else prior.before
        unread = [shards.positions(n) for n in range(shards.shards)]
        if same:
            unread = [each[[i not in same for i in each.tolist()]] for each in unread]
        wanted = CheckList(candidates=candidates, positions=unread, before=before)
        if self.checker is None:
            checked = self.check(wanted, reporter)
        else:
            checked = self.checker.check(
                wanted,
                format=self.format.name,
                listing=f"{listing}{self.origin.variant}",
                folder=folder,
                reporter=reporter,
            )
        for number, (found, progressive) in enumerate(checked):
            positions = shards.positions(number)
            if len(positions) > len(found):
                reporter.done(len(positions) - len(found), 0)
            yield _ShardResults(
                positions=positions,
                results=[
                    found[i] if i in found else _reusable_facts(candidates, i, same[i])
                    for i in positions.tolist()
                ],
                progressive=progressive,
            )

    def check(self, wanted: CheckList, reporter: ProgressReporter) -> Iterator[Checked]:
        """Check some candidates of each shard in this process, in order. Raises errors of
        reading."""
        candidates = wanted.candidates
        images = image_fields(candidates.schema, candidates.schema)
        chunks = read_candidate_batches(
            self.origin, candidates, iter(enumerate(wanted.positions)), workers=self.workers
        )
        sizes = candidates.sizes
        for mine in wanted.positions:
            found: dict[int, Mapping[str, Facts] | Rejection] = {}
            progressive: Counter[str] = Counter()
            if not self._keeps_facts:
                progressive.update(dict.fromkeys(images, 0))
            while len(found) < len(mine):
                chunk = next(chunks)
                verdicts = self._check(candidates, chunk, wanted.before)
                found |= zip(chunk.positions.tolist(), verdicts, strict=True)
                if progressive:
                    _count_progressive(progressive, chunk, verdicts)
                reporter.done(len(chunk.positions), int(sizes[chunk.positions].sum()))
            yield found, progressive

    def _check(
        self,
        candidates: Candidates,
        chunk: CandidateBatch,
        before: Mapping[int, Mapping[str, Facts]],
    ) -> list[Mapping[str, Facts] | Rejection]:
        """Decode new samples. For a copied or touched file with the same bytes, reuse the earlier
        facts."""
        results: dict[int, Mapping[str, Facts] | Rejection] = {}
        new: list[int] = []
        for row, position in enumerate(chunk.positions.tolist()):
            earlier = before.get(position)
            if earlier is not None and all(
                isinstance(sample := chunk.contents[name][row], np.ndarray)
                and crc32c(sample) == facts.crc32c
                for name, facts in earlier.items()
            ):
                results[row] = _reusable_facts(candidates, position, earlier)
            else:
                new.append(row)
        results |= zip(new, chunk.examine(candidates, self.verify, new), strict=True)
        return [results[row] for row in range(len(chunk.positions))]


def _reusable_facts(
    candidates: Candidates, position: int, facts: Mapping[str, Facts]
) -> Mapping[str, Facts] | Rejection:
    """Return the facts of a sample whose files are unchanged, checked against the current values of
    tables."""
    noted = {name: value for name, (value,) in noted_values(candidates, [position]).items()}
    return (check_noted(noted, facts, candidates.schema) or facts) if noted else facts


def noted_directories(snapshot: Snapshot) -> tuple[tuple[str, int], ...]:
    """Return a snapshot's folders and their times, in the form of a manifest."""
    return tuple((os.fsdecode(k), v) for k, v in sorted(snapshot.directories.items()))


def _count_progressive(
    counts: Counter[str], chunk: CandidateBatch, verdicts: list[Mapping[str, Facts] | Rejection]
) -> None:
    """Count the progressive JPEGs of good samples. counts: by image field."""
    for row, verdict in enumerate(verdicts):
        if isinstance(verdict, Rejection):
            continue
        for name in counts:
            sample = chunk.contents[name][row] if name in chunk.contents else None
            if isinstance(sample, np.ndarray):
                counts[name] += is_progressive(sample)


class IndexRepair:
    """Repair one open index in a local folder. Thread-safe. verify: as in `open_index`."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        origin: Origin,
        place: bytes,
        verify: Verify | None,
        workers: int,
    ) -> None:
        self._manifest, self._origin, self._place = manifest, origin, place
        self._verify, self._workers = verify, workers
        self._lock = threading.Lock()
        self._unsaved: dict[int, Sidecar] = {}  # sidecars that couldn't be written, by shard
        # Listed at the first damage, and kept: if the folder was removed, all parts are damaged.
        self._listing: Listing | None = None
        self._has_warned = False

    def read(self, shard: int, read: Callable[[], Sidecar]) -> Sidecar:
        """Read a sidecar by read(), and rebuild it if it is damaged or missing. Raises
        IndexChangedError if the data has changed, DatasetError, FetchError."""
        if (unsaved := self._unsaved.get(shard)) is not None:
            return unsaved
        with contextlib.suppress(CorruptShardError, IndexChangedError):
            return read()
        with self._lock:
            if (unsaved := self._unsaved.get(shard)) is not None:
                return unsaved
            try:
                return read()  # the previous holder of the lock may have written it
            except (CorruptShardError, IndexChangedError) as error:
                _log.info("A part of the index is rebuilt: %s", error)
                if not self._has_warned:
                    self._has_warned = True
                    warn_of_damage(self._origin.url, error)
            sidecar = self._rebuild(shard)
            if not self._put_back(shard, sidecar):
                self._unsaved[shard] = sidecar
            return sidecar

    def _rebuild(self, shard: int) -> Sidecar:
        manifest = self._manifest
        wanted = manifest.samples[shard], manifest.shard_bytes[shard], manifest.sums(shard)
        for attempt in range(2):
            try:
                for sidecar, summary in self._attempts(shard):
                    if (summary.samples, summary.size_bytes, summary.sums) == wanted:
                        return sidecar
                break
            except IndexChangedError:  # the data changed after the listing
                self._listing = None
                if attempt:
                    raise
        raise IndexChangedError(
            f"{printable(os.path.join(self._place, manifest.names[shard]))}: this part of the "
            f"index was damaged or removed. It can't be rebuilt, because {self._origin.url} has "
            f"changed since it was indexed. Open the dataset again, or: {REINDEX}"
        )

    def _attempts(self, shard: int) -> Iterator[tuple[Sidecar, ShardSummary]]:
        """Yield the possible sidecars of the shard from its current files."""
        manifest = self._manifest
        format = manifest.format
        if self._listing is None:
            self._listing = indexing_of(format).list(self._origin)
        builder = IndexBuilder(
            origin=self._origin,
            format=format,
            verify=verify_for(
                manifest.about.schema,
                self._verify,
                workers=self._workers,
                max_pixels=self._origin.arrangement.max_pixels,
            ),
            workers=self._workers,
        )
        counterparts = self._listing.counterparts(
            shard, manifest.names[shard], total=len(manifest.names), workers=self._workers
        )
        for candidates, number in counterparts:
            if _are_alike(candidates, manifest):
                layout = manifest.about.layout
                found = builder.rebuild_shard(candidates, number, layout=layout)
                if found is not None:
                    yield found

    def _put_back(self, shard: int, sidecar: Sidecar) -> bool:
        """Write the part back into the folder and return True on success. Don't wait for a process
        that is building an index there."""
        name, etag = self._manifest.names[shard], self._manifest.etags[shard]
        try:
            path = below(self._place, name)
            make_folder(os.path.join(self._place, SIDECARS))
            with locked(self._place, busy="an index is being built there"):
                if not self._is_ours(shard):
                    return False
                return sidecar.write(path) == etag
        except (CorruptShardError, DestinationError, WriteError, OSError) as error:
            _log.info("The rebuilt part of the index stays in memory: %s", error)
            return False

    def _is_ours(self, shard: int) -> bool:
        """Return True if the folder holds this very index. A damaged or missing manifest is written
        back."""
        path = os.path.join(self._place, MANIFEST)
        try:
            found = read_manifest(path, remedy=REINDEX, mapped=False)
        except (CorruptShardError, FileNotFoundError):
            write_manifest(path, self._manifest)
            return True
        except DatasetError:  # a newer version wrote it
            return False
        mine = self._manifest
        return len(found.names) > shard and (found.names[shard], found.etags[shard]) == (
            mine.names[shard],
            mine.etags[shard],
        )


def _are_alike(candidates: Candidates, manifest: Manifest) -> bool:
    """Return True if candidates have the fields of an index, as far as that is known before they
    are read."""
    open, wanted = candidates.schema.unsettled, manifest.about.layout
    return candidates.layout.storage == wanted.storage and all(
        type == wanted.schema[name] for name, type in candidates.schema.items() if name not in open
    )


_FILE = re.compile(rb"[0-9a-f]{16}-\d{6,}(-[0-9a-f]{32})?\.arrow")
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
    sidecars = os.path.join(folder, SIDECARS)
    for name in os.listdir(sidecars):
        ours = _FILE.fullmatch(name.removeprefix(b".").removesuffix(b".tmp"))
        if ours and SIDECARS + b"/" + name not in keep:
            os.unlink(os.path.join(sidecars, name))


def label_correlation(shards: Sequence[Mapping[int, int]]) -> float:
    """Measure how similar the labels of one shard are: 0 for a random mixture, 1 for one label per
    shard.

    The result is (P_within - P_total) / (1 - P_total). P is the probability that two distinct
    random samples share their label, if both are drawn from one shard (pairs of all shards weigh
    the same) or from the whole set. P is Simpson's index in its unbiased form (E. H. Simpson,
    Measurement of Diversity, Nature 163, 1949); for indicator variables of the labels, summed over
    labels, the ratio is the intraclass correlation of cluster sampling. It is slightly below 0 if
    shards are more even than chance, and 0 if it is undefined: there is one label, or no shard of
    two samples.
    """
    total: Counter[int] = Counter()
    same = pairs = 0
    for counts in shards:
        total.update(counts)
        n = sum(counts.values())
        pairs += n * (n - 1)
        same += sum(c * (c - 1) for c in counts.values())
    n = total.total()
    same_total = sum(c * (c - 1) for c in total.values())
    if pairs == 0 or same_total == n * (n - 1):
        return 0.0
    p_within, p_total = same / pairs, same_total / (n * (n - 1))
    return (p_within - p_total) / (1 - p_total)


def fingerprint(
    *, schema: Schema, samples: Ints, crcs: NDArray[np.uint32], columns_crcs: NDArray[np.uint32]
) -> str:
    """Return the fingerprint of the content, 64 hex digits: a hash of the schema, the shards' sizes
    and their checksums. It doesn't depend on the place or the time of writing, so a folder and its
    unshuffled pack of equal shards share it."""
    digest = hashlib.sha256(json.dumps(schema.to_json(), sort_keys=True).encode("ascii"))
    for column, kind in ((samples, "<i8"), (crcs, "<u4"), (columns_crcs, "<u4")):
        digest.update(np.ascontiguousarray(column, kind).tobytes())
    return digest.hexdigest()


def join_manifest(
    names: Sequence[bytes],
    shards: Sequence[ShardSummary],
    *,
    kind: str,
    schema: Schema,
    quarantined: int,
    etags: Sequence[str] | None = None,
    **more: Any,
) -> Manifest:
    """Build the manifest of at least one shard, in their order. schema: settled. more: further
    fields of the header. Raises DatasetError for more than a manifest may contain."""
    labels = [s.labels for s in shards if s.labels is not None]
    overheads = [s.overhead_bytes for s in shards if s.overhead_bytes is not None]
    samples = np.array([s.samples for s in shards], np.int64)
    crcs = np.array([s.sums.samples for s in shards], np.uint32)
    columns_crcs = np.array([s.sums.columns for s in shards], np.uint32)
    about = ManifestHeader(
        kind=kind,
        schema=schema,
        fields={name: join_summaries([s.fields[name] for s in shards]) for name in schema},
        samples=int(samples.sum()),
        fingerprint=fingerprint(
            schema=schema, samples=samples, crcs=crcs, columns_crcs=columns_crcs
        ),
        icc=label_correlation(labels) if labels else None,
        quarantined=quarantined,
        overhead_bytes=max(overheads) if len(overheads) == len(shards) else None,
        **more,
    )
    manifest = Manifest(
        about=about,
        names=names,
        etags=etags if etags is not None else [""] * len(names),
        shard_bytes=np.array([s.size_bytes for s in shards], np.int64),
        samples=samples,
        files=np.array([s.files for s in shards], np.int64),
        units=[np.array(s.units, "<u4").tobytes() for s in shards],
        crc32c=crcs,
        columns_crc32c=columns_crcs,
        field_bytes=_field_bytes(shards),
    )
    try:
        check_manifest(manifest)
    except ValueError as error:
        raise DatasetError(
            f"{about.source or 'The dataset'}: {error}. Use smaller shards or tar files, or "
            "split it into several datasets."
        ) from error
    return manifest


def _field_bytes(shards: Sequence[ShardSummary]) -> list[bytes] | None:
    if not any(each.field_bytes for each in shards):
        return None
    return [
        np.array(each.field_bytes, "<u8" if max(each.field_bytes) >= 2**32 else "<u4").tobytes()
        for each in shards
    ]


def join_summaries(parts: Sequence[FieldSummary]) -> FieldSummary:
    """Combine the summaries of one field over several shards, at least one. Raises ValueError if
    they store it in different ways."""
    first = parts[0]
    if any(part.storage != first.storage for part in parts):
        raise ValueError("shards store one field in different ways")
    ranges = [part.images for part in parts if part.images is not None]
    lengths = [part.lengths for part in parts if part.lengths]
    bounds = [part.bounds for part in parts if part.bounds is not None]
    counted = [part.progressive for part in parts if part.progressive is not None]
    return FieldSummary(
        storage=first.storage,
        missing=sum(part.missing for part in parts),
        images=join_ranges(ranges) if ranges else None,
        channels=tuple(sorted({c for part in parts for c in part.channels})),
        codecs=tuple(sorted({c for part in parts for c in part.codecs})),
        lengths=tuple(
            (min(low for low, _ in axis), max(high for _, high in axis))
            for axis in zip(*lengths, strict=True)
        ),
        bounds=(
            (min(low for low, _ in bounds), max(high for _, high in bounds))
            if len(bounds) == len(parts)
            else None
        ),
        progressive=sum(counted) if len(counted) == len(parts) else None,
    )
