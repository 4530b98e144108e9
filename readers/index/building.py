"""Build an index: check every candidate once, write facts by shard, and the manifest last."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import DatasetError, DatasetNotFoundError, ordered
from penstock.readers.fieldtypes import Settling
from penstock.readers.files import ProgressReporter, make_folder, printable, write_bytes
from penstock.readers.formats import FieldSummary, join_ranges, make_chunked_sidecar, make_sidecar
from penstock.readers.index.candidate_checks import (
    CheckList,
    check_here,
    check_units,
    reusable_facts,
)
from penstock.readers.index.manifest import (
    MANIFEST,
    SIDECARS,
    Manifest,
    ManifestHeader,
    check_manifest,
    is_sidecar_name,
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
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Schema
    from penstock.readers.formats import (
        Candidates,
        Format,
        SampleLayout,
        ShardSummary,
        Sidecar,
        Snapshot,
    )
    from penstock.readers.index.candidate_checks import IndexWorkers, Results
    from penstock.readers.origin import Origin
    from penstock.readers.types import Facts, Progress, Verify

    Ints = NDArray[np.int64]
    _Part = tuple[Sidecar, ShardSummary]

_log = logging.getLogger("penstock")

_WRITERS = 8
_MOST_LEFT_OUT = 1000  # columns that are no field, and characters of a reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorFacts:
    """Facts of an earlier index about the current candidates, by position.

    same: of candidates whose files have the same listing, which needn't be read. before: of all
    candidates whose files have the same size; the facts hold if the bytes have the same CRC-32Cs.
    shared, gone: the number of samples of that index whose names still exist, or don't.
    """

    same: Mapping[int, Mapping[str, Facts]] = field(default_factory=dict)
    before: Mapping[int, Mapping[str, Facts]] = field(default_factory=dict)
    shared: int = 0
    gone: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexBuilder:
    """Build the index of one dataset, or rebuild a single shard of it.

    format: of a dataset that doesn't carry its index. verify: decodes images; None means the
    installed decoder. workers: threads that read. executor: checks the samples; None means this
    process.
    """

    origin: Origin
    format: Format
    verify: Verify | None
    workers: int
    progress: Progress | None = None
    executor: IndexWorkers | None = None

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
        settling = Settling(candidates.schema)

        def parts() -> Iterator[_Part]:
            """Yield the sidecar and the facts of each shard that has a good sample."""
            checked = self._checked(candidates, prior or PriorFacts(), reporter, folder, snapshot)
            for positions, results, progressive in checked:
                good = []
                for position, result in zip(positions, results, strict=True):
                    name = candidates.names[position]
                    if isinstance(result, Rejection):
                        quarantined.append(QuarantineEntry(name=name, reason=result.reason))
                        continue
                    good.append((position, result))
                    if not settling.is_done:
                        settling.add(result, sample=printable(name))
                if good:
                    sidecar = self._sidecar(good, candidates, candidates.layout)
                    yield sidecar, sidecar.summary(progressive=progressive)
            for chunked in candidates.chunked:
                sidecar = make_chunked_sidecar(chunked, layout=candidates.layout)
                yield sidecar, chunked.summary(candidates.schema)

        def write(numbered: tuple[int, _Part]) -> tuple[bytes, str, ShardSummary]:
            number, (sidecar, summary) = numbered
            name = sidecar_name(snapshot.fingerprint, number, sidecar.suffix)
            return name, sidecar.write(os.path.join(folder, name)), summary

        # Several are written at the same time, because each waits for the disk.
        written = list(
            ordered(write, enumerate(parts()), workers=_WRITERS, ahead=2 * _WRITERS, name="write")
        )
        write_bytes(os.path.join(folder, QUARANTINE), quarantine_lines(quarantined))
        if not written:
            raise DatasetNotFoundError(no_good_sample_message(self.origin.url, quarantined))
        names, etags, summaries = zip(*written, strict=True)
        left_out = count_left_out(quarantined, has_stray_files=candidates.has_stray_files)
        manifest = join_manifest(
            names,
            summaries,
            etags=etags,
            kind=self.format.name,
            schema=settling.schema(),
            quarantined=len(quarantined),
            # If facts of files are kept, the names of the files identify the dataset.
            source="" if self.format.keeps_facts else self.origin.url,
            arrangement=self.origin.variant,
            directories=tuple((os.fsdecode(k), v) for k, v in sorted(snapshot.directories.items())),
            listing=snapshot.fingerprint,
            passed_over=candidates.passed_over,
            left_out={  # a file may have any number of columns
                name[:_MOST_LEFT_OUT]: reason[:_MOST_LEFT_OUT]
                for name, reason in list(candidates.left_out.items())[:_MOST_LEFT_OUT]
            },
            samples_left_out=joined_left_out([left_out, candidates.unnamed]),
        )
        write_manifest(os.path.join(folder, MANIFEST), manifest)
        sweep_sidecars(folder, keep=set(names))
        if self.executor is not None:
            self.executor.finish(folder)
        _log.info(
            "Indexed %s: %d samples in %d shards, %d quarantined, %.1f s",
            self.origin.url,
            manifest.about.samples,
            len(manifest.names),
            manifest.about.quarantined,
            reporter.seconds,
        )
        if bad := quarantined[len(candidates.quarantined) :]:
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
        self,
        good: Sequence[tuple[int, Mapping[str, Facts]]],
        candidates: Candidates,
        layout: SampleLayout,
    ) -> Sidecar:
        """Make the sidecar of the good samples of a shard. good: position and facts of each."""
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
        layout = layout or candidates.layout
        if candidates.chunked:
            chunked = candidates.chunked[number]
            return make_chunked_sidecar(chunked, layout=layout), chunked.summary(candidates.schema)
        candidates = self._limited(candidates)
        positions = candidates.shards.positions(number)
        (checked,) = check_here(
            self.origin,
            CheckList(candidates=candidates, positions=[positions]),
            verify=self.verify,
            workers=self.workers,
        )
        results = zip(positions.tolist(), checked.found, strict=True)
        good = [(place, each) for place, each in results if not isinstance(each, Rejection)]
        if not good:
            return None
        sidecar = self._sidecar(good, candidates, layout)
        return sidecar, sidecar.summary()

    def _checked(
        self,
        candidates: Candidates,
        prior: PriorFacts,
        reporter: ProgressReporter,
        folder: bytes,
        snapshot: Snapshot,
    ) -> Iterator[tuple[list[int], Results, Mapping[str, int]]]:
        """Check the candidates that aren't known. Yield the positions of each shard, the results in
        their order, and the number of progressive JPEGs by field."""
        shards = [candidates.shards.positions(n) for n in range(candidates.shards.shards)]
        same, unread = prior.same, shards
        if same:
            unread = [each[[i not in same for i in each.tolist()]] for each in shards]
        wanted = CheckList(
            candidates=candidates,
            positions=unread,
            before=prior.before,
            counts_progressive=not self.format.keeps_facts,
        )
        if self.executor is None:
            checked = check_here(
                self.origin, wanted, verify=self.verify, workers=self.workers, reporter=reporter
            )
        else:
            key = f"{snapshot.fingerprint}{self.origin.variant}"
            checked = self.executor.check(wanted, key=key, folder=folder, reporter=reporter)
        for positions, read, each in zip(shards, unread, checked, strict=True):
            if len(positions) > len(read):
                reporter.done(len(positions) - len(read), 0)
            found = dict(zip(read.tolist(), each.found, strict=True))
            results = [
                found[i] if i in found else reusable_facts(candidates, i, same[i])
                for i in positions.tolist()
            ]
            yield positions.tolist(), results, each.progressive


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
        field_bytes=(
            [_packed(each.field_bytes) for each in shards]
            if any(each.field_bytes for each in shards)
            else None
        ),
    )
    try:
        check_manifest(manifest)
    except ValueError as error:
        raise DatasetError(
            f"{about.source or 'The dataset'}: {error}. Use smaller shards or tar files, or "
            "split it into several datasets."
        ) from error
    return manifest


def _packed(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, "<u8" if max(numbers) >= 2**32 else "<u4").tobytes()


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
