"""Decode the images of batches: check recipes, draw random numbers, build and feed the graphs.

Each image field has a graph of its own; all of them are fed and taken together. Draws are pure
functions of (seed, epoch, sample id), so any thread may draw.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import (
    DecodedBatch,
    Draws,
    Graph,
    draw,
    draw_with_moves,
    follow,
    mix_images,
    mixer_of,
    soft_targets,
)
from penstock.cache import ConfigError
from penstock.pipeline.plan import PARTNERS_ELSEWHERE
from penstock.readers import ANY_SIZE
from penstock.readers.fields import Boxes, BoxUnits, ClassLabel, DenseColumn, ListColumn, Mask

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from numpy.typing import NDArray

    from penstock.augment import CheckedRecipe, FieldRecipes, ImageMoves, Mix, Mixer
    from penstock.pipeline.feed.batch import Batch
    from penstock.pipeline.feed.map_fields import MappedFields
    from penstock.pipeline.feed.resident_images import ResidentGraph, ResidentImages
    from penstock.pipeline.options import NativeOptions
    from penstock.pipeline.plan import JobOrder, PlanSettings, Walk
    from penstock.pipeline.report import ResidentFacts
    from penstock.readers import EncodedBatch, ImageRange, Source
    from penstock.readers.fields import SampleBatch, Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDraws:
    """Draws random numbers for recipes: pure functions of (seed, epoch, sample id), on any thread.

    mixer: of MixUp and CutMix; None without them. units: compares the boxes with their formats.
    """

    recipes: FieldRecipes
    seed: int
    mixer: Mixer | None
    units: BoxUnits

    def draw(self, content: SampleBatch, epoch: int) -> tuple[dict[str, Draws], SampleBatch]:
        """The numbers of each sample of a batch, by image field; a substitute has those of its own
        id. And the batch with masks, boxes and points where their pixels will be."""
        recipes, found = self.recipes, dict[str, Draws]()
        moves: dict[str, ImageMoves] = {}
        for field, recipe in recipes.images.items():
            arguments: dict[str, Any] = {
                "ids": content.ids,
                "dims": _dims(content, field),
                "seed": self.seed,
                "epoch": epoch,
            }
            if field in recipes.followed:
                found[field], moves[field] = draw_with_moves(recipe, **arguments)
            else:
                found[field] = draw(recipe, **arguments)
        if not recipes.followers:
            return found, content
        columns: dict[str, Any] = {name: content.columns[name] for name in recipes.followers}
        dtypes: dict[str, str] = {}
        for name, follower in recipes.followers.items():
            column = columns[name]
            if isinstance(column, ListColumn):
                columns[name] = column.samples
            if isinstance(follower.type, Boxes):
                self.units.add(name, follower.type, column.values)
            if isinstance(follower.type, Mask) and follower.type.is_settled:
                dtypes[name] = follower.type.dtype
        return found, content.with_columns(follow(recipes, moves, columns, dtypes=dtypes))

    def mix(self, batch: Batch) -> Mix | None:
        """How each sample is mixed, and with which other; None where none is."""
        slots = batch.slots
        if self.mixer is None or slots.partner is None:
            return None
        # Keyed by the plan's ids: a substitute is mixed as what it stands for.
        return self.mixer(batch.own[: slots.real], slots.partner, epoch=batch.epoch)


def _dims(content: SampleBatch, field: str) -> NDArray[np.int32]:
    """Heights and widths to draw windows in; of an image that is missing any will do."""
    dims = content.encoded(field).dims
    return np.maximum(dims, 1) if field in content.present else dims


_MISSING = "it has no such image"


class ImageGraphs:
    """Decodes the images of batches, field by field. One thread calls; none without image fields.

    What one of the graphs raises leaves the others a batch ahead of it: drain() before the next.
    """

    def __init__(self, graphs: Mapping[str, Graph | ResidentGraph]) -> None:
        self._graphs = dict(graphs)

    def __bool__(self) -> bool:
        return bool(self._graphs)

    def feed(self, batch: Batch) -> None:
        """Give a batch to all graphs, which work on several at once."""
        for field, graph in self._graphs.items():
            encoded, draws = batch.content.encoded(field), batch.draws[field]
            missing: Mapping[int, str] = _missing(batch.content, field)
            if missing:
                encoded, draws, missing = _with_stand_ins(encoded, draws, missing, batch.left_out)
            graph.feed(encoded, draws, bad={**missing, **batch.left_out})

    def take(self, batch: Batch) -> dict[str, dict[int, str]]:
        """Fill in the images of the oldest batch, which must be this one, zeros where there are
        none; tell the rows of each field that didn't decode, and why."""
        bad: dict[str, dict[int, str]] = {}
        for field, graph in self._graphs.items():
            decoded = graph.outputs_marked()
            batch.images[field] = decoded.images
            missing = _missing(batch.content, field)
            if missing:
                decoded.images[list(missing)] = 0
            if decoded.bad:
                known = batch.left_out.keys() | missing.keys()
                new = {row: why for row, why in decoded.bad.items() if row not in known}
                bad |= {field: new} if new else {}
        return bad

    def decode(self, content: SampleBatch, draws: Mapping[str, Draws]) -> dict[str, DecodedBatch]:
        """Decode a few samples out of turn, now; missing images are zeros, and not bad."""
        return {
            field: _decode(graph, content, draws[field], field)
            for field, graph in self._graphs.items()
        }

    def resident_facts(self) -> ResidentFacts:
        """What is kept in memory, of the one graph that is fed from there."""
        from penstock.pipeline.feed.resident_images import ResidentGraph

        (graph,) = self._graphs.values()
        assert isinstance(graph, ResidentGraph)
        return graph.facts()

    def drain(self) -> None:
        """Drop what is in flight."""
        for graph in self._graphs.values():
            graph.drain()

    def close(self) -> None:
        """Release the graphs."""
        for graph in self._graphs.values():
            graph.close()


