"""Keep the decoded images of a small dataset in memory: read, check and decode each once per job.

When a sample is read for the first time, the reading thread decodes the whole image and copies the
pixels into an arena on the device of the batches. From then on the sample needs no read, no CRC and
no decoding: the graph is fed from the arena.

Reading threads decode because they work on later batches while the graph augments and the training
step runs. Images are kept as a whole, although the graph decodes only windows, because later
windows may be anywhere in them, and resampled pixels would change the results.
docs/reference/datasets.md describes the costs and gains.

Images that can't be kept (a damaged one of which only some windows decode, or one for which the
arena has no room) are read and decoded in each epoch, as without an arena. Nearly every batch is of
one kind.

The limits, by the value of `resident=`:
- "auto" on the CPU: 10 % of the memory that this process may still allocate, divided among the
  node's ranks, and at most 2 GiB per rank. The page cache and the user's code hardly miss that.
- "auto" on CUDA: 20 % of the GPU's free memory, after subtracting what DALI needs to decode and
  deliver. The model, which takes most of the memory, isn't on the device yet.
- True: half of the memory of either kind. More would leave too little for the job itself.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.augment import (
    HELD_RUNS,
    RUN_PIXELS,
    RUN_SAMPLES,
    RUNS_IN_FLIGHT,
    FullImageDecoder,
    GraphPlan,
    resident_tensor,
)
from penstock.cache import ConfigError
from penstock.cache.base import available_memory_bytes, format_size
from penstock.pipeline.report import ResidentFacts
from penstock.readers import ANY_SIZE
from penstock.readers.fieldtypes import (
    DenseColumn,
    EncodedColumn,
    ListColumn,
    RaggedColumn,
    SampleBatch,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from penstock.augment import CheckedRecipe
    from penstock.pipeline.feed.checked_recipes import CheckedAugment, MappedFields
    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import JobOrder, PlanSettings, World
    from penstock.readers import EncodedBatch, ImageRange, Source
    from penstock.readers.fieldtypes import Column

    Present = dict[str, NDArray[np.bool_]]
    Read = Callable[[NDArray[np.int64], dict[int, str]], SampleBatch]

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

NO_BYTES = np.empty(0, np.uint8)
"""The placeholder for the bytes of a resident sample, which aren't read."""
NO_BYTES.flags.writeable = False


class KeptColumns:
    """Columns of samples by id. One thread at a time may add samples; any thread may take them.

    Numbers of one shape are stored in arrays, and all else as copies sample by sample, because a
    view would keep its file or its batch alive.
    """

    def __init__(self, *, samples: int) -> None:
        """samples: larger than each id."""
        self._samples = samples
        self._dense: dict[str, NDArray[Any]] = {}
        self._single: dict[str, list[NDArray[Any] | None]] = {}
        self._dims: dict[str, NDArray[np.int32]] = {}
        self._like: dict[str, RaggedColumn] = {}
        self._present: dict[str, NDArray[np.bool_]] = {}

    def keep(self, content: SampleBatch, rows: Sequence[int], *, without: str) -> None:
        """Store these rows. without: the image field, which is stored elsewhere."""
        ids = content.ids[rows]
        for name, column in content.columns.items():
            if name != without:
                self._keep(name, column, rows, ids)
        for name, present in content.present.items():
            if name not in self._present:
                # Samples stored earlier came from a dataset in which no sample lacks this field.
                self._present[name] = np.ones(self._samples, np.bool_)
            self._present[name][ids] = present[rows]

    def _keep(self, name: str, column: Column, rows: Sequence[int], ids: NDArray[np.int64]) -> None:
        if isinstance(column, DenseColumn):
            values = column.values
            if name not in self._dense:
                self._dense[name] = np.zeros((self._samples, *values.shape[1:]), values.dtype)
            self._dense[name][ids] = values[rows]
            return
        kept = self._single.setdefault(name, [None] * self._samples)
        assert not isinstance(column, ListColumn), name  # decoded: behind what is kept
        if isinstance(column, RaggedColumn):
            self._like.setdefault(name, column.take([]))
            samples = [column.sample(row) for row in rows]
        else:
            samples = [column.samples[row] for row in rows]
            if column.dims is not None:
                if name not in self._dims:
                    self._dims[name] = np.zeros((self._samples, 2), np.int32)
                self._dims[name][ids] = column.dims[rows]
        for sample_id, sample in zip(ids.tolist(), samples, strict=True):
            kept[sample_id] = sample.copy()

    def take(self, ids: NDArray[np.int64]) -> tuple[dict[str, Column], Present]:
        """Return the columns of samples, and masks of fields that some samples lack.

        A sample that isn't stored has empty values.
        """
        columns: dict[str, Column] = {
            name: DenseColumn(values[ids]) for name, values in self._dense.items()
        }
        for name, kept in self._single.items():
            found = [kept[sample_id] for sample_id in ids.tolist()]
            like, dims = self._like.get(name), self._dims.get(name)
            if like is None:
                samples = [NO_BYTES if each is None else each for each in found]
                columns[name] = EncodedColumn(samples, None if dims is None else dims[ids])
            else:
                samples = [like.nothing if each is None else each for each in found]
                columns[name] = RaggedColumn.of(samples, like=like)
        return columns, {name: present[ids] for name, present in self._present.items()}


