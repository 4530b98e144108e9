"""One process's run of packing: from what was asked for to a finished share or a finished pack."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.cache.base.sizes import parse_size
from penstock.cache.errors import ConfigError
from penstock.readers.fields.place_names import stay_behind
from penstock.readers.files.atomic import locked, make_folder
from penstock.readers.files.names import printable
from penstock.readers.formats.limits import VERSION
from penstock.readers.formats.pack.forms import pack_forms
from penstock.readers.packing.completion import PackCompletion
from penstock.readers.packing.folder import PackFolder
from penstock.readers.packing.summary import PackSummary
from penstock.readers.packing.writer import ShardWriter
from penstock.readers.types import MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from penstock.readers.packing.crew import Crew, PackLuggage
    from penstock.readers.packing.folder import ShardRecord
    from penstock.readers.packing.plan import PackPlan
    from penstock.readers.packing.source import PackSource
    from penstock.readers.packing.transcode import Transcode
    from penstock.readers.types import Progress, Verify

    ShardRule = Callable[[NDArray[np.int64]], int]

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackTask:
    """What `pack` was asked for, checked. shard_bytes: or a rule that tells it from the samples'
    bytes, asked once these are known. Raises ConfigError."""

    shuffle: bool
    seed: int
    shard_bytes: int | ShardRule
    transcode: Transcode
    workers: int
    verify: Verify | None
    rank: int
    size: int
    progress: Progress | None
    crew: Crew | None = None
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank: got {self.rank} of size {self.size}, wanted 0 <= rank < size."
            )
        if self.crew is not None and self.size > 1:
            raise ConfigError(
                f"executor: got one together with rank {self.rank} of {self.size}. Either ranks "
                "share the work out, or one process hands it to an executor's workers: run the "
                "latter once, outside of torchrun and srun."
            )

    def settings(self, source: PackSource) -> dict[str, Any]:
        """What the pack is made of; equal settings make equal packs."""
        return {
            "version": VERSION,
            "source": source.fingerprint,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
            "shard_bytes": self.shard_bytes,
            "fields": list(source.schema),
            **({"max_pixels": source.max_pixels} if source.max_pixels != MAX_PIXELS else {}),
            **self.transcode.settings(),
        }

    def run(
        self,
        source: PackSource,
        root: bytes,
        luggage: Callable[[], PackLuggage | None] | None = None,
    ) -> PackSummary:
        """Write this rank's share, and the manifest if all shares are there by then. luggage: the
        source for a crew, asked for where there is one."""
        if not isinstance(self.shard_bytes, int):
            told = parse_size(self.shard_bytes(source.sizes), what="shard_bytes")
            return replace(self, shard_bytes=told).run(source, root, luggage)
        travels = None if self.crew is None or luggage is None else luggage()
        self.transcode.image_fields(source.schema)
        if self.transcode.short_side is not None:
            for name in stay_behind(source.schema):
                _log.warning(
                    '"%s" stays as it is while images are resized, as it is no Boxes or Keypoints '
                    "in the schema. If it is places in an image, pack from Python: pack(source, "
                    'destination, schema={"%s": Boxes(of=…, format=…)}, short_side=…).',
                    name,
                    name,
                )
        pack_forms(source.schema)
        folder = PackFolder(root, self.settings(source))
        manifest = folder.finished()
        if manifest is not None:
            _log.info("%s already holds this pack, complete: nothing to do", printable(root))
            with locked(folder.own):
                folder.tidy()
            return PackSummary.of_manifest(manifest, self._seconds(), folder.left_out(manifest))
        plan = source.plan(shuffle=self.shuffle, seed=self.seed, shard_bytes=self.shard_bytes)
        folder.begin()
        mine = b"%06d-of-%06d" % (self.rank, self.size)
        own = os.path.join(folder.own, b"ranks", b"driver" if travels is not None else mine)
        make_folder(own)
        busy = (
            f"{printable(root)}: another process is packing into it. Wait for it, or end it first."
        )
        known: dict[int, ShardRecord] = {}
        records: list[ShardRecord] = []
        with locked(own, busy=busy):
            if travels is not None:
                known = self._with_crew(travels, source, plan, folder)
            else:
                records = self._alone(source, plan, folder)
        done = PackCompletion(source=source, plan=plan, folder=folder, known=known)
        manifest = done.finish()
        if manifest is None:
            return PackSummary.of_records(records, self._seconds())
        return PackSummary.of_manifest(manifest, self._seconds(), folder.left_out(manifest))

    def _alone(self, source: PackSource, plan: PackPlan, folder: PackFolder) -> list[ShardRecord]:
        """Write this rank's shards on threads."""
        writer = ShardWriter(
            source=source,
            plan=plan,
            folder=folder,
            verify=self.verify,
            transcode=self.transcode,
            workers=self.workers,
            progress=self.progress,
        )
        return writer.write(range(self.rank, plan.grouping.shards, self.size))

    def _with_crew(
        self, luggage: PackLuggage, source: PackSource, plan: PackPlan, folder: PackFolder
    ) -> dict[int, ShardRecord]:
        """Have all shards written by workers."""
        from penstock.readers.packing.crew import CrewWriter  # who packs alone needs none

        assert self.crew is not None
        writer = CrewWriter(
            crew=self.crew,
            luggage=luggage,
            source=source,
            plan=plan,
            folder=folder,
            transcode=self.transcode,
            progress=self.progress,
        )
        return writer.write()

    def _seconds(self) -> float:
        return time.monotonic() - self.began
