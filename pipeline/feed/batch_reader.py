"""Read the samples of a batch, decode all but images, and replace samples that are bad.

It runs on the reading threads. Texts, bytes and masks are decoded here; images go to DALI.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.cache import PenstockError
from penstock.pipeline.feed.batch import Batch
from penstock.pipeline.report import ReadProbe
from penstock.readers import MAX_PIXELS, Blocks, EncodedBatch
from penstock.readers.fields import (
    Bytes,
    ClassLabel,
    EncodedColumn,
    FieldType,
    ListColumn,
    Mask,
    RaggedColumn,
    Text,
    Value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.augment import ArrayDraws, CheckedRecipe
    from penstock.cache.base import ReadMode
    from penstock.pipeline.feed.bad_samples import BadSamples
    from penstock.pipeline.feed.resident_images import ResidentImages
    from penstock.pipeline.plan import RankSlots, Step
    from penstock.readers import Encoded, Source
    from penstock.readers.fields import BoxChecks, Column, ColumnCrop, SampleBatch

    Undecodable = Mapping[str, Mapping[int, str]]
    """By image field: rows that don't decode, and why."""
    Decode = Callable[[Encoded], Any]


class Transform(Protocol):
    """What is done to samples once they are read and all but images is decoded; on any thread.

    is_random: a sample may become another in another epoch."""

    @property
    def is_random(self) -> bool: ...

    def close(self) -> None:
        """End what it works with. Safe to call twice."""

    def __call__(self, content: SampleBatch, *, epoch: int, bad: dict[int, str]) -> SampleBatch:
        """Other columns for these samples, each as a function of its own sample, id and epoch.
        bad: rows that are known to be, which have empty columns; those that turn out so are added,
        with reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReader:
    """Reads the samples of a batch, and finds others for those that are bad; on any thread.

    recipes: by image field. payloads: decodes what is neither images nor numbers. resident: what
    keeps decoded images in memory; None where each sample is read each time. transform: what is
    done to samples then; None: nothing. crops: draws the parts of arrays that are read; None: all
    of them. fields: that are read; None: those of the dataset. boxes: finds bad boxes among what no
    index has checked; None where there are none. blocks:
    the memory of large arrays. probe: is shown what was read. bad_headers: `bad_headers` of
    augment; None without images.
    """

    dataset: Source
    recipes: Mapping[str, CheckedRecipe]
    payloads: Payloads
    mode: ReadMode
    bad_samples: BadSamples
    probe: ReadProbe = field(default_factory=ReadProbe)
    resident: ResidentImages | None = None
    transform: Transform | None = None
    fields: tuple[str, ...] | None = None
    crops: ArrayDraws | None = None
    boxes: BoxChecks | None = None
    blocks: Blocks = field(default_factory=Blocks)
    bad_headers: Callable[..., Mapping[int, str]] | None = None

    @property
    def _max_pixels(self) -> int | None:
        """The limit of images that nobody has verified: in chunks; None for all others."""
        contents = self.dataset.contents
        return None if contents.units is None else contents.max_pixels

    def read(self, step: Step, slots: RankSlots) -> Batch:
        """The batch of a step with its bytes. Raises what reading raises, and
        TooManyBadSamplesError."""
        rows, epoch, valid = slots.rows, step.start.epoch, slots.valid
        own = self.dataset.ids(rows)
        bad = self.bad_samples.reasons(epoch, own)
        if valid is None:
            content = self._read(own, epoch, bad=bad, rows=rows)
        else:
            found: dict[int, str] = {}
            content = self._read_once(own, epoch, found, rows)
            for row, why in found.items():
                self.bad_samples.learn(epoch, int(own[row]), why, lasting=self._lasts)
            bad |= found
            valid = valid.copy()
            valid[list(bad)] = False
            # Rows of boxes and of what belongs to them agree in number, here too: nowhere any.
            content = _emptied(content, sorted(bad))
        image = next(iter(self.recipes), None)
        self.probe.sample(None if image is None else content.encoded(image))
        return Batch(step=step, slots=slots, own=own, content=content, bad=bad, valid=valid)

    def read_together(
        self, steps: Sequence[Step], slots: Sequence[RankSlots]
    ) -> list[Batch] | None:
        """The batches of several steps by one read; None where that can't be: some sample is bad,
        which is seen to batch by batch, or the steps aren't of one epoch."""
        epoch = steps[0].start.epoch
        if len(steps) == 1 or epoch != steps[-1].start.epoch or slots[0].valid is not None:
            return None
        rows = np.concatenate([each.rows for each in slots])
        ids, bad = self.dataset.ids(rows), dict[int, str]()
        if self.bad_samples.reasons(epoch, ids):
            return None
        try:
            bounds = [0, *accumulate(len(each.rows) for each in slots)]
            parts = self._read_parts(ids, epoch, bad, rows, bounds)
        except (PenstockError, OSError):  # raised again where its own batch is due
            return None
        if bad:
            return None
        self.probe.sample(None)
        return [
            Batch(step=step, slots=each, own=part.ids, content=part, bad={}, valid=None)
            for step, each, part in zip(steps, slots, parts, strict=True)
        ]

    def _read_parts(
        self,
        ids: NDArray[np.int64],
        epoch: int,
        bad: dict[int, str],
        rows: NDArray[np.int64],
        bounds: Sequence[int],
    ) -> list[SampleBatch]:
        """As `_read_once`, of several batches."""
        is_all = self.payloads.are_none and not self.recipes
        more = (self.transform, self.crops, self.resident, self.boxes)
        if not is_all or any(each is not None for each in more):
            content = self._read_once(ids, epoch, bad, rows)
            return content.parts(bounds, array=self.blocks.array)
        return self.dataset.read_parts(
            rows, bounds, mode=self.mode, bad=bad, fields=self.fields, blocks=self.blocks
        )

    def close(self) -> None:
        """End what samples are transformed by; what is read then fails. Memory that batches gave
        back is freed, what they have stays theirs. Safe to call twice."""
        self.blocks.close()
        if self.transform is not None:
            self.transform.close()

    def mark(self, batch: Batch, undecodable: Undecodable) -> None:
        """Mark the rows of a padded batch that don't decode as not valid."""
        assert batch.valid is not None
        reasons = self._learn_undecodable(batch, undecodable)
        valid = batch.valid.copy()
        valid[list(reasons)] = False
        batch.valid, batch.bad = valid, {**batch.bad, **reasons}

    def replace(self, batch: Batch, undecodable: Undecodable) -> tuple[list[int], SampleBatch]:
        """Other samples for the rows that don't decode, and these rows. Raises
        TooManyBadSamplesError."""
        rows = sorted(self._learn_undecodable(batch, undecodable))
        bad = self.bad_samples.reasons(batch.epoch, batch.own[rows])
        substitutes = self._read(batch.own[rows], batch.epoch, bad=bad)
        batch.bad = {**batch.bad, **{rows[place]: why for place, why in bad.items()}}
        return rows, substitutes

    def _learn_undecodable(self, batch: Batch, undecodable: Undecodable) -> dict[int, str]:
        """Remember what didn't decode; the rows, and why."""
        reasons: dict[int, str] = {}
        for image, rows in undecodable.items():
            from penstock.augment import decodes_window  # reached only where an image fails

            recipe = self.recipes[image]
            # A random window may miss the damage in another epoch.
            lasting = not (recipe.random and decodes_window(recipe))
            for row, why in rows.items():
                reason, sample_id = self.payloads.reason(image, why), int(batch.content.ids[row])
                self.bad_samples.learn(batch.epoch, sample_id, reason, lasting=lasting)
                reasons.setdefault(row, reason)
        return reasons

    def _read(
        self,
        own: NDArray[np.int64],
        epoch: int,
        *,
        bad: dict[int, str],
        rows: NDArray[np.int64] | None = None,
    ) -> SampleBatch:
        """Samples by id, with substitutes for bad ones. bad: rows known to be bad; those whose
        bytes or headers turn out so are added. rows: where these ids lie, if that is known."""
        ids = own.copy()
        for row in bad:
            ids[row] = self.bad_samples.substitute(epoch, int(own[row]))
        found: dict[int, str] = {}
        content = self._read_once(ids, epoch, found, None if bad else rows)
        while found:
            for row, why in found.items():
                self.bad_samples.learn(epoch, int(ids[row]), why, lasting=self._lasts)
                bad.setdefault(row, why)  # the first that was tried was the row's own
                ids[row] = self.bad_samples.substitute(epoch, int(own[row]))
            replaced, again = sorted(found), dict[int, str]()
            content = content.patched(replaced, self._read_once(ids[replaced], epoch, again))
            found = {replaced[place]: why for place, why in again.items()}
        return content

    @property
    def _lasts(self) -> bool:
        """Whether what is bad when it is read is so in every epoch."""
        is_cropped = self.crops is not None and self.crops.is_random
        return not is_cropped and (self.transform is None or not self.transform.is_random)

    def _read_once(
        self,
        ids: NDArray[np.int64],
        epoch: int,
        bad: dict[int, str],
        rows: NDArray[np.int64] | None = None,
    ) -> SampleBatch:
        """From memory what is there, the rest from its files; decoded, but for images. bad: is told
        rows and reasons. rows: where these ids lie, if that is known."""
        if self.resident is not None:
            content = self.resident.read(ids, bad, self._read_files)
        elif self.crops is None:
            content = self._read_files(ids, bad, rows)
        else:
            content = self._read_files(ids, bad, rows, self.crops.before(ids, epoch))
            content = self.crops.after(content, epoch, bad)
        content = self.payloads(content, bad)
        if self.transform is not None:
            content = self.transform(content, epoch=epoch, bad=bad)
        return content

    def _read_files(
        self,
        ids: NDArray[np.int64],
        bad: dict[int, str],
        rows: NDArray[np.int64] | None = None,
        crops: Mapping[str, ColumnCrop] | None = None,
    ) -> SampleBatch:
        """Read, and look at the headers of what this process sees for the first time: DALI doesn't
        survive all of those that can't be parsed. bad: is told rows and reasons."""
        places = self.dataset.rows(ids) if rows is None else rows
        content = self.dataset.read(
            places, mode=self.mode, bad=bad, fields=self.fields, crops=crops, blocks=self.blocks
        )
        if self.boxes is not None:
            found = self.boxes(content)
            bad |= {row: why for row, why in found.items() if row not in bad}
        if self.bad_headers is None:
            return content
        ledger = self.bad_samples
        new = [row for row in ledger.unseen(places).tolist() if row not in bad]
        if not new:
            return content
        for image in self.recipes:
            present = content.present.get(image)
            those = new if present is None else [row for row in new if present[row]]
            images = content.encoded(image)
            some = EncodedBatch(
                ids=ids[those],
                encoded=[images.encoded[row] for row in those],
                dims=images.dims[those],
            )
            for place, why in self.bad_headers(some, max_pixels=self._max_pixels).items():
                bad[those[place]] = self.payloads.reason(image, why)
        ledger.mark_seen(places[[row for row in new if row not in bad]])
        return content


