"""What each stage can do alone, measured beside a run so that shares are comparable.

remote: ranges of its objects, fetched and dropped.
read: as many threads as the loader has read batches in a shuffled order, and check them; of a
remote dataset those that the cache has by then.
decode: encoded samples in memory go through the recipe's own windows with all sizes divided by 16
and without antialiasing, so that hardly anything but decoding those windows is left.
augment: the same samples through the whole recipe. python: the same without any decoding: views,
draws and the hand-over. copy: encoded bytes from pinned memory to the GPU, as what crosses the bus.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment.geometric_ops import CenterCrop, RandomCrop, RandomResizedCrop, Resize
from penstock.augment.ops import Decode
from penstock.augment.recipe import check_recipe
from penstock.cache.base.limits import usable_cores
from penstock.cache.errors import ConfigError
from penstock.cache.threads import Ordered, Workers
from penstock.pipeline.bench.progressive import progressive_cost
from penstock.pipeline.bench.raw_remote import raw_remote
from penstock.pipeline.bench.recipe_timer import (
    Clock,
    RecipeTimer,
    play_in_turns,
    rate_of,
    wait_for,
)
from penstock.pipeline.feed.read_scale import MAPPED_READ_THREADS, READ_THREADS
from penstock.pipeline.plan.settings import make_plan, shuffled_settings
from penstock.pipeline.report.ceilings import Ceilings, Rate
from penstock.pipeline.report.meter import BLOCK_BYTES
from penstock.pipeline.report.read_changes import COLD_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.augment.ops import Operation
    from penstock.augment.recipe import CheckedRecipe
    from penstock.readers.source import Source
    from penstock.readers.types import EncodedBatch

_SHRINK = 16  # a 224 crop becomes 14 x 14: a two-hundredth of the pixels to resize
_LOOKED_AT = 4096  # shards, whether they are in the cache
_FEW = 8  # samples a thread, where they must be fetched


def measure_ceilings(
    dataset: Source,
    image: tuple[str, CheckedRecipe] | None,
    *,
    batch_size: int,
    device: str = "cpu",
    threads: int = 0,
    seconds: float = 0.5,
    seed: int = 0,
) -> Ceilings:
    """Measure reading, decoding, augmenting, the copy and Python's part, each for about `seconds`.

    image: the field of images that is decoded, and its recipe (of several fields: one call for
    each, and `joined_ceilings`); None without images. threads: that decode, 0: all usable cores.
    seed: of the order that is read in. The dataset stays open. Call it when nothing else of this
    process runs. Raises ConfigError for numbers that can't be, and what reading and decoding raise.
    """
    if batch_size < 1 or threads < 0 or seconds <= 0:
        raise ConfigError(
            f"measure_ceilings: got batch_size={batch_size}, threads={threads}, seconds={seconds}; "
            "wanted a batch of 1 or more, threads of 0 or more and seconds above 0."
        )
    remote = raw_remote(dataset, seconds=seconds)
    near = _near(dataset)
    rows = _rows(dataset, batch_size, seed=seed, near=near)
    read, is_cold = _read(dataset, rows, seconds) if near is None or near.any() else (None, False)
    if image is None:
        return Ceilings(remote=remote, read=read, is_cold=is_cold)
    field, recipe = image
    threads = threads or usable_cores()
    # From a remote only as few as it takes.
    some = next(rows) if read is not None else next(rows)[: _FEW * threads]
    batch, share = _images(dataset, field, some)
    if batch is None:
        return Ceilings(remote=remote, read=read, is_cold=is_cold)
    bare = check_recipe(without_augmenting(recipe.ops), images=dataset.contents.images[field])
    stages = [RecipeTimer(bare), RecipeTimer(recipe), RecipeTimer(recipe, constant=True)]
    with contextlib.ExitStack() as open_ones:
        for stage in stages:
            stage.open(batch, device=device, threads=threads, seconds=seconds)
            open_ones.callback(stage.close)
        decode, augment, python = (_of_all(rate, share) for rate in play_in_turns(stages, seconds))
    return Ceilings(
        device=device,
        remote=remote,
        read=read,
        is_cold=is_cold,
        decode=decode,
        augment=augment,
        copy=_copy(batch, device, seconds) if device.startswith("cuda") else None,
        python=python,
        progressive=progressive_cost(batch, bare, device=device, threads=threads, seconds=seconds),
    )


def _images(
    dataset: Source, field: str, rows: NDArray[np.int64]
) -> tuple[EncodedBatch | None, float]:
    """The images that some rows have, None without any, and the share of the rows that have one."""
    found = dataset.values(field, rows)
    there = [row for row, image in enumerate(found.encoded(field).encoded) if len(image)]
    return (found.take(there).encoded(field) if there else None), len(there) / max(1, len(rows))


def _of_all(rate: Rate, share: float) -> Rate:
    """A rate by samples, of which this share has an image."""
    return Rate(
        samples_per_s=rate.samples_per_s / share,
        bytes_per_s=rate.bytes_per_s,
        cpu_s_per_1000=rate.cpu_s_per_1000 * share,
    )


def joined_ceilings(fields: Sequence[Ceilings]) -> Ceilings:
    """What the stages do with all image fields of a sample. fields: measured with each of them, at
    least one."""
    first = fields[0]
    return replace(
        first,
        decode=_in_a_row([each.decode for each in fields]),
        augment=_in_a_row([each.augment for each in fields]),
        copy=_in_a_row([each.copy for each in fields]),
        python=_in_a_row([each.python for each in fields]),
    )


def _in_a_row(rates: Sequence[Rate | None]) -> Rate | None:
    """The rate of pieces of work that each sample takes one after the other."""
    known = [rate for rate in rates if rate is not None]
    if len(known) <= 1:
        return known[0] if known else None
    samples_per_s = 1 / sum(1 / rate.samples_per_s for rate in known)
    return Rate(
        samples_per_s=samples_per_s,
        bytes_per_s=samples_per_s * sum(rate.bytes_per_s / rate.samples_per_s for rate in known),
        cpu_s_per_1000=sum(rate.cpu_s_per_1000 for rate in known),
    )


def without_augmenting(ops: tuple[Operation, ...]) -> list[Operation]:
    """The recipe's windows, with hardly any pixels to resize to, and nothing behind them."""
    resizes = any(isinstance(op, Resize | RandomResizedCrop) for op in ops)
    bare: list[Operation] = []
    for op in ops:
        if isinstance(op, Resize | RandomResizedCrop):
            bare.append(replace(op, size=_smaller(op.size), antialias=False))
        elif isinstance(op, CenterCrop | RandomCrop):
            # In front of any resize it is the window to decode; without one it is all there is.
            is_behind = any(isinstance(other, Resize | RandomResizedCrop) for other in bare)
            bare.append(replace(op, size=_smaller(op.size)) if resizes and is_behind else op)
        elif isinstance(op, Decode):
            bare.append(op)
    return bare


