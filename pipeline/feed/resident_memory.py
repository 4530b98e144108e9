"""Decide whether a dataset's decoded images fit into memory, and how much of it a rank needs.

The limits, by the value of `resident=`:
- "auto" on the CPU: 10 % of the memory that this process may still allocate, divided among the
  node's ranks, and at most 2 GiB per rank. The page cache and the user's code hardly miss that.
- "auto" on CUDA: 20 % of the GPU's free memory, after subtracting what DALI needs to decode and
  deliver. The model, which takes most of the memory, isn't on the device yet.
- True: half of the memory of either kind. More would leave too little for the job itself.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.augment import HELD_RUNS, RUN_PIXELS, RUN_SAMPLES, RUNS_IN_FLIGHT, GraphPlan
from penstock.cache import ConfigError
from penstock.cache.base import available_memory_bytes, format_size
from penstock.readers import ANY_SIZE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.augment import CheckedRecipe
    from penstock.pipeline.feed.map_fields import MappedFields
    from penstock.pipeline.feed.resident_images import ResidentImages
    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import JobOrder, PlanSettings, World
    from penstock.readers import ImageRange, Source

AUTO_SHARE_CPU = 0.10
AUTO_MAX_BYTES_CPU = 2 * 2**30
AUTO_SHARE_CUDA = 0.20
ASKED_SHARE = 0.50
# Lanes differ in size, and partners for mixing and substitutes may come from other ranks' lanes.
SPARE = 1.05
# Bytes of a sample in addition to its pixels: their offset, its size and label, and on CUDA the
# tensor that wraps them.
SAMPLE_BYTES_CPU = 24
SAMPLE_BYTES_CUDA = 512
# Delivered batches: the user's, and one whose tensor was dropped. DALI gets its memory back once
# the device has finished the earlier work (DLPack; frees are ordered by streams).
DELIVERED = 2

_LOG = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The memory that images may take. reason: how it follows from the machine's memory."""

    most_bytes: int
    reason: str


def memory_budget(options: LoaderOptions, recipe: CheckedRecipe) -> MemoryBudget:
    """Return the memory that the limits at the top of this module allow now."""
    device, is_asked = options.device, options.resident is True
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        needed = dali_needs_bytes(recipe, batch_size=options.per_rank, depth=options.depth)
        share = ASKED_SHARE if is_asked else AUTO_SHARE_CUDA
        return MemoryBudget(
            most_bytes=max(0, int((free - needed) * share)),
            reason=f"{share:.0%} of the {format_size(free)} free on {device}, less the "
            f"{format_size(needed)} that decoding needs",
        )
    free, ranks = available_memory_bytes(), options.world.local_size
    share = ASKED_SHARE if is_asked else AUTO_SHARE_CPU
    most = int(free * share) // ranks
    if not is_asked and most > AUTO_MAX_BYTES_CPU:
        return MemoryBudget(most_bytes=AUTO_MAX_BYTES_CPU, reason="the limit of resident='auto'")
    return MemoryBudget(
        most_bytes=most,
        reason=f"{share:.0%} of the {format_size(free)} that this process may allocate, divided "
        f"among {ranks} rank(s) of this node",
    )


def dali_needs_bytes(recipe: CheckedRecipe, *, batch_size: int, depth: int) -> int:
    """Return the GPU memory that decoding and the batches in flight need.

    Decoding needs it for runs of whole images, in DALI and while they are copied. Each batch in
    DALI, and each delivered one, needs its float32 tensors twice.
    """
    channels, height, width = recipe.shape
    batch_bytes = 4 * batch_size * channels * height * width
    runs = (RUNS_IN_FLIGHT + HELD_RUNS) * RUN_PIXELS * recipe.decode.channels
    return runs + 2 * (depth + DELIVERED) * batch_bytes


