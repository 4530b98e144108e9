"""Build what one loader works with from its options: order, pipeline, runner, prefetch and meter.

Of a dataset in chunks it also compares the memory that the windows need with what there is to keep
decoded chunks in, and logs both.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock.cache import STALL_TIMEOUT_S, PenstockError
from penstock.cache.base import format_size, usable_cores
from penstock.pipeline.feed.bad_samples import BadCount, BadSamples
from penstock.pipeline.feed.batch_pipeline import BatchPipeline
from penstock.pipeline.feed.batch_reader import BatchReader, Payloads
from penstock.pipeline.feed.frozen_order import freeze_order, warn_of_the_order
from penstock.pipeline.feed.map_fields import make_recipes, mapped_fields
from penstock.pipeline.feed.runner import READ_AHEAD, PipelineRunner, ReadScale
from penstock.pipeline.feed.tensors import Finisher
from penstock.pipeline.members import RankMembership, join_ranks, refuse_unbuilt
from penstock.pipeline.plan import RankOrder, live_share, open_units, shards_of_a_rank, unit_count
from penstock.pipeline.report import Meter, QuarantineFile
from penstock.readers import Blocks
from penstock.readers.fields import Boxes, Keypoints, stored_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.augment import ArrayDraws, FieldRecipes
    from penstock.pipeline.feed.image_decoding import ImageDecoding
    from penstock.pipeline.feed.map_calls import Mapper
    from penstock.pipeline.feed.map_fields import MappedFields
    from penstock.pipeline.feed.padding import Pads
    from penstock.pipeline.feed.position import Position
    from penstock.pipeline.feed.prefetch import Prefetch
    from penstock.pipeline.feed.tensors import PageLocked
    from penstock.pipeline.members import JobWaits, LoaderChannel
    from penstock.pipeline.options import NativeOptions
    from penstock.pipeline.plan import JobOrder, LaneOrder, PlanSettings, World
    from penstock.pipeline.report import ChunkFacts, ShardFigures
    from penstock.readers import Source
    from penstock.readers.fields import BoxChecks


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """What one loader works with, put together. fingerprint: of dataset and order."""

    order: JobOrder
    fingerprint: str
    membership: RankMembership
    road: BatchPipeline
    feed: PipelineRunner


def build_assembly(
    dataset: Source,
    options: NativeOptions,
    position: Position,
    *,
    settings: PlanSettings | None = None,
    lane_order: LaneOrder | None = None,
    membership: RankMembership | None = None,
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
    membership: RankMembership,
    fingerprint: str,
) -> Assembly:
    agreement, seed = membership.channel, order.settings.seed
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
        if road.graphs is not None:
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
    feed = PipelineRunner(
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
        order=order, fingerprint=fingerprint, membership=membership, feed=feed, road=road
    )


def _read_scale(
    dataset: Source,
    options: NativeOptions,
    mapped: MappedFields,
    road: BatchPipeline,
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
        meter.chunks = watch_chunks(
            dataset, order.settings, options.world, batch_size=options.sizes.per_rank
        )


def _road(
    dataset: Source,
    options: NativeOptions,
    order: JobOrder,
    agreement: LoaderChannel,
    mapped: MappedFields,
    recipes: FieldRecipes,
    mapper: Mapper | None,
    meter: Meter,
    *,
    threads: int,
) -> BatchPipeline:
    """The stages of the loader's batches."""
    seed, walk, schema = order.settings.seed, order.walk, dataset.schema
    decoding = _image_decoding(dataset, options, order, mapped, recipes, threads=threads)
    mixed = None if decoding is None else decoding.mixed
    resident = None if decoding is None else decoding.resident
    if decoding is not None and resident is not None:
        meter.resident = decoding.graphs.resident_facts
    bad_samples = BadSamples(dataset, seed=seed)
    memory = _page_locked(options)
    return BatchPipeline(
        walk=walk,
        endless=order.settings.shuffle,
        slots=_rank_order(order, options, mixes=mixed is not None),
        reader=BatchReader(
            dataset=dataset,
            recipes=recipes.images,
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
            boxes=_box_checks(dataset, mapped),
            blocks=Blocks(allocate=memory),
            fields=None
            if mapped.reads == stored_fields(dataset.fields, dataset.schema)
            else mapped.reads,
            bad_headers=_header_checks(recipes),
        ),
        draws=None if decoding is None else decoding.draws,
        graphs=None if decoding is None else decoding.graphs,
        finisher=Finisher(
            recipes.fields,
            mixed=mixed,
            device=options.device,
            memory=memory,
            as_dict=options.as_dict,
        ),
        bad_count=_bad_count(dataset, options, bad_samples, agreement, meter),
        meter=meter,
        pads=_pads(dataset, recipes),
        job_waits=_job_waits(agreement, meter, options),
    )