def _missing(content: SampleBatch, field: str) -> dict[int, str]:
    """Rows that have no such image: these are zeros, and not bad."""
    present = content.present.get(field)
    if present is None or present.all():
        return {}
    return dict.fromkeys(np.flatnonzero(~present).tolist(), _MISSING)


def _with_stand_ins(
    images: EncodedBatch, draws: Draws, missing: Mapping[int, str], left_out: Mapping[int, str]
) -> tuple[EncodedBatch, Draws, Mapping[int, str]]:
    """A batch with the smallest of its images in place of those that are missing, whose draws they
    have too; and what is missing still. Decoding some for nothing costs less than a batch that is
    put together from parts: 0.36 CPU-seconds per 1,000 samples against 1.0 where a tenth of them is
    missing (measured)."""
    others = [
        row for row in range(len(images.encoded)) if row not in missing and row not in left_out
    ]
    if not others:
        return images, draws, missing
    smallest = min(others, key=lambda row: len(images.encoded[row]))
    rows = np.arange(len(images.encoded))
    rows[list(missing)] = smallest
    encoded = [images.encoded[row] for row in rows.tolist()]
    few = {name: values[rows] for name, values in draws.items()}
    stood_in = replace(images, ids=images.ids[rows], encoded=encoded, dims=images.dims[rows])
    return stood_in, few, {}


