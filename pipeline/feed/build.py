"""Builds what one loader works with from its options: road, feed, prefetch and meter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.base.limits import usable_cores
from penstock.cache.errors import PenstockError
from penstock.cache.outcomes import STALL_TIMEOUT_S
from penstock.pipeline.feed.bad_count import BadCount
from penstock.pipeline.feed.bad_samples import BadSamples
from penstock.pipeline.feed.draws import BatchDraws
from penstock.pipeline.feed.feed import Feed
from penstock.pipeline.feed.finisher import Finisher
from penstock.pipeline.feed.frozen_order import freeze_order, warn_of_the_order
from penstock.pipeline.feed.image_graph import (
    make_graphs,
    make_mixed,
    make_recipes,
    make_resident,
)
from penstock.pipeline.feed.mapping.fields import mapped_fields
from penstock.pipeline.feed.membership import Membership, join_ranks, refuse_unbuilt
from penstock.pipeline.feed.padding import Pads
from penstock.pipeline.feed.payloads import Payloads
from penstock.pipeline.feed.read_ahead import READ_AHEAD
from penstock.pipeline.feed.read_scale import ReadScale
from penstock.pipeline.feed.reader import BatchReader
from penstock.pipeline.feed.road import Road
from penstock.pipeline.plan.slots import RankOrder
from penstock.pipeline.report.facts import ShardFacts
from penstock.pipeline.report.meter import Meter
from penstock.pipeline.report.quarantine import QuarantineFile
from penstock.readers.blocks import Blocks
from penstock.readers.fields.boxes import BoxChecks, BoxUnits
from penstock.readers.fields.selection import stored_fields

if TYPE_CHECKING:
    from penstock.augment.array_draws import ArrayDraws
    from penstock.augment.field_recipes import FieldRecipes
    from penstock.pipeline.feed.agreement import Agreement
    from penstock.pipeline.feed.job_waits import JobWaits
    from penstock.pipeline.feed.mapping.fields import MappedFields
    from penstock.pipeline.feed.mapping.mapper import Mapper
    from penstock.pipeline.feed.page_locked import PageLocked
    from penstock.pipeline.feed.position import Position
    from penstock.pipeline.feed.prefetch import Prefetch
    from penstock.pipeline.options.native_options import NativeOptions
    from penstock.pipeline.plan.job_order import JobOrder
    from penstock.pipeline.plan.lane_order import LaneOrder
    from penstock.pipeline.plan.settings import PlanSettings
    from penstock.readers.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """What one loader works with, put together. fingerprint: of dataset and order."""

    order: JobOrder
    fingerprint: str
    membership: Membership
    road: Road
    feed: Feed


def build(
    dataset: Source,
    options: NativeOptions,
    position: Position,
    *,
    settings: PlanSettings | None = None,
    lane_order: LaneOrder | None = None,
    membership: Membership | None = None,
) -> Assembly:
    """Open the dataset, freeze the order and build the graph; nothing is read yet.

    position: where the feed will look what its user wants next. settings: of the plan of a state,
    taken over as they are; lane_order: of that plan. membership: among the ranks of the job, where
    it stands; None begins one. Raises what DataLoader's constructor documents.
    """
    try:
        order = freeze_order(dataset, options, settings, lane_order)
    except PenstockError as error:
        if membership is None:
            refuse_unbuilt(dataset, options, error)
        raise
    if settings is None:
        warn_of_the_order(order, options)
    fingerprint = order.fingerprint()
    membership = membership or join_ranks(order, options, plan=fingerprint)
    try:
        return _assembly(dataset, options, position, order, membership, fingerprint)
    except PenstockError as error:
        membership.refuse(error)
        raise


def _assembly(
    dataset: Source,
    options: NativeOptions,
    position: Position,
    order: JobOrder,
    membership: Membership,
    fingerprint: str,
) -> Assembly:
    agreement, seed = membership.agreement, order.settings.seed
    threads = options.threads or options.world.threads(usable_cores())
    mapped = mapped_fields(dataset, options)
    recipes = make_recipes(dataset, options, mapped)
    meter = _meter(dataset, options, recipes, threads=threads)
    mapper = _mapper(dataset, options, mapped, meter, seed=seed)
    road = _road(
        dataset, options, order, agreement, mapped, recipes, mapper, meter, threads=threads
    )
    try:
        prefetch = _prefetch(dataset, options, order, road.reader.crops, agreement)
    except PenstockError:
        road.graphs.close()
        raise
    if prefetch is not None:
        meter.remote = prefetch.facts
    _watch_chunks(meter, dataset, options, order)
    scale = _read_scale(dataset, options, mapped, road, mapper)
    map_threads = mapper.threads if mapper is not None else 0
    units_threads = scale.threads if dataset.contents.units is not None else 0
    # Without images nothing is in DALI: one batch waits there, the others where they are counted.
    depth = options.depth if road.graphs else 1
    feed = Feed(
        road,
        position,
        depth=depth,
        read_threads=max(scale.threads, map_threads),
        least_ahead=max(map_threads, units_threads, READ_AHEAD + options.depth - depth),
        most_ahead=scale.most_ahead - depth,
        turn=scale.turn,
        decodes_ahead=options.device.type == "cpu" and (bool(road.graphs) or options.pin_memory),
        prefetch=prefetch,
        timeout_s=options.timeout_s or STALL_TIMEOUT_S,
    )
    return Assembly(
        order=order,
        fingerprint=fingerprint,
        membership=membership,
        feed=feed,
        road=road,
    )


def _read_scale(
    dataset: Source,
    options: NativeOptions,
    mapped: MappedFields,
    road: Road,
    mapper: Mapper | None,
) -> ReadScale:
    return ReadScale.of(
        dataset,
        options,
        fields=mapped.reads,
        are_slow=road.reader.payloads.are_slow,
        is_plain=not road.graphs and mapper is None,
    )


def _watch_chunks(meter: Meter, dataset: Source, options: NativeOptions, order: JobOrder) -> None:
    if dataset.chunks:
        from penstock.pipeline.feed.chunk_room import watch_chunks  # others need none of it

        meter.chunks = watch_chunks(
            dataset, order.settings, options.world, batch_size=options.sizes.per_rank
        )


def _road(
    dataset: Source,
    options: NativeOptions,
    order: JobOrder,
    agreement: Agreement,
    mapped: MappedFields,
    recipes: FieldRecipes,
    mapper: Mapper | None,
    meter: Meter,
    *,
    threads: int,
) -> Road:
    """The stages of the loader's batches."""
    seed, walk, schema = order.settings.seed, order.walk, dataset.schema
    mixed = make_mixed(mapped.schema, options, recipes, seed=seed)
    images = recipes.images
    resident = make_resident(
        dataset, options, order.settings, images, mapped, walk=walk, threads=threads
    )
    ranges, elsewhere = dataset.contents.images, order.partners_elsewhere(options.world)
    graphs = make_graphs(recipes, options, threads, resident, ranges=ranges, elsewhere=elsewhere)
    if resident is not None:
        meter.resident = graphs.resident_facts
    bad_samples = BadSamples(dataset, seed=seed)
    is_checked = dataset.contents.units is None  # when it was indexed; nobody looks into tables
    memory = _page_locked(options)
    return Road(
        walk=walk,
        endless=order.settings.shuffle,
        slots=_rank_order(order, options, mixes=mixed is not None),
        reader=BatchReader(
            dataset=dataset,
            recipes=images,
            payloads=Payloads(
                {name: schema[name] for name in mapped.reads},
                max_pixels=dataset.contents.max_pixels,
            ),
            mode=options.read,
            bad_samples=bad_samples,
            probe=meter.probe,
            resident=resident,
            transform=mapper,
            crops=_crops(mapped, seed=seed),
            boxes=None if is_checked else BoxChecks.of(schema, mapped.reads, samples=len(dataset)),
            blocks=Blocks(allocate=memory),
            fields=None
            if mapped.reads == stored_fields(dataset.fields, dataset.schema)
            else mapped.reads,
        ),
        draws=BatchDraws(
            recipes=recipes,
            seed=seed,
            mixer=mixed.mixer if mixed else None,
            units=BoxUnits(enough=min(8, int(dataset.contents.sizes.sum()))),
        ),
        graphs=graphs,
        finisher=Finisher(
            recipes.fields,
            mixed=mixed,
            device=options.device,
            memory=memory,
            as_dict=options.as_dict,
        ),
        bad_count=_bad_count(dataset, options, bad_samples, agreement, meter),
        meter=meter,
        pads=Pads(tuple(recipes.pads.values()), names=dataset.names),
        job_waits=_job_waits(agreement, meter, options),
    )


