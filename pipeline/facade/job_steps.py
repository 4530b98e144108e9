"""What a loader says and does by the numbers of a job's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError
from penstock.pipeline.feed.native import NativeEngine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class JobSteps:
    """A loader's methods that count global batches since the job's start, on all ranks alike."""

    _engine: Any

    @property
    def step(self) -> int:
        """The number of the next global batch, counted from the job's start over all epochs.

        It is in the state, and the same whatever worlds and batches the job was resumed with.
        Native datasets only. Raises PlanError while the world isn't known.
        """
        return self._steps_of_plan("step").step

    def samples_of(self, step: int, *, rank: int | None = None) -> NDArray[np.int64]:
        """Ids of the samples in the global batch of that number, past or future.

        rank: those of one rank of this world; None: of all, in the order in which the ranks take
        slices of them. int64, shape (n,), the caller's own. It costs the same for any step, and no
        reading (`dataset.names` tells the files). Samples that were found bad stand in it as
        planned. Native datasets only. Raises ConfigError, PlanError for what isn't there.
        """
        return self._steps_of_plan("samples_of").samples_of(step, rank=rank)

    def skip(self, steps: int) -> None:
        """Go on so many global batches later, on every rank alike: past a loss that explodes.

        An iterator that runs goes on there if that is in its epoch, else it ends, and the next one
        begins there. What was skipped counts as handed out. Native datasets only. Raises
        ConfigError for a negative number.
        """
        self._steps_of_plan("skip").skip(steps)

    def _settle(self, *, begins: bool) -> None:
        raise NotImplementedError

    def _steps_of_plan(self, name: str) -> NativeEngine:
        """The engine that numbers steps, for the world as it is now."""
        engine = self._engine
        if not isinstance(engine, NativeEngine):
            raise ConfigError(
                f"loader.{name} works on native datasets (penstock.Dataset), and this is a torch "
                "dataset, whose state keeps no history of its batches. Count its steps in your "
                "loop, or point penstock.Dataset at the files."
            )
        if not engine.has_begun:
            self._settle(begins=False)
        return engine