def _decode(
    graph: Graph | ResidentGraph, content: SampleBatch, draws: Draws, field: str
) -> DecodedBatch:
    missing = _missing(content, field)
    if not missing:
        return graph.decode(content.encoded(field), draws)
    rows = [row for row in range(len(content)) if row not in missing]  # DALI may see no others
    few = {name: values[rows] for name, values in draws.items()}
    decoded = graph.decode(content.take(rows).encoded(field), few)
    images = decoded.images.new_zeros((len(content), *decoded.images.shape[1:]))
    images[rows] = decoded.images
    return DecodedBatch(images, {rows[place]: why for place, why in decoded.bad.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedFields:
    """Mixes the samples of a batch with one another. image, label: the fields that change."""

    mixer: Mixer
    image: str
    label: str

    def __call__(self, batch: Batch) -> tuple[dict[str, torch.Tensor], SampleBatch]:
        """Return the mixed images and labels, without the samples that were read as partners
        only."""
        mix, content = batch.mix, batch.content
        assert mix is not None
        images = batch.images | {self.image: mix_images(batch.images[self.image], mix)}
        count = batch.samples
        images = {name: each[:count] for name, each in images.items()}
        labels = content.columns[self.label]
        assert isinstance(labels, DenseColumn)
        soft = soft_targets(labels.values, mix, classes=self.mixer.classes)
        others = content.without(batch.images.keys())
        if len(others) > count:
            others = others.take(np.arange(count))
        return images, others.with_columns({self.label: DenseColumn(soft)})


def make_mixed(
    schema: Schema, options: NativeOptions, recipes: FieldRecipes, *, seed: int
) -> MixedFields | None:
    """Make what mixes the samples of a batch; None where the recipe doesn't."""
    image = recipes.mixed
    if image is None:
        return None
    recipe = recipes.images[image]
    name = type(recipe.mixing[0]).__name__
    labels = [f for f in recipes.fields if isinstance(schema.get(f), ClassLabel)]
    if len(labels) != 1:
        known = list(schema.of_type(ClassLabel))
        remedy = f'add "{known[0]}" to the dataset\'s fields' if known else "give it labels"
        raise ConfigError(
            f"{name} mixes labels with the images, but fields={recipes.fields!r} leaves them out. "
            f"Drop {name}, or {remedy}."
            if not labels
            else f"{name} mixes one field of classes with the images, and fields= has "
            f"{', '.join(labels)}. Select one of them, or drop {name}."
        )
    if options.pad:
        raise ConfigError(
            f'Got {name} and pad="mask": a padded batch is for evaluation, which wants each sample '
            f"as it is. Drop {name}, or pass drop_last=True in place of pad=."
        )
    (label,) = labels
    names = schema.of_type(ClassLabel)[label].names
    mixer = mixer_of(recipe, classes=len(names) or None, seed=seed)
    assert mixer is not None
    return MixedFields(mixer=mixer, image=image, label=label)


def make_resident(
    dataset: Source,
    options: NativeOptions,
    frozen: PlanSettings,
    images: Mapping[str, CheckedRecipe],
    mapped: MappedFields,
    *,
    walk: Walk,
    threads: int,
) -> ResidentImages | None:
    """Make what keeps decoded images in memory; None where none are kept.

    Raises ConfigError where that was asked for and can't be."""
    mode, world, device = options.resident, options.world, options.device
    if mode is False:
        return None
    why_not = _not_resident(images, mapped, dataset.contents.images)
    if why_not is not None:
        if mode is True:
            raise ConfigError(why_not)
        return None
    ((image, recipe),) = images.items()
    # Nobody who doesn't use it waits for its import.
    from penstock.pipeline.feed.resident_images import ResidentImages
    from penstock.pipeline.feed.resident_memory import memory_budget, resident_bytes, share_of_rank

    room = memory_budget(
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
        dataset,
        recipe,
        image=image,
        share=max(
            share_of_rank(frozen, global_batch=size, world=world) for size in walk.schedule.sizes
        ),
        cuda=device.type == "cuda",
        fed_samples=options.sizes.per_rank * options.depth,
    )
    if max_bytes is None:
        return None
    return ResidentImages(
        recipe,
        image=image,
        samples=dataset.contents.id_end,
        max_bytes=max_bytes,
        threads=threads,
        device=device,
        deterministic=options.deterministic,
    )


def _not_resident(
    images: Mapping[str, CheckedRecipe], mapped: MappedFields, ranges: Mapping[str, ImageRange]
) -> str | None:
    """Why no decoded images can be kept in memory; None where they can."""
    if len(images) != 1:
        return (
            f"resident=True keeps decoded images of one field in memory, and "
            f"fields={mapped.fields!r} has {len(images) or 'none'}. Drop resident=, or select one "
            "image field of the dataset."
        )
    (image,) = images
    if mapped.crops:
        return (
            f"resident=True keeps samples in memory, and {next(iter(mapped.crops.values())).op} "
            "takes another part of them in each epoch: drop one of the two."
        )
    if image in mapped.encoded_images:
        return (
            "resident=True keeps decoded images in memory, and a Map gets the bytes of "
            f'"{image}": drop one of the two.'
        )
    if ranges[image] == ANY_SIZE:
        return (
            "resident=True keeps decoded images in memory, and nobody knows how large those of "
            "this dataset are before they are read. Drop resident=, or pack the dataset."
        )
    return None


def make_graphs(
    recipes: FieldRecipes,
    options: NativeOptions,
    threads: int,
    resident: ResidentImages | None,
    *,
    ranges: Mapping[str, ImageRange],
    elsewhere: int = PARTNERS_ELSEWHERE,
) -> ImageGraphs:
    """Build the graphs that decode a loader's batches. threads: of all of them together, as far as
    each can have one. ranges: sizes of the images by field. elsewhere: samples of other ranks that
    are read as partners, at most, where the recipe mixes."""
    shares = thread_shares(threads, {field: ranges[field] for field in recipes.images})
    graphs: dict[str, Graph | ResidentGraph] = {}
    try:
        for field, recipe in recipes.images.items():
            batch = options.sizes.per_rank
            if options.world.size > 1 and recipe.mixing:
                batch += elsewhere
            graphs[field] = _make_graph(recipe, options, shares[field], resident, batch=batch)
    except BaseException:
        ImageGraphs(graphs).close()
        raise
    return ImageGraphs(graphs)


def thread_shares(threads: int, ranges: Mapping[str, ImageRange]) -> dict[str, int]:
    """Decode threads of each field's graph, by what its images take: their pixels, rounded up.

    All graphs of a batch are waited for, so a thumbnail's threads mustn't be missing beside those
    of a photograph: for 384 x 512 and 96 x 96 pixels on 2 cores, one thread each gave 901
    samples/s and two each 1,169.
    """
    pixels = {
        field: each.min_height * each.min_width + each.max_height * each.max_width
        for field, each in ranges.items()
    }
    total = sum(pixels.values())
    if ANY_SIZE in ranges.values():  # nobody knows, so all alike
        pixels = dict.fromkeys(ranges, 1)
        total = len(ranges)
    return {field: -(-threads * each // total) for field, each in pixels.items()}


def _make_graph(
    recipe: CheckedRecipe,
    options: NativeOptions,
    threads: int,
    resident: ResidentImages | None,
    *,
    batch: int,
) -> Graph | ResidentGraph:
    def make(*, from_memory: bool = False) -> Graph:
        return Graph(
            recipe,
            batch_size=batch,
            threads=threads,
            device=options.device.type,
            device_id=options.device.index,
            deterministic=options.deterministic,
            resident=from_memory,
        )

    if resident is None:
        return make()
    from penstock.pipeline.feed.resident_images import ResidentGraph

    return ResidentGraph(resident, from_memory=make(from_memory=True), make_from_bytes=make)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDecoding:
    """The parts of a loader's pipeline that only images and what follows them need."""

    draws: BatchDraws
    graphs: ImageGraphs
    mixed: MixedFields | None
    resident: ResidentImages | None


def make_decoding(
    dataset: Source,
    options: NativeOptions,
    order: JobOrder,
    mapped: MappedFields,
    recipes: FieldRecipes,
    *,
    threads: int,
) -> ImageDecoding:
    """Build what decodes, augments and mixes images. Raises ConfigError for what can't be."""
    seed, contents = order.settings.seed, dataset.contents
    mixed = make_mixed(mapped.schema, options, recipes, seed=seed)
    resident = make_resident(
        dataset, options, order.settings, recipes.images, mapped, walk=order.walk, threads=threads
    )
    elsewhere = order.partners_elsewhere(options.world)
    return ImageDecoding(
        draws=BatchDraws(
            recipes=recipes,
            seed=seed,
            mixer=mixed.mixer if mixed else None,
            units=BoxUnits(enough=min(8, int(contents.sizes.sum()))),
        ),
        graphs=make_graphs(
            recipes, options, threads, resident, ranges=contents.images, elsewhere=elsewhere
        ),
        mixed=mixed,
        resident=resident,
    )
