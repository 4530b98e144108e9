"""From checked options to a run: index, plan, walk, recipe, graph; tied here only."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
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
from penstock.pipeline.feed.resident.room import resident_bytes, room_for, share_of_rank
from penstock.pipeline.feed.run import Run
from penstock.pipeline.plan.advice import advice
from penstock.pipeline.plan.order import Plan, default_lanes, default_window
from penstock.pipeline.plan.partners import PARTNERS_ELSEWHERE
from penstock.pipeline.plan.state import PlanSettings
from penstock.pipeline.plan.steps import Walk
from penstock.pipeline.report.facts import ShardFacts
from penstock.pipeline.report.meter import Meter

if TYPE_CHECKING:
    from penstock.pipeline.options.native_options import NativeOptions
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
class Built:
    """A loader's parts. fingerprint: of dataset and plan, hex."""

    run: Run
    walk: Walk
    meter: Meter
    frozen: PlanSettings
    fingerprint: str


def build(dataset: Dataset, options: NativeOptions, *, frozen: PlanSettings | None = None) -> Built:
    """Open the dataset, freeze the plan and build the graph; nothing is read yet.

    frozen: the plan of a state, taken over as it is. Raises what DataLoader's constructor
    documents.
    """
    index = dataset.index
    is_new = frozen is None
    frozen = frozen or freeze_plan(index, options)
    plan = make_plan(index, frozen)
    if is_new:
        _warn_of_the_plan(index, options, plan)
    walk = make_walk(dataset, options)
    agreement = (
        join(
            dataset=index.fingerprint,
            shuffle=frozen.shuffle,
            rank=options.world.rank,
            size=options.world.size,
        )
        if options.agrees
        else Agreement(rank=options.world.rank, size=options.world.size)
    )
    fingerprint = order_fingerprint(index, frozen)
    check_same_plan(agreement, plan=fingerprint, seed=frozen.seed, size=options.world.size)
    threads = options.threads or options.world.threads(usable_cores())
    recipe = _recipe(dataset, options)
    mixer = _mixer(dataset, options, recipe, seed=frozen.seed)
    store = _store(dataset, options, frozen, recipe, walk=walk, threads=threads)
    graph = _graph(recipe, options, threads, store) if recipe else None
    meter = _meter(dataset, options, recipe, threads=threads)
    if isinstance(graph, ResidentGraph):
        meter.resident = graph.facts
    reader = BatchReader(
        dataset=dataset,
        probe=meter.probe,
        plan=plan,
        recipe=recipe,
        draw_seed=frozen.seed,
        world=options.world,
        global_batch=walk.global_batch,
        padded_size=options.sizes.per_rank if options.pad else None,
        mixer=mixer,
        mode=options.read,
        bad_samples=BadSamples(
            dataset,
            seed=frozen.seed,
            max_bad=options.max_bad,
            agreement=agreement,
            report=QuarantineFile(
                dataset.kept_folder,
                name=f"{index.fingerprint[:16]}-rank-{options.world.rank:05d}.jsonl",
            ),
            meter=meter,
        ),
        resident=store,
    )
    try:
        prefetch = _prefetch(dataset, options, frozen, walk)
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
        depth=options.depth,
        endless=frozen.shuffle,
        meter=meter,
        read_threads=_read_threads(dataset, options),
        made_ahead=graph is not None and options.device.type == "cpu",
        prefetch=prefetch,
        timeout_s=options.timeout_s or STALL_TIMEOUT_S,
        finish=Finish(dataset.fields, mixer=mixer, device=options.device, pins=options.pin_memory),
    )
    return Built(run=run, walk=walk, meter=meter, frozen=frozen, fingerprint=fingerprint)


def check(dataset: Dataset, options: NativeOptions) -> PlanSettings:
    """The plan that `build` would freeze, with every check that needs no thread, no graph and no
    other rank: for a loader whose world isn't known yet. Raises what `build` raises."""
    frozen = freeze_plan(dataset.index, options)
    make_walk(dataset, options)
    _mixer(dataset, options, _recipe(dataset, options), seed=frozen.seed)
    return frozen


def make_walk(dataset: Dataset, options: NativeOptions) -> Walk:
    """The steps of a job's epochs. Raises PlanError where an epoch would have none."""
    walk = Walk(
        samples=dataset.index.samples,
        global_batch=options.sizes.global_batch,
        drop_last=options.drop_last,
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
    dataset: Dataset, options: NativeOptions, recipe: CheckedRecipe | None, *, threads: int
) -> Meter:
    index = dataset.index
    # Of a folder each image is a file, or an object, of its own.
    count = index.files
    return Meter(
        decode_threads=threads,
        device=str(options.device),
        usable_cores=options.world.threads(usable_cores()),
        url=dataset.url,
        shards=ShardFacts(
            count=count, mean_bytes=float(index.shard_bytes.sum()) / count, kind=index.kind
        ),
        output=recipe.shape[1:] if recipe is not None else None,
    )


