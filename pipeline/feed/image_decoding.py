"""Decode the images of batches: check recipes, draw random numbers, build and feed the graphs.

Each image field has a graph of its own. A batch is fed to all graphs, and then collected from all.
Parts of a mixture that have recipes of their own have graphs of their own (`PartDecoding`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import (
    DecodedBatch,
    Draws,
    Graph,
    GraphPlan,
    ImageList,
    ViewTensors,
    class_count,
    draw,
    draw_mix,
    draw_with_moves,
    mix_images,
    soft_targets,
)
from penstock.cache import ConfigError
from penstock.pipeline.plan import SlotSamples
from penstock.readers import ANY_SIZE, PART
from penstock.readers.fieldtypes import (
    MASK,
    SIZE,
    ArrayForm,
    BoxUnits,
    DenseColumn,
    EncodedColumn,
    ListColumn,
    interleaved,
    joined_batches,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.augment import FieldRecipes, ImageMoves, Images, Mix
    from penstock.pipeline.feed.batch import Batch
    from penstock.pipeline.feed.checked_recipes import Augments
    from penstock.pipeline.feed.resident_images import ResidentImages
    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import Delivery, JobOrder
    from penstock.readers import EncodedBatch, ImageRange, Source
    from penstock.readers.fieldtypes import Column, SampleBatch, Schema

    Ints = NDArray[np.int64]
    Reasons = Mapping[int, str]
    DrawsByField = dict[str, Draws]
    ImagesByField = dict[str, DecodedBatch]

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
        self, content: SampleBatch, delivery: Delivery, key: tuple[int, int]
    ) -> tuple[DrawsByField, SampleBatch]:
        """Draw the numbers of each sample, by image field, and move masks, boxes and points.

        A substitute has the numbers of its own id. key: of the global batch. Returns the draws, and
        the samples with masks, boxes and points where their pixels will be.
        """
        recipes, draws = self.recipes, dict[str, Draws]()
        moves: dict[str, ImageMoves] = {}
        for field, recipe in recipes.images.items():
            dims = content.encoded(field).dims
            missing = None
            if field in content.present:
                dims = np.maximum(dims, 1)  # a missing image needs some size to draw a window
                missing = ~content.present[field]
            samples: dict[str, Any] = {
                "ids": content.ids,
                "dims": dims,
                "seed": self.seed,
                "epoch": delivery.epoch,
                "occurrences": delivery.occurrences,
                "batch": key,
                "missing": missing,
            }
            if recipe.needs_boxes:
                samples["boxes"] = recipes.boxes_of(field, content.columns, dims)
            if recipe.views:
                draws[field] = draw(recipe, **samples)
            else:
                draws[field], moves[field] = draw_with_moves(recipe, **samples)
        if companions := _companions(recipes.fields, content, moves):
            content = content.with_columns(companions)
        if not recipes.followers:
            return draws, content
        for name, follower in recipes.followers.items():
            column = content.columns[name]
            if not isinstance(column, ListColumn | EncodedColumn):
                self.units.add(name, follower.type, column.values)
        return draws, content.with_columns(recipes.follow(moves, content.columns))

    def draw_together(self, batches: Sequence[Batch]) -> None:
        """Draw the numbers of several batches at once, unless a sample's depend on other samples,
        or fields follow images."""
        recipes, contents = self.recipes, [batch.content for batch in batches]
        follows = recipes.followers or any(name.endswith((SIZE, MASK)) for name in recipes.fields)
        if follows or not all(recipe.draws_alone for recipe in recipes.images.values()):
            return
        slots = SlotSamples.end_to_end([batch.slots.samples for batch in batches])
        key, bounds = batches[0].key, [0, *accumulate(map(len, contents))]
        draws, _ = self.draw(joined_batches(contents), slots.delivery(key[0]), key)
        for batch, (a, b) in zip(batches, pairwise(bounds), strict=True):
            parts = draws.items()
            batch.draws = {name: {k: v[a:b] for k, v in each.items()} for name, each in parts}

    @property
    def has_joint_size(self) -> bool:
        """True if the size of a batch's images depends on all of them."""
        return any(each.pad and not each.is_fixed for each in self.recipes.images.values())

    def mix(self, batch: Batch) -> Mix | None:
        """Draw how each sample is mixed, and with which partner; None without mixing."""
        slots, image = batch.slots, self.recipes.mixed
        if image is None or slots.partner is None:
            return None
        # By the plan's ids, so that a substitute is mixed as the sample that it replaces.
        ids, recipe = batch.own[: slots.real], self.recipes.images[image]
        of = batch.delivery.take(slice(slots.real))
        keys: Any = {"seed": self.seed, "epoch": of.epoch, "occurrences": of.occurrences}
        return draw_mix(recipe, ids, slots.partner, **keys)

    def feed(self, content: SampleBatch, draws: DrawsByField, left_out: Reasons) -> None:
        """Feed samples to all graphs, which work on several batches at once. left_out: rows that
        aren't decoded, with reasons."""
        for field, graph in self.graphs.items():
            encoded, drawn = content.encoded(field), draws[field]
            missing: Reasons = _missing(content, field)
            if missing:
                encoded, drawn, missing = _with_stand_ins(encoded, drawn, missing, left_out)
            graph.feed(encoded, drawn, bad={**missing, **left_out})

    def collect(self, content: SampleBatch, left_out: Reasons) -> ImagesByField:
        """Wait for the oldest samples that were fed, which must be these, and return their images.

        Missing images are zeros, and not bad; nor are rows that were left out.
        """
        found: ImagesByField = {}
        for field, graph in self.graphs.items():
            decoded = graph.outputs_marked()
            missing = _missing(content, field)
            if missing:
                decoded.clear(list(missing))
            known = left_out.keys() | missing.keys()
            new = {row: why for row, why in decoded.bad.items() if row not in known}
            found[field] = DecodedBatch(decoded.images, new)
        return found

    def decode(self, content: SampleBatch, draws: DrawsByField) -> ImagesByField:
        """Decode a few samples at once, ahead of the batches that were fed.

        Missing images are zeros, and not bad.
        """
        found: ImagesByField = {}
        for field, graph in self.graphs.items():
            missing = _missing(content, field)  # DALI gets no empty bytes
            rows = [row for row in range(len(content)) if row not in missing]
            few = {name: values[rows] for name, values in draws[field].items()}
            decoded = graph.decode(content.take(rows).encoded(field), few)
            images: Any = graph.zeros(len(content), draws[field])
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
        with contextlib.ExitStack() as stack:
            if self.resident is not None:
                stack.callback(self.resident.close)
            for graph in self.graphs.values():
                stack.callback(graph.close)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDecoding:
    """Draws, decodes and mixes the images of a mixture whose parts have different recipes.

    decodings: one for each recipe, in the order of augments. The samples of a batch are divided by
    the recipes of their parts, and their images are joined again. Draws are by "<number of the
    recipe>/<image field>", of its samples.
    """

    augments: Augments
    decodings: tuple[ImageDecoding, ...]
    resident = None
    has_joint_size = False  # such recipes are refused

    @property
    def graphs(self) -> Mapping[str, Graph]:
        """The graphs of one of the recipes, by image field."""
        return self.decodings[0].graphs

    @property
    def mixed(self) -> MixedFields | None:
        """The mixer of a batch's samples, the same for all recipes."""
        return self.decodings[0].mixed

    def draw(
        self, content: SampleBatch, delivery: Delivery, key: tuple[int, int]
    ) -> tuple[DrawsByField, SampleBatch]:
        """Draw the numbers of each sample, and move what follows images, as `ImageDecoding`."""
        draws: DrawsByField = {}
        moved: list[SampleBatch] = []
        places: list[Ints] = []
        for number, rows in self.augments.split(content.ids):
            some = content.take(rows) if self._has_followers else self._images(content, rows)
            own, after = self.decodings[number].draw(some, delivery.take(rows), key)
            draws |= {f"{number}/{field}": each for field, each in own.items()}
            moved.append(after)
            places.append(rows)
        return draws, interleaved(moved, places) if self._has_followers else content

    def draw_together(self, batches: Sequence[Batch]) -> None:
        """Draw nothing, as the samples of a batch are divided by recipe."""

    def mix(self, batch: Batch) -> Mix | None:
        """Draw how each sample is mixed, and with which partner, which is of the same part."""
        mix = self.decodings[0].mix(batch)
        if mix is None:
            return None
        share, box, boxed = mix.share.copy(), mix.box.copy(), mix.boxed.copy()
        for number, rows in self.augments.split(batch.own[: batch.slots.real]):
            own = self.decodings[number].mix(batch)
            assert own is not None  # all recipes mix, or none
            share[rows], box[rows], boxed[rows] = own.share[rows], own.box[rows], own.boxed[rows]
        return replace(mix, share=share, box=box, boxed=boxed)

    def feed(self, content: SampleBatch, draws: DrawsByField, left_out: Reasons) -> None:
        """Feed the samples of a batch to the graphs of their recipes."""
        for number, rows in self.augments.split(content.ids):
            images, own = self._images(content, rows), self._own(draws, number)
            self.decodings[number].feed(images, own, _of_rows(left_out, rows))

    def collect(self, content: SampleBatch, left_out: Reasons) -> ImagesByField:
        """Wait for the images of the oldest batch, which must be this one, and return them."""
        parts = []
        for number, rows in self.augments.split(content.ids):
            images, reasons = self._images(content, rows), _of_rows(left_out, rows)
            parts.append((rows, self.decodings[number].collect(images, reasons)))
        return _joined(parts, len(content))

    def decode(self, content: SampleBatch, draws: DrawsByField) -> ImagesByField:
        """Decode a few samples at once, ahead of the batches that were fed."""
        parts = []
        for number, rows in self.augments.split(content.ids):
            own = self._own(draws, number)
            parts.append((rows, self.decodings[number].decode(content.take(rows), own)))
        return _joined(parts, len(content))

    def _own(self, draws: DrawsByField, number: int) -> DrawsByField:
        """Return the draws of the samples of a recipe."""
        return {field: draws[f"{number}/{field}"] for field in self.graphs}

    @property
    def _has_followers(self) -> bool:
        return bool(self.decodings[0].recipes.followers)

    def _images(self, content: SampleBatch, rows: Ints) -> SampleBatch:
        """Return only the images of some samples."""
        return content.without(content.columns.keys() - self.graphs.keys()).take(rows)

    def drain(self) -> None:
        """Drop the batches in flight."""
        for decoding in self.decodings:
            decoding.drain()

    def close(self) -> None:
        """Release the graphs."""
        with contextlib.ExitStack() as stack:
            for decoding in self.decodings:
                stack.callback(decoding.close)


