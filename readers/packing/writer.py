"""Writing the shards of a pack: samples are read, examined, transcoded and written, shard by shard.

Each shard is written, renamed into place and then recorded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.threads import ordered
from penstock.readers.fields.verify import SampleFacts
from penstock.readers.files.progress import Reporter
from penstock.readers.formats.image_columns import ImageColumns
from penstock.readers.formats.pack.content import ShardContent, write_shard
from penstock.readers.origin.quarantine import QuarantineEntry
from penstock.readers.packing.folder import ShardRecord
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.readers.packing.folder import PackFolder
    from penstock.readers.packing.plan import PackPlan
    from penstock.readers.packing.source import PackSource, SampleGroup
    from penstock.readers.packing.transcode import Transcode
    from penstock.readers.types import Encoded, Progress, Verify

    _Pair = tuple[Encoded | Rejection, SampleFacts | Rejection]

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardDraft:
    """A shard's samples, good and bad, before it is written."""

    shard: int
    positions: NDArray[np.int64]
    samples: list[Encoded | Rejection]
    results: list[SampleFacts | Rejection]
    names: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWriter:
    """Writes shards of a plan into a pack's folder. verify: None where the source's samples were
    verified already; workers: threads."""

    source: PackSource
    plan: PackPlan
    folder: PackFolder
    verify: Verify | None
    transcode: Transcode
    workers: int
    progress: Progress | None

    def write(self, mine: range) -> list[ShardRecord]:
        """Write the shards of one rank that aren't finished; returns the records of all of them.

        Raises IndexChangedError, DatasetError, FetchError, WriteError.
        """
        self.folder.sweep(mine)
        records = {shard: self.folder.read_record(shard) for shard in mine}
        positions = {shard: self.plan.grouping.positions(shard) for shard in mine}
        reporter = Reporter(
            f"Packing {self.source.url}",
            total=sum(len(p) for p in positions.values()),
            progress=self.progress,
            remedy="`penstock pack` shows a progress bar.",
        )
        left = [shard for shard, record in records.items() if record is None]
        done = [positions[shard] for shard, record in records.items() if record is not None]
        if done:
            _log.info("Resuming: %d of %d shards are finished", len(done), len(mine))
            ready = np.concatenate(done)
            reporter.done(len(ready), int(self.source.sizes[ready].sum()))
        drafts = self._drafts(left, reporter)
        # One thread writes a shard while the next one is decoded.
        written = ordered(
            self._write_shard, drafts, workers=1, ahead=1, name="pack-write", leave_s=None
        )
        records |= zip(left, written, strict=True)
        return [record for record in records.values() if record is not None]

    def _drafts(self, shards: list[int], reporter: Reporter) -> Iterator[_ShardDraft]:
        wanted = ((shard, self.plan.grouping.positions(shard)) for shard in shards)
        groups = self.source.groups(wanted, verify=self.verify, workers=self.workers)
        for shard in shards:
            positions = self.plan.grouping.positions(shard)
            samples: list[Encoded | Rejection] = []
            results: list[SampleFacts | Rejection] = []
            names: list[bytes] = []
            while len(samples) < len(positions):
                group = next(groups)
                names += group.names
                for sample, result in self._transcoded(group):
                    samples.append(sample)
                    results.append(result)
                reporter.done(len(group.positions), int(self.source.sizes[group.positions].sum()))
            yield _ShardDraft(
                shard=shard, positions=positions, samples=samples, results=results, names=names
            )

    def _transcoded(self, group: SampleGroup) -> Iterator[_Pair]:
        pairs = zip(group.samples, group.results, strict=True)
        if not self.transcode.is_needed:
            return iter(pairs)
        return ordered(
            self._transcode, pairs, workers=self.workers, ahead=self.workers + 2, name="transcode"
        )

    def _transcode(self, pair: _Pair) -> _Pair:
        sample, result = pair
        if isinstance(sample, Rejection) or isinstance(result, Rejection):
            return pair
        return self.transcode.apply(sample, result)

    def _write_shard(self, draft: _ShardDraft) -> ShardRecord:
        good = np.array([isinstance(r, SampleFacts) for r in draft.results], bool)
        content = self._content(draft, draft.positions[good]) if good.any() else None
        facts = None
        if content is not None:
            size_bytes = write_shard(self.folder.shard(draft.shard), content)
            facts = content.summary(size_bytes)
        rejected = [
            (
                int(self.plan.source_ids[position]),
                QuarantineEntry(name=self.source.name(position), reason=result.reason),
            )
            for position, result in zip(draft.positions.tolist(), draft.results, strict=True)
            if isinstance(result, Rejection)
        ]
        record = ShardRecord(facts=facts, rejected=rejected)
        self.folder.write_record(draft.shard, record)
        return record

    def _content(self, draft: _ShardDraft, positions: NDArray[np.int64]) -> ShardContent:
        pairs = zip(draft.samples, draft.results, strict=True)
        images = [
            s for s, r in pairs if isinstance(r, SampleFacts) and not isinstance(s, Rejection)
        ]
        facts = [r for r in draft.results if isinstance(r, SampleFacts)]
        labels = self.source.labels
        return ShardContent(
            encoded=images,
            columns=ImageColumns.of(facts, None if labels is None else labels[positions]),
            source=self.plan.source_ids[positions],
            names=[
                name
                for name, result in zip(draft.names, draft.results, strict=True)
                if isinstance(result, SampleFacts)
            ],
        )
