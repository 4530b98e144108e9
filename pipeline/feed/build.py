"""From checked settings to a run: index, plan, walk, recipe, graph; tied here only."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.augment.graph import Graph
from penstock.augment.mixing import Mixer, mixer_of
from penstock.augment.recipe import CheckedRecipe, check_recipe
from penstock.cache.base.limits import usable_cores
from penstock.cache.errors import ConfigError, PenstockError, PenstockWarning, PlanError
from penstock.cache.outcomes import STALL_TIMEOUT_S
from penstock.pipeline.feed.agreement import Agreement, check_same_plan, join
from penstock.pipeline.feed.bad_samples import BadSamples
from penstock.pipeline.feed.batches import BatchReader
from penstock.pipeline.feed.decoding import PREPARED_AHEAD
from penstock.pipeline.feed.finish import Finish
from penstock.pipeline.feed.prefetch import Prefetch
from penstock.pipeline.feed.quarantine import QuarantineFile
from penstock.pipeline.feed.resident.graph import ResidentGraph
from penstock.pipeline.feed.resident.images import Store
from penstock.pipeline.feed.resident.room import (
    ResidentMode,
    resident_bytes,
    room_for,
    share_of_rank,
)
from penstock.pipeline.feed.run import Run
from penstock.pipeline.options.arguments import BatchSizes, batch_sizes
from penstock.pipeline.plan.advice import advice
from penstock.pipeline.plan.order import Plan, default_lanes, default_window
from penstock.pipeline.plan.partners import PARTNERS_ELSEWHERE
from penstock.pipeline.plan.state import LoaderState, PlanSettings
from penstock.pipeline.plan.steps import Walk
from penstock.pipeline.report.facts import Shards
from penstock.pipeline.report.statistics import Meter

if TYPE_CHECKING:
    import torch

    from penstock.augment import Operation
    from penstock.cache.base.blob import ReadMode
    from penstock.pipeline.plan.world import World
    from penstock.readers import Dataset
    from penstock.readers.index.index import Index

# Threads that read ahead. From a mapped pack one thread checks 4 GB/s of warm pages and reads cold
# ones ahead; a second spends a third more CPU time to be no faster. Files and downloads wait, so
# there several wait at once.
MAPPED_READ_THREADS = 1
READ_THREADS = 4
# A thread reads a batch; of a remote as many batches as hide its latency, up to so many.
REMOTE_READ_THREADS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asked for, checked. wanted: plan settings that were spelt out.

    threads: decode threads, 0 for this rank's share of the cores. depth: batches in DALI.
    agrees: the world is that of torch's process group, so its ranks compare plans and count bad
    samples together. resident: whether decoded images stay in memory. pin_memory: of what is
    handed out on the CPU.
    """

    world: World
    sizes: BatchSizes
    wanted: dict[str, int | float]
    seed: int
    shuffle: bool
    drop_last: bool
    pad: bool
    augment: tuple[Operation, ...] | None
    device: torch.device
    deterministic: bool
    threads: int
    depth: int
    timeout_s: float
    mode: ReadMode
    max_bad: float = 0.001
    agrees: bool = False
    resident: ResidentMode = False
    pin_memory: bool = False

    def resumed(self, state: LoaderState, *, take_batch: bool) -> Settings:
        """Settings to go on from a state. take_batch: nobody gave a batch size, so the state's.

        Warns of what differs from the saved job from here on.
        """
        sizes = batch_sizes(1, state.global_batch_size, self.world) if take_batch else self.sizes
        self._warn_of_other_ends(state, global_batch=sizes.global_batch)
        if self.sizes.global_batch != state.global_batch_size and not take_batch:
            warnings.warn(
                f"The global batch goes from {state.global_batch_size} to "
                f"{self.sizes.global_batch} samples with this state: no sample is lost, but "
                "batches differ from the saved job's. For identical ones pass "
                f"global_batch_size={state.global_batch_size}.",
                PenstockWarning,
                stacklevel=3,
            )
        return replace(self, seed=state.plan.seed, sizes=sizes)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A loader's parts. fingerprint: of dataset and plan, hex."""

    run: Run
    walk: Walk
    meter: Meter
    frozen: PlanSettings
    fingerprint: str


