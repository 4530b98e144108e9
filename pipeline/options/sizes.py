"""How large batches are on each rank, and how an epoch ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.cache.errors import ConfigError, PlanError
from penstock.pipeline.options.checks import check_count

if TYPE_CHECKING:
    from penstock.pipeline.plan.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Batch sizes in samples. per_rank: of the largest rank; the others have at most one less."""

    global_batch: int
    per_rank: int


def batch_sizes(batch_size: object, global_batch_size: int | None, world: World) -> BatchSizes:
    """The batch sizes by what the user gave.

    Raises ConfigError, and PlanError for a global batch below the world.
    """
    if global_batch_size is not None:
        if batch_size != 1:
            raise ConfigError(
                f"Got batch_size={batch_size!r} and global_batch_size={global_batch_size!r}: "
                "batch_size is per rank, global_batch_size over all ranks. Pass one of them."
            )
        check_count("global_batch_size", global_batch_size, least=1)
        if global_batch_size < world.size:
            raise PlanError(
                f"global_batch_size={global_batch_size} is smaller than the world of {world.size} "
                f"ranks, so some ranks would get nothing. Pass at least {world.size}."
            )
        return BatchSizes(
            global_batch=global_batch_size, per_rank=-(-global_batch_size // world.size)
        )
    if batch_size is None:
        raise ConfigError(
            "batch_size=None (no batching) isn't possible with a native dataset: DALI decodes "
            "batches. Pass batch_size=1 and take the first element."
        )
    count = check_count("batch_size", batch_size, least=1)
    return BatchSizes(global_batch=count * world.size, per_rank=count)


def check_by_tokens(
    batch_size: object, global_batch_size: int | None, *, pad: Literal["mask"] | None
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