def _image_decoding(
    dataset: Source,
    options: NativeOptions,
    order: JobOrder,
    mapped: MappedFields,
    recipes: FieldRecipes,
    *,
    threads: int,
) -> ImageDecoding | None:
    """Build what decodes images; None where batches have neither images nor what follows them."""
    # resident=True without images is an error, which is raised there.
    if not recipes.images and not recipes.followers and options.resident is not True:
        return None
    from penstock.pipeline.feed.image_decoding import make_decoding

    return make_decoding(dataset, options, order, mapped, recipes, threads=threads)


def _header_checks(recipes: FieldRecipes) -> Callable[..., Mapping[int, str]] | None:
    if not recipes.images:
        return None
    from penstock.augment import bad_headers

    return bad_headers


def _box_checks(dataset: Source, mapped: MappedFields) -> BoxChecks | None:
    """Return the checks of boxes and points that no index has checked, as those of tables; None
    where there are none."""
    schema = dataset.schema
    has_boxes = any(isinstance(schema.get(name), Boxes | Keypoints) for name in mapped.reads)
    if dataset.contents.units is None or not has_boxes:
        return None
    from penstock.readers.fields import BoxChecks

    return BoxChecks.of(schema, mapped.reads, samples=len(dataset))


def _pads(dataset: Source, recipes: FieldRecipes) -> Pads | None:
    if not recipes.pads:
        return None
    from penstock.pipeline.feed.padding import Pads

    return Pads(tuple(recipes.pads.values()), names=dataset.names)


def _rank_order(order: JobOrder, options: NativeOptions, *, mixes: bool) -> RankOrder:
    """What this rank reads in each step."""
    return RankOrder(
        plan=order.plan(),
        world=options.world,
        padded_by=order.walk if options.pad else None,
        mixes=mixes,
    )


def checked_order(dataset: Source, options: NativeOptions) -> JobOrder:
    """The order that `build` would freeze, with every check that needs no thread, no graph and no
    other rank: for a loader whose world isn't known yet. Raises what `build` raises."""
    order = freeze_order(dataset, options)
    mapped = mapped_fields(dataset, options)
    recipes = make_recipes(dataset, options, mapped)
    if recipes.mixed is not None:
        from penstock.pipeline.feed.image_decoding import make_mixed

        make_mixed(mapped.schema, options, recipes, seed=order.settings.seed)
    return order


def _mapper(
    dataset: Source, options: NativeOptions, mapped: MappedFields, meter: Meter, *, seed: int
) -> Mapper | None:
    """What calls the functions of the recipe's Maps; None where it has none."""
    if mapped.maps is None:
        return None
    from penstock.pipeline.feed.map_calls import Mapper  # others needn't wait for its import

    timeout_s = options.timeout_s or STALL_TIMEOUT_S
    mapper = Mapper(mapped.maps, seed=seed, names=dataset.names, timeout_s=timeout_s)
    meter.map = mapper.facts
    return mapper


def _crops(mapped: MappedFields, *, seed: int) -> ArrayDraws | None:
    """What draws the parts of arrays that are read; None where all of them is."""
    if not mapped.crops:
        return None
    from penstock.augment import ArrayDraws  # images need none of it

    return ArrayDraws(crops=mapped.crops, seed=seed)


def _page_locked(options: NativeOptions) -> PageLocked | None:
    """The memory that large arrays are read into; None where it is that of any others."""
    if options.device.type == "cpu" and not options.pin_memory:
        return None
    from penstock.pipeline.feed.tensors import PageLocked  # others needn't wait for its import

    return PageLocked.of(options.device, pins=options.pin_memory)