def _rank_order(order: JobOrder, options: NativeOptions, *, mixes: bool) -> RankOrder:
    """What this rank reads in each step."""
    return RankOrder(
        plan=order.plan(),
        world=options.world,
        padded_by=order.walk if options.pad else None,
        mixes=mixes,
    )


def check(dataset: Source, options: NativeOptions) -> JobOrder:
    """The order that `build` would freeze, with every check that needs no thread, no graph and no
    other rank: for a loader whose world isn't known yet. Raises what `build` raises."""
    order = freeze_order(dataset, options)
    mapped = mapped_fields(dataset, options)
    recipes = make_recipes(dataset, options, mapped)
    make_mixed(mapped.schema, options, recipes, seed=order.settings.seed)
    return order


def _mapper(
    dataset: Source, options: NativeOptions, mapped: MappedFields, meter: Meter, *, seed: int
) -> Mapper | None:
    """What calls the functions of the recipe's Maps; None where it has none."""
    if not mapped.maps.maps:
        return None
    from penstock.pipeline.feed.mapping.mapper import Mapper  # others needn't wait for its import

    timeout_s = options.timeout_s or STALL_TIMEOUT_S
    mapper = Mapper(mapped.maps, seed=seed, names=dataset.names, timeout_s=timeout_s)
    meter.map = mapper.facts
    return mapper


