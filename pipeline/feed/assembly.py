"""Build the parts of one loader from its options: order, pipeline, runner, prefetch and meter.

For data in chunks, the memory that the windows need is compared with the room for decoded chunks,
and both are logged.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.cache import STALL_TIMEOUT_S, PenstockError, RecipeError
from penstock.cache.base import available_memory_bytes, summed, usable_cores
from penstock.pipeline.feed.bad_samples import BadCount, BadSamples
from penstock.pipeline.feed.batch_pipeline import BatchPipeline
from penstock.pipeline.feed.batch_reader import BatchReader, Payloads
from penstock.pipeline.feed.checked_recipes import checked_augments
from penstock.pipeline.feed.frozen_order import freeze_order, warn_of_costs
from penstock.pipeline.feed.runner import READ_AHEAD, PipelineRunner, ReadScale
from penstock.pipeline.feed.tensors import Finisher, PageLocked
from penstock.pipeline.members import Membership
from penstock.pipeline.options import MAX_BAD
from penstock.pipeline.plan import RankOrder, process_group
from penstock.pipeline.report import Meter, QuarantineFile
from penstock.readers import Blocks
from penstock.readers.fieldtypes import stored_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.augment import ArrayDraws
    from penstock.pipeline.feed.checked_recipes import Augments
    from penstock.pipeline.feed.device_augment import DeviceAugment
    from penstock.pipeline.feed.image_decoding import ImageDecoding, PartDecoding
    from penstock.pipeline.feed.map_calls import Mapper
    from penstock.pipeline.feed.position import Position
    from penstock.pipeline.feed.prefetch import Prefetch
    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import JobOrder, LaneOrder, PlanSettings, World
    from penstock.pipeline.report import ChunkFacts, ShardFigures
    from penstock.readers import Source
    from penstock.readers.fieldtypes import ValueChecks


def checked_order(dataset: Source, options: LoaderOptions) -> JobOrder:
    """Return the order of a loader whose world isn't known yet, after checking its options.

    It makes every check of `build_assembly` that needs no thread, no graph and no other rank.
    Raises what `build_assembly` raises.
    """
    order = freeze_order(dataset, options)
    augments = checked_augments(dataset, options)
    if augments.first.recipes.mixed is not None:
        from penstock.pipeline.feed.image_decoding import make_mixed

        make_mixed(dataset, augments.first.mapped.schema, options, augments.first.recipes)
    return order


class Assembly(NamedTuple):
    """The parts of one loader. fingerprint: of its dataset and order."""

    order: JobOrder
    fingerprint: str
    membership: Membership
    pipeline: BatchPipeline
    runner: PipelineRunner


def build_assembly(
    dataset: Source,
    options: LoaderOptions,
    position: Position,
    settings: PlanSettings | None = None,
    lane_order: LaneOrder | None = None,
    membership: Membership | None = None,
) -> Assembly:
    """Open the dataset, freeze the order and build the graphs. Nothing is read yet.

    position: the runner reads from it where the next batch begins. settings: of a state's plan,
    used unchanged; lane_order: of that plan. membership: the existing one among the ranks of the
    job; None starts a new one. Raises what DataLoader's constructor documents.
    """
    try:
        order = freeze_order(dataset, options, settings, lane_order)
    except PenstockError as error:
        if membership is None:
            from penstock.pipeline.members import refuse_unbuilt

            refuse_unbuilt(dataset, options, error)
        raise
    if settings is None:
        warn_of_costs(order, options)
    fingerprint = order.fingerprint()
    world = options.world
    is_single = not options.agrees or (world.processes == 1 and process_group() is None)
    if membership is None and is_single:
        membership = Membership(world)
    elif membership is None:
        from penstock.pipeline.members import join_ranks

        membership = join_ranks(order, options, plan=fingerprint)
    try:
        built = _build(options, position, order, membership)
    except PenstockError as error:
        membership.refuse(error)
        raise
    return Assembly(order, fingerprint, membership, *built)


def _build(
    options: LoaderOptions, position: Position, order: JobOrder, membership: Membership
) -> tuple[BatchPipeline, PipelineRunner]:
    dataset, seed = order.source, order.settings.seed
    contents, schema = dataset.contents, dataset.schema
    augments = checked_augments(dataset, options)
    device, world = options.device, options.world
    if _decodes_on_cpu(augments, device):
        options = replace(options, device=torch.device("cpu"), pin_memory=True)
    cores = world.threads(usable_cores())
    threads, timeout_s = options.num_workers or cores, options.timeout or STALL_TIMEOUT_S
    recipes, reads, mixture = augments.first.recipes, augments.reads, contents.mixture
    image = next(iter(recipes.images.values()), None)
    meter = Meter(
        decode_threads=threads,
        device=str(options.device),
        usable_cores=cores,
        url=dataset.url if dataset.is_one_url else "",
        shards=partial(_shard_figures, dataset),
        output=image.shape[1:] if image is not None and image.is_fixed else None,
        decodes=image is not None,
        left_out=dataset.left_out,
    )
    membership.use_meter(meter)
    plan = order.plan()
    if mixture is not None and order.settings.mixture is not None:
        from penstock.pipeline.report import PartMeter
        from penstock.readers import fixed_tokens

        tokens = [fixed_tokens(part.schema, dataset.fields) for part in mixture.parts]
        parts: Any = plan  # of several parts, so it counts them
        meter.parts = PartMeter(
            mixture, consumed=lambda: parts.part_counts(*position.cursor), tokens=tokens
        )
    mappers: list[Mapper | None] = []
    crops: list[ArrayDraws | None] = []
    for each in augments.each:
        mappers.append(None)
        if each.mapped.maps:
            from penstock.pipeline.feed.map_calls import Mapper, joined_facts  # for Maps only

            mappers[-1] = Mapper(
                each.mapped.maps, seed=seed, names=dataset.names, timeout_s=timeout_s
            )
            meter.map = partial(joined_facts, [one for one in mappers if one is not None])
        crops.append(None)
        if each.mapped.crops:
            from penstock.augment import ArrayDraws  # needed for arrays only

            crops[-1] = ArrayDraws(crops=each.mapped.crops, seed=seed)
    boxes: ValueChecks | None = None
    has_rules = any(schema[name].checks_values for name in reads if name in schema)
    if has_rules and not contents.are_checked:
        from penstock.readers.fieldtypes import ValueChecks

        boxes = ValueChecks.of(schema, reads, samples=len(dataset))
    prefetch: Prefetch | None = None
    if (remote := dataset.remote_shards) is not None:
        from penstock.pipeline.feed.prefetch import FILLED_SHARE, Prefetch, wanted_share

        prefetch = Prefetch(
            remote,
            order,
            world=world,
            least_ahead=options.depth + READ_AHEAD,
            store=membership.store,
            fills=any(
                each is None or wanted_share(dataset, remote, each) >= FILLED_SHARE
                for each in crops
            ),
        )
        meter.remote = prefetch.facts
    decoding: ImageDecoding | PartDecoding | None = None
    # resident=True without images is an error, which make_decoding raises.
    if recipes.images or recipes.followers or options.resident is True:
        from penstock.pipeline.feed.image_decoding import make_decoding

        decoding = make_decoding(options, order, augments, threads=threads)
        if decoding.resident is not None:
            meter.resident = decoding.resident.facts
    mixed = None if decoding is None else decoding.mixed
    bad_samples = BadSamples(dataset, seed=seed)
    memory = PageLocked.of(options.device, pins=options.pin_memory)
    reader = BatchReader(
        dataset=dataset,
        recipes=recipes.images,
        payloads=Payloads({n: schema[n] for n in reads}, max_pixels=contents.max_pixels),
        mode=options.read,
        bad_samples=bad_samples,
        probe=meter.probe,
        resident=None if decoding is None else decoding.resident,
        maps=mappers[0],
        crops=crops[0],
        boxes=boxes,
        blocks=Blocks(allocate=memory),
        fields=None if reads == stored_fields(dataset.fields, schema) else reads,
    )
    if len(augments.each) > 1:
        readers = tuple(
            replace(reader, recipes=each.recipes.images, maps=maps, crops=crop)
            for each, maps, crop in zip(augments.each, mappers, crops, strict=True)
        )
        reader = replace(reader, maps=None, crops=None, augments=augments, readers=readers)
    on_device: DeviceAugment | None = None
    if options.device_augment is not None or options.device != device:
        from penstock.pipeline.feed.device_augment import DeviceAugment  # few loaders need it

        on_device = DeviceAugment(
            function=options.device_augment,
            device=device,
            copies=options.device != device,
            seed=seed,
            rank=world.rank,
            walk=order.walk,
        )
    padded_by = None if options.pad is None else order.walk
    as_dict = options.as_dict or options.device_augment is not None
    report = f"{contents.fingerprint[:16]}-{world.file_label}.jsonl"
    pipeline = BatchPipeline(
        walk=order.walk,
        endless=order.settings.shuffle,
        slots=RankOrder(plan=plan, world=world, padded_by=padded_by, mixes=mixed is not None),
        reader=reader,
        images=decoding,
        finisher=Finisher(
            recipes.fields, mixed=mixed, device=options.device, memory=memory, as_dict=as_dict
        ),
        bad_count=BadCount(
            samples=min(contents.samples, len(dataset)),
            names=dataset.names,
            bad_samples=bad_samples,
            max_bad=MAX_BAD if options.max_bad is None else options.max_bad,
            membership=membership,
            report=QuarantineFile(dataset.cache_folder, name=report),
            meter=meter,
        ),
        meter=meter,
        columns=(*dict.fromkeys(recipes.columns.values()),),
        membership=None if membership.store is None else membership,
        on_device=on_device,
    )
    meter.chunks = _watch_chunks(dataset, order.settings, world, batch_size=options.per_rank)
    runner = PipelineRunner(
        pipeline,
        position,
        ReadScale.of(pipeline, options, reads),
        decodes_ahead=options.device.type == "cpu" and (pipeline.has_images or options.pin_memory),
        prefetch=prefetch,
        timeout_s=timeout_s,
    )
    return pipeline, runner


def _decodes_on_cpu(augments: Augments, device: torch.device) -> bool:
    """Return True if the CPU decodes the images of another device. Raises RecipeError if it decodes
    only some of them."""
    places = {
        recipe.decode.device for each in augments.each for recipe in each.recipes.images.values()
    }
    if device.type == "cpu" or "cpu" not in places:
        return False
    if len(places) > 1:
        raise RecipeError(
            'Some images have Decode(device="cpu") in their recipes and others don\'t: the images '
            "of a batch are decoded on one device. Put it into all of them, or into none."
        )
    return True


def _shard_figures(dataset: Source) -> ShardFigures:
    from penstock.pipeline.report import ShardFigures  # needed by statistics only

    contents = dataset.contents
    # A shard of chunks may be a part of a file, or many files that are requested together.
    shards = len(contents.shard_bytes) if dataset.chunks else contents.files
    return ShardFigures(
        count=shards,
        mean_bytes=float(contents.shard_bytes.sum()) / max(1, shards),
        are_files=contents.is_file_per_sample and not dataset.chunks,
        fields=len(dataset.fields),
    )


# Batches that reading threads may be working on at a time, several in a turn. A chunk that wasn't
# used for so many batches may still be needed.
_IN_FLIGHT = 32

_log = logging.getLogger("penstock")


def _watch_chunks(
    source: Source, settings: PlanSettings, world: World, *, batch_size: int
) -> Callable[[], ChunkFacts] | None:
    """Divide the memory for decoded chunks among the ranks, and log what the windows need.

    Returns a function that returns the current figures; None if samples are decoded one by one.
    batch_size: of this rank.
    """
    stores = source.chunks
    if not stores:
        return None
    from penstock.pipeline.plan import live_share, open_units, shards_of_a_rank, unit_count
    from penstock.pipeline.report import ChunkFacts

    available = available_memory_bytes()
    for store in stores:
        store.share(world.local_size * len(stores), available_bytes=available)
    contents, mixed, rows = source.contents, 1.0, 1.0
    if contents.units is not None:
        rows = contents.samples / max(1, unit_count(contents))
    needed = contents.unit_bytes
    mine = rows
    if settings.shuffle and contents.units is not None:
        units = open_units(contents, lanes=settings.lanes, window=settings.window)
        if (own := settings.mixture) is not None and contents.mixture is not None:
            each = [*zip(contents.mixture.parts, own.lanes, own.windows, strict=True)]
            chunked = [(part, n, w) for part, n, w in each if part.units is not None]
            units = sum(open_units(part, lanes=n, window=w) for part, n, w in chunked)
        mixed = shards_of_a_rank(units, lanes=settings.lanes, ranks=world.size)
        needed *= mixed * live_share(rows)
        mine *= min(1.0, settings.lanes / world.size)  # this rank's rows of a lane
    for store in stores:
        store.expect(max(round(mixed * mine), _IN_FLIGHT * batch_size))
    memory = sum(store.max_bytes for store in stores)
    files = sum(store.file_room_bytes() for store in stores) if needed > memory else 0
    if needed:
        from penstock.cache.base import format_size  # needed for chunks only

        is_short = needed > memory + files
        remedy = (
            ", so some are decoded repeatedly. Give Dataset(decoded_bytes=…), a cache=DiskCache(…) "
            "with more room, or order=Order(window=…)."
        )
        _log.log(
            logging.WARNING if is_short else logging.INFO,
            "%s: this rank's windows mix %s decode units, which take about %s decoded; memory "
            "keeps up to %s, and the cache folder up to %s%s",
            source.url,
            f"{mixed:,.0f}",
            *map(format_size, (needed, memory, files)),
            remedy if is_short else "",
        )

    def facts() -> ChunkFacts:
        counts, window = summed(store.counts() for store in stores), settings.window
        return ChunkFacts(counts=counts, open_chunks=mixed, window=window, file_bytes=files)

    return facts
