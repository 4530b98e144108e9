"""The seed of a loader's order and random draws: the user's, or one drawn as torch does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from penstock.pipeline.plan.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSeed:
    """A loader's seed, as given or as drawn from torch's generator when the loader was made.

    drawn: each rank has its own, so it orders samples in a world of one rank only.
    """

    given: int | None
    drawn: int | None = None

    @classmethod
    def choose(
        cls, given: int | None, generator: torch.Generator | None, *, draws: bool
    ) -> LoaderSeed:
        """The user's seed; without one it is drawn, if anything follows from it.

        draws: whether anything does.
        """
        if given is not None or not draws:
            return cls(given=given)
        import torch

        drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
        return cls(given=given, drawn=int(drawn.item()))

    def in_world(self, world: World, *, draws: bool) -> int:
        """The seed for a world. draws: whether anything follows from it; otherwise it is 0.

        Raises ConfigError where several ranks would each draw their own.
        """
        if self.given is not None:
            return int(self.given)
        if not draws:
            return 0
        if self.drawn is None or world.size > 1:
            raise ConfigError(
                f"shuffle=True on {world.size} ranks needs seed=: without it each rank would draw "
                "its own order, and samples would repeat and go missing. Pass the same seed on "
                "every rank."
            )
        return self.drawn
