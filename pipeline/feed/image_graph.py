"""How a loader's images become tensors: recipes, mixing, images in memory, graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.augment.field_recipes import FieldRecipes, check_recipes
from penstock.augment.graph import Graph
from penstock.augment.mixing import mixer_of
from penstock.cache.errors import ConfigError
from penstock.pipeline.feed.finisher import VALID, MixedFields
from penstock.pipeline.feed.graphs import ImageGraphs
from penstock.pipeline.plan.partners import PARTNERS_ELSEWHERE
from penstock.readers.fields.field_types import ClassLabel
from penstock.readers.types import ANY_SIZE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.augment.recipe import CheckedRecipe
    from penstock.pipeline.feed.mapping.fields import MappedFields
    from penstock.pipeline.feed.resident.graph import ResidentGraph
    from penstock.pipeline.feed.resident.images import ResidentImages
    from penstock.pipeline.options.native_options import NativeOptions
    from penstock.pipeline.plan.settings import PlanSettings
    from penstock.pipeline.plan.steps import Walk
    from penstock.readers.fields.schema import Schema
    from penstock.readers.source import Source
    from penstock.readers.types import ImageRange


def make_recipes(dataset: Source, options: NativeOptions, mapped: MappedFields) -> FieldRecipes:
    """Check the recipe, its Maps apart, against the fields that batches have."""
    images = dataset.contents.images
    recipes = check_recipes(mapped.augment, mapped.schema, mapped.fields, images, mapped.salts)
    if options.as_dict and options.pad and VALID in recipes.fields:
        raise ConfigError(
            f'as_dict=True and pad="mask" add "{VALID}" to each batch, and there is a field of '
            "that name. Drop as_dict= and take tuples, or leave the field out of fields=."
        )
    return recipes


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
    from penstock.pipeline.feed.resident.images import ResidentImages
    from penstock.pipeline.feed.resident.room import resident_bytes, room_for, share_of_rank

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
    from penstock.pipeline.feed.resident.graph import ResidentGraph

    return ResidentGraph(resident, from_memory=make(from_memory=True), make_from_bytes=make)