def _of_rows(reasons: Reasons, rows: Ints) -> dict[int, str]:
    """Return the reasons of some rows, by their places among them."""
    if not reasons:
        return {}
    return {place: reasons[row] for place, row in enumerate(rows.tolist()) if row in reasons}


def _joined(parts: Sequence[tuple[Ints, ImagesByField]], count: int) -> ImagesByField:
    """Join the images of parts of a batch of count samples, at least one part. Each has its rows
    and its images by field."""
    (_, first), *others = parts
    if not others or not first:
        return first
    found: ImagesByField = {}
    for field in first:
        bad: dict[int, str] = {}
        outputs = [(rows, part[field].outputs(field)) for rows, part in parts]
        for rows, part in parts:
            bad |= {int(rows[place]): why for place, why in part[field].bad.items()}
        joined: dict[str, Any] = {
            name: _joined_images([(rows, own[name]) for rows, own in outputs], count)
            for name in outputs[0][1]
        }
        has_views = isinstance(first[field].images, ViewTensors)
        found[field] = DecodedBatch(ViewTensors(joined) if has_views else joined[field], bad)
    return found


def _joined_images(parts: Sequence[tuple[Ints, Any]], count: int) -> Any:
    """Join tensors or lists of images. parts: rows of the result, each with their images."""
    import torch

    first = parts[0][1]
    if isinstance(first, ImageList):
        found: Any = ImageList([first[0]] * count)
    else:
        found = first.new_empty((count, *first.shape[1:]))
    for rows, images in parts:
        if isinstance(found, ImageList) or found.is_cuda:
            found[rows.tolist()] = images
        else:  # torch's threads need 20 times the CPU time of this copy
            found.numpy()[rows] = images.numpy()
    if not isinstance(found, ImageList) and found.is_cuda:
        # DALI reuses the memory of the parts when they are dropped.
        torch.cuda.current_stream(found.device).synchronize()
    return found