def build(dataset: Dataset, settings: Settings, *, frozen: PlanSettings | None = None) -> Built:
    """Open the dataset, freeze the plan and build the graph; nothing is read yet.

    frozen: the plan of a state, taken over as it is. Raises what DataLoader's constructor
    documents.
    """
    index = dataset.index
    is_new = frozen is None
    frozen = frozen or freeze_plan(index, settings)
    plan = make_plan(index, frozen)
    if is_new:
        _warn_of_the_plan(index, settings, plan)
    walk = make_walk(dataset, settings)
    agreement = (
        join(
            dataset=index.fingerprint,
            shuffle=frozen.shuffle,
            rank=settings.world.rank,
            size=settings.world.size,
        )
        if settings.agrees
        else Agreement(rank=settings.world.rank, size=settings.world.size)
    )
    fingerprint = order_fingerprint(index, frozen)
    check_same_plan(agreement, plan=fingerprint, seed=frozen.seed, size=settings.world.size)
    threads = settings.threads or settings.world.threads(usable_cores())
    recipe = _recipe(dataset, settings)
    mixer = _mixer(dataset, settings, recipe, seed=frozen.seed)
    store = _store(dataset, settings, frozen, recipe, walk=walk, threads=threads)
    graph = _graph(recipe, settings, threads, store) if recipe else None
    meter = _meter(dataset, settings, recipe, threads=threads)
    if isinstance(graph, ResidentGraph):
        meter.resident = graph.facts
    reader = BatchReader(
        dataset=dataset,
        probe=meter.probe,
        plan=plan,
        recipe=recipe,
        draw_seed=frozen.seed,
        world=settings.world,
        global_batch=walk.global_batch,
        padded_size=settings.sizes.per_rank if settings.pad else None,
        mixer=mixer,
        mode=settings.mode,
        bad_samples=BadSamples(
            dataset,
            seed=frozen.seed,
            max_bad=settings.max_bad,
            agreement=agreement,
            report=QuarantineFile(
                dataset.kept_folder,
                name=f"{index.fingerprint[:16]}-rank-{settings.world.rank:05d}.jsonl",
            ),
            meter=meter,
        ),
        resident=store,
    )
    try:
        prefetch = _prefetch(dataset, settings, frozen, walk)
    except PenstockError:
        if graph is not None:
            graph.close()
        raise
    if prefetch is not None:
        meter.remote = prefetch.facts
    run = Run(
        reader=reader,
        walk=walk,
        graph=graph,
        depth=settings.depth,
        endless=frozen.shuffle,
        meter=meter,
        read_threads=_read_threads(dataset, settings),
        made_ahead=graph is not None and settings.device.type == "cpu",
        prefetch=prefetch,
        timeout_s=settings.timeout_s or STALL_TIMEOUT_S,
        finish=Finish(
            dataset.fields, mixer=mixer, device=settings.device, pins=settings.pin_memory
        ),
    )
    return Built(run=run, walk=walk, meter=meter, frozen=frozen, fingerprint=fingerprint)


def check(dataset: Dataset, settings: Settings) -> PlanSettings:
    """The plan that `build` would freeze, with every check that needs no thread, no graph and no
    other rank: for a loader whose world isn't known yet. Raises what `build` raises."""
    frozen = freeze_plan(dataset.index, settings)
    make_walk(dataset, settings)
    _mixer(dataset, settings, _recipe(dataset, settings), seed=frozen.seed)
    return frozen