_LOG = logging.getLogger("penstock")

_ABSENT, _REFUSED = -1, -2  # instead of an image's offset


class ResidentImages:
    """Whole decoded images by sample id. Reading threads fill it, and one thread feeds from it.

    Nothing is allocated before the first image. On the CPU, memory is used as it is filled.
    idle_batches: after so many batches without decoding, the decoder is released.
    """

    idle_batches = 64

    def __init__(self, plan: GraphPlan, *, image: str, samples: int, max_bytes: int) -> None:
        """plan: of the decoder. image: the field. samples: larger than each id. max_bytes: the
        limit for pixels."""
        self._plan, self._image = plan, image
        self._samples, self._max_bytes = samples, max_bytes
        self._channels = plan.recipe.decode.channels
        self._filling = threading.Lock()
        self._decoder: FullImageDecoder | None = None
        self._arena: Any = None
        self._stream: Any = None  # of its own, as the thread's may be the training step's
        self._on_stream: Any = contextlib.nullcontext()
        self._begin = np.full(samples, _ABSENT, np.int64)
        self._dims = np.zeros((samples, 2), np.int32)
        self._others = KeptColumns(samples=samples)
        self._wrapped: dict[int, Any] = {}  # on CUDA, because wrapping again is expensive
        self._kept, self._used, self._fill_s = 0, 0, 0.0
        self._idle = self._hits = self._hit_bytes = 0
        self._is_full = self._closed = False

    def read(self, ids: NDArray[np.int64], bad: dict[int, str], read: Read) -> SampleBatch:
        """Return samples by id; resident ones without bytes, the others are read and stored.

        read: returns encoded samples by ids, and adds the rows of bad ones to its argument. bad:
        gets the rows of bad samples, with reasons. Raises the errors of `read`, and PenstockError
        if memory for decoding is short.
        """
        new = np.flatnonzero(self._begin[ids] < 0)
        if len(new) == len(ids):
            batch = read(ids, bad)
            self._fill(batch, bad)
            return batch
        part: SampleBatch | None = None
        if len(new):
            found: dict[int, str] = {}
            part = read(ids[new], found)
            bad.update({int(new[place]): why for place, why in found.items()})
            self._fill(part, found)
        else:
            self._idle += 1
            if self._idle == self.idle_batches:
                with self._filling:
                    self._decoder = None
        columns, present = self._others.take(ids)
        columns[self._image] = EncodedColumn([NO_BYTES] * len(ids), self._dims[ids])
        batch = SampleBatch(ids=ids.copy(), columns=columns, present=present)
        return batch if part is None else batch.patched(new, part)

    def feed(self, batch: EncodedBatch) -> list[Any]:
        """Return the images of a batch for a `Graph`, and count those whose bytes weren't read."""
        images, encoded = self.images(batch.ids), batch.encoded
        hits = [i for i, each in enumerate(images) if each is not None and not len(encoded[i])]
        self._hits += len(hits)
        self._hit_bytes += int(self.decoded_bytes(batch.dims[hits]).sum())
        return images

    def images(self, ids: NDArray[np.int64]) -> list[Any]:
        """Return images by sample id for a graph; None for absent ones."""
        begins = self._begin[ids].tolist()
        if self._plan.is_cuda:
            return [self._wrapped.get(sample_id) for sample_id in ids.tolist()]
        arena, channels, images = self._arena, self._channels, list[Any]()
        for begin, (height, width) in zip(begins, self._dims[ids].tolist(), strict=True):
            if begin < 0:
                images.append(None)
                continue
            end = begin + height * width * channels
            images.append(arena[begin:end].reshape(height, width, channels))
        return images

    def facts(self) -> ResidentFacts:
        """Return what is kept, and what was fed from memory so far."""
        return ResidentFacts(
            samples=self._kept,
            size_bytes=self._used,
            max_bytes=self._max_bytes,
            fill_s=self._fill_s,
            hits=self._hits,
            bytes_memory=self._hit_bytes,
        )

    def close(self) -> None:
        """Release the memory after a running fill has ended. Close the graphs first."""
        with self._filling:
            self._closed = True
            self._begin[:] = _ABSENT
            self._decoder = self._arena = self._stream = None
            self._wrapped.clear()
            self._others = KeptColumns(samples=self._samples)  # a thread may still use the old one

    def _fill(self, content: SampleBatch, bad: Iterable[int]) -> None:
        """Decode and store samples, except bad rows, resident ones and those without room."""
        batch, left_out = content.encoded(self._image), set(bad)
        present = content.present.get(self._image)
        if present is not None:
            left_out.update(np.flatnonzero(~present).tolist())
        with self._filling:
            if self._closed:
                return
            rows = self._admitted(batch, left_out)
            if not rows or not self._has_arena():
                return
            self._idle = 0
            began = time.perf_counter()
            decoder = self._decoder or FullImageDecoder(self._plan)
            self._decoder = None  # an interrupt leaves the decoder in an undefined state
            try:
                self._decode(decoder, content, rows)
            finally:
                self._fill_s += time.perf_counter() - began
            self._decoder = decoder

    def _admitted(self, batch: EncodedBatch, left_out: set[int]) -> list[int]:
        """Return the rows to decode, each sample once, as far as there is room."""
        room = self._max_bytes - self._used
        begins, sizes = self._begin[batch.ids].tolist(), self.decoded_bytes(batch.dims).tolist()
        rows: dict[int, int] = {}
        for row, sample_id in enumerate(batch.ids.tolist()):
            if begins[row] != _ABSENT or row in left_out or sample_id in rows:
                continue
            if sizes[row] > room:
                if not self._is_full:
                    self._is_full = True
                    _LOG.info(
                        "resident: the %s are full; other images are decoded in each epoch",
                        format_size(self._max_bytes),
                    )
                continue
            room -= sizes[row]
            rows[sample_id] = row
        return list(rows.values())

    def decoded_bytes(self, dims: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the bytes of images, int64, shape (n,). dims: heights and widths, shape (n, 2)."""
        sizes: NDArray[np.int64] = dims.astype(np.int64).prod(axis=1) * self._channels
        return sizes

    def _decode(self, decoder: FullImageDecoder, content: SampleBatch, rows: list[int]) -> None:
        batch = content.encoded(self._image)
        pixels = [int(height) * int(width) for height, width in batch.dims[rows].tolist()]
        kept: set[int] = set()
        with self._on_stream:
            for run in decoder([batch.encoded[row] for row in rows], pixels):
                fitting = [
                    (rows[place], image)
                    for place, image in run
                    if tuple(image.shape) == (*batch.dims[rows[place]].tolist(), self._channels)
                ]
                self._others.keep(content, [row for row, _ in fitting], without=self._image)
                self._keep(batch, fitting)
                kept.update(row for row, _ in fitting)
        for row in rows:
            if row not in kept:
                self._begin[batch.ids[row]] = _REFUSED

    def _keep(self, batch: EncodedBatch, run: list[tuple[int, torch.Tensor]]) -> None:
        """Copy a run's images, by row, into the arena, where other threads then find them."""
        begins: list[int] = []
        for _, image in run:
            begins.append(self._used)
            self._used += image.numel()
            part = self._arena[begins[-1] : self._used]
            if self._plan.is_cuda:
                part.view(image.shape).copy_(image, non_blocking=True)
            else:
                part[:] = image.numpy().reshape(-1)
        if self._plan.is_cuda:
            # The next run reuses the images' memory, and graphs read the arena without waiting.
            self._stream.synchronize()
        for (row, image), begin in zip(run, begins, strict=True):
            sample_id = int(batch.ids[row])
            if self._plan.is_cuda:
                part = self._arena[begin : begin + image.numel()].view(image.shape)
                self._wrapped[sample_id] = resident_tensor(part)
            self._dims[sample_id] = batch.dims[row]
            self._begin[sample_id] = begin  # last, because other threads may read it from now on
        self._kept += len(run)

    def _has_arena(self) -> bool:
        """Allocate the arena if necessary; return False if there isn't enough memory any more."""
        if self._arena is not None:
            return True
        import torch

        try:
            if self._plan.is_cuda:
                device = f"cuda:{self._plan.device_id}"
                self._arena = torch.empty(self._max_bytes, dtype=torch.uint8, device=device)
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self._on_stream = torch.cuda.stream(self._stream)
            else:
                self._arena = np.empty(self._max_bytes, np.uint8)
        except (MemoryError, torch.OutOfMemoryError) as error:
            _LOG.warning(
                "resident: %s of memory for decoded images can't be allocated (%s): none are kept",
                format_size(self._max_bytes),
                str(error).splitlines()[0] if str(error) else type(error).__name__,
            )
            self._max_bytes, self._is_full = 0, True
            return False
        return True


class MemoryBudget(NamedTuple):
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
    batch_bytes = 4 * batch_size * recipe.values
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
    images = contents.images[image]
    least = contents.samples * images.min_height * images.min_width * channels
    if images.fixed or least > most:
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
    options: LoaderOptions, order: JobOrder, augment: CheckedAugment, *, threads: int
) -> ResidentImages | None:
    """Make the store of decoded images in memory; None if none are kept.

    Raises ConfigError if `resident=True` can't be fulfilled.
    """
    dataset, images = order.source, augment.recipes.images
    if (reason := _why_not(images, augment.mapped, dataset.contents.images)) is not None:
        if options.resident is True:
            raise ConfigError(reason)
        return None
    ((image, recipe),) = images.items()
    settings, sizes, world = order.settings, order.walk.schedule.sizes, options.world
    share = max(share_of_rank(settings, global_batch=size, world=world) for size in sizes)
    room = memory_budget(options, recipe)
    max_bytes = resident_bytes(options, room, dataset, recipe, image=image, share=share)
    if max_bytes is None:
        return None
    device_id, exact = options.device.index, options.deterministic
    plan = GraphPlan(
        recipe, batch_size=RUN_SAMPLES, threads=threads, device_id=device_id, deterministic=exact
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
