"""Read the samples of a batch, decode all but images, and replace bad samples.

This runs on the reading threads. They decode texts, bytes and masks; DALI decodes images.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from penstock.pipeline.feed.batch import Batch
from penstock.pipeline.report import ReadProbe
from penstock.readers import MAX_PIXELS, Blocks, EncodedBatch
from penstock.readers.fieldtypes import (
    EncodedColumn,
    FieldType,
    ListColumn,
    RaggedColumn,
    SampleBatch,
    interleaved,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.augment import ArrayDraws, CheckedRecipe
    from penstock.cache.base import ReadMode
    from penstock.pipeline.feed.bad_samples import BadSamples
    from penstock.pipeline.feed.batch import Output
    from penstock.pipeline.feed.checked_recipes import Augments
    from penstock.pipeline.feed.map_calls import Mapper
    from penstock.pipeline.feed.resident_images import ResidentImages
    from penstock.pipeline.plan import Delivery, RankSlots, SlotSamples, Step
    from penstock.readers import Encoded, Source
    from penstock.readers.fieldtypes import Column, ColumnCrop, ValueChecks

    Ints = NDArray[np.int64]
    Bad = dict[int, str]
    Crops = Mapping[str, ColumnCrop]
    Undecodable = Mapping[str, Mapping[int, str]]
    """Rows that don't decode, by image field, with reasons."""
    Decode = Callable[[Encoded], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReader:
    """Reads the samples of a batch and substitutes for bad ones, on any thread.

    recipes: by image field. payloads: decodes encoded columns other than images. resident: keeps
    decoded images in memory; None if every sample is read each time. maps: calls the recipe's
    Maps; None without any. crops: draws the parts of arrays to read; None to read whole arrays.
    fields: to read; None for those of the dataset. boxes: finds bad boxes that no index has
    checked; None if there are none. blocks: memory for large arrays. probe: samples the batches
    that were read. augments, readers: of a mixture whose parts have different recipes, these and a
    reader for each, which has their recipes, maps and crops.
    """

    dataset: Source
    recipes: Mapping[str, CheckedRecipe]
    payloads: Payloads
    mode: ReadMode
    bad_samples: BadSamples
    probe: ReadProbe = field(default_factory=ReadProbe)
    resident: ResidentImages | None = None
    maps: Mapper | None = None
    fields: tuple[str, ...] | None = None
    crops: ArrayDraws | None = None
    boxes: ValueChecks | None = None
    blocks: Blocks = field(default_factory=Blocks)
    augments: Augments | None = None
    readers: tuple[BatchReader, ...] = ()

    def read(
        self,
        steps: Sequence[Step],
        slots: Sequence[RankSlots],
        samples: SlotSamples,
        *,
        finish: Callable[[SampleBatch, Sequence[int]], list[Output] | None] | None = None,
    ) -> list[Batch]:
        """Read the batches of one step, or of several steps of an epoch without padding, at once.

        samples: of all slots. Several batches share memory, at most `runner.LARGE_TURN_BYTES`.
        finish: converts the samples between bounds to outputs, or returns None; batches with an
        output have no columns. Raises the errors of reading, and TooManyBadSamplesError if no
        substitute is found.
        """
        epoch, valid, rows = steps[0].start.epoch, slots[0].valid, samples.rows
        own, delivery = self.dataset.ids(rows), samples.delivery(epoch)
        bad = self.bad_samples.reasons(epoch, own, delivery)
        if valid is None:
            content = self._read(own, epoch, delivery, bad=bad, rows=rows)
        else:
            found: dict[int, str] = {}
            content = self._read_once(own, delivery, found, rows)
            for row, why in found.items():
                sample = delivery.of(row, int(own[row]))
                self.bad_samples.record(epoch, sample, why, lasting=self._lasts)
            bad |= found
            valid = valid.copy()
            valid[list(bad)] = False
            # A bad sample has no boxes, and nothing that belongs to boxes.
            content = self.payloads.emptied(content, sorted(bad)) if bad else content
        image = next(iter(self.recipes), None)
        self.probe.sample(None if image is None else content.encoded(image))
        bounds = [0, *accumulate(len(each.rows) for each in slots)]
        outputs: Sequence[Output | None] = [None] * len(steps)
        if finish is not None and (finished := finish(content, bounds)) is not None:
            outputs, content = finished, replace(content, columns={}, present={})
        parts = content.parts(bounds) if len(steps) > 1 else [content]
        return [
            Batch(
                step=step,
                slots=each,
                own=own[begin:end],
                content=part,
                bad={row - begin: why for row, why in bad.items() if begin <= row < end},
                valid=valid,
                output=output,
            )
            for step, each, part, output, (begin, end) in zip(
                steps, slots, parts, outputs, pairwise(bounds), strict=True
            )
        ]

    def close(self) -> None:
        """End the processes of Maps and free unused memory; later reads may fail.

        Batches that exist keep their memory. Safe to call twice.
        """
        self.blocks.close()
        if self.maps is not None:
            self.maps.close()
        for reader in self.readers:
            reader.close()

    def mark(self, batch: Batch, undecodable: Undecodable) -> None:
        """Mark the rows of a padded batch that don't decode as not valid."""
        assert batch.valid is not None
        reasons = self.record(batch, undecodable)
        valid = batch.valid.copy()
        valid[list(reasons)] = False
        batch.valid, batch.bad = valid, {**batch.bad, **reasons}

    def replace(self, batch: Batch, undecodable: Undecodable) -> tuple[list[int], SampleBatch]:
        """Return the rows that don't decode, and substitutes for them.

        Raises TooManyBadSamplesError if no substitute is found.
        """
        rows = sorted(self.record(batch, undecodable))
        own, delivery = batch.own[rows], batch.delivery.take(rows)
        bad = self.bad_samples.reasons(batch.epoch, own, delivery)
        substitutes = self._read(own, batch.epoch, delivery, bad=bad)
        batch.bad = {**batch.bad, **{rows[place]: why for place, why in bad.items()}}
        return rows, substitutes

    def record(self, batch: Batch, undecodable: Undecodable) -> dict[int, str]:
        """Record the samples that didn't decode, and return their rows with reasons."""
        reasons, delivery = dict[int, str](), batch.delivery
        for image, rows in undecodable.items():
            recipes = [each.recipes[image] for each in self.readers or (self,)]
            # In another epoch, a random window may miss the damage.
            lasting = not any(recipe.random and recipe.decodes_window for recipe in recipes)
            for row, why in rows.items():
                reason = self.payloads.reason(image, why)
                sample = delivery.of(row, int(batch.content.ids[row]))
                self.bad_samples.record(batch.epoch, sample, reason, lasting=lasting)
                reasons.setdefault(row, reason)
        return reasons

    def _read(
        self, own: Ints, epoch: int, delivery: Delivery, *, bad: Bad, rows: Ints | None = None
    ) -> SampleBatch:
        """Read samples by id, with substitutes for bad ones.

        bad: rows known to be bad; those with bad bytes or headers are added. rows: (shard, row) of
        each id, if known.
        """
        ids = own.copy()
        for row in bad:
            ids[row] = self.bad_samples.substitute(epoch, delivery.of(row, int(own[row])))
        found: dict[int, str] = {}
        content = self._read_once(ids, delivery, found, None if bad else rows)
        while found:
            for row, why in found.items():
                sample = delivery.of(row, int(ids[row]))
                self.bad_samples.record(epoch, sample, why, lasting=self._lasts)
                bad.setdefault(row, why)  # the first reason is that of the row's own sample
                ids[row] = self.bad_samples.substitute(epoch, delivery.of(row, int(own[row])))
            replaced, again = sorted(found), dict[int, str]()
            others = self._read_once(ids[replaced], delivery.take(replaced), again)
            content = content.patched(replaced, others)
            found = {replaced[place]: why for place, why in again.items()}
        return content

    @property
    def _lasts(self) -> bool:
        """True if a sample that is bad when it is read is bad in every epoch."""
        if self.readers:
            return all(reader._lasts for reader in self.readers)
        is_cropped = self.crops is not None and self.crops.is_random
        return not is_cropped and (self.maps is None or not self.maps.is_random)

    def _read_once(
        self, ids: Ints, delivery: Delivery, bad: Bad, rows: Ints | None = None
    ) -> SampleBatch:
        """Read samples from memory or from files, and decode all but images.

        bad: gets the rows of bad samples, with reasons. rows: (shard, row) of each id, if known.
        """
        if any(each.maps is not None or each.crops is not None for each in self.readers):
            return self._read_by_recipe(ids, delivery, bad, rows)
        if self.resident is not None:
            content = self.resident.read(ids, bad, self._read_files)
        elif self.crops is None:
            content = self._read_files(ids, bad, rows)
        else:
            epoch, occurrences = delivery.epoch, delivery.occurrences
            content = self._read_files(ids, bad, rows, self.crops.before(ids, epoch, occurrences))
            content = self.crops.after(content, epoch, bad, occurrences)
        content = self.payloads(content, bad)
        if self.maps is not None:
            content = self.maps(
                content, epoch=delivery.epoch, occurrences=delivery.occurrences, bad=bad
            )
        return content

    def _read_by_recipe(
        self, ids: Ints, delivery: Delivery, bad: Bad, rows: Ints | None
    ) -> SampleBatch:
        """Read samples as `_read_once`, those of each recipe by its own reader."""
        assert self.augments is not None
        batches: list[SampleBatch] = []
        places: list[Ints] = []
        for number, own in self.augments.split(ids):
            found: dict[int, str] = {}
            some = None if rows is None else rows[own]
            reader = self.readers[number]
            batches.append(reader._read_once(ids[own], delivery.take(own), found, some))
            places.append(own)
            bad.update({int(own[place]): why for place, why in found.items()})
        return interleaved(batches, places)

    def _read_files(
        self, ids: Ints, bad: Bad, rows: Ints | None = None, crops: Crops | None = None
    ) -> SampleBatch:
        """Read samples, and check the image headers that this process reads for the first time.

        DALI crashes on some headers that can't be parsed. bad: gets the rows of bad samples, with
        reasons.
        """
        places = self.dataset.rows(ids) if rows is None else rows
        content = self.dataset.read(
            places, mode=self.mode, bad=bad, fields=self.fields, crops=crops, blocks=self.blocks
        )
        if self.boxes is not None:
            found = self.boxes(content)
            bad |= {row: why for row, why in found.items() if row not in bad}
        if not self.recipes:
            return content
        new = [row for row in self.bad_samples.unseen(places).tolist() if row not in bad]
        if not new:
            return content
        from penstock.augment import bad_headers  # needed by the first epoch of images only

        contents = self.dataset.contents
        # Indexing has checked the size of all images that aren't in chunks.
        max_pixels = None if contents.units is None else contents.max_pixels
        for image in self.recipes:
            present = content.present.get(image)
            those = new if present is None else [row for row in new if present[row]]
            images = content.encoded(image)
            encoded = [images.encoded[row] for row in those]
            some = EncodedBatch(ids=ids[those], encoded=encoded, dims=images.dims[those])
            for place, why in bad_headers(some, max_pixels=max_pixels).items():
                bad[those[place]] = self.payloads.reason(image, why)
        self.bad_samples.mark_seen(places[[row for row in new if row not in bad]])
        return content


class Payloads:
    """Decodes encoded columns other than images, on any thread.

    are_slow: decoding takes longer than reading and checking.
    """

    def __init__(self, types: Mapping[str, FieldType], *, max_pixels: int = MAX_PIXELS) -> None:
        """types: of the fields that are read. max_pixels: of a mask."""
        self._decoders = {
            name: (type.decoder(max_pixels=max_pixels), type.empty, type.column)
            for name, type in types.items()
            if type.is_encoded and not type.is_image
        }
        self._rows_of_boxes = [name for name, t in types.items() if t.refers_to == "boxes"]
        self.are_slow = any(type.is_slow for type in types.values())
        kinds = [type for type in types.values() if type.number is None]
        self._names_fields = len(kinds) > 1

    def reason(self, field: str, why: str) -> str:
        """Return the reason why a sample is bad, after the field's name if there are several."""
        return f"{field}: {why}" if self._names_fields else why

    def emptied(self, content: SampleBatch, rows: Sequence[int]) -> SampleBatch:
        """Return the samples with empty ragged values, and without the decoded values that belong
        to boxes, in some rows."""
        columns: dict[str, Column] = {
            n: c.emptied(rows) for n, c in content.columns.items() if isinstance(c, RaggedColumn)
        }
        for name in self._rows_of_boxes:
            column = content.columns[name]
            if isinstance(column, ListColumn):
                _, empty, joined = self._decoders[name]
                kept = [empty if i in rows else each for i, each in enumerate(column.samples)]
                columns[name] = joined(kept)
        return content.with_columns(columns)

    def __call__(self, content: SampleBatch, bad: Bad) -> SampleBatch:
        """Return the samples with these columns decoded; missing and bad values are empty.

        bad: rows known to be bad; those that don't decode are added, with reasons.
        """
        if not self._decoders:
            return content
        columns: dict[str, Column] = {}
        for name, (decode, empty, joined) in self._decoders.items():
            column = content.columns[name]
            if not isinstance(column, EncodedColumn):
                continue
            samples, present = list[Any](), content.present.get(name)
            for row, payload in enumerate(column.samples):
                value = empty
                if row not in bad and (present is None or present[row]):
                    try:
                        value = decode(payload)
                    except ValueError as error:
                        bad[row] = self.reason(name, str(error))
                samples.append(value)
            columns[name] = joined(samples)
        return content.with_columns(columns)