def _crops(mapped: MappedFields, *, seed: int) -> ArrayDraws | None:
    """What draws the parts of arrays that are read; None where all of them is."""
    if not mapped.crops:
        return None
    from penstock.augment.array_draws import ArrayDraws  # images need none of it

    return ArrayDraws(crops=mapped.crops, seed=seed)


def _page_locked(options: NativeOptions) -> PageLocked | None:
    """The memory that large arrays are read into; None where it is that of any others."""
    if options.device.type == "cpu" and not options.pin_memory:
        return None
    from penstock.pipeline.feed.page_locked import PageLocked  # others needn't wait for its import

    return PageLocked.of(options.device, pins=options.pin_memory)


def _job_waits(agreement: Agreement, meter: Meter, options: NativeOptions) -> JobWaits | None:
    if not agreement.is_shared:
        return None
    from penstock.pipeline.feed.job_waits import JobWaits  # a process alone needs none of it

    waits = JobWaits(agreement, meter, options.world)
    meter.job = waits.statistics
    return waits


def _bad_count(
    dataset: Source,
    options: NativeOptions,
    bad_samples: BadSamples,
    agreement: Agreement,
    meter: Meter,
) -> BadCount:
    name = f"{dataset.contents.fingerprint[:16]}-{options.world.file_label}.jsonl"
    return BadCount(
        dataset,
        bad_samples,
        max_bad=options.max_bad,
        agreement=agreement,
        report=QuarantineFile(dataset.cache_folder, name=name),
        meter=meter,
    )


def _meter(
    dataset: Source, options: NativeOptions, recipes: FieldRecipes, *, threads: int
) -> Meter:
    contents, image = dataset.contents, next(iter(recipes.images.values()), None)
    # A shard of chunks may be a part of a file, or many files that are asked for side by side.
    shards = len(contents.shard_bytes) if dataset.chunks else contents.files
    return Meter(
        decode_threads=threads,
        device=str(options.device),
        usable_cores=options.world.threads(usable_cores()),
        url=dataset.url,
        shards=ShardFacts(
            count=shards,
            mean_bytes=float(contents.shard_bytes.sum()) / max(1, shards),
            are_files=contents.is_file_per_sample and not dataset.chunks,
        ),
        output=image.shape[1:] if image is not None else None,
        decodes=image is not None,
        left_out=dataset.left_out,
    )


def _prefetch(
    dataset: Source,
    options: NativeOptions,
    order: JobOrder,
    crops: ArrayDraws | None,
    agreement: Agreement,
) -> Prefetch | None:
    """Joins the cache; None for a local dataset."""
    remote = dataset.remote_shards
    if remote is None:
        return None
    # Local data need none of it.
    from penstock.pipeline.feed.prefetch import FILLED_SHARE, Prefetch, wanted_share

    return Prefetch(
        remote,
        dataset,
        order,
        world=options.world,
        least_ahead=options.depth + READ_AHEAD,
        store=agreement.store,
        fills=crops is None or wanted_share(dataset, remote, crops) >= FILLED_SHARE,
    )
