"""What an engine for a torch dataset is built by: the arguments, worked out for one world."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError
from penstock.pipeline.options.sizes import batch_sizes, check_ends

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from penstock.pipeline.options.penstock_options import PenstockOptions
    from penstock.pipeline.options.seed import LoaderSeed
    from penstock.pipeline.options.torch_options import TorchOptions
    from penstock.pipeline.plan.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """torch's arguments about workers and pinning, under torch's names."""

    num_workers: int
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool

    @classmethod
    def of(cls, options: TorchOptions) -> WorkerOptions:
        """The options by all of torch's arguments, but for what means nothing without workers.

        torch's constructor refuses that; in attributes of a loader torch ignores it.
        """
        values = {field.name: getattr(options, field.name) for field in fields(cls)}
        if options.num_workers == 0:
            values.update(
                multiprocessing_context=None, prefetch_factor=None, persistent_workers=False
            )
        return cls(**values)

    def arguments(self) -> dict[str, Any]:
        """The options as keyword arguments for torch's constructor."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignOptions:
    """What a loader over a torch dataset works by, worked out for one world.

    torch_options: as the user gave them, but for attributes that were set since. own: Penstock's.
    indices: the sampler or batch sampler that torch's constructor made or took; None
    for an iterable dataset. batch_size: of this rank's largest batch; None where torch batches
    nothing, or by a batch sampler. is_batched: whether samples come in batches. draw_seed: of
    augmentation, else None. agrees: the world is that of torch's process group.
    """

    torch_options: TorchOptions
    own: PenstockOptions
    indices: Any
    batch_size: int | None
    is_batched: bool
    workers: WorkerOptions
    draw_seed: int | None
    world: World
    agrees: bool
    device: torch.device

    @property
    def seed(self) -> int | None:
        """The seed of the order and of each sample; None leaves randomness to torch."""
        return None if self.own.seed is None else int(self.own.seed)


def planned_batch_size(
    torch_options: TorchOptions, own: PenstockOptions, world: World
) -> int | None:
    """This rank's batch size in Penstock's order of a torch dataset; None for single samples.

    Raises ConfigError and PlanError for sizes that don't fit it or the world.
    """
    check_ends(world, drop_last=bool(torch_options.drop_last), pad=own.pad)
    if torch_options.batch_size is None:
        if own.global_batch_size is not None or own.pad is not None:
            raise ConfigError(
                "batch_size=None (single samples) allows no global_batch_size= and no pad=."
            )
        return None
    return batch_sizes(torch_options.batch_size, own.global_batch_size, world).per_rank


def draw_seed(
    own: PenstockOptions, seed: LoaderSeed, world: World, *, is_sharded: bool
) -> int | None:
    """The seed of augmentation in a world; None where nothing is augmented.

    is_sharded: a sampler shares the samples out, so each rank has crops, and a state, of its own.
    Raises ConfigError where several ranks would draw their own crops of the same samples.
    """
    if own.augment is None:
        return None
    if seed.given is None and seed.drawn is not None and is_sharded:
        return seed.drawn
    if seed.given is None and world.size > 1:
        raise ConfigError(
            f"augment= on {world.size} ranks needs seed=, the same on every rank: then Penstock "
            "orders the samples and shares them out, so leave sampler= out. Or pass a sampler that "
            "shares them out, such as torch's DistributedSampler, and no seed=."
        )
    return seed.in_world(world, draws=True)
