"""How large batches are on each rank, and how an epoch ends."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.cache.errors import ConfigError, PlanError
from penstock.pipeline.options.checks import check_count
from penstock.pipeline.plan.batch_schedule import MOST_ENTRIES, BatchSchedule

if TYPE_CHECKING:
    from penstock.pipeline.plan.world import World

GlobalBatch = int | Mapping[int, int]
"""Samples of a global batch, or such numbers by the job's sample from which they hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Batch sizes in samples. schedule: of global batches. ranks: of the world."""

    schedule: BatchSchedule
    ranks: int

    @property
    def global_batch(self) -> int:
        """Of all ranks, to begin with."""
        return self.schedule.size

    @property
    def per_rank(self) -> int:
        """Of the largest rank, of all its batches; the other ranks have at most one less."""
        return self.share(self.schedule.largest)

    def share(self, global_batch: int) -> int:
        """The largest rank's part of a global batch."""
        return -(-global_batch // self.ranks)


def batch_sizes(
    batch_size: object, global_batch_size: GlobalBatch | None, world: World
) -> BatchSizes:
    """The batch sizes by what the user gave.

    Raises ConfigError, and PlanError for a global batch below the world.
    """
    if global_batch_size is not None:
        if batch_size != 1:
            raise ConfigError(
                f"Got batch_size={batch_size!r} and global_batch_size={global_batch_size!r}: "
                "batch_size is per rank, global_batch_size over all ranks. Pass one of them."
            )
        return sizes_in_world(batch_schedule(global_batch_size), world)
    if batch_size is None:
        raise ConfigError(
            "batch_size=None (no batching) isn't possible with a native dataset: DALI decodes "
            "batches. Pass batch_size=1 and take the first element."
        )
    count = check_count("batch_size", batch_size, least=1)
    return BatchSizes(schedule=BatchSchedule.constant(count * world.size), ranks=world.size)


def sizes_in_world(schedule: BatchSchedule, world: World) -> BatchSizes:
    """The sizes of a schedule's batches in a world. Raises PlanError for one below the world."""
    if (least := schedule.smallest) < world.size:
        raise PlanError(
            f"global_batch_size={least} is smaller than the world of {world.size} "
            f"ranks, so some ranks would get nothing. Pass at least {world.size}."
        )
    return BatchSizes(schedule=schedule, ranks=world.size)


def batch_schedule(global_batch_size: GlobalBatch) -> BatchSchedule:
    """The schedule by what the user gave: a number, or numbers by the sample from which they hold.

    Raises ConfigError for what goes backwards or can't be.
    """
    if not isinstance(global_batch_size, Mapping):
        return BatchSchedule.constant(check_count("global_batch_size", global_batch_size, least=1))
    given = dict(global_batch_size)
    wanted = "global_batch_size: wanted sizes by the sample from which they hold, {0: 8192, ...}"
    if not 0 < len(given) <= MOST_ENTRIES:
        raise ConfigError(f"{wanted}, 1 to {MOST_ENTRIES} of them; got {len(given)}.")
    sizes = {
        check_count(
            "global_batch_size: the sample from which a size holds", first, least=0
        ): check_count(f"global_batch_size[{first!r}]", size, least=1)
        for first, size in given.items()
    }
    firsts = list(sizes)
    if firsts[0] != 0:
        raise ConfigError(f"{wanted}: the first one holds from sample 0, got {firsts[0]:,}.")
    for before, after in itertools.pairwise(firsts):
        if after <= before:
            raise ConfigError(
                f"{wanted}, in ascending order: got {after:,} behind {before:,}. Samples are "
                "counted from the job's start, over all epochs."
            )
    return BatchSchedule.of(sizes)


def check_by_tokens(
    batch_size: object, global_batch_size: GlobalBatch | None, *, pad: Literal["mask"] | None
) -> None:
    """Raise ConfigError for what can't go with batch_tokens=, which says how large batches are."""
    for name, given in (
        ("batch_size", None if batch_size in (1, None) else batch_size),
        ("global_batch_size", global_batch_size),
        ("pad", pad),
    ):
        if given is not None:
            raise ConfigError(
                f"Got batch_tokens= and {name}={given!r}: a batch has as many samples as its "
                "tokens allow, on every rank, and no sample is left out. Pass one of them."
            )


def check_ends(world: World, *, drop_last: bool, pad: Literal["mask"] | None) -> None:
    """Raise ConfigError unless every rank's epoch ends alike: unequal ranks hang collectives."""
    if pad is not None and drop_last:
        raise ConfigError(
            'Got drop_last=True and pad="mask": drop what does not fill a batch, or pad it. Pass '
            "one of them (drop_last for training, pad for evaluation)."
        )
    if world.size > 1 and pad is None and not drop_last:
        raise ConfigError(
            f"With {world.size} ranks the end of an epoch must be the same on each: pass "
            'drop_last=True (training), or pad="mask" (evaluation: each sample exactly once, and '
            "a `valid` mask as the last element of every batch)."
        )
