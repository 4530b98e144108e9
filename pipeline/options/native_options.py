"""What a native engine is built by: the user's arguments, worked out for one world."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.cache.errors import PenstockWarning
from penstock.pipeline.options.order_options import shuffle_settings
from penstock.pipeline.options.sizes import (
    BatchSizes,
    batch_sizes,
    check_by_tokens,
    check_ends,
    sizes_in_world,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from penstock.augment.field_recipes import Recipes
    from penstock.cache.base.blob import ReadMode
    from penstock.pipeline.options.order_options import Order
    from penstock.pipeline.options.penstock_options import (
        PenstockOptions,
        ResidentMode,
    )
    from penstock.pipeline.options.seed import LoaderSeed
    from penstock.pipeline.options.torch_options import TorchOptions
    from penstock.pipeline.plan.batch_schedule import BatchSchedule
    from penstock.pipeline.plan.state import LoaderState
    from penstock.pipeline.plan.world import World

MAX_BAD = 0.001
"""Share of a dataset's samples that may be bad in an epoch, unless the user says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOptions:
    """What the user asked of a native loader, checked and worked out for one world.

    given_seed: the seed that the user passed, which a state has to equal; None where they passed
    none. batch_is_default: nobody gave a batch size, so a state may.
    threads: decode threads, 0 for this rank's share of the cores. depth: batches in DALI.
    agrees: the world is that of torch's process group, so its ranks compare plans and count bad
    samples together. resident: whether decoded images stay in memory. pin_memory: of what is
    handed out on the CPU. as_dict: batches are dicts by field, not tuples. batch_tokens: of a
    rank's batch at most, whose samples then vary in number, and sizes mean nothing; else None.
    """

    world: World
    order: Order
    sizes: BatchSizes
    seed: int
    given_seed: int | None
    shuffle: bool
    drop_last: bool
    pad: bool
    augment: Recipes | None
    device: torch.device
    deterministic: bool
    threads: int
    depth: int
    timeout_s: float
    read: ReadMode
    batch_is_default: bool = False
    max_bad: float = MAX_BAD
    agrees: bool = False
    resident: ResidentMode = False
    pin_memory: bool = False
    as_dict: bool = False
    batch_tokens: int | Mapping[str, int] | None = None

    @classmethod
    def of(
        cls,
        torch_options: TorchOptions,
        own: PenstockOptions,
        *,
        seed: LoaderSeed,
        world: World,
        agrees: bool,
        device: torch.device,
    ) -> NativeOptions:
        """The options by both kinds of arguments. own: Penstock's.

        Raises ConfigError and PlanError for what doesn't fit a native dataset or the world.
        """
        torch_options.check_native()
        shuffle, drop_last = bool(torch_options.shuffle), bool(torch_options.drop_last)
        if own.batch_tokens is None:
            check_ends(world, drop_last=drop_last, pad=own.pad)
        else:
            check_by_tokens(torch_options.batch_size, own.global_batch_size, pad=own.pad)
        return cls(
            world=world,
            sizes=batch_sizes(torch_options.batch_size, own.global_batch_size, world),
            seed=seed.in_world(world, draws=shuffle),
            given_seed=own.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            pad=own.pad is not None,
            augment=own.augment,
            device=device,
            deterministic=own.deterministic,
            threads=torch_options.num_workers,
            depth=torch_options.prefetch_factor or (2 if shuffle else 1),
            timeout_s=float(torch_options.timeout),
            read=own.read,
            order=own.order,
            batch_is_default=torch_options.batch_size == 1 and own.global_batch_size is None,
            max_bad=MAX_BAD if own.max_bad is None else own.max_bad,
            agrees=agrees,
            resident=own.resident,
            pin_memory=bool(torch_options.pin_memory),
            as_dict=own.as_dict,
            batch_tokens=own.batch_tokens,
        )

    def wanted(self) -> dict[str, int | float]:
        """Return the settings by name that the user passed, which a state has to equal."""
        seed = {} if self.given_seed is None else {"seed": self.given_seed}
        return {"shuffle": self.shuffle, **seed, **shuffle_settings(self.order)}

    def resumed(self, state: LoaderState, *, warns: bool = True) -> NativeOptions:
        """The options to go on with from a state: its seed, and its batches, but that from its
        place on those count that the user gave, if any.

        warns: of what differs from the saved job from here on. Raises PlanError for batches of the
        state's below the world.
        """
        if state.plan.buckets is not None:
            return replace(self, seed=state.plan.seed)
        # A job's first start needs none of it.
        from penstock.pipeline.plan.history import resumed_schedule

        wanted = None if self.batch_is_default else self.sizes.schedule
        schedule = resumed_schedule(state, wanted, drop_last=self.drop_last)
        if warns:
            planned = resumed_schedule(state, None, drop_last=self.drop_last)
            self._warn_of_other_batches(planned, schedule)
            self._warn_of_other_ends(state, global_batch=schedule.size)
        return replace(self, seed=state.plan.seed, sizes=sizes_in_world(schedule, self.world))

    def _warn_of_other_batches(self, planned: BatchSchedule, schedule: BatchSchedule) -> None:
        if schedule == planned:
            return
        if schedule.size != planned.size:
            change = f"goes from {planned.size} to {schedule.size} samples with this state"
        else:
            change = "will change at other samples, or to other sizes, than the saved job planned"
        given = planned.size if len(planned.sizes) == 1 else planned.as_given()
        warnings.warn(
            f"The global batch {change}: no sample is lost, but "
            "batches differ from the saved job's. For identical ones pass "
            f"global_batch_size={given}.",
            PenstockWarning,
            stacklevel=4,
        )

    def _warn_of_other_ends(self, state: LoaderState, *, global_batch: int) -> None:
        rest = state.samples % global_batch
        if not rest or self.drop_last == state.drop_last:
            return
        change = (
            f"each epoch now leaves out its last {rest} samples, which the saved job handed out"
            if self.drop_last
            else f"each epoch now ends with a batch of {rest} samples, which the saved job left out"
        )
        warnings.warn(
            f"State was saved with drop_last={state.drop_last}, this loader has "
            f"drop_last={self.drop_last}: the batches before an epoch's end stay the same, but "
            f"{change}. For the same epochs pass drop_last={state.drop_last}.",
            PenstockWarning,
            stacklevel=4,
        )