def _emptied(content: SampleBatch, rows: list[int]) -> SampleBatch:
    """The samples with nothing ragged in some rows."""
    if not rows:
        return content
    ragged = {n: c.emptied(rows) for n, c in content.columns.items() if isinstance(c, RaggedColumn)}
    return content.with_columns(ragged)


_NO_MASK = np.zeros((0, 0), np.uint8)
_NO_MASK.flags.writeable = False


class Payloads:
    """Decodes those encoded columns that aren't images; on any thread.

    are_slow: they take a thread longer than to read and to check them; are_none: there are none.
    """

    def __init__(self, types: Mapping[str, FieldType], *, max_pixels: int = MAX_PIXELS) -> None:
        """types: of the fields that are read. max_pixels: of a mask."""
        decoders = {name: _decoder(type, max_pixels) for name, type in types.items()}
        self._decoders = {name: each for name, each in decoders.items() if each is not None}
        self.are_none = not self._decoders
        self.are_slow = any(isinstance(type, Mask) for type in types.values())
        kinds = [type for type in types.values() if not isinstance(type, Value | ClassLabel)]
        self._names_fields = len(kinds) > 1

    def reason(self, field: str, why: str) -> str:
        """Why a sample is bad: with the field in front where a sample has several that can be."""
        return f"{field}: {why}" if self._names_fields else why

    def __call__(self, content: SampleBatch, bad: dict[int, str]) -> SampleBatch:
        """The samples with these columns decoded; what is missing or bad is empty. bad: rows that
        are known to be; those that don't decode are added, with reasons."""
        if not self._decoders:
            return content
        columns: dict[str, Column] = {}
        for name, (decode, empty) in self._decoders.items():
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
            columns[name] = ListColumn(samples)
        return content.with_columns(columns)


def _decoder(type: FieldType, max_pixels: int) -> tuple[Decode, Any] | None:
    """How a payload is decoded, and what stands for one that isn't there; None: elsewhere."""
    if isinstance(type, Text):
        from penstock.readers.fields import decode_text  # images need none of it

        return decode_text, ""
    if isinstance(type, Bytes):
        return _as_bytes, b""
    if isinstance(type, Mask):
        from penstock.readers.fields import decode_mask

        return partial(decode_mask, dtype=type.dtype, max_pixels=max_pixels), _NO_MASK
    return None


def _as_bytes(payload: Encoded) -> bytes:
    return payload.tobytes()
