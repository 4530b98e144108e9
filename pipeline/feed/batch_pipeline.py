"""List the stages of a batch, from the plan to the training loop. Read this file first.

    stage      method of          result                              thread
               `BatchPipeline`
    ---------  -----------------  ----------------------------------  --------------------------
    order      order              Step: positions of the stream       the one that pulls the next
                                                                      batch
    read       read               Batch: ids and columns, all         penstock-read_N
                                  decoded but images
    draw       draw               Batch.draws, .mix: random numbers;  penstock-read_N
                                  masks and boxes follow their image
    decode     begin_decode,      Batch.images, by DALI; substitutes  penstock-decode_0; on CUDA,
               decode             for those that don't decode         and without images, the
                                                                      training loop's
    finish     finish             Batch.output: mixed, as tensors on  the one that decodes
                                  their device
    deliver    hand_out           the output, which is the user's;    the training loop's
                                  bad samples are counted for all
                                  ranks

One `Batch` passes through all stages, and each stage fills in its own fields. `BatchPipeline` says
what happens to a batch. `runner` schedules it: it decides on which thread a stage runs, how many
batches are in flight and what stops them. `Position` alone holds how far the user is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.pipeline.feed.bad_samples import BadCount
    from penstock.pipeline.feed.batch import Batch, Output
    from penstock.pipeline.feed.batch_reader import BatchReader
    from penstock.pipeline.feed.image_decoding import BatchDraws, ImageGraphs
    from penstock.pipeline.feed.padding import Pads
    from penstock.pipeline.feed.tensors import Finisher
    from penstock.pipeline.members import JobWaits
    from penstock.pipeline.plan import Cursor, RankOrder, Step, Walk
    from penstock.pipeline.report import Meter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchPipeline:
    """Says what happens to each batch of a loader, stage by stage; it has no thread and no place.

    endless: it goes on into the next epoch. draws, graphs: None without images. pads: ragged fields
    that are filled up; None where none are. job_waits: None without other processes.
    """

    walk: Walk
    endless: bool
    slots: RankOrder
    reader: BatchReader
    draws: BatchDraws | None
    graphs: ImageGraphs | None
    finisher: Finisher
    bad_count: BadCount
    meter: Meter
    pads: Pads | None
    job_waits: JobWaits | None = None

    # -- ordered

    def order(self, start: Cursor) -> Iterator[Step]:
        """The steps from a cursor on."""
        return self.walk.steps(start, endless=self.endless)

    # -- read, drawn: on a reading thread

    def prepare(self, step: Step) -> Batch:
        """Read and draw: what a reading thread does for a batch."""
        began, began_s = time.thread_time(), time.perf_counter()
        batch = self.read(step)
        self.draw(batch)
        batch.read_s = time.thread_time() - began
        batch.load_s = time.perf_counter() - began_s
        return batch

    def prepare_all(self, steps: Sequence[Step]) -> list[Batch | Exception]:
        """Prepare the batches of some steps: by one read if that can be, else one after the other.
        An error stands for the first that can't be read, and is raised if nothing is before it."""
        if len(steps) > 1 and (together := self._prepare_together(steps)) is not None:
            return [*together]
        batches: list[Batch] = []
        for step in steps:
            try:
                batches.append(self.prepare(step))
            except Exception as error:  # raised again where its own batch is due
                if not batches:
                    raise
                return [*batches, error]
        return [*batches]

    def _prepare_together(self, steps: Sequence[Step]) -> list[Batch] | None:
        began, began_s = time.thread_time(), time.perf_counter()
        batches = self.reader.read_together(steps, [self.slots.slots(step) for step in steps])
        for batch in batches or ():
            self.draw(batch)
        read_s, load_s = time.thread_time() - began, time.perf_counter() - began_s
        for batch in batches or ():
            batch.read_s, batch.load_s = read_s / len(steps), load_s / len(steps)
        return batches

    def read(self, step: Step) -> Batch:
        """A batch with the samples that this rank has in a step."""
        return self.reader.read(step, self.slots.slots(step))

    def draw(self, batch: Batch) -> None:
        """Draw the random numbers of its samples: functions of seed, epoch and sample id. Masks,
        boxes and points go where their pixels will be."""
        if self.draws is not None:
            batch.draws, batch.content = self.draws.draw(batch.content, batch.epoch)
            batch.mix = self.draws.mix(batch)
        if self.pads is not None:
            batch.filled = self.pads(batch)

    # -- decoded: one thread at a time

    def begin_decode(self, batch: Batch) -> None:
        """Give a batch to DALI, which works on several at once."""
        if self.graphs is not None:
            self.graphs.feed(batch)

    def decode(self, batch: Batch) -> None:
        """Take the images of the oldest batch from DALI, which must be this one."""
        if self.graphs is not None and (bad := self.graphs.take(batch)):
            self._mend(batch, bad)

    def _mend(self, batch: Batch, bad: Mapping[str, Mapping[int, str]]) -> None:
        """Put substitutes in the place of what didn't decode (in the images too), or mark it."""
        if batch.valid is not None:
            self.reader.mark(batch, bad)
            return
        assert self.draws is not None
        assert self.graphs is not None
        while bad:
            rows, substitutes = self.reader.replace(batch, bad)
            draws, substitutes = self.draws.draw(substitutes, batch.epoch)
            batch.content = batch.content.patched(rows, substitutes)
            again = self.graphs.decode(substitutes, draws)
            bad = {}
            for image, decoded in again.items():
                batch.images[image][rows] = decoded.images
                if decoded.bad:
                    bad[image] = {rows[place]: why for place, why in decoded.bad.items()}
        if self.pads is not None:
            batch.filled = self.pads(batch)

    # -- finished: where it was decoded

    def finish(self, batch: Batch) -> None:
        """Make what is handed out."""
        batch.output = self.finisher(batch)
        batch.images = {}

    # -- handed out: in the training loop

    def hand_out(self, batch: Batch, *, wait_s: float, begins_epoch: bool) -> Output:
        """Count a batch, tell the other ranks of its bad samples, and return what the user gets.

        Before it is handed out, so that the others know when they ask for the next. wait_s: that
        the training loop waited for it."""
        # What making it waited for says what we waited for.
        share = wait_s / max(batch.read_wait_s + batch.decode_wait_s, 1e-9)
        self.meter.count_batch(
            batch.samples,
            wait_s=wait_s,
            read_s=batch.read_wait_s * share,
            decode_s=batch.decode_wait_s * share,
            size_bytes=batch.size_bytes,
        )
        self.bad_count.count(batch.step.start, batch.bad_ids, begins_epoch=begins_epoch)
        if self.job_waits is not None:
            step = batch.step
            epoch = step.start.epoch
            self.job_waits.count_batch(ended=epoch if step.then.epoch != epoch else None)
        return batch.output