def _read_threads(dataset: Dataset, options: NativeOptions) -> int:
    if dataset.remote is not None:
        return REMOTE_READ_THREADS
    mapped = not dataset.index.format.is_file_per_sample and options.read != "pread"
    return MAPPED_READ_THREADS if mapped else READ_THREADS


def _prefetch(
    dataset: Dataset, options: NativeOptions, frozen: PlanSettings, walk: Walk
) -> Prefetch | None:
    """Joins the cache; None for a local dataset."""
    if dataset.remote is None:
        return None
    return Prefetch(
        dataset.remote,
        dataset,
        make_plan(dataset.index, frozen),
        walk=walk,
        world=options.world,
        frozen=frozen,
        least_ahead=options.depth + PREPARED_AHEAD,
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


def freeze_plan(index: Index, options: NativeOptions) -> PlanSettings:
    """Plan settings for a job's first start: the user's, else from dataset and global batch."""
    spelt_out = options.plan
    spelt_out.check_order(shuffle=options.shuffle)
    if not options.shuffle:
        return PlanSettings(seed=options.seed, shuffle=False, lanes=1, window=1, reshuffle=0.0)
    return shuffled_plan(
        index,
        seed=options.seed,
        global_batch=options.sizes.global_batch,
        lanes=spelt_out.lanes,
        window=spelt_out.window,
        reshuffle=float(spelt_out.reshuffle),
    )


def shuffled_plan(
    index: Index,
    *,
    seed: int,
    global_batch: int,
    lanes: int | None = None,
    window: int | None = None,
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


def _warn_of_the_plan(index: Index, options: NativeOptions, plan: Plan) -> None:
    """What the order costs this job, told once: by the first rank."""
    world = options.world
    if world.rank or not options.shuffle:
        return
    words = advice(
        plan,
        icc=index.icc,
        global_batch=options.sizes.global_batch,
        ranks=world.size,
        nodes=-(-world.size // world.local_size),
        chosen=options.plan.lanes is None,
    )
    for one in words:
        warnings.warn(one, PenstockWarning, stacklevel=4)


def _recipe(dataset: Dataset, options: NativeOptions) -> CheckedRecipe | None:
    if "image" not in dataset.fields:
        if options.augment is not None:
            raise ConfigError(
                f"augment= needs images, but fields={dataset.fields!r} leaves them out. Drop "
                'augment=, or add "image" to the dataset\'s fields.'
            )
        return None
    return check_recipe(options.augment, images=dataset.index.images)


def _mixer(
    dataset: Dataset, options: NativeOptions, recipe: CheckedRecipe | None, *, seed: int
) -> Mixer | None:
    if recipe is None or not recipe.mixing:
        return None
    name = type(recipe.mixing[0]).__name__
    if "label" not in dataset.fields:
        raise ConfigError(
            f"{name} mixes labels with the images, but fields={dataset.fields!r} leaves them out. "
            f'Drop {name}, or add "label" to the dataset\'s fields.'
        )
    if options.pad:
        raise ConfigError(
            f'Got {name} and pad="mask": a padded batch is for evaluation, which wants each sample '
            f"as it is. Drop {name}, or pass drop_last=True in place of pad=."
        )
    return mixer_of(recipe, classes=len(dataset.classes) or None, seed=seed)


def _store(
    dataset: Dataset,
    options: NativeOptions,
    frozen: PlanSettings,
    recipe: CheckedRecipe | None,
    *,
    walk: Walk,
    threads: int,
) -> Store | None:
    """Where decoded images stay; None where none do. Raises ConfigError where that was asked for
    and can't be."""
    mode, world, device = options.resident, options.world, options.device
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
        batch_size=options.sizes.per_rank,
        depth=options.depth,
    )
    max_bytes = resident_bytes(
        mode,
        room,
        dataset.index,
        recipe,
        share=share_of_rank(frozen, global_batch=walk.global_batch, world=world),
        cuda=device.type == "cuda",
        fed_samples=options.sizes.per_rank * options.depth,
    )
    if max_bytes is None:
        return None
    return Store(
        recipe,
        samples=dataset.index.samples,
        max_bytes=max_bytes,
        threads=threads,
        device=device,
        deterministic=options.deterministic,
    )


def _graph(
    recipe: CheckedRecipe, options: NativeOptions, threads: int, store: Store | None
) -> Graph | ResidentGraph:
    alone = options.world.size == 1 or not recipe.mixing

    def make(*, resident: bool = False) -> Graph:
        return Graph(
            recipe,
            batch_size=options.sizes.per_rank + (0 if alone else PARTNERS_ELSEWHERE),
            threads=threads,
            device=options.device.type,
            device_id=options.device.index,
            deterministic=options.deterministic,
            resident=resident,
        )

    if store is None:
        return make()
    return ResidentGraph(store, kept=make(resident=True), make_plain=make)