def _smaller(size: Any) -> Any:
    if isinstance(size, int):
        return max(1, size // _SHRINK)
    return tuple(max(1, side // _SHRINK) for side in size)


def _near(dataset: Source) -> NDArray[np.bool_] | None:
    """Which shards of a remote dataset are in the cache, of so many; None for a local one."""
    remote = dataset.remote_shards
    if remote is None:
        return None
    near = np.zeros(len(dataset.contents.sizes), np.bool_)
    for shard in range(min(_LOOKED_AT, len(near))):
        near[shard] = remote.is_whole(shard)
    return near


def _rows(
    dataset: Source, batch_size: int, *, seed: int, near: NDArray[np.bool_] | None
) -> Iterator[NDArray[np.int64]]:
    """(shard, row) of batch after batch, as a job of this seed would walk them, without an end.

    near: shards to take samples of, where any is.
    """
    contents = dataset.contents
    plan = make_plan(contents, shuffled_settings(contents, seed=seed, global_batch=batch_size))
    for epoch in itertools.count(1):  # the run itself has had epoch 0 in memory lately
        for position in range(0, contents.samples, batch_size):
            rows = plan.batch(epoch, position, batch_size)
            if near is not None and near.any():
                rows = rows[near[rows[:, 0]]]
            if len(rows):
                yield rows


def _read(dataset: Source, rows: Iterator[NDArray[np.int64]], seconds: float) -> tuple[Rate, bool]:
    """What reading gives, and whether the disk had to be waited for."""
    is_mapped = not dataset.contents.is_file_per_sample
    workers = MAPPED_READ_THREADS if is_mapped else READ_THREADS
    blocks = _blocks()

    def read(some: NDArray[np.int64]) -> tuple[int, int]:
        read = dataset.read(some)
        return len(read), read.bytes_read

    pool = Workers(workers, name="ceiling")
    stream = Ordered(read, rows, pool=pool, ahead=2 * workers)
    clock = Clock(seconds)
    try:
        while not clock.is_over:
            clock.count(*next(stream))
        rate = rate_of([clock.settled()])
    finally:
        stream.close()
        pool.close()
    read_bytes = sum(mark[3] for mark in clock.marks)
    is_cold = (_blocks() - blocks) * BLOCK_BYTES > COLD_SHARE * read_bytes
    return rate, is_cold


def _blocks() -> int:
    """Blocks that this process has had to read from disks."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock


def _copy(batch: EncodedBatch, device: str, seconds: float) -> Rate:
    import torch

    size_bytes = sum(map(len, batch.encoded))
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    clock = Clock(seconds)
    while not clock.is_over:
        host.to(device, non_blocking=True)
        wait_for(device)
        clock.count(len(batch.encoded), size_bytes)
    return rate_of([clock.settled()])
