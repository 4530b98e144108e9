"""How a loader's images become tensors: recipe, mixing, images in memory, the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.augment.graph import Graph
from penstock.augment.mixing import Mixer, mixer_of
from penstock.augment.recipe import CheckedRecipe, check_recipe
from penstock.cache.errors import ConfigError
from penstock.pipeline.plan.partners import PARTNERS_ELSEWHERE

if TYPE_CHECKING:
    from penstock.pipeline.feed.resident.graph import ResidentGraph
    from penstock.pipeline.feed.resident.images import ResidentImages
    from penstock.pipeline.options.native_options import NativeOptions
    from penstock.pipeline.plan.settings import PlanSettings
    from penstock.pipeline.plan.steps import Walk
    from penstock.readers.source import Source


def make_recipe(dataset: Source, options: NativeOptions) -> CheckedRecipe | None:
    """Check the recipe against the dataset; None where its images aren't wanted."""
    if "image" not in dataset.fields:
        if options.augment is not None:
            raise ConfigError(
                f"augment= needs images, but fields={dataset.fields!r} leaves them out. Drop "
                'augment=, or add "image" to the dataset\'s fields.'
            )
        return None
    return check_recipe(options.augment, images=dataset.contents.images["image"])


def make_mixer(
    dataset: Source, options: NativeOptions, recipe: CheckedRecipe | None, *, seed: int
) -> Mixer | None:
    """Make what mixes the samples of a batch; None where the recipe doesn't."""
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


def make_resident(
    dataset: Source,
    options: NativeOptions,
    frozen: PlanSettings,
    recipe: CheckedRecipe | None,
    *,
    walk: Walk,
    threads: int,
) -> ResidentImages | None:
    """Make what keeps decoded images in memory; None where none are kept.

    Raises ConfigError where that was asked for and can't be."""
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
        image="image",
        share=share_of_rank(frozen, global_batch=walk.global_batch, world=world),
        cuda=device.type == "cuda",
        fed_samples=options.sizes.per_rank * options.depth,
    )
    if max_bytes is None:
        return None
    return ResidentImages(
        recipe,
        image="image",
        samples=dataset.contents.id_end,
        max_bytes=max_bytes,
        threads=threads,
        device=device,
        deterministic=options.deterministic,
    )


def make_graph(
    recipe: CheckedRecipe, options: NativeOptions, threads: int, resident: ResidentImages | None
) -> Graph | ResidentGraph:
    """Build the graph that decodes a loader's batches."""
    alone = options.world.size == 1 or not recipe.mixing

    def make(*, from_memory: bool = False) -> Graph:
        return Graph(
            recipe,
            batch_size=options.sizes.per_rank + (0 if alone else PARTNERS_ELSEWHERE),
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
