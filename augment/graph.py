"""Run batches through the DALI graph of a checked recipe, on "cpu" or "cuda".

Its inputs are views of encoded bytes, without a copy, and windows and flips as arguments (`draws`);
its outputs are torch tensors, without a copy. The graph keeps no random state and makes no
decisions.

Usually a batch is one sub-batch, which is one run of DALI. A sample that doesn't decode fails its
whole run. Then the good samples of that run are decoded again, in a separate pipeline, until the
bad ones are found (`failing_rows`), and the next batches are cut into smaller runs.

Measurements behind this design, with DALI 2.4 on the CPU at batch 256:
- Three small argument inputs (start, shape, mirror) take 4.3 us a sample; one packed input that the
  graph unpacks takes 9.4, as each subscript is an operator.
- A crop after a resize is one resize of a region: fewer pixels are decoded and fewer resized.
- The dynamic executor with prefetch_queue_depth=1 makes one run for each schedule_run(), and any
  number of runs may be in flight. With a depth of 2 the first one runs twice; without the dynamic
  executor returned tensors are overwritten.
- A sample that doesn't decode fails only its batch. But a header that can't be parsed, or a window
  outside its image, ends the run while other threads still decode into it, and most trials ended in
  a segmentation fault. Such samples must never reach DALI: readers compare the CRC of verified
  bytes, and check_headers=True checks other bytes (`verify`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from penstock.augment.dali_runs import (
    NO_IMAGE,
    SPLIT_WAYS,
    EncodedPipeline,
    check_machine,
    corrupt_sample_error,
    decode_runs,
    failing_rows,
    fault_of,
    load_dali,
    machine_error,
    split_rows,
)
from penstock.augment.graph_definition import GraphInputs, ViewInputs, decoded, define_outputs
from penstock.augment.verify import bad_headers, read_header
from penstock.cache import ClosedError, PenstockError
from penstock.readers import Encoded, EncodedBatch, Rejection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from penstock.augment.draws import Draws
    from penstock.augment.graph_definition import GraphPlan

# Batches after a failure that are cut into small runs, and samples of a small run. With 1 % bad
# samples 72 of 100 runs of 128 fail and 15 of 100 runs of 16, and a failed run loses its good
# samples.
SMALL_RUN_BATCHES = 64
SMALL_RUN_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """The output of a graph for one batch. images: (n, channels, height, width), a list of images
    of different sizes, or the views of images. bad: rows of zeros for samples that don't decode,
    with reasons."""

    images: Decoded
    bad: dict[int, str]

    def clear(self, rows: list[int]) -> None:
        """Set images to zeros; those of a list have no pixels then."""
        if isinstance(self.images, ImageList):
            none = ImageList(self.images[row][:, :0, :0] for row in rows)
            self.images[rows] = none
        else:
            self.images[rows] = 0

    def outputs(self, field: str) -> dict[str, Images]:
        """Return what a batch has of the images, by field. field: of the images."""
        images = self.images
        return {**images.fields} if isinstance(images, ViewTensors) else {field: images}


@dataclass(frozen=True, slots=True)
class BatchInFlight:
    """A batch in flight. batch: its samples as they were fed. marks: omitted rows with reasons.
    kept: rows whose decoded images were fed. runs: rows of the runs of the others, with their
    pipeline and the objects that DALI reads until a run is complete."""

    batch: EncodedBatch
    draws: Draws
    marks: dict[int, str]
    kept: frozenset[int]
    runs: list[tuple[list[int], DaliPipeline, tuple[Any, ...]]]


def select_rows(
    batch: EncodedBatch, draws: Draws, rows: list[int]
) -> tuple[Sequence[Encoded], Draws]:
    """Return some samples of a batch and their draws; for all rows the same objects."""
    if len(rows) == len(batch.encoded):
        return batch.encoded, draws
    some = {name: values[rows] for name, values in draws.items()}
    return [batch.encoded[row] for row in rows], some


_LESS_MEMORY = "a smaller batch, or a smaller prefetch_factor"
_SIDE_THREADS = 4


class ImageList(list["torch.Tensor"]):
    """The images of a batch, (channels, height, width) each, of different sizes."""

    __slots__ = ()

    def __setitem__(self, rows: Any, images: Any) -> None:
        """Replace the images of some rows; 0 sets their pixels to zero."""
        for place, row in enumerate(rows):
            if isinstance(images, int):
                self[row].zero_()
            else:
                list.__setitem__(self, row, images[place])

    def __getitem__(self, rows: Any) -> Any:
        """Return one image, or those of a slice."""
        found = list.__getitem__(self, rows)
        return ImageList(found) if isinstance(rows, slice) else found


class ViewTensors:
    """The views of a batch of images: tensors by field, (n, views, channels, height, width)."""

    def __init__(self, fields: dict[str, torch.Tensor]) -> None:
        self.fields = fields

    def __setitem__(self, rows: Any, views: ViewTensors | int) -> None:
        """Set the views of some images to those of others, or to a number."""
        for name, tensor in self.fields.items():
            tensor[rows] = views if isinstance(views, int) else views.fields[name]

    def __getitem__(self, rows: Any) -> ViewTensors:
        """Return the views of some images."""
        return ViewTensors({name: tensor[rows] for name, tensor in self.fields.items()})


Images: TypeAlias = "torch.Tensor | ImageList"
"""The images of a batch: one tensor, or a list of tensors of different sizes."""
Decoded: TypeAlias = "Images | ViewTensors"
"""The output of a graph for a batch: its images, or several views of each image."""


class DaliPipeline(EncodedPipeline):
    """The pipeline of a graph. One thread uses it."""

    def __init__(self, plan: GraphPlan) -> None:
        self._plan = plan
        self._inputs: Any = ViewInputs(plan) if plan.recipe.views else GraphInputs(plan)
        super().__init__(plan, lambda encoded: define_outputs(plan, encoded))
        self._constant: Decoded | None = None
        if plan.constant:
            smallest = {"canvas": np.ones((plan.batch_size, 2), np.int32)}
            self._constant = self.empty(plan.batch_size, smallest)
            self._constant[list(range(plan.batch_size))] = 0

    def schedule(self, samples: Sequence[Encoded], draws: Any = None) -> tuple[Any, ...]:
        """Start one run with the draws of its samples, as `EncodedPipeline.schedule`."""
        arguments = self._inputs(draws, len(samples)) if samples else None
        return EncodedPipeline.schedule(self, samples, arguments)

    def take(self, samples: int) -> Decoded:
        """Return the oldest run's images. Raises DALI's RuntimeError."""
        from torch.utils.dlpack import from_dlpack

        output, *others = self.outputs()
        if self._constant is not None:
            return self._constant[:samples]
        if views := self._plan.recipe.views:
            tensors = [from_dlpack(each.as_tensor()) for each in (output, *others)]
            return ViewTensors({field.name: one for field, one in zip(views, tensors, strict=True)})
        if self._plan.recipe.form == "list":
            return ImageList(from_dlpack(output[row]) for row in range(samples))
        return from_dlpack(output.as_tensor())

    def empty(self, samples: int, draws: Draws) -> Decoded:
        """Return memory for the images of samples, uninitialised if they have one size. draws: of
        the batch."""
        import torch

        recipe, number = self._plan.recipe, self._plan.device_id
        device = "cpu" if number is None else number
        options: Any = {"dtype": getattr(torch, recipe.dtype), "device": device}
        if recipe.views:
            fields = {}
            for each in recipe.views:
                options["dtype"] = getattr(torch, each.recipe.dtype)
                shape = (samples, each.count, *each.recipe.shape)
                fields[each.name] = torch.empty(shape, **options)
            return ViewTensors(fields)
        if recipe.is_fixed:
            return torch.empty((samples, *recipe.shape), **options)
        channels, sizes = recipe.decode.channels, draws["canvas"][:samples].tolist()
        if recipe.form == "list":
            return ImageList(torch.zeros((channels, *size), **options) for size in sizes)
        return torch.empty((samples, channels, *(sizes[0] if sizes else (1, 1))), **options)


class Graph:
    """The graph that decodes and augments batches. One thread uses it; close() is safe to call
    twice.

    feed() schedules a batch, and outputs() returns the oldest one. The caller decides how many
    batches are in flight; they may have any size up to batch_size, including 0.

    If decoded images are kept in memory, it has two pipelines, because one takes one kind of input.
    That for encoded samples is then built when a sample first needs it.
    """

    def __init__(
        self, plan: GraphPlan, *, kept: Callable[[EncodedBatch], list[Any]] | None = None
    ) -> None:
        """Build the graph without running it. Raises MissingDependencyError without DALI.

        kept: returns the decoded image of each sample of a batch, as `GraphPlan.resident` describes
        them, or None for a sample that isn't kept.
        """
        self._plan, self._kept = plan, kept
        self._closed = False
        # By whether their inputs are kept images.
        self._pipes: dict[bool, DaliPipeline] = {}
        # For samples of failed runs, so that runs in flight aren't affected. They are built once,
        # at the first failure: building pipelines that fail leaks.
        self._sides: dict[bool, DaliPipeline] = {}
        self._pipe = self._pipe_for(is_kept=kept is not None)
        self._flights: deque[BatchInFlight] = deque()
        # DALI may still read the batch that was just returned.
        self._last: BatchInFlight | None = None
        self._careful = 0  # next batches to cut into small runs

    @property
    def in_flight(self) -> int:
        """The number of batches that were fed and not yet returned."""
        return len(self._flights)

    def feed(
        self, batch: EncodedBatch, draws: Draws, *, bad: Mapping[int, str] | None = None
    ) -> None:
        """Schedule one batch, and return before it is decoded. draws: from `draws.draw`.

        bad: rows that are known to be bad, with reasons; they aren't decoded, and their images are
        zeros. Raises ClosedError after close().
        """
        self._check_open()
        marks = dict(bad or {})
        if self._plan.check_headers:
            marks |= bad_headers(batch)
        flight = self._flight(batch, draws, marks)
        for rows in self._by_kind(flight):
            is_kept = rows[0] in flight.kept
            size = SMALL_RUN_SAMPLES if self._careful and not is_kept else len(rows)
            pipe = self._pipe_for(is_kept)
            for run in split_rows(rows, size):
                held = pipe.schedule(*select_rows(flight.batch, draws, run))
                flight.runs.append((run, pipe, held))
        self._careful = max(0, self._careful - 1)
        self._flights.append(flight)

    def _flight(self, batch: EncodedBatch, draws: Draws, marks: dict[int, str]) -> BatchInFlight:
        """Return a batch with the images that are kept in memory in place of encoded samples."""
        if self._kept is None:
            return BatchInFlight(batch, draws, marks, frozenset(), [])
        images = self._kept(batch)
        kept = frozenset(row for row, image in enumerate(images) if image is not None)
        fed = [images[row] if row in kept else each for row, each in enumerate(batch.encoded)]
        return BatchInFlight(replace(batch, encoded=fed), draws, marks, kept, [])

    def _by_kind(self, flight: BatchInFlight) -> list[list[int]]:
        """Return the rows to decode, divided into those that are kept in memory and the others."""
        rows = [row for row in range(len(flight.batch.encoded)) if row not in flight.marks]
        if not flight.kept:
            return [rows] if rows else []
        kept = [row for row in rows if row in flight.kept]
        others = [row for row in rows if row not in flight.kept]
        return [part for part in (kept, others) if part]

    def outputs(self) -> torch.Tensor:
        """Return the oldest batch that was fed, (n, channels, height, width), an `ImageList`, or
        `ViewTensors`.
        Blocks until it is complete.

        The tensor is the caller's: no later run overwrites it. On CUDA it belongs to the current
        stream. Raises CorruptSampleError if samples don't decode; that batch is then lost, and the
        next call returns the next batch. Raises ClosedError after close().
        """
        batch = self.outputs_marked()
        if batch.bad and self._last is not None:
            ids = self._last.batch.ids
            raise corrupt_sample_error({int(ids[row]): why for row, why in batch.bad.items()})
        return cast("torch.Tensor", batch.images)

    def outputs_marked(self) -> DecodedBatch:
        """Return the oldest batch as `outputs` does; samples that don't decode are zeros, listed
        with their reasons.

        Raises DeviceError if memory is short or the device fails, ClosedError after close().
        """
        self._check_open()
        if not self._flights:
            raise PenstockError("Graph.outputs: no batch is in flight. Call feed() first.")
        self._last = flight = self._flights.popleft()
        samples = len(flight.batch.encoded)
        images: Any = None
        failed: list[tuple[list[int], RuntimeError]] = []
        taken: list[Decoded] = []
        for rows, pipe, _ in flight.runs:  # all of them, or later batches would get their results
            try:
                taken.append(pipe.take(len(rows)))
            except RuntimeError as error:
                failed.append((rows, error))
                continue
            if len(rows) == samples:
                return DecodedBatch(taken[0], {})
            images = self._pipe.empty(samples, flight.draws) if images is None else images
            images[rows] = taken[-1]
        if failed:
            self._careful = SMALL_RUN_BATCHES
        for _, failure in failed:
            check_machine(failure, remedy=_LESS_MEMORY)
        images = self._pipe.empty(samples, flight.draws) if images is None else images
        return self._completed(flight, [rows for rows, _ in failed], images, taken)

    def decode(self, batch: EncodedBatch, draws: Draws) -> DecodedBatch:
        """Decode a few samples immediately, as `outputs_marked`; batches in flight aren't
        affected."""
        self._check_open()
        flight = self._flight(batch, draws, {})
        images = self._pipe.empty(len(batch.encoded), draws)
        return self._completed(flight, self._by_kind(flight), images, [])

    def zeros(self, samples: int, draws: Draws) -> Decoded:
        """Return black images of samples with these draws."""
        images = self._pipe.empty(samples, draws)
        images[list(range(samples))] = 0
        return images

    def drain(self) -> None:
        """Drop the batches in flight and their errors."""
        self._check_open()
        while self._flights:
            self._last = self._flights.popleft()
            for _, pipe, _ in self._last.runs:
                with contextlib.suppress(RuntimeError):
                    pipe.output()

    def close(self) -> None:
        """Wait for the batches in flight and release DALI's threads and memory."""
        if not self._closed:
            self.drain()
            self._closed, self._last = True, None
            self._pipes.clear()
            self._sides.clear()
            del self._pipe

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("This graph is closed. Create a new loader.")

    def _pipe_for(self, is_kept: bool) -> DaliPipeline:
        """Return the pipeline for kept images or for encoded samples; build it at its first use."""
        if is_kept not in self._pipes:
            self._pipes[is_kept] = DaliPipeline(self._plan_for(is_kept))
        return self._pipes[is_kept]

    def _plan_for(self, is_kept: bool) -> GraphPlan:
        return replace(self._plan, pixels=True, resident=True) if is_kept else self._plan

    def _completed(
        self, flight: BatchInFlight, failed: list[list[int]], images: Any, taken: list[Decoded]
    ) -> DecodedBatch:
        """Decode the samples of failed runs again into the images, with zeros for bad samples.

        failed: the rows of each run. taken: tensors that are being copied into images. Raises
        DeviceError if no sample is the cause.
        """

        def again(rows: list[int]) -> None:
            taken.append(self._decoded_again(flight, rows))
            images[rows] = taken[-1]

        bad: dict[int, str] = {}
        for rows in failed:
            size = min(SMALL_RUN_SAMPLES, -(-len(rows) // SPLIT_WAYS))
            bad |= failing_rows(rows, again, size)
        self._check_blame(flight, bad)
        bad |= flight.marks
        if bad:
            images[list(bad)] = 0
        if taken and self._plan.is_cuda:  # the copies read `taken` until they are complete
            import torch

            torch.cuda.current_stream(self._plan.device_id).synchronize()
        return DecodedBatch(images, bad)

    def _decoded_again(self, flight: BatchInFlight, rows: list[int]) -> Decoded:
        is_kept = rows[0] in flight.kept
        if is_kept not in self._sides:
            plan = self._plan_for(is_kept)
            few = min(plan.threads, _SIDE_THREADS)
            size = min(plan.batch_size, SMALL_RUN_SAMPLES)
            plan = replace(plan, batch_size=size, threads=few, constant=False)
            self._sides[is_kept] = DaliPipeline(plan)
        side = self._sides[is_kept]
        held = side.schedule(*select_rows(flight.batch, flight.draws, rows))
        try:
            return side.take(len(rows))
        except RuntimeError as error:
            check_machine(error, remedy=_LESS_MEMORY)
            raise
        finally:
            del held  # DALI read it until here

    def _check_blame(self, flight: BatchInFlight, bad: dict[int, str]) -> None:
        """Raise DeviceError if the samples aren't the likely cause: a codec fails although it can
        read the header, or a whole batch fails for an unknown reason."""
        encoded = flight.batch.encoded
        for row in [row for row, why in bad.items() if why == NO_IMAGE and not self._plan.pixels]:
            if row not in flight.kept and not isinstance(read_header(encoded[row]), Rejection):
                raise machine_error(
                    f"nvImageCodec fails on sample {int(flight.batch.ids[row])}, whose header it "
                    "can read"
                )
        tried = len(encoded) - len(flight.marks)
        if len(bad) == tried > 1 and all(fault_of(why) == "unclear" for why in bad.values()):
            raise machine_error(f"all {tried} samples of a batch fail ({next(iter(bad.values()))})")


RUNS_IN_FLIGHT = 2
HELD_RUNS = 1  # runs whose memory returns to DALI after the copies of their images are complete


class FullImageDecoder:
    """A decoder of full images, upright and in a recipe's colours, to keep them in memory. One
    thread calls it; the headers of its samples were checked.

    It has the graph's own options, so that a window of its output has the same bits as the same
    window decoded by the graph (on the CPU; measured with DALI 2.4, and checked by a test). Samples
    are decoded in runs, two of them in flight: one is copied while the next is decoded, and memory
    in flight is bounded for batches of any size.
    """

    def __init__(self, plan: GraphPlan) -> None:
        """Build the decoder. plan: of runs of RUN_SAMPLES."""
        self.pipeline = EncodedPipeline(plan, lambda encoded: [decoded(plan, encoded)])

    def __call__(
        self, samples: Sequence[Encoded], pixels: Sequence[int]
    ) -> Iterator[list[tuple[int, Any]]]:
        """Yield runs of (row, image) of the samples that decode, in any order.

        pixels: height times width of each sample. An image is a torch tensor on the device, uint8,
        shape (height, width, channels), valid until the next run. The caller must consume all runs
        before the next call. Raises DeviceError if memory is short or the device fails.
        """
        from torch.utils.dlpack import from_dlpack

        waiting = deque(decode_runs(pixels))
        flying: deque[tuple[list[int], Any]] = deque()
        while waiting or flying:
            while waiting and len(flying) < RUNS_IN_FLIGHT:
                run = waiting.popleft()
                flying.append((run, self.pipeline.schedule([samples[row] for row in run])))
            rows, held = flying.popleft()
            try:
                images = self.pipeline.output()
            except RuntimeError as error:
                check_machine(error, remedy="resident=False, or a smaller batch")
                if len(rows) > 1:  # one at a time, since a failed run loses its good samples, too
                    waiting.extend([row] for row in rows)
                continue
            finally:
                del held  # DALI read it until here
            yield [(row, from_dlpack(images[place])) for place, row in enumerate(rows)]


def resident_tensor(image: Any) -> Any:
    """Return DALI's view of an image in the memory of a GPU, which graphs with resident=True read.

    image: torch uint8 on CUDA, shape (height, width, channels), contiguous.
    """
    return load_dali().tensors.TensorGPU(image, layout="HWC")
