"""List the stages of a batch, from the plan to the training loop. Read this file first.

    stage      method of          result                              thread
               `BatchPipeline`
    ---------  -----------------  ----------------------------------  --------------------------
    order      order              Step: positions of the stream       the one that requests the
                                                                      next batch
    read       read               Batch: ids and columns, all         penstock-read_N
                                  decoded but images
    draw       draw               Batch.draws, .mix: random numbers;  penstock-read_N
                                  masks and boxes follow their image
    decode     begin_decode,      Batch.images, by DALI; substitutes  penstock-decode_0; on CUDA,
               decode             for those that don't decode         and without images, the
                                                                      training loop's
    finish     finish             Batch.output: mixed, as tensors on  the one that decodes; without
                                  their device                        images on the CPU,
                                                                      penstock-read_N
    augment    augment            Batch.output: on its device; what   the training loop's
                                  device_augment= returned
    deliver    deliver            the output, which is the user's;    the training loop's
                                  bad samples are counted for all
                                  ranks

One `Batch` of a native dataset passes through all stages, and each stage fills in its own fields.
`BatchPipeline` implements the stages. `runner` schedules them: it decides on which thread a stage
runs, how many batches are in flight and what stops them. Only `Position` holds how far the user is.

A batch of a torch dataset passes through none of these stages, because the user's code reads it, in
torch's workers. `torch_data.torch_engine` has its stages: an order (`torch_data.pass_order`:
Penstock's plan with a seed, else torch's sampler) requests indices, torch's own loader reads and
collates their samples, and a `Pass` delivers the batch and records how far the user is.
`loader.DataLoader` chooses between these two ways by the dataset.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache import PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.augment import ColumnOperation, DecodedBatch
    from penstock.pipeline.feed.bad_samples import BadCount
    from penstock.pipeline.feed.batch import Batch, Output
    from penstock.pipeline.feed.batch_reader import BatchReader, Undecodable
    from penstock.pipeline.feed.device_augment import DeviceAugment
    from penstock.pipeline.feed.image_decoding import ImageDecoding, PartDecoding
    from penstock.pipeline.feed.tensors import Finisher
    from penstock.pipeline.members import Membership
    from penstock.pipeline.plan import Cursor, RankOrder, Step, Walk
    from penstock.pipeline.report import Meter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchPipeline:
    """The stages of a loader's batches, as methods. It has neither a thread nor a position.

    endless: continue into the next epoch. images: None without images and fields that follow one.
    columns: operations on the form of fields' columns. membership: None without other processes.
    on_device: copies whole batches to the device and calls the user's function on them; None if
    neither is needed.
    """

    walk: Walk
    endless: bool
    slots: RankOrder
    reader: BatchReader
    images: ImageDecoding | PartDecoding | None
    finisher: Finisher
    bad_count: BadCount
    meter: Meter
    columns: tuple[ColumnOperation, ...] = ()
    membership: Membership | None = None
    on_device: DeviceAugment | None = None

    @property
    def has_images(self) -> bool:
        """True if DALI decodes images."""
        return self.images is not None and bool(self.images.graphs)

    # -- order

    def order(self, start: Cursor) -> Iterator[Step]:
        """Yield the steps from a cursor on."""
        return self.walk.steps(start, endless=self.endless)

    # -- read and draw: on a reading thread

    def prepare_all(self, steps: Sequence[Step]) -> list[Batch | Exception]:
        """Prepare the batches of several steps by one read if possible, else as `prepare_each`."""
        if len(steps) > 1:
            with contextlib.suppress(PenstockError, OSError):  # raised again for its own batch
                if batches := self.prepare(steps):
                    return [*batches]
        return self.prepare_each(steps)

    def prepare_each(self, steps: Sequence[Step]) -> list[Batch | Exception]:
        """Prepare the batches of several steps one by one.

        If a batch can't be read, the list ends with its error. An error of the first batch is
        raised.
        """
        batches: list[Batch] = []
        for step in steps:
            try:
                batches += self.prepare([step])
            except Exception as error:  # raised later, when its own batch is due
                if not batches:
                    raise
                return [*batches, error]
        return [*batches]

    def prepare(self, steps: Sequence[Step]) -> list[Batch]:
        """Read the batches of some steps at once, as `read` does, and draw their random numbers."""
        began, began_s = time.thread_time(), time.perf_counter()
        batches = self.read(steps)
        if len(batches) > 1 and self.images is not None:
            self.images.draw_together(batches)
        for batch in batches:
            if batch.output is None:
                self.draw(batch)
                if self._finishes_early:
                    self.finish(batch)
        read_s, load_s = time.thread_time() - began, time.perf_counter() - began_s
        for batch in batches:
            batch.read_s, batch.load_s = read_s / len(steps), load_s / len(steps)
        return batches

    def read(self, steps: Sequence[Step]) -> list[Batch]:
        """Read the samples that this rank has in some steps, at once.

        Returns no batches for several steps of two epochs, or that are padded or mixed.
        """
        if len(steps) == 1:
            slots = [self.slots.slots(steps[0])]
            samples = slots[0].samples
        elif (together := self.slots.slots_together(steps)) is not None:
            slots, samples = together
        else:
            return []
        # Nothing but the output is needed of several batches that are finished here.
        finishes = len(steps) > 1 and self._finishes_early and not self.columns
        finishes = finishes and self.on_device is None
        finish = self.finisher.together if finishes else None
        return self.reader.read(steps, slots, samples, finish=finish)

    def draw(self, batch: Batch) -> None:
        """Draw the random numbers of a batch's samples, and move masks, boxes and points.

        The numbers are pure functions of the seed, the epoch and the sample's id.
        """
        if self.images is not None:
            if not batch.draws:  # otherwise by `draw_together`
                draws, batch.content = self.images.draw(batch.content, batch.delivery, batch.key)
                batch.draws = draws
            batch.mix = self.images.mix(batch)
        self._change_columns(batch)

    def _change_columns(self, batch: Batch) -> None:
        """Pad, pack and unpack the fields that the recipe names."""
        if self.columns:
            names = self.reader.dataset.names
            batch.filled = {
                field: column
                for op in self.columns
                for field, column in op.columns(batch.content, names).items()
            }

    # -- decode: one thread at a time

    def begin_decode(self, batch: Batch) -> None:
        """Feed a batch to DALI, which works on several at once."""
        if self.images is not None:
            self.images.feed(batch.content, batch.draws, batch.left_out)

    def decode(self, batch: Batch) -> None:
        """Wait for the images of the oldest batch in DALI, which must be this one."""
        if self.images is not None:
            found = self.images.collect(batch.content, batch.left_out)
            if bad := _fill_in(batch, found):
                self._replace(batch, bad, self.images)

    def _replace(
        self, batch: Batch, bad: Undecodable, images: ImageDecoding | PartDecoding
    ) -> None:
        """Replace samples that didn't decode by substitutes, images included, or mark them.

        bad: rows by image field, with reasons.
        """
        if batch.valid is not None:
            self.reader.mark(batch, bad)
            return
        while bad and images.has_joint_size:
            # Substitutes may be larger than all others, so that the batch gets another size.
            self.reader.record(batch, bad)
            (new,) = self.read([batch.step])
            self.draw(new)
            found = images.decode(new.content, new.draws)
            batch.content, batch.draws, batch.bad = new.content, new.draws, new.bad
            batch.images = {}
            bad = _fill_in(batch, found)
        while bad:
            rows, substitutes = self.reader.replace(batch, bad)
            draws, substitutes = images.draw(substitutes, batch.delivery.take(rows), batch.key)
            batch.content = batch.content.patched(rows, substitutes)
            again = images.decode(substitutes, draws)
            bad = {}
            for image, decoded in again.items():
                for field, replaced in decoded.outputs(image).items():
                    all_images: Any = batch.images[field]
                    all_images[rows] = replaced
                if decoded.bad:
                    bad[image] = {rows[place]: why for place, why in decoded.bad.items()}
        self._change_columns(batch)

    # -- finish: on the thread that decoded, or on a reading thread if there is nothing to decode

    @property
    def _finishes_early(self) -> bool:
        return self.images is None and self.finisher.is_anywhere

    def finish(self, batch: Batch) -> None:
        """Make the output of a decoded batch, once."""
        if batch.output is None:
            batch.output = self.finisher(batch)
            batch.images = {}

    # -- augment: in the training loop

    def augment(self, batch: Batch) -> None:
        """Copy a finished batch to the device if the CPU decoded it, and call the user's function
        on it."""
        if self.on_device is not None:
            began = time.perf_counter()
            self.on_device(batch)
            batch.augment_s = time.perf_counter() - began
            self.meter.step_s += batch.augment_s  # the user's function is no wait for data

    # -- deliver: in the training loop

    def deliver(self, batch: Batch, *, wait_s: float, begins_epoch: bool) -> Output:
        """Count a batch, publish the number of its bad samples, and return its output.

        The number is published first, so that the other ranks have it when they request the next
        batch. wait_s: time that the training loop waited for this batch.
        """
        # The loop waited for reading and decoding in the proportion in which the batch did.
        share = wait_s / max(batch.read_wait_s + batch.decode_wait_s, 1e-9)
        meter, size_bytes = self.meter, batch.content.bytes_read
        meter.read_s += batch.read_s
        meter.load_s += batch.load_s
        meter.bytes_disk += size_bytes
        meter.count_batch(
            batch.samples,
            wait_s=wait_s,
            read_s=batch.read_wait_s * share,
            decode_s=batch.decode_wait_s * share,
            size_bytes=size_bytes,
        )
        if meter.parts is not None and batch.content.loads is not None:
            meter.parts.count(batch.content.loads)
        if batch.bad or begins_epoch:
            self.bad_count.count(batch.step.start, batch.bad_ids, begins_epoch=begins_epoch)
        if self.membership is not None:
            step = batch.step
            epoch = step.start.epoch
            self.membership.count_batch(ended=epoch if step.then.epoch != epoch else None)
        if self.on_device is not None:
            self.on_device.deliver(batch)
        assert batch.output is not None
        return batch.output


def _fill_in(batch: Batch, found: Mapping[str, DecodedBatch]) -> Undecodable:
    """Add decoded images to a batch, and return the rows that didn't decode, by image field."""
    for field, decoded in found.items():
        batch.images |= decoded.outputs(field)
    return {field: dict(decoded.bad) for field, decoded in found.items() if decoded.bad}
