"""Writing the shards of a pack: samples are read, examined, transcoded and written, shard by shard.

Each shard is written, renamed into place and then recorded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.threads import ordered
from penstock.readers.files.progress import Reporter
from penstock.readers.formats.pack.content import write_shard
from penstock.readers.origin.quarantine import QuarantineEntry
from penstock.readers.packing.folder import ShardRecord
from penstock.readers.packing.sample import shard_content
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from penstock.readers.formats.pack.content import ShardContent
    from penstock.readers.packing.folder import PackFolder
    from penstock.readers.packing.plan import PackPlan
    from penstock.readers.packing.sample import PackSample
    from penstock.readers.packing.source import SampleGroup, SampleSource
    from penstock.readers.packing.transcode import Transcode
    from penstock.readers.types import Progress, Verify

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardDraft:
    """A shard's samples, good and bad, before it is written."""

    shard: int
    positions: NDArray[np.int64]
    samples: list[PackSample | Rejection]
    names: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWriter:
    """Writes shards of a plan into a pack's folder. verify: decodes images, None for the installed
    decoder; workers: threads."""

    source: SampleSource
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
            samples: list[PackSample | Rejection] = []
            names: list[bytes] = []
            while len(samples) < len(positions):
                group = next(groups)
                names += group.names
                samples += self._transcoded(group)
                reporter.done(len(group.positions), int(self.source.sizes[group.positions].sum()))
            yield _ShardDraft(shard=shard, positions=positions, samples=samples, names=names)

    def _transcoded(self, group: SampleGroup) -> Iterable[PackSample | Rejection]:
        if not self.transcode.is_needed:
            return group.samples
        ahead = self.workers + 2
        return ordered(
            self._transcode, group.samples, workers=self.workers, ahead=ahead, name="transcode"
        )

    def _transcode(self, sample: PackSample | Rejection) -> PackSample | Rejection:
        if isinstance(sample, Rejection):
            return sample
        return self.transcode.apply(sample, self.source.schema)

    def _write_shard(self, draft: _ShardDraft) -> ShardRecord:
        content = self._content(draft)
        facts = None
        if content is not None:
            facts = write_shard(self.folder.shard(draft.shard), content)
        rejected = [
            (
                int(self.plan.source_ids[position]),
                QuarantineEntry(name=self.source.name(position), reason=sample.reason),
            )
            for position, sample in zip(draft.positions.tolist(), draft.samples, strict=True)
            if isinstance(sample, Rejection)
        ]
        record = ShardRecord(facts=facts, rejected=rejected)
        self.folder.write_record(draft.shard, record)
        return record

    def _content(self, draft: _ShardDraft) -> ShardContent | None:
        """What goes into a shard; None where no sample is good."""
        good = [sample for sample in draft.samples if not isinstance(sample, Rejection)]
        if not good:
            return None
        is_good = np.array([not isinstance(sample, Rejection) for sample in draft.samples], bool)
        names = zip(draft.names, is_good.tolist(), strict=True)
        return shard_content(
            good,
            self.source.schema,
            source=self.plan.source_ids[draft.positions[is_good]],
            names=[name for name, is_one in names if is_one],
        )
