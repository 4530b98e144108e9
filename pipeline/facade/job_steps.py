"""What a loader says and does by the numbers of a job's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError
from penstock.cache.job_store import JobStore
from penstock.pipeline.facade.late_attributes import AS_GIVEN
from penstock.pipeline.feed.native import NativeEngine
from penstock.pipeline.options.checks import check_count
from penstock.pipeline.plan.world import World

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.pipeline.facade.arguments import LoaderArguments


class JobSteps:
    """A loader's methods that count global batches since the job's start, on all ranks alike.

    It is a part of `DataLoader`, which has what stands in its first lines.
    """

    _engine: Any
    _arguments: LoaderArguments
    if TYPE_CHECKING:

        def _settle(self, *, begins: bool) -> None: ...
        def _show(self, batch_size: int | None) -> None: ...

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

    def rejoin(self, world: World, *, step: int, store: Any = None) -> None:
        """Go on at a global batch of the job as a rank of another world, without a restart.

        All ranks of the new world call it with the same step, the number of the next global batch:
        one that was handed out but never committed, or one ahead. Global batches stay the job's,
        also where `batch_size` was given, so a rank may get more or fewer samples of each. An
        iterator that runs goes on there if the step is in its epoch, else it ends, and the next one
        begins there. It costs the same for any step.

        world: rank and size, from World.detect() or from whatever manages the ranks.
        store: any of torch's stores that all of the new ranks reach, of these ranks alone (a
        PrefixStore of the quorum): through it they compare what they read, and agree on what their
        caches hold. None: the ranks before are compared with if their store still answers, and who
        reads what stays; so a process that is new must have loaded another one's state_dict().
        A process that is new makes its loader, loads such a state and calls this.

        Native datasets only. Raises ConfigError and PlanError for a world or a step that can't be,
        for a global batch below the world, and where ranks differ; StalledError naming the ranks
        that don't come to the store. The loader is then unchanged.
        """
        if not isinstance(world, World):
            raise ConfigError(f"rejoin: got {world!r}, wanted World(rank, size).")
        step = check_count("step", step, least=0)
        if store is not None and not hasattr(store, "compare_set"):
            raise ConfigError(
                f"rejoin: got store={store!r}, wanted one of torch.distributed's stores, such as "
                "PrefixStore(quorum, store), or None."
            )
        engine = self._numbered("rejoin")
        arguments = self._arguments.rejoined(world, seed=engine.options.seed)
        live = {name: getattr(self, name) for name in AS_GIVEN}
        job_store = None if store is None else JobStore.of(store)
        engine.rejoin(arguments.native(live), step=step, store=job_store)
        self._arguments = arguments
        self._show(engine.batch_size)

    def _steps_of_plan(self, name: str) -> NativeEngine:
        """The engine that numbers steps, for the world as it is now."""
        engine = self._numbered(name)
        if not engine.has_begun:
            self._settle(begins=False)
        return engine

    def _numbered(self, name: str) -> NativeEngine:
        engine = self._engine
        if not isinstance(engine, NativeEngine):
            raise ConfigError(
                f"loader.{name} works on native datasets (penstock.Dataset), and this is a torch "
                "dataset, whose state keeps no history of its batches. Count its steps in your "
                "loop, or point penstock.Dataset at the files."
            )
        return engine
