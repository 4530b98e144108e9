"""What the user asked a loader for, and the world that it is for, which may become known later.

A trainer's launcher may start the process group between the loader's construction and its first
batch, and tell its children less than their rank before (Lightning's does). So arguments are kept
as they were given, and turned into settings for a world when there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.cache.errors import PlanError
from penstock.pipeline.feed.build import Settings
from penstock.pipeline.options import arguments
from penstock.pipeline.plan.world import World

if TYPE_CHECKING:
    import torch

    from penstock.augment import Operation
    from penstock.cache.base.blob import ReadMode
    from penstock.pipeline.feed.resident.room import ResidentMode


class Whereabouts:
    """The world of one loader: as it was given, or as it was found when last looked for.

    world: what is known so far; World(0, 1) where nobody said anything. is_given: by the user.
    doubt: why it can't be known yet, though there is more than this process; None: it is known.
    """

    def __init__(self, given: World | None) -> None:
        self.is_given = given is not None
        self.world = World(0, 1) if given is None else given
        self.doubt: PlanError | None = None
        self._is_told = self.is_given
        if given is None:
            try:
                self._take(World.told())
            except PlanError as error:
                self.doubt = error

    def settle(self, *, has_begun: bool) -> None:
        """Look again. has_begun: batches were handed out.

        Raises PlanError where the world still can't be known, and where one that was told became
        another under a loader that has begun.
        """
        if self.is_given:
            return
        told = World.told()
        now, before = told or World(0, 1), self.world
        has_changed = (now.rank, now.size) != (before.rank, before.size)
        if has_changed and has_begun and self._is_told:
            raise PlanError(
                f"This loader has begun as rank {before.rank} of {before.size}, and this process "
                f"is rank {now.rank} of {now.size} now: samples would repeat or go missing. Make "
                "a loader for the new world and hand it this one's state_dict(), or pass world=."
            )
        if has_changed or self.doubt is not None or not has_begun:
            self._take(told)

    def _take(self, told: World | None) -> None:
        self.world = World(0, 1) if told is None else told
        self._is_told = told is not None
        self.doubt = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The loader's own arguments, and those of torch that decide batches, as they were given.

    wanted: plan settings that were spelt out. drawn_seed: what torch's generator gave in a seed's
    place; it holds for one rank only.
    """

    batch_size: Any
    shuffle: bool
    drop_last: bool
    wanted: dict[str, int | float]
    seed: int | None
    augment: tuple[Operation, ...] | None
    global_batch_size: int | None
    pad: Literal["mask"] | None
    max_bad: float
    deterministic: bool
    read: ReadMode
    resident: ResidentMode
    drawn_seed: int | None = None

    def seed_in(self, world: World, *, draws: bool) -> int:
        """The seed of order and draws. draws: whether anything follows from it.

        Raises ConfigError where several ranks would each draw their own.
        """
        if self.seed is None and self.drawn_seed is not None and world.size == 1:
            return self.drawn_seed
        return arguments.choose_seed(self.seed, None, shuffle=draws, world=world)

    @property
    def batch_is_default(self) -> bool:
        """Nobody gave a batch size, so a state may."""
        return self.batch_size == 1 and self.global_batch_size is None

    def native_settings(
        self, where: Whereabouts, *, device: torch.device, live: dict[str, Any]
    ) -> Settings:
        """What a native engine works by in a world. live: the attributes that may be set later.

        Raises ConfigError and PlanError for what doesn't fit the world.
        """
        world = where.world
        arguments.check_ends(world, drop_last=self.drop_last, pad=self.pad)
        sizes = arguments.batch_sizes(self.batch_size, self.global_batch_size, world)
        return Settings(
            world=world,
            sizes=sizes,
            wanted=self.wanted,
            seed=self.seed_in(world, draws=self.shuffle),
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            pad=self.pad is not None,
            augment=self.augment,
            device=device,
            deterministic=self.deterministic,
            threads=live["num_workers"],
            depth=live["prefetch_factor"] or (2 if self.shuffle else 1),
            timeout_s=float(live["timeout"]),
            mode=self.read,
            max_bad=self.max_bad,
            agrees=not where.is_given,
            resident=self.resident,
            pin_memory=bool(live["pin_memory"]),
        )
