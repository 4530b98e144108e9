"""Report what the parts of a mixture give in an epoch, for `penstock inspect` and `plan`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from penstock.cache.base import format_size
from penstock.pipeline.plan import first_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.pipeline.plan.sizing import ClusterSetup
    from penstock.readers import Contents, Mixture, MixtureSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureFigures:
    """The mixture that `penstock plan` sizes: the parts of its first epoch, and its contents."""

    summary: MixtureSummary
    contents: Contents

    @property
    def sample_bytes(self) -> float:
        """The mean size of a sample that an epoch delivers."""
        return self.summary.bytes / self.summary.samples

    def completed(self, setup: ClusterSetup) -> ClusterSetup:
        """Return the setup of a job with the bytes that its epochs read for the first time."""
        from penstock.pipeline.plan.sizing import mixture_reads

        mixture = self.contents.mixture
        own = first_settings(self.contents, seed=0, global_batch=setup.global_batch).mixture
        assert mixture is not None
        assert own is not None
        reads = mixture_reads(mixture, own, epochs=setup.epochs)
        return replace(
            setup,
            stored_bytes=float(self.contents.shard_bytes.sum()),
            new_first=reads.first / setup.total_bytes,
            new_later=reads.later / setup.total_bytes,
        )


def part_table(summary: MixtureSummary) -> Table:
    """Return a row for each part of an epoch, and one for all of them."""
    table = Table(summary.HEADS[0], box=None, pad_edge=False)
    for head in summary.HEADS[1:]:
        table.add_column(head, justify="right")
    for name, *others in summary.rows():
        table.add_row(escape(name), *others)
    return table


def mixture_values(
    mixture: Mixture, *, batch_size: int, epoch: int
) -> tuple[dict[str, Any], MixtureSummary]:
    """Return the values of `penstock inspect --json` for a mixture, and the epoch's parts.
    batch_size: the job's global batch."""
    contents = mixture.contents
    assert contents.mixture is not None
    settings = first_settings(contents, seed=0, global_batch=batch_size)
    parts = settings.mixture
    assert parts is not None
    stream = parts.stream(contents.mixture)
    summary = mixture.summary_of(stream, samples=parts.samples, epoch=epoch)
    values: dict[str, Any] = {
        "kind": mixture.kind,
        "samples": parts.samples,
        "shards": len(contents.sizes),
        "bytes": int(contents.shard_bytes.sum()),
        "fields": {name: repr(contents.schema[name]) for name in contents.schema},
        "fingerprint": contents.fingerprint,
        "batch_size": batch_size,
        "lanes": settings.lanes,
        "mixture": summary.values(),
    }
    for part, lanes, window in zip(
        values["mixture"]["parts"], parts.lanes, parts.windows, strict=True
    ):
        part |= {"lanes": lanes, "window": window}
    return values, summary


def shown_mixture(
    url: str, values: Mapping[str, Any], summary: MixtureSummary
) -> Iterator[str | Table]:
    """Yield the values of a mixture for people, as lines and tables."""
    yield (
        f"{escape(url)}: {escape(values['kind'])}, {len(summary.parts):,} parts, "
        f"{values['shards']:,} shards, {format_size(values['bytes'])} stored"
    )
    table = Table("field", "type", box=None, pad_edge=False)
    for name, type in values["fields"].items():
        table.add_row(escape(name), escape(type))
    yield table
    yield (
        f"Epoch {summary.epoch} of {summary.samples:,} samples, in global batches of "
        f"{values['batch_size']:,}:"
    )
    yield part_table(summary)
