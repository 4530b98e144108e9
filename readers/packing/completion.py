"""The last step of packing: the manifest, once every shard of every rank is finished."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import DatasetNotFoundError, PenstockError
from penstock.readers.fields.field_types import Mask
from penstock.readers.fields.masks import mask_dtype
from penstock.readers.fields.schema import Schema
from penstock.readers.files.atomic import locked, write_bytes
from penstock.readers.formats.pack.format import PackFormat
from penstock.readers.formats.pack.shard import rewrite_source
from penstock.readers.index.manifest import Manifest, join_manifest
from penstock.readers.index.manifest_file import MANIFEST, write_manifest
from penstock.readers.origin.quarantine import (
    QUARANTINE,
    count_left_out,
    joined_left_out,
    nothing_decodes,
    quarantine_lines,
)
from penstock.readers.packing.folder import shard_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.summary import ShardSummary
    from penstock.readers.packing.folder import PackFolder, ShardRecord
    from penstock.readers.packing.plan import PackPlan
    from penstock.readers.packing.source import PackSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCompletion:
    """Turns a folder of finished shards into a pack. Whichever rank comes last does it. known:
    records by shard, where somebody was told them already."""

    source: PackSource
    plan: PackPlan
    folder: PackFolder
    known: Mapping[int, ShardRecord] = field(default_factory=dict)

    def finish(self) -> Manifest | None:
        """Write the manifest if every shard of every rank is finished; else None.

        Raises DatasetNotFoundError where not one image is good, WriteError.
        """
        with locked(self.folder.own):
            try:
                done = self.folder.finished()
                return done if done is not None else self._finish()
            except (PenstockError, FileNotFoundError):
                # Without locks (some NFS) two ranks may finish at once, and one tidies up under the
                # other: fine if the result stands.
                if (done := self.folder.finished()) is not None:
                    return done
                raise

    def _finish(self) -> Manifest | None:
        records = []
        for shard in range(self.plan.grouping.shards):
            record = self.known.get(shard) or self.folder.read_record(shard)
            if record is None:
                return None
            records.append(record)
        rejected = [r for record in records for r in record.rejected]
        quarantined = [*self.source.quarantined, *(q for _, q in rejected)]
        write_bytes(os.path.join(self.folder.own, QUARANTINE), quarantine_lines(quarantined))
        good = [(k, record.facts) for k, record in enumerate(records) if record.facts is not None]
        if not good:
            raise DatasetNotFoundError(nothing_decodes(self.source.url, quarantined))
        if rejected and not self.source.has_ids:
            self._close_gaps(records, np.sort(np.array([i for i, _ in rejected], np.int64)))
        settings = self.folder.settings
        manifest = join_manifest(
            [shard_name(shard) for shard, _ in good],
            [facts for _, facts in good],
            kind=PackFormat.name,
            schema=_settled(self.source.schema, [facts for _, facts in good]),
            quarantined=len(quarantined),
            shuffled=settings["shuffle"],
            seed=settings["seed"],
            source=self.source.url,
            settings=settings,
            samples_left_out=joined_left_out(
                [
                    count_left_out(quarantined, has_papers=self.source.has_papers),
                    self.source.left_out,
                ]
            )
            or None,
        )
        write_manifest(os.path.join(self.folder.own, MANIFEST), manifest)
        self.folder.tidy()
        return manifest

    def _close_gaps(self, records: list[ShardRecord], rejected: NDArray[np.int64]) -> None:
        """Turn the `source` columns into ids of the source's index, which counts good files only.

        Which files are bad is known only now. The column is computed from the plan, not from what
        is there, so doing it twice does no harm.
        """
        for shard, record in enumerate(records):
            if record.facts is None:
                continue
            ids = self.plan.source_ids[self.plan.grouping.positions(shard)]
            ids = ids[~np.isin(ids, rejected)]
            source = ids - np.searchsorted(rejected, ids)
            rewrite_source(self.folder.shard(shard), self.source.schema, source)


def _settled(schema: Schema, shards: Sequence[ShardSummary]) -> Schema:
    """The schema, in which masks that may have any dtype get the one that holds them all."""
    found = dict(schema)
    for name, type in schema.of_type(Mask).items():
        if not type.is_settled:
            dtypes = {mask_dtype(codec) for shard in shards for codec in shard.fields[name].codecs}
            found[name] = replace(type, dtype="int32" if "int32" in dtypes else "uint8")
    return Schema(found)