def _companions(
    fields: Sequence[str], content: SampleBatch, moves: Mapping[str, ImageMoves]
) -> dict[str, Column]:
    """Return the selected sizes and masks of images."""
    found: dict[str, Column] = {}
    for name in fields:
        image, suffix = name[: -len(SIZE)], name[-len(SIZE) :]
        if suffix not in (SIZE, MASK) or name in content.columns or image not in moves:
            continue
        if suffix == SIZE:
            found[name] = DenseColumn(moves[image].shown_sizes)
            continue
        masks = moves[image].shown_masks()
        if isinstance(masks, list):
            found[name] = ArrayForm(np.dtype(np.bool_), (None, None)).column(masks)
        else:
            found[name] = DenseColumn(masks)
    return found


def _missing(content: SampleBatch, field: str) -> dict[int, str]:
    """Return the rows that have no such image. They become zeros, and are not bad."""
    present = content.present.get(field)
    if present is None or present.all():
        return {}
    return dict.fromkeys(np.flatnonzero(~present).tolist(), _MISSING)


def _with_stand_ins(
    images: EncodedBatch, draws: Draws, missing: Reasons, left_out: Reasons
) -> tuple[EncodedBatch, Draws, Reasons]:
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

    def __call__(self, batch: Batch) -> tuple[dict[str, Images], SampleBatch]:
        """Mix images and labels, and drop the samples that were read as partners only."""
        mix, content = batch.mix, batch.content
        assert mix is not None
        own: Any = batch.images[self.image]  # of one size
        images: dict[str, Any] = batch.images | {self.image: mix_images(own, mix)}
        count = batch.samples
        images = {name: each[:count] for name, each in images.items()}
        labels = content.columns[self.label]
        assert isinstance(labels, DenseColumn)
        soft = soft_targets(labels.values, mix, classes=self.classes)
        others = content.without(batch.images.keys())
        if len(others) > count:
            others = others.take(np.arange(count))
        return images, others.with_columns({self.label: DenseColumn(soft)})


