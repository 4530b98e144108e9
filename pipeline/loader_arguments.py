"""Resolve a loader's arguments for its engine, and resolve them again when the world changes.

The world may become known only after the loader was made. A trainer's launcher may start the
process group between the loader's construction and its first batch, and may not give its child
processes their rank before that (Lightning's doesn't). So a loader keeps its arguments as the user
passed them, and resolves them once the world is known.
"""

from __future__ import annotations

import contextlib
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError, PlanError
from penstock.pipeline.options import LoaderSeed, NativeOptions, parse_device
from penstock.pipeline.plan import World, local_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from penstock.pipeline.options import PenstockOptions, TorchOptions


class LateWorld:
    """The world of one loader: the user's, or the one found by the latest search.

    world: World(0, 1) until another is found. is_given: the user passed it. doubt: the error that
    says why the world isn't known yet although other processes exist; None if it is known.
    """

    def __init__(
        self, given: World | None, *, data_parallel: tuple[int, int] | None = None
    ) -> None:
        """data_parallel: rank and size among the replicas of a model, if several processes share
        one.

        Raises ConfigError if both arguments are passed, and PlanError for impossible replicas.
        """
        if not isinstance(given, World | None):
            raise ConfigError(f"world: got {given!r}, wanted World(rank, size) or None.")
        if given is not None and data_parallel is not None:
            raise ConfigError(
                "Got world= and data_parallel=, which both set the rank whose batches this process "
                "gets. Pass one of them."
            )
        self.is_given = given is not None
        self._replica = _checked_replica(data_parallel)
        self.world = self._placed(None) if given is None else given
        self.doubt: PlanError | None = None
        self._was_found = self.is_given
        if given is None:
            try:
                found = World.find()
            except PlanError as error:
                self.doubt = error
            else:
                self._set_found(found)

    @property
    def is_of_group(self) -> bool:
        """True if the world's ranks are those of torch's process group, so that they exchange
        facts."""
        return not self.is_given or self.world.place is not None

    def settle(self, *, has_begun: bool) -> None:
        """Search for the world again. has_begun: the loader has delivered batches.

        Raises PlanError if the world still isn't known, or if it changed under a loader that has
        begun.
        """
        if self.is_given:
            return
        found = World.find()
        now, before = self._placed(found), self.world
        has_changed = (now.rank, now.size) != (before.rank, before.size)
        if has_changed and has_begun and self._was_found:
            raise PlanError(
                f"This loader has begun as rank {before.rank} of {before.size}, but this process "
                f"is now rank {now.rank} of {now.size}: samples would repeat or go missing. Make "
                "a loader for the new world and load this one's state_dict() into it, or pass "
                "world=."
            )
        if has_changed or self.doubt is not None or not has_begun:
            self._set_found(found)

    def _set_found(self, found: World | None) -> None:
        self.world = self._placed(found)
        self._was_found = found is not None
        self.doubt = None

    def _placed(self, found: World | None) -> World:
        """Return the world that was found, with the replica that the user passed."""
        if self._replica is None:
            return World(0, 1) if found is None else found
        rank, size = self._replica
        return World(rank, size) if found is None else found.with_replicas(rank, size)


def _checked_replica(replica: object) -> tuple[int, int] | None:
    if replica is None:
        return None
    if not isinstance(replica, (tuple, list)) or len(replica) != 2:
        hint = ' For a torch DeviceMesh pass world=World.from_mesh(mesh["dp"]).'
        raise ConfigError(
            f"data_parallel: got {type(replica).__name__}, wanted (rank, size) of this process's "
            f"replica.{hint if hasattr(replica, 'mesh') else ''}"
        )
    world = World(*replica)  # checks both numbers
    return world.rank, world.size


class LoaderArguments:
    """The arguments of a loader, and the world, the device and the seed that follow from them so
    far.

    torch_options, own: torch's arguments and Penstock's, as passed. seed: known once it is chosen.
    """

    def __init__(
        self,
        torch_options: TorchOptions,
        own: PenstockOptions,
        *,
        world: World | None,
        data_parallel: tuple[int, int] | None = None,
    ) -> None:
        """Search for the world, unless the user passed it, and for this rank's device.

        Raises ConfigError for a device that this machine doesn't have.
        """
        self.torch_options = torch_options
        self.own = own
        self.seed = LoaderSeed(given=own.seed)
        self._late_world = LateWorld(world, data_parallel=data_parallel)
        self.device, self._device_world = self._own_device(), self.world

    @property
    def world(self) -> World:
        """Rank and size, as far as they are known."""
        return self._late_world.world

    @property
    def agrees(self) -> bool:
        """True if the world is that of torch's process group, so that its ranks exchange facts."""
        return self._late_world.is_of_group

    @property
    def world_is_known(self) -> bool:
        """True unless other processes exist whose ranks aren't known yet."""
        return self._late_world.doubt is None

    def choose_seed(self, generator: torch.Generator | None, *, draws: bool) -> None:
        """Draw a seed for this rank if the user passed none.

        generator: to draw it from; None is torch's default one. draws: False draws none, because
        nothing depends on it.
        """
        self.seed = LoaderSeed.choose(self.own.seed, generator, draws=draws)

    def settle(self, *, is_shared: bool, has_begun: bool, must_be_known: bool) -> None:
        """Search for the world again.

        is_shared: Penstock shares the samples out over the ranks. has_begun: the loader has
        delivered batches. Raises what `LateWorld.settle` raises if the world must be known, and
        ConfigError for a device that this rank doesn't have.
        """
        late = self._late_world
        if is_shared or self.own.seed is not None or self.own.augment is not None:
            try:
                late.settle(has_begun=has_begun)
            except PlanError:
                if must_be_known:
                    raise
        else:  # torch distributes the samples; Penstock only warns
            with contextlib.suppress(PlanError):
                late.settle(has_begun=False)
        if self.world != self._device_world:
            self.device, self._device_world = self._own_device(), self.world

    def rejoined(self, world: World, *, seed: int) -> LoaderArguments:
        """Return the arguments for another world, with the job's batches and seed and this rank's
        device.

        world: if it has no place on a node, this process keeps its own.
        """
        before = self.world
        if world.local_size == 1 and before.local_size <= world.processes:
            world = replace(world, local_rank=before.local_rank, local_size=before.local_size)
        arguments = copy(self)
        arguments.torch_options = replace(self.torch_options, batch_size=1)
        arguments.own = replace(self.own, global_batch_size=None)
        arguments.seed = LoaderSeed(given=seed)
        arguments._late_world = LateWorld(world)
        arguments._device_world = world  # the device stays
        return arguments

    def _own_device(self) -> torch.device:
        place = self.world.local_rank or local_rank()
        return parse_device(self.own.device, local_rank=place)

    def native(self, live: Mapping[str, Any]) -> NativeOptions:
        """Return the options of a native engine. live: torch's arguments that were set since, by
        name.

        Raises ConfigError and PlanError for arguments that don't fit a native dataset or the world.
        """
        return NativeOptions.of(
            replace(self.torch_options, **live),
            self.own,
            seed=self.seed,
            world=self.world,
            agrees=self.agrees,
            device=self.device,
        )
