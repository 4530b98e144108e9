"""The world of a loader, which may become known only after the loader was made.

A trainer's launcher may start the process group between the loader's construction and its first
batch, and tell its children less than their rank before (Lightning's does). So a loader keeps its
arguments as they were given, and works them out for a world when there is one.
"""

from __future__ import annotations

from penstock.cache.errors import PlanError
from penstock.pipeline.plan.world import World


class LateWorld:
    """The world of one loader: as it was given, or as it was found when last looked for.

    world: what is known so far; World(0, 1) where nobody said anything. is_given: by the user.
    doubt: why it can't be known yet, though there is more than this process; None: it is known.
    """

    def __init__(self, given: World | None) -> None:
        self.is_given = given is not None
        self.world = World(0, 1) if given is None else given
        self.doubt: PlanError | None = None
        self._was_found = self.is_given
        if given is None:
            try:
                self._take(World.find())
            except PlanError as error:
                self.doubt = error

    def settle(self, *, has_begun: bool) -> None:
        """Look for the world again. has_begun: batches were handed out.

        Raises PlanError where it still can't be known, and where one that was found became another
        under a loader that has begun.
        """
        if self.is_given:
            return
        found = World.find()
        now, before = found or World(0, 1), self.world
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
        self.world = World(0, 1) if found is None else found
        self._was_found = found is not None
        self.doubt = None