def make_mixed(
    dataset: Source, schema: Schema, options: LoaderOptions, recipes: FieldRecipes
) -> MixedFields | None:
    """Make the mixer of a batch's samples; None if the recipe doesn't mix. schema: of the samples
    after Maps. Raises ConfigError."""
    image = recipes.mixed
    if image is None:
        return None
    recipe = recipes.images[image]
    name = type(recipe.mixing[0]).__name__
    # Partners are of one part, which stays as it is.
    part = None if dataset.contents.mixture is None else PART
    known = [field for field, type in schema.items() if type.is_class and field != part]
    labels = [field for field in recipes.fields if field in known]
    if len(labels) != 1:
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
    options: LoaderOptions, order: JobOrder, augments: Augments, *, threads: int
) -> ImageDecoding | PartDecoding:
    """Build what decodes, augments and mixes the images of all recipes of a loader. Raises
    ConfigError."""
    dataset, seed, made = order.source, order.settings.seed, list[ImageDecoding]()
    elsewhere = order.partners_elsewhere(options.world) if options.world.size > 1 else 0
    with contextlib.ExitStack() as stack:  # closes what is built if the rest can't be
        for augment in augments.each:
            recipes, kept = augment.recipes, None
            mixed = make_mixed(dataset, augment.mapped.schema, options, recipes)
            if options.resident is not False and len(augments.each) == 1:
                from penstock.pipeline.feed.resident_images import make_resident

                kept = make_resident(options, order, augment, threads=threads)
            graphs: dict[str, Graph] = {}
            units = BoxUnits(enough=min(8, int(dataset.contents.sizes.sum())))
            decoding = ImageDecoding(
                recipes=recipes, seed=seed, graphs=graphs, units=units, mixed=mixed, resident=kept
            )
            stack.callback(decoding.close)
            images = dataset.contents.images
            shares = thread_shares(threads, {field: images[field] for field in recipes.images})
            for field, recipe in recipes.images.items():
                plan = GraphPlan(
                    recipe,
                    batch_size=options.per_rank + (elsewhere if recipe.mixing else 0),
                    threads=shares[field],
                    device_id=options.device.index,
                    deterministic=options.deterministic,
                )
                graphs[field] = Graph(plan, kept=None if kept is None else kept.feed)
            made.append(decoding)
        stack.pop_all()
    return PartDecoding(augments=augments, decodings=tuple(made)) if len(made) > 1 else made[0]