def share_of_rank(settings: PlanSettings, *, global_batch: int, world: World) -> float:
    """Return the share of all samples that the largest rank reads over all epochs.

    It is the rank's lanes if they are fixed, the rank's slots if samples come in index order, and
    otherwise all samples.
    """
    if not settings.shuffle:
        return -(-global_batch // world.size) / global_batch
    lanes = settings.lanes
    fixed = settings.reshuffle == 0 and global_batch % lanes == 0
    return 1 / world.size if fixed and lanes % world.size == 0 else 1.0


def decoded_bytes(
    source: Source, *, image: str, channels: int, most: float, only_near: bool
) -> int | None:
    """Return the decoded bytes of all images; if they exceed `most`, some number above it.

    It opens shards until the result is known. only_near: return None if that would need the remote.
    Raises the errors of opening a shard.
    """
    contents = source.contents
    images, samples = contents.images[image], contents.samples
    if images.fixed:
        return samples * images.min_height * images.min_width * channels
    least = samples * images.min_height * images.min_width * channels
    if least > most:
        return least
    total = 0
    for shard in range(len(contents.sizes)):
        if only_near and not source.is_near(shard):
            return None
        total += channels * int(source.image_dims(shard, image).astype(np.int64).prod(axis=1).sum())
        if total > most:
            break
    return total


def make_resident(
    dataset: Source,
    options: LoaderOptions,
    order: JobOrder,
    images: Mapping[str, CheckedRecipe],
    mapped: MappedFields,
    *,
    threads: int,
) -> ResidentImages | None:
    """Make the store of decoded images in memory; None if none are kept.

    Raises ConfigError if `resident=True` can't be fulfilled.
    """
    if options.resident is False:
        return None
    if (reason := _why_not(images, mapped, dataset.contents.images)) is not None:
        if options.resident is True:
            raise ConfigError(reason)
        return None
    ((image, recipe),) = images.items()
    max_bytes = resident_bytes(
        options,
        memory_budget(options, recipe),
        dataset,
        recipe,
        image=image,
        share=max(
            share_of_rank(order.settings, global_batch=size, world=options.world)
            for size in order.walk.schedule.sizes
        ),
    )
    if max_bytes is None:
        return None
    from penstock.pipeline.feed.resident_images import ResidentImages

    plan = GraphPlan(
        recipe,
        batch_size=RUN_SAMPLES,
        threads=threads,
        device_id=options.device.index,
        deterministic=options.deterministic,
    )
    return ResidentImages(plan, image=image, samples=dataset.contents.id_end, max_bytes=max_bytes)


def _why_not(
    images: Mapping[str, CheckedRecipe], mapped: MappedFields, ranges: Mapping[str, ImageRange]
) -> str | None:
    """Return the reason why no decoded images can be kept in memory; None if they can."""
    if len(images) != 1:
        return (
            f"resident=True keeps decoded images of one field in memory, and "
            f"fields={mapped.fields!r} has {len(images) or 'none'}. Drop resident=, or select one "
            "image field of the dataset."
        )
    (image,) = images
    if mapped.crops:
        op = next(iter(mapped.crops.values())).op
        other = f"{op} reads another part of the samples in each epoch"
    elif image in mapped.encoded_images:
        other = f'a Map takes the encoded bytes of "{image}"'
    elif ranges[image] == ANY_SIZE:
        return (
            "resident=True keeps decoded images in memory, and the sizes of this dataset's images "
            "aren't known before they are read. Drop resident=, or pack the dataset."
        )
    else:
        return None
    return f"resident=True keeps decoded images in memory, and {other}. Drop one of the two."


def resident_bytes(
    options: LoaderOptions,
    room: MemoryBudget,
    source: Source,
    recipe: CheckedRecipe,
    *,
    image: str,
    share: float,
) -> int | None:
    """Return the bytes for the pixels that a rank keeps; None if none are kept.

    share: of the samples, those that this rank reads. On CUDA, DALI also copies the whole images of
    all batches that it works on. Raises ConfigError if resident=True doesn't fit.
    """
    cuda, is_asked = options.device.type == "cuda", options.resident is True
    overhead = source.contents.id_end * (SAMPLE_BYTES_CUDA if cuda else SAMPLE_BYTES_CPU)
    left = room.most_bytes - overhead
    spare = SPARE if share < 1 else 1.0
    fed_samples = options.per_rank * options.depth if cuda else 0
    fed = SPARE * fed_samples / source.contents.samples  # of all images
    total = decoded_bytes(
        source,
        image=image,
        channels=recipe.decode.channels,
        most=left / (min(1.0, share * spare) + fed),
        only_near=not is_asked,
    )
    needed = 0 if total is None else min(total, int(total * share * spare))
    if total is not None and needed + int(total * fed) <= left:
        _LOG.info(
            "resident: %s of decoded images are kept in memory (%s)",
            format_size(needed),
            room.reason,
        )
        return needed
    if is_asked:
        assert total is not None
        raise ConfigError(
            f"resident=True: the decoded images of this rank take more than "
            f"{format_size(int(total * (share + fed)) + overhead)}, and there is room for "
            f"{format_size(room.most_bytes)} ({room.reason}). Pass resident=False, or pack smaller "
            "images (`penstock pack --short-side`)."
        )
    size = "unknown" if total is None else f"more than {format_size(int(total * (share + fed)))}"
    _LOG.info(
        "resident: no images are kept: their decoded size is %s, the room %s (%s)",
        size,
        format_size(room.most_bytes),
        room.reason,
    )
    return None
