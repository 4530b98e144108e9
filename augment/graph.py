"""A checked recipe as a running DALI graph, for "cpu" or "cuda" from one description.

Encoded bytes go in as views, without a copy; windows and flips go in as arguments (`draws`); torch
tensors come out, without a copy. The graph keeps no random state and decides nothing.

What shapes it, measured with DALI 2.4 on the CPU at batch 256:
- Three small argument inputs (start, shape, mirror) cost 4.3 us a sample; one packed input that the
  graph takes apart costs 9.4, as each subscript is an operator.
- A crop after a resize is one resize of a region: fewer pixels are decoded and fewer resized.
- The dynamic executor with prefetch_queue_depth=1 takes one schedule_run() per feed and holds as
  many runs as one schedules. With a depth of 2 the first one runs twice; without the dynamic
  executor tensors that were handed out are overwritten.
- A sample that doesn't decode fails its batch and nothing else. But a header that can't be parsed,
  or a window outside its image, ends the run while other threads still decode into it, and most
  trials ended in a segmentation fault. Such samples must never get here: readers compare the CRC of
  what was verified, and check_headers=True looks at what wasn't.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from penstock.augment import resample_node
from penstock.augment.batches import (
    BatchInFlight,
    Caution,
    DecodedBatch,
    FailedRun,
    SubBatch,
    failure_reason,
    select_rows,
)
from penstock.augment.culprits import corrupt
from penstock.augment.dali_pipeline import DaliPipeline
from penstock.augment.devices import checked_device
from penstock.augment.draws import decodes_window
from penstock.augment.headers import bad_headers
from penstock.augment.nodes import GraphPlan
from penstock.augment.region import window_decoding
from penstock.augment.rescue import Rescue
from penstock.augment.value_ranges import warn_of_values
from penstock.cache.errors import ClosedError, ConfigError, DeviceError, PenstockError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from penstock.augment.draws import Draws
    from penstock.augment.recipe import CheckedRecipe
    from penstock.readers.types import EncodedBatch

_FIRST_LOOKED_AT = 64  # images of the first batch, for the range of their values


class Graph:
    """Decodes and augments batches. One thread feeds and takes; close() is safe to call twice.

    Every feed() is one run; outputs() takes the oldest. How many are in flight is the caller's
    choice; batches may be of any size up to batch_size, 0 too.
    """

    def __init__(
        self,
        recipe: CheckedRecipe,
        *,
        batch_size: int,
        threads: int,
        device: str = "cpu",
        device_id: int | None = None,
        deterministic: bool = False,
        check_headers: bool = False,
        constant_decode: bool = False,
        pixels: bool = False,
        resident: bool = False,
    ) -> None:
        """Build the graph; nothing runs yet.

        batch_size: the largest batch. threads: CPU threads that decode. device_id: CUDA ordinal,
        None: torch's current one. deterministic: on CUDA decode without the hardware decoder, so
        that pixels don't depend on which decoder a sample falls to; on the CPU they never do.
        check_headers: read each sample's header before DALI sees it, for 4 us a sample: needed for
        bytes that no `ImageVerifier` has seen or whose checksum was not compared since.
        constant_decode: for benchmarks: take the same inputs, decode nothing and hand out a
        constant; what is left is the cost of everything but decoding.
        pixels: samples come decoded instead, RGB, uint8 of shape (height, width, 3).
        resident: samples come as `whole.WholeDecoder` gave them: uint8 of shape (height, width,
        channels) in the recipe's colours; on CUDA as what `whole.resident_tensor` made of them.
        Raises ConfigError (no such device), MissingDependencyError (no DALI).
        """
        if batch_size < 1 or threads < 1:
            raise ConfigError(
                f"Graph: got batch_size={batch_size} and threads={threads}, wanted at least 1."
            )
        self._plan = GraphPlan(
            recipe=recipe,
            batch_size=batch_size,
            threads=threads,
            deterministic=deterministic,
            check_headers=check_headers,
            constant=constant_decode,
            pixels=pixels or resident,
            compiled=device == "cpu" and not constant_decode and resample_node.is_compiled(),
            resident=resident,
            **(where := checked_device(device, device_id)),
            windows=(
                window_decoding(recipe, **where)
                if decodes_window(recipe) and not (pixels or resident or constant_decode)
                else "decoder"
            ),
        )
        self._pipe: DaliPipeline | None = DaliPipeline(self._plan)
        self._flights: deque[BatchInFlight] = deque()
        # DALI may still read the batch that was just taken.
        self._last: BatchInFlight | None = None
        self._caution = Caution()
        self._rescue = Rescue(self._plan, self._caution)
        self._values_seen = self._plan.pixels or constant_decode

    @property
    def in_flight(self) -> int:
        """Batches that were fed and not yet taken."""
        return len(self._flights)

    def feed(
        self, batch: EncodedBatch, draws: Draws, *, bad: Mapping[int, str] | None = None
    ) -> None:
        """Schedule one batch; returns before it is decoded. draws: of `draws.draw`.

        bad: rows known to be bad and why; they are left out, and their images are zeros.
        Raises ConfigError for a batch larger than batch_size, ClosedError after close().
        """
        samples = len(batch.encoded)
        if samples > self._plan.batch_size:
            raise ConfigError(
                f"Graph.feed: got {samples} samples, wanted at most the "
                f"batch_size={self._plan.batch_size} that the graph was built for."
            )
        pipe = self._open_pipe()
        marks = dict(bad or {})
        if self._plan.check_headers:
            marks |= bad_headers(batch)
        if not self._values_seen:
            self._values_seen = True
            good = [each for row, each in enumerate(batch.encoded) if row not in marks]
            warn_of_values(good[:_FIRST_LOOKED_AT])
        runs = [
            SubBatch(rows, pipe.schedule(*select_rows(batch, draws, rows)))
            for rows in self._caution.cut(batch, marks)
        ]
        self._flights.append(BatchInFlight(batch, draws, marks, runs))

    def outputs(self) -> torch.Tensor:
        """The oldest batch that was fed: (n, channels, height, width). Blocks until it is there.

        The tensor is the caller's: no later run overwrites it. On CUDA it belongs to the stream
        that is current now. Raises CorruptSampleError if samples don't decode; that batch is then
        gone, and the graph goes on with the next. Raises ClosedError after close().
        """
        ids = self._flights[0].batch.ids if self._flights else None
        decoded = self.outputs_marked()
        if decoded.bad:
            assert ids is not None
            raise corrupt({int(ids[row]): why for row, why in decoded.bad.items()})
        return decoded.images

    def outputs_marked(self) -> DecodedBatch:
        """As `outputs`, but samples that don't decode are zeros and listed with their reasons.

        Raises DeviceError if memory was short or the device fails, ClosedError after close().
        """
        pipe = self._open_pipe()
        if not self._flights:
            raise PenstockError("Graph.outputs: no batch is in flight. Call feed() first.")
        flight = self._flights.popleft()
        self._last = flight
        samples = len(flight.batch.encoded)
        if len(flight.runs) == 1 and len(flight.runs[0].rows) == samples:
            try:
                return DecodedBatch(pipe.take(samples), {})
            except RuntimeError as error:
                whole = FailedRun(flight.runs[0].rows, failure_reason(error))
                return self._rescue.decode(flight, [whole], pipe.empty(samples), [])
        images = pipe.empty(samples)
        failed: list[FailedRun] = []
        taken: list[torch.Tensor] = []
        broken: DeviceError | None = None
        for run in flight.runs:  # all of them, so that runs and batches stay in step
            try:
                taken.append(pipe.take(len(run.rows)))
            except RuntimeError as error:
                try:
                    failed.append(FailedRun(run.rows, failure_reason(error)))
                except DeviceError as machine:
                    broken = broken or machine
            else:
                images[run.rows] = taken[-1]
        if broken is not None:
            raise broken
        return self._rescue.decode(flight, failed, images, taken)

    def decode(self, batch: EncodedBatch, draws: Draws) -> DecodedBatch:
        """Decode a few samples out of turn, now: what is in flight stays there. As
        `outputs_marked`."""
        pipe, rows = self._open_pipe(), list(range(len(batch.encoded)))
        flight = BatchInFlight(batch, draws, {}, [])
        untried = [FailedRun(rows, None)] if rows else []
        return self._rescue.decode(flight, untried, pipe.empty(len(rows)), [])

    def drain(self) -> None:
        """Drop what is in flight, with its errors: nobody will see those batches."""
        pipe = self._open_pipe()
        while self._flights:
            self._last = self._flights.popleft()
            for _ in self._last.runs:
                pipe.skip()

    def close(self) -> None:
        """Wait for what runs and release DALI's threads and memory."""
        if self._pipe is not None:
            self.drain()
            self._pipe = self._last = None
            self._rescue.close()

    def _open_pipe(self) -> DaliPipeline:
        if self._pipe is None:
            raise ClosedError("This graph is closed; make a new loader.")
        return self._pipe