def _job_waits(agreement: LoaderChannel, meter: Meter, options: NativeOptions) -> JobWaits | None:
    if not agreement.is_shared:
        return None
    from penstock.pipeline.members import JobWaits  # a process alone needs none of it

    waits = JobWaits(agreement, meter, options.world)
    meter.job = waits.statistics
    return waits


def _bad_count(
    dataset: Source,
    options: NativeOptions,
    bad_samples: BadSamples,
    agreement: LoaderChannel,
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
    image = next(iter(recipes.images.values()), None)
    return Meter(
        decode_threads=threads,
        device=str(options.device),
        usable_cores=options.world.threads(usable_cores()),
        url=dataset.url,
        shards=partial(_shard_figures, dataset),
        output=image.shape[1:] if image is not None else None,
        decodes=image is not None,
        left_out=dataset.left_out,
    )


def _shard_figures(dataset: Source) -> ShardFigures:
    from penstock.pipeline.report import ShardFigures  # for statistics alone

    contents = dataset.contents
    # A shard of chunks may be a part of a file, or many files that are asked for side by side.
    shards = len(contents.shard_bytes) if dataset.chunks else contents.files
    return ShardFigures(
        count=shards,
        mean_bytes=float(contents.shard_bytes.sum()) / max(1, shards),
        are_files=contents.is_file_per_sample and not dataset.chunks,
    )


def _prefetch(
    dataset: Source,
    options: NativeOptions,
    order: JobOrder,
    crops: ArrayDraws | None,
    agreement: LoaderChannel,
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


# Batches that reading threads may have in hand at a time, several in a turn: a chunk that nobody
# takes while those are read isn't left over for that.
_IN_FLIGHT = 32

_log = logging.getLogger("penstock")


def watch_chunks(
    source: Source, settings: PlanSettings, world: World, *, batch_size: int
) -> Callable[[], ChunkFacts] | None:
    """Share the machine's memory among the ranks' chunks, say what the windows need, and return
    what tells how it goes; None where samples can be had alone. batch_size: of this rank."""
    stores = source.chunks
    if not stores:
        return None
    from penstock.pipeline.report import ChunkFacts
    from penstock.readers.formats import sum_counts

    for store in stores:
        store.share(world.local_size * len(stores))
    contents, mixed, rows = source.contents, 1.0, 1.0
    if contents.units is not None:
        rows = contents.samples / max(1, unit_count(contents))
    needed = contents.unit_bytes
    mine = rows
    if settings.shuffle and contents.units is not None:
        units = open_units(contents, lanes=settings.lanes, window=settings.window)
        mixed = shards_of_a_rank(units, lanes=settings.lanes, ranks=world.size)
        needed *= mixed * live_share(rows)
        mine *= min(1.0, settings.lanes / world.size)  # of a lane's rows that are this rank's
    for store in stores:
        store.expect(max(round(mixed * mine), _IN_FLIGHT * batch_size))
    memory = sum(store.max_bytes for store in stores)
    files = sum(store.file_room_bytes() for store in stores) if needed > memory else 0
    if needed:
        _log_chunk_memory(source.url, units=mixed, needed=needed, memory=memory, files=files)

    def facts() -> ChunkFacts:
        counts = sum_counts(store.counts() for store in stores)
        return ChunkFacts(
            counts=counts, open_chunks=mixed, window=settings.window, file_bytes=files
        )

    return facts


def _log_chunk_memory(url: str, *, units: float, needed: float, memory: int, files: int) -> None:
    """One line at the start: what the windows need, and what there is."""
    wanted = (
        f"{url}: this rank's windows mix {units:,.0f} decode units, which "
        f"take about {format_size(needed)} decoded"
    )
    if needed <= memory:
        _log.info("%s; memory has room for %s", wanted, format_size(memory))
    elif needed <= memory + files:
        _log.info(
            "%s; memory keeps %s of that, the cache folder the rest", wanted, format_size(memory)
        )
    else:
        _log.warning(
            "%s; memory keeps %s and the cache folder %s, so some are decoded again and again. "
            "Give Dataset(decoded_bytes=…), a cache=DiskCache(…) with more room, or "
            "order=Order(window=…).",
            wanted,
            format_size(memory),
            format_size(files),
        )
