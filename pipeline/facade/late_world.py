"""The world of a loader, which may become known only after the loader was made.

A trainer's launcher may start the process group between the loader's construction and its first
batch, and tell its children less than their rank before (Lightning's does). So a loader keeps its
arguments as they were given, and works them out for a world when there is one.
"""

from __future__ import annotations

from penstock.cache.errors import ConfigError, PlanError
from penstock.pipeline.plan.world import World


class LateWorld:
    """The world of one loader: as it was given, or as it was found when last looked for.

    world: what is known so far; World(0, 1) where nobody said anything. is_given: by the user.
    doubt: why it can't be known yet, though there is more than this process; None: it is known.
    """

    def __init__(
        self, given: World | None, *, data_parallel: tuple[int, int] | None = None
    ) -> None:
        """data_parallel: rank and size among the replicas of a model that several processes share.

        Raises ConfigError for both at once, and PlanError for replicas that can't be."""
        if not isinstance(given, World | None):
            raise ConfigError(f"world: got {given!r}, wanted World(rank, size) or None.")
        if given is not None and data_parallel is not None:
            raise ConfigError(
                "world= and data_parallel= both say whose batches this process gets: pass one."
            )
        self.is_given = given is not None
        self._replica = _checked(data_parallel)
        self.world = self._placed(None) if given is None else given
        self.doubt: PlanError | None = None
        self._was_found = self.is_given
        if given is None:
            found = None
            try:
                found = World.find()
            except PlanError as error:
                self.doubt = error
            if self.doubt is None:
                self._take(found)

    @property
    def is_of_group(self) -> bool:
        """Whether other processes of torch's group are told of: the world wasn't given, or says
        which of their processes this is."""
        return not self.is_given or self.world.place is not None

    def settle(self, *, has_begun: bool) -> None:
        """Look for the world again. has_begun: batches were handed out.

        Raises PlanError where it still can't be known, and where one that was found became another
        under a loader that has begun.
        """
        if self.is_given:
            return
        found = World.find()
        now, before = self._placed(found), self.world
        has_changed = (now.rank, now.size) != (before.rank, before.size)
        if has_changed and has_begun and self._was_found:
            raise PlanError(
                f"This loader has begun as rank {before.rank} of {before.size}, and this process "
                f"is rank {now.rank} of {now.size} now: samples would repeat or go missing. Make "
                "a loader for the new world and hand it this one's state_dict(), or pass world=."
            )
        if has_changed or self.doubt is not None or not has_begun:
            self._take(found)

    def _take(self, found: World | None) -> None:
        self.world = self._placed(found)
        self._was_found = found is not None
        self.doubt = None

    def _placed(self, found: World | None) -> World:
        """A world that was found, as one of the replica that the user named."""
        if self._replica is None:
            return World(0, 1) if found is None else found
        rank, size = self._replica
        return World(rank, size) if found is None else found.with_replicas(rank, size)


def _checked(replica: object) -> tuple[int, int] | None:
    if replica is None:
        return None
    if not isinstance(replica, (tuple, list)) or len(replica) != 2:
        hint = ' For a torch DeviceMesh pass world=World.from_mesh(mesh["dp"]).'
        raise ConfigError(
            f"data_parallel: got {type(replica).__name__}, wanted (rank, size) of this process's "
            f"replica.{hint if hasattr(replica, 'mesh') else ''}"
        )
    rank, size = replica
    world = World(rank, size)  # checks them
    return world.rank, world.size