def make_walk(dataset: Dataset, settings: Settings) -> Walk:
    """The steps of a job's epochs. Raises PlanError where an epoch would have none."""
    walk = Walk(
        samples=dataset.index.samples,
        global_batch=settings.sizes.global_batch,
        drop_last=settings.drop_last,
    )
    if not len(walk):
        raise PlanError(
            f"One global batch of {walk.global_batch} samples is more than the {walk.samples} of "
            f"{dataset!r}, and drop_last=True drops it: an epoch would have no step. Pass a "
            "smaller batch or drop_last=False."
        )
    return walk


def order_fingerprint(index: Index, frozen: PlanSettings) -> str:
    """Of dataset and order, hex: what a resumed job must share."""
    plan = make_plan(index, frozen)
    return hashlib.sha256(f"{index.fingerprint} {plan.fingerprint}".encode()).hexdigest()


def _meter(
    dataset: Dataset, settings: Settings, recipe: CheckedRecipe | None, *, threads: int
) -> Meter:
    index = dataset.index
    # Of a folder each image is a file, or an object, of its own.
    count = index.samples if index.kind == "folder" else len(index.sizes)
    return Meter(
        decode_threads=threads,
        device=str(settings.device),
        usable_cores=settings.world.threads(usable_cores()),
        url=dataset.url,
        shards=Shards(
            count=count, mean_bytes=float(index.shard_bytes.sum()) / count, kind=index.kind
        ),
        output=recipe.shape[1:] if recipe is not None else None,
    )


def _read_threads(dataset: Dataset, settings: Settings) -> int:
    if dataset.remote is not None:
        return REMOTE_READ_THREADS
    mapped = dataset.index.kind != "folder" and settings.mode != "pread"
    return MAPPED_READ_THREADS if mapped else READ_THREADS


def _prefetch(
    dataset: Dataset, settings: Settings, frozen: PlanSettings, walk: Walk
) -> Prefetch | None:
    """Joins the cache; None for a local dataset."""
    if dataset.remote is None:
        return None
    return Prefetch(
        dataset.remote,
        dataset,
        make_plan(dataset.index, frozen),
        walk=walk,
        world=settings.world,
        frozen=frozen,
        least_ahead=settings.depth + PREPARED_AHEAD,
    )


def make_plan(index: Index, frozen: PlanSettings) -> Plan:
    """The order of a job. Each walker takes a plan of its own: a plan remembers the windows of one
    place only, and two places on one plan would compute them over and over."""
    return Plan(
        index.sizes,
        seed=frozen.seed if frozen.shuffle else None,
        lanes=frozen.lanes,
        window=frozen.window,
        reshuffle=frozen.reshuffle,
    )


def freeze_plan(index: Index, settings: Settings) -> PlanSettings:
    """Plan settings for a job's first start: the user's, else from dataset and global batch."""
    wanted, batch = settings.wanted, settings.sizes.global_batch
    if not settings.shuffle:
        for name in ("lanes", "window", "reshuffle"):
            if name in wanted:
                raise ConfigError(
                    f"{name}={wanted[name]} has no meaning with shuffle=False: samples come in "
                    "index order. Drop it, or pass shuffle=True."
                )
        return PlanSettings(seed=settings.seed, shuffle=False, lanes=1, window=1, reshuffle=0.0)
    return shuffled_plan(
        index,
        seed=settings.seed,
        global_batch=batch,
        lanes=wanted.get("lanes"),
        window=wanted.get("window"),
        reshuffle=wanted.get("reshuffle", 0.0),
    )


def shuffled_plan(
    index: Index,
    *,
    seed: int,
    global_batch: int,
    lanes: float | None = None,
    window: float | None = None,
    reshuffle: float = 0.0,
) -> PlanSettings:
    """Plan settings of a shuffled job: what isn't given follows from dataset and global batch."""
    shards = int(np.count_nonzero(index.sizes))
    lanes = int(lanes or default_lanes(global_batch, shards))
    window = int(
        window
        or default_window(
            shards, lanes, global_batch=global_batch, icc=index.icc, shuffled=index.shuffled
        )
    )
    return PlanSettings(seed=seed, shuffle=True, lanes=lanes, window=window, reshuffle=reshuffle)


