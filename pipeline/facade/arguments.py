"""The arguments of one loader, worked out for its engine as often as the world changes."""

from __future__ import annotations

import contextlib
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import PlanError
from penstock.pipeline.facade.late_world import LateWorld
from penstock.pipeline.options.device import parse_device
from penstock.pipeline.options.foreign_options import (
    ForeignOptions,
    WorkerOptions,
    draw_seed,
    planned_batch_size,
)
from penstock.pipeline.options.native_options import NativeOptions
from penstock.pipeline.options.seed import LoaderSeed
from penstock.pipeline.plan.world import local_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from penstock.pipeline.options.penstock_options import PenstockOptions
    from penstock.pipeline.options.torch_options import TorchOptions
    from penstock.pipeline.plan.world import World


class LoaderArguments:
    """What a loader was given, and the world, the device and the seed that follow from it by now.

    torch_options, own: torch's arguments and Penstock's, as given. seed: known once it is chosen.
    """

    def __init__(
        self,
        torch_options: TorchOptions,
        own: PenstockOptions,
        *,
        world: World | None,
        data_parallel: tuple[int, int] | None = None,
    ) -> None:
        """Look for the world, unless the user gave it, and for this rank's device.

        Raises ConfigError for a device that isn't here.
        """
        self.torch_options = torch_options
        self.own = own
        self.seed = LoaderSeed(given=own.seed)
        self._late_world = LateWorld(world, data_parallel=data_parallel)
        self.device, self._device_world = self._own_device(), self.world

    @property
    def world(self) -> World:
        """Rank and size as far as they are known."""
        return self._late_world.world

    @property
    def world_is_known(self) -> bool:
        """Whether nothing says that there is more than is known."""
        return self._late_world.doubt is None

    def choose_seed(self, generator: torch.Generator | None, *, draws: bool) -> None:
        """Draw a seed for this rank where none was given. draws: whether anything follows from it.

        generator: to draw it from; None is torch's default one.
        """
        self.seed = LoaderSeed.choose(self.own.seed, generator, draws=draws)

    def settle(self, *, is_shared: bool, has_begun: bool, must_be_known: bool) -> None:
        """Look for the world again. is_shared: Penstock shares the samples out over the ranks.

        has_begun: batches were handed out. Raises PlanError as `LateWorld.settle` where the world
        must be known; ConfigError for a device that this rank hasn't got.
        """
        late = self._late_world
        if is_shared or self.own.seed is not None or self.own.augment is not None:
            try:
                late.settle(has_begun=has_begun)
            except PlanError:
                if must_be_known:
                    raise
        else:  # each rank is torch's business; ours is to warn
            with contextlib.suppress(PlanError):
                late.settle(has_begun=False)
        if self.world != self._device_world:
            self.device, self._device_world = self._own_device(), self.world

    def rejoined(self, world: World, *, seed: int) -> LoaderArguments:
        """The arguments among other ranks: this process stays where it is, and the job's batches
        and seed are as they are. world: one that says no place on a node keeps this one's."""
        before = self.world
        if world.local_size == 1 and before.local_size <= world.processes:
            world = replace(world, local_rank=before.local_rank, local_size=before.local_size)
        found = copy(self)
        found.torch_options = replace(self.torch_options, batch_size=1)
        found.own = replace(self.own, global_batch_size=None)
        found.seed = LoaderSeed(given=seed)
        found._late_world = LateWorld(world)
        found._device_world = world  # the device stays
        return found

    def _own_device(self) -> torch.device:
        place = self.world.local_rank or local_rank()
        return parse_device(self.own.device, local_rank=place)

    def native(self, live: Mapping[str, Any]) -> NativeOptions:
        """What a native engine works by now. live: torch's arguments that were set since, by name.

        Raises ConfigError and PlanError for what doesn't fit a native dataset or the world.
        """
        return NativeOptions.of(
            replace(self.torch_options, **live),
            self.own,
            seed=self.seed,
            world=self.world,
            agrees=self._late_world.is_of_group,
            device=self.device,
        )

    def foreign(
        self,
        live: Mapping[str, Any],
        *,
        indices: Any,
        batch_size: int | None,
        is_batched: bool,
        is_planned: bool,
        is_sharded: bool,
    ) -> ForeignOptions:
        """What an engine for a torch dataset works by now; torch's constructor has been called.

        live: as in `native`. indices: the sampler or batch sampler. batch_size: as torch has it.
        is_planned: the order is Penstock's, so the batch size follows from the world. is_sharded:
        the sampler shares the samples out over the ranks.
        Raises ConfigError and PlanError for what doesn't fit the world.
        """
        options, own, world = replace(self.torch_options, **live), self.own, self.world
        if is_planned:
            batch_size = planned_batch_size(options, own, world)
        return ForeignOptions(
            torch_options=options,
            own=own,
            indices=indices,
            batch_size=batch_size,
            is_batched=is_batched,
            workers=WorkerOptions.of(options),
            draw_seed=draw_seed(own, self.seed, world, is_sharded=is_sharded),
            world=world,
            agrees=self._late_world.is_of_group,
            device=self.device,
        )
