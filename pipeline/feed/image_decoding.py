"""Decode the images of batches: check recipes, draw random numbers, build and feed the graphs.

Each image field has a graph of its own. A batch is fed to all graphs, and then collected from all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.augment import (
    DecodedBatch,
    Draws,
    Graph,
    GraphPlan,
    class_count,
    draw_mix,
    draw_with_moves,
    mix_images,
    soft_targets,
)
from penstock.cache import ConfigError
from penstock.readers import ANY_SIZE
from penstock.readers.fieldtypes import BoxUnits, DenseColumn, EncodedColumn, ListColumn

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from penstock.augment import FieldRecipes, ImageMoves, Mix
    from penstock.pipeline.feed.batch import Batch
    from penstock.pipeline.feed.map_fields import MappedFields
    from penstock.pipeline.feed.resident_images import ResidentImages
    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import Delivery, JobOrder
    from penstock.readers import EncodedBatch, ImageRange, Source
    from penstock.readers.fieldtypes import SampleBatch, Schema


_MISSING = "it has no such image"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDecoding:
    """Draws, decodes and mixes the images of batches, and moves the fields that follow them.

    graphs: by image field; one thread may use them. If one raises, the others are a batch ahead of
    it; call drain() before the next batch. Any thread may draw: draws are pure functions of (seed,
    epoch, sample id). units: checks the units of boxes against their formats. mixed: None if the
    recipe doesn't mix. resident: the images in memory from which the graphs are fed.
    """

    recipes: FieldRecipes
    seed: int
    graphs: Mapping[str, Graph]
    units: BoxUnits
    mixed: MixedFields | None = None
    resident: ResidentImages | None = None

    def draw(
        self, content: SampleBatch, delivery: Delivery
    ) -> tuple[dict[str, Draws], SampleBatch]:
        """Draw the numbers of each sample, by image field, and move masks, boxes and points.

        A substitute has the numbers of its own id. Returns the draws, and the samples with masks,
        boxes and points where their pixels will be.
        """
        recipes, draws = self.recipes, dict[str, Draws]()
        moves: dict[str, ImageMoves] = {}
        for field, recipe in recipes.images.items():
            dims = content.encoded(field).dims
            if field in content.present:
                dims = np.maximum(dims, 1)  # a missing image needs some size to draw a window
            draws[field], moves[field] = draw_with_moves(
                recipe,
                ids=content.ids,
                dims=dims,
                seed=self.seed,
                epoch=delivery.epoch,
                occurrences=delivery.occurrences,
            )
        if not recipes.followers:
            return draws, content
        for name, follower in recipes.followers.items():
            column = content.columns[name]
            if not isinstance(column, ListColumn | EncodedColumn):
                self.units.add(name, follower.type, column.values)
        return draws, content.with_columns(recipes.follow(moves, content.columns))

    def mix(self, batch: Batch) -> Mix | None:
        """Draw how each sample is mixed, and with which partner; None without mixing."""
        slots, image = batch.slots, self.recipes.mixed
        if image is None or slots.partner is None:
            return None
        # By the plan's ids, so that a substitute is mixed as the sample that it replaces.
        ids, recipe = batch.own[: slots.real], self.recipes.images[image]
        delivery = batch.delivery.take(slice(slots.real))
        return draw_mix(
            recipe,
            ids,
            slots.partner,
            seed=self.seed,
            epoch=delivery.epoch,
            occurrences=delivery.occurrences,
        )

    def feed(self, batch: Batch) -> None:
        """Feed a batch to all graphs, which work on several batches at once."""
        for field, graph in self.graphs.items():
            encoded, draws = batch.content.encoded(field), batch.draws[field]
            missing: Mapping[int, str] = _missing(batch.content, field)
            if missing:
                encoded, draws, missing = _with_stand_ins(encoded, draws, missing, batch.left_out)
            graph.feed(encoded, draws, bad={**missing, **batch.left_out})

    def collect(self, batch: Batch) -> dict[str, dict[int, str]]:
        """Wait for the images of the oldest batch, which must be this one, and fill them in.

        Missing images are zeros. Returns the rows of each field that didn't decode, with reasons.
        """
        bad: dict[str, dict[int, str]] = {}
        for field, graph in self.graphs.items():
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
        """Decode a few samples at once, ahead of the batches that were fed.

        Missing images are zeros, and not bad.
        """
        found: dict[str, DecodedBatch] = {}
        for field, graph in self.graphs.items():
            missing = _missing(content, field)
            rows = [
                row for row in range(len(content)) if row not in missing
            ]  # DALI gets no empty bytes
            few = {name: values[rows] for name, values in draws[field].items()}
            decoded = graph.decode(content.take(rows).encoded(field), few)
            images = decoded.images.new_zeros((len(content), *decoded.images.shape[1:]))
            images[rows] = decoded.images
            bad = {rows[place]: why for place, why in decoded.bad.items()}
            found[field] = DecodedBatch(images, bad)
        return found

    def drain(self) -> None:
        """Drop the batches in flight."""
        for graph in self.graphs.values():
            graph.drain()

    def close(self) -> None:
        """Release the graphs, then the images from which they were fed."""
        try:
            for graph in self.graphs.values():
                graph.close()
        finally:
            if self.resident is not None:
                self.resident.close()


def _missing(content: SampleBatch, field: str) -> dict[int, str]:
    """Return the rows that have no such image. They become zeros, and are not bad."""
    present = content.present.get(field)
    if present is None or present.all():
        return {}
    return dict.fromkeys(np.flatnonzero(~present).tolist(), _MISSING)


def _with_stand_ins(
    images: EncodedBatch, draws: Draws, missing: Mapping[int, str], left_out: Mapping[int, str]
) -> tuple[EncodedBatch, Draws, Mapping[int, str]]:
    """Replace missing images, and their draws, by the batch's smallest image.

    Returns the images, the draws, and the rows that are still missing. Decoding some images in vain
    is cheaper than assembling a batch from parts: if a tenth of the images is missing, it takes
    0.36 instead of 1.0 CPU-seconds per 1,000 samples (measured).
    """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedFields:
    """Mixes the samples of a batch. image, label: the fields that change. classes: number of
    classes of the soft targets."""

    image: str
    label: str
    classes: int

    def __call__(self, batch: Batch) -> tuple[dict[str, torch.Tensor], SampleBatch]:
        """Mix images and labels, and drop the samples that were read as partners only."""
        mix, content = batch.mix, batch.content
        assert mix is not None
        images = batch.images | {self.image: mix_images(batch.images[self.image], mix)}
        count = batch.samples
        images = {name: each[:count] for name, each in images.items()}
        labels = content.columns[self.label]
        assert isinstance(labels, DenseColumn)
        soft = soft_targets(labels.values, mix, classes=self.classes)
        others = content.without(batch.images.keys())
        if len(others) > count:
            others = others.take(np.arange(count))
        return images, others.with_columns({self.label: DenseColumn(soft)})


def make_mixed(schema: Schema, options: LoaderOptions, recipes: FieldRecipes) -> MixedFields | None:
    """Make the mixer of a batch's samples; None if the recipe doesn't mix. Raises ConfigError."""
    image = recipes.mixed
    if image is None:
        return None
    recipe = recipes.images[image]
    name = type(recipe.mixing[0]).__name__
    labels = [field for field in recipes.fields if field in schema and schema[field].is_class]
    if len(labels) != 1:
        known = [field for field, type in schema.items() if type.is_class]
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
            f'Got {name} and pad="mask": a padded batch is for evaluation, which needs unmixed '
            f"samples. Drop {name}, or pass drop_last=True instead of pad=."
        )
    (label,) = labels
    classes = class_count(recipe.mixing, len(schema[label].class_names) or None)
    return MixedFields(image=image, label=label, classes=classes)


def thread_shares(threads: int, ranges: Mapping[str, ImageRange]) -> dict[str, int]:
    """Return the decode threads of each field's graph, in proportion to its pixels, rounded up.

    A batch waits for all of its graphs, so rounding down would slow large images: for 384 x 512
    and 96 x 96 pixels on 2 cores, one thread each decoded 901 samples/s, and two each 1,169.
    """
    pixels = {
        field: each.min_height * each.min_width + each.max_height * each.max_width
        for field, each in ranges.items()
    }
    total = sum(pixels.values())
    if ANY_SIZE in ranges.values():  # unknown sizes: all fields get the same
        pixels = dict.fromkeys(ranges, 1)
        total = len(ranges)
    return {field: -(-threads * each // total) for field, each in pixels.items()}


def make_decoding(
    dataset: Source,
    options: LoaderOptions,
    order: JobOrder,
    mapped: MappedFields,
    recipes: FieldRecipes,
    *,
    threads: int,
) -> ImageDecoding:
    """Build the parts that decode, augment and mix images. Raises ConfigError."""
    contents, samples = dataset.contents, int(dataset.contents.sizes.sum())
    mixed = make_mixed(mapped.schema, options, recipes)
    resident: ResidentImages | None = None
    if options.resident is not False:
        from penstock.pipeline.feed.resident_images import make_resident

        resident = make_resident(dataset, options, order, recipes.images, mapped, threads=threads)
    shares = thread_shares(threads, {field: contents.images[field] for field in recipes.images})
    elsewhere = order.partners_elsewhere(options.world) if options.world.size > 1 else 0
    graphs: dict[str, Graph] = {}
    decoding = ImageDecoding(
        recipes=recipes,
        seed=order.settings.seed,
        graphs=graphs,
        units=BoxUnits(enough=min(8, samples)),
        mixed=mixed,
        resident=resident,
    )
    try:
        for field, recipe in recipes.images.items():
            plan = GraphPlan(
                recipe,
                batch_size=options.per_rank + (elsewhere if recipe.mixing else 0),
                threads=shares[field],
                device_id=options.device.index,
                deterministic=options.deterministic,
            )
            graphs[field] = Graph(plan, kept=None if resident is None else resident.feed)
    except BaseException:
        decoding.close()
        raise
    return decoding