def _warn_of_the_plan(index: Index, settings: Settings, plan: Plan) -> None:
    """What the order costs this job, told once: by the first rank."""
    world = settings.world
    if world.rank or not settings.shuffle:
        return
    words = advice(
        plan,
        icc=index.icc,
        global_batch=settings.sizes.global_batch,
        ranks=world.size,
        nodes=-(-world.size // world.local_size),
        chosen="lanes" not in settings.wanted,
    )
    for one in words:
        warnings.warn(one, PenstockWarning, stacklevel=4)


def _recipe(dataset: Dataset, settings: Settings) -> CheckedRecipe | None:
    if "image" not in dataset.fields:
        if settings.augment is not None:
            raise ConfigError(
                f"augment= needs images, but fields={dataset.fields!r} leaves them out. Drop "
                'augment=, or add "image" to the dataset\'s fields.'
            )
        return None
    return check_recipe(settings.augment, images=dataset.index.images)


def _mixer(
    dataset: Dataset, settings: Settings, recipe: CheckedRecipe | None, *, seed: int
) -> Mixer | None:
    if recipe is None or not recipe.mixing:
        return None
    name = type(recipe.mixing[0]).__name__
    if "label" not in dataset.fields:
        raise ConfigError(
            f"{name} mixes labels with the images, but fields={dataset.fields!r} leaves them out. "
            f'Drop {name}, or add "label" to the dataset\'s fields.'
        )
    if settings.pad:
        raise ConfigError(
            f'Got {name} and pad="mask": a padded batch is for evaluation, which wants each sample '
            f"as it is. Drop {name}, or pass drop_last=True in place of pad=."
        )
    return mixer_of(recipe, classes=len(dataset.classes) or None, seed=seed)


def _store(
    dataset: Dataset,
    settings: Settings,
    frozen: PlanSettings,
    recipe: CheckedRecipe | None,
    *,
    walk: Walk,
    threads: int,
) -> Store | None:
    """Where decoded images stay; None where none do. Raises ConfigError where that was asked for
    and can't be."""
    mode, world, device = settings.resident, settings.world, settings.device
    if mode is False:
        return None
    if recipe is None:
        if mode is True:
            raise ConfigError(
                f"resident=True keeps decoded images, and fields={dataset.fields!r} leaves them "
                'out. Drop resident=, or add "image" to the fields of the dataset.'
            )
        return None
    room = room_for(
        mode,
        device=device,
        world=world,
        recipe=recipe,
        batch_size=settings.sizes.per_rank,
        depth=settings.depth,
    )
    max_bytes = resident_bytes(
        mode,
        room,
        dataset.index,
        recipe,
        share=share_of_rank(frozen, global_batch=walk.global_batch, world=world),
        cuda=device.type == "cuda",
        fed_samples=settings.sizes.per_rank * settings.depth,
    )
    if max_bytes is None:
        return None
    return Store(
        recipe,
        samples=dataset.index.samples,
        max_bytes=max_bytes,
        threads=threads,
        device=device,
        deterministic=settings.deterministic,
    )


def _graph(
    recipe: CheckedRecipe, settings: Settings, threads: int, store: Store | None
) -> Graph | ResidentGraph:
    alone = settings.world.size == 1 or not recipe.mixing

    def make(*, resident: bool = False) -> Graph:
        return Graph(
            recipe,
            batch_size=settings.sizes.per_rank + (0 if alone else PARTNERS_ELSEWHERE),
            threads=threads,
            device=settings.device.type,
            device_id=settings.device.index,
            deterministic=settings.deterministic,
            resident=resident,
        )

    if store is None:
        return make()
    return ResidentGraph(store, kept=make(resident=True), make_plain=make)
