"""Building an index: every candidate read and decoded once, facts kept by shard, manifest last."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crc32c import crc32c

from penstock.cache.errors import DatasetNotFoundError
from penstock.readers.fields.sniff import is_progressive
from penstock.readers.fields.verify import SampleFacts, examine
from penstock.readers.files.atomic import make_folder, write_bytes
from penstock.readers.files.progress import Reporter
from penstock.readers.index.intake import read_chunks
from penstock.readers.index.manifest import join_manifest
from penstock.readers.index.manifest_file import MANIFEST, write_manifest
from penstock.readers.index.sidecar_names import SIDECARS, sidecar_name, sweep_sidecars
from penstock.readers.origin.quarantine import (
    QUARANTINE,
    QuarantineEntry,
    nothing_decodes,
    quarantine_lines,
)
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from penstock.readers.formats.format import Candidates, Format, PriorFacts, Sidecar, Snapshot
    from penstock.readers.formats.summary import ShardSummary
    from penstock.readers.index.intake import Chunk
    from penstock.readers.index.manifest import Manifest
    from penstock.readers.origin.origin import Origin
    from penstock.readers.types import Progress, Verify

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardResults:
    """The results of checking one shard. positions: int64, shape (n,); results: of each;
    progressive: JPEGs of that kind, None where nobody counts."""

    number: int
    positions: NDArray[np.int64]
    results: list[SampleFacts | Rejection]
    progressive: int | None

    def sidecar(self, candidates: Candidates) -> Sidecar | None:
        """The sidecar of the good samples; None where there is none."""
        facts = [result for result in self.results if isinstance(result, SampleFacts)]
        good = [i for i, result in enumerate(self.results) if isinstance(result, SampleFacts)]
        if not good:
            return None
        return candidates.sidecar(self.number, self.positions[good], facts)

    def rejected(self, candidates: Candidates) -> Iterator[QuarantineEntry]:
        """The bad samples, by name."""
        for position, result in zip(self.positions.tolist(), self.results, strict=True):
            if isinstance(result, Rejection):
                yield QuarantineEntry(name=candidates.name(position), reason=result.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexBuilder:
    """Builds the index of one dataset, or a single shard of it anew.

    format: one whose datasets don't carry their index. verify, workers: decode on so many threads.
    """

    origin: Origin
    format: Format
    verify: Verify
    workers: int
    progress: Progress | None = None

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
        """Check every candidate and write sidecars, quarantine and, last, the manifest into
        `folder`.

        snapshot: what the candidates were listed from; prior: what an earlier index says of them.
        Raises DatasetNotFoundError if nothing decodes, WriteError, and what reading raises.
        """
        make_folder(os.path.join(folder, SIDECARS))
        reporter = Reporter(
            f"Indexing {self.origin.url}",
            total=len(candidates.sizes),
            progress=self.progress,
            remedy="This is done once; `penstock index` does it before the job.",
        )
        quarantined = list(candidates.quarantined)
        names: list[bytes] = []
        etags: list[str] = []
        summaries: list[ShardSummary] = []
        for shard in self._results(candidates, prior, reporter):
            quarantined += shard.rejected(candidates)
            sidecar = shard.sidecar(candidates)
            if sidecar is not None:
                name = sidecar_name(snapshot.fingerprint, len(names), sidecar.suffix)
                etags.append(sidecar.write(os.path.join(folder, name)))
                names.append(name)
                summaries.append(sidecar.summary(progressive=shard.progressive))
        write_bytes(os.path.join(folder, QUARANTINE), quarantine_lines(quarantined))
        if not names:
            raise DatasetNotFoundError(nothing_decodes(self.origin.url, quarantined))
        manifest = join_manifest(
            names,
            summaries,
            etags=etags,
            kind=self.format.name,
            classes=candidates.classes,
            quarantined=len(quarantined),
            # Whose an index is, is told by its files' names where facts of files are kept.
            source="" if self._keeps_facts else self.origin.url,
            directories=noted_directories(snapshot),
            listing=snapshot.fingerprint,
            passed_over=candidates.passed_over,
        )
        write_manifest(os.path.join(folder, MANIFEST), manifest)
        sweep_sidecars(folder, keep=set(names))
        _log.info(
            "Indexed %s: %d samples in %d shards, %d quarantined, %.1f s",
            self.origin.url,
            manifest.about.samples,
            len(names),
            len(quarantined),
            reporter.seconds,
        )
        return manifest

    def rebuild_shard(
        self, candidates: Candidates, number: int
    ) -> tuple[Sidecar, ShardSummary] | None:
        """Make one shard's sidecar, as `build` makes it of these candidates; None if nothing of it
        decodes. Raises what reading raises."""
        positions = candidates.shards.positions(number)
        results: list[SampleFacts | Rejection] = []
        for chunk in read_chunks(candidates, iter([(number, positions)]), workers=self.workers):
            results += examine(chunk.samples, self.verify)
        shard = _ShardResults(number=number, positions=positions, results=results, progressive=None)
        sidecar = shard.sidecar(candidates)
        return None if sidecar is None else (sidecar, sidecar.summary(progressive=None))

    def _results(
        self, candidates: Candidates, prior: PriorFacts | None, reporter: Reporter
    ) -> Iterator[_ShardResults]:
        """Of each shard, in order."""
        shards = candidates.shards
        same: Mapping[int, SampleFacts] = {} if prior is None else prior.same
        before: Mapping[int, SampleFacts] = {} if prior is None else prior.before
        unread = [_without(shards.positions(n), same) for n in range(shards.shards)]
        chunks = read_chunks(candidates, iter(enumerate(unread)), workers=self.workers)
        for number in range(shards.shards):
            found: dict[int, SampleFacts | Rejection] = {}
            progressive = None if self._keeps_facts else 0
            while len(found) < len(unread[number]):
                chunk = next(chunks)
                verdicts = self._check(chunk, before)
                found |= zip(chunk.positions.tolist(), verdicts, strict=True)
                if progressive is not None:
                    progressive += _count_progressive(chunk, verdicts)
                reporter.done(len(chunk.positions), int(candidates.sizes[chunk.positions].sum()))
            positions = shards.positions(number)
            if len(positions) > len(found):
                reporter.done(len(positions) - len(found), 0)
            yield _ShardResults(
                number=number,
                positions=positions,
                results=[same.get(i) or found[i] for i in positions.tolist()],
                progressive=progressive,
            )

    def _check(
        self, chunk: Chunk, before: Mapping[int, SampleFacts]
    ) -> list[SampleFacts | Rejection]:
        """Decode what is new; a copied or touched file with the bytes it had is known."""
        results: dict[int, SampleFacts | Rejection] = {}
        new: list[int] = []
        for i, position in enumerate(chunk.positions.tolist()):
            sample, earlier = chunk.samples[i], before.get(position)
            if earlier and not isinstance(sample, Rejection) and crc32c(sample) == earlier.crc32c:
                results[i] = earlier
            else:
                new.append(i)
        verdicts = examine([chunk.samples[i] for i in new], self.verify)
        results |= zip(new, verdicts, strict=True)
        return [results[i] for i in range(len(chunk.samples))]


def noted_directories(snapshot: Snapshot) -> tuple[tuple[str, int], ...]:
    """A snapshot's folders and their times, as a manifest has them."""
    return tuple((os.fsdecode(k), v) for k, v in sorted(snapshot.directories.items()))


def _without(positions: NDArray[np.int64], facts: Mapping[int, SampleFacts]) -> NDArray[np.int64]:
    """The positions that have no facts yet."""
    if not facts:
        return positions
    return positions[[i not in facts for i in positions.tolist()]]


def _count_progressive(chunk: Chunk, verdicts: list[SampleFacts | Rejection]) -> int:
    return sum(
        is_progressive(sample)
        for sample, verdict in zip(chunk.samples, verdicts, strict=True)
        if not isinstance(sample, Rejection) and isinstance(verdict, SampleFacts)
    )
