"""Decide whether a dataset's decoded images fit into memory, and how much of it a rank needs.

The rule, by what was asked for:
- "auto" on the CPU: at most 10 % of the memory that this process may still take, shared by the
  node's ranks, and at most 2 GiB a rank: an amount that the page cache and the user's own code
  hardly miss.
- "auto" on CUDA: at most 20 % of the GPU's free memory after what DALI needs to decode and deliver.
  This is asked before the model is on the device, and the model takes most of the memory.
- True: half of either. The user asked for it, but beyond that the job itself would run short.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.augment import HELD_RUNS, RUN_PIXELS, RUNS_IN_FLIGHT
from penstock.cache import ConfigError
from penstock.cache.base import available_memory_bytes, format_size

if TYPE_CHECKING:
    import torch

    from penstock.augment import CheckedRecipe
    from penstock.pipeline.options import ResidentMode
    from penstock.pipeline.plan import PlanSettings, World
    from penstock.readers import Source

AUTO_SHARE_CPU = 0.10
AUTO_MAX_BYTES_CPU = 2 * 2**30
AUTO_SHARE_CUDA = 0.20
ASKED_SHARE = 0.50
# A rank's lanes aren't equally large, and partners for mixing and substitutes come from others.
SPARE = 1.05
# Beside its pixels: where they are, its size and label, and on CUDA the tensor that wraps them.
SAMPLE_BYTES_CPU = 24
SAMPLE_BYTES_CUDA = 512
# Batches that were handed out: the user's, and one whose memory DALI has back only when the device
# has done what was asked of it before the tensor went (DLPack; frees are ordered by streams).
HANDED_OUT = 2

_LOG = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """How much memory images may take, and why.

    reason: how that follows from what there is.
    """

    most_bytes: int
    reason: str


def memory_budget(
    mode: ResidentMode,
    *,
    device: torch.device,
    world: World,
    recipe: CheckedRecipe,
    batch_size: int,
    depth: int,
) -> MemoryBudget:
    """How much memory the rule at the top allows here and now."""
    if device.type != "cuda":
        free = available_memory_bytes()
        share = ASKED_SHARE if mode is True else AUTO_SHARE_CPU
        most = int(free * share) // world.local_size
        reason = (
            f"{share:.0%} of the {format_size(free)} that this process may take, shared by "
            f"{world.local_size} rank(s) of this node"
        )
        if mode is True or most <= AUTO_MAX_BYTES_CPU:
            return MemoryBudget(most_bytes=most, reason=reason)
        return MemoryBudget(
            most_bytes=AUTO_MAX_BYTES_CPU, reason="the most that resident='auto' takes"
        )
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    needed = dali_needs_bytes(recipe, batch_size=batch_size, depth=depth)
    share = ASKED_SHARE if mode is True else AUTO_SHARE_CUDA
    return MemoryBudget(
        most_bytes=max(0, int((free - needed) * share)),
        reason=f"{share:.0%} of the {format_size(free)} free on {device}, less the "
        f"{format_size(needed)} that decoding needs",
    )


def dali_needs_bytes(recipe: CheckedRecipe, *, batch_size: int, depth: int) -> int:
    """GPU memory for decoding and for batches in flight: runs of whole images, in DALI and on their
    way to the store, and, for each batch in DALI and those handed out, its tensors in float32 and
    once again on the way there."""
    channels, height, width = recipe.shape
    batch_bytes = 4 * batch_size * channels * height * width
    runs = (RUNS_IN_FLIGHT + HELD_RUNS) * RUN_PIXELS * recipe.decode.channels
    return runs + 2 * (depth + HANDED_OUT) * batch_bytes


def share_of_rank(settings: PlanSettings, *, global_batch: int, world: World) -> float:
    """The share of all samples that a rank reads in some epoch: its own lanes where these are fixed
    and whole, its own places where samples come in index order, else all. Of the largest rank."""
    if not settings.shuffle:
        return -(-global_batch // world.size) / global_batch
    lanes = settings.lanes
    fixed = settings.reshuffle == 0 and global_batch % lanes == 0
    return 1 / world.size if fixed and lanes % world.size == 0 else 1.0


def decoded_bytes(
    source: Source, *, image: str, channels: int, most: float, only_near: bool
) -> int | None:
    """Bytes of all images, decoded; where it is more than `most`, something more than that.

    Opens shards until it knows. only_near: None if that would need the remote.
    Raises what opening a shard raises.
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


def resident_bytes(
    mode: ResidentMode,
    room: MemoryBudget,
    source: Source,
    recipe: CheckedRecipe,
    *,
    image: str,
    share: float,
    cuda: bool,
    fed_samples: int = 0,
) -> int | None:
    """Bytes for the pixels that a rank keeps; None: none are kept.

    share: of the samples, that this rank reads. fed_samples: of all batches in DALI; on CUDA it
    copies their whole images into batches of its own. Raises ConfigError where that was asked for
    and doesn't fit.
    """
    beside = source.contents.id_end * (SAMPLE_BYTES_CUDA if cuda else SAMPLE_BYTES_CPU)
    left = room.most_bytes - beside
    spare = SPARE if share < 1 else 1.0
    fed = SPARE * fed_samples / source.contents.samples if cuda else 0.0  # of all images
    total = decoded_bytes(
        source,
        image=image,
        channels=recipe.decode.channels,
        most=left / (min(1.0, share * spare) + fed),
        only_near=mode == "auto",
    )
    needed = 0 if total is None else min(total, int(total * share * spare))
    if total is not None and needed + int(total * fed) <= left:
        _LOG.info(
            "resident: %s of decoded images are kept in memory (%s)",
            format_size(needed),
            room.reason,
        )
        return needed
    if mode is True:
        assert total is not None
        raise ConfigError(
            f"resident=True: the decoded images of this rank take more than "
            f"{format_size(int(total * (share + fed)) + beside)}, and there is room for "
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
