"""Read arrays directly into their slots in a batch, without joining payloads.

A field of arrays gets one array for the batch, and each sample that is stored as it is delivered
(in native byte order, rows first) has a slot in it. The kernel reads files into the slots, mapped
bytes are copied once, and each sample is summed while it is in the processor's cache. Other samples
are converted from their codec.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.cache import DatasetError
from penstock.readers.byte_source import NO_BYTES, STEP_BYTES
from penstock.readers.fieldtypes import (
    ARRAY_CODECS,
    CODEC_ITEMSIZES,
    DenseColumn,
    RaggedColumn,
    codec_number,
    decode_array,
)
from penstock.readers.reading.parallel_copies import SHARED_BYTES, CopyThreads
from penstock.readers.types import offsets_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.readers.blocks import Blocks
    from penstock.readers.byte_source import Unread
    from penstock.readers.fieldtypes import ArrayForm, Column
    from penstock.readers.formats import SpanPlace
    from penstock.readers.reading.batch_plan import BatchFields, BatchRows
    from penstock.readers.types import Encoded, Ints


class _Arrays:
    """The arrays of one field of a batch, whose memory is allocated here.

    flat: their numbers end to end. starts, counts: the position and the count of each sample's
    numbers in flat. is_direct: marks the samples that are read into their slots.
    """

    def __init__(self, visit: BatchRows, place: SpanPlace, form: ArrayForm, blocks: Blocks) -> None:
        """Opening the shards has checked that each sample's bytes are those that its lengths take;
        raises ValueError otherwise, as memory beyond would be written."""
        table, n, order = visit.table, len(visit.rows), visit.positions
        assert place.codec is not None
        self._form, self._codecs = form, table[:, place.codec]
        sizes = table[:, place.end] - table[:, place.start]
        has_bytes = sizes > 0
        self._lengths: Ints | None = None  # in the visit's order
        if place.lengths is None:
            self.counts = np.full(n, math.prod(form.fixed_shape), np.int64)
            offsets = offsets_of(self.counts)
        else:
            lengths = np.empty((n, len(form.shape)), np.int64)
            self._lengths = table[:, place.lengths : place.lengths + len(form.shape)]
            lengths[order] = self._lengths
            in_batch = lengths.prod(axis=1)
            offsets = offsets_of(in_batch)
            self.counts = in_batch[order]
        itemsizes = CODEC_ITEMSIZES[np.where(has_bytes, self._codecs, 0)]
        if (sizes != self.counts * itemsizes)[has_bytes | (place.lengths is not None)].any():
            raise ValueError("an array's bytes aren't those that its lengths take")
        self.column: DenseColumn | RaggedColumn
        if place.lengths is None:
            self.column = DenseColumn(blocks.array((n, *form.fixed_shape), form.dtype))
        elif form.rest is None:
            values = blocks.array((int(offsets[-1]),), form.dtype)
            self.column = RaggedColumn(values, offsets, lengths)
        else:
            first = offsets_of(lengths[:, 0])
            values = blocks.array((int(first[-1]), *form.rest), form.dtype)
            self.column = RaggedColumn(values, first)
        self.flat = self.column.values.reshape(-1)
        self.starts = offsets[order]
        self.is_direct = has_bytes & (self._codecs == codec_number(form.dtype.str))

    def slots(self) -> list[Encoded | None]:
        """Return the slot of each sample; None if it isn't read into one."""
        data, size = self.flat.view(np.uint8), self._form.dtype.itemsize
        starts = self.starts * size
        bounds = zip(starts.tolist(), (starts + self.counts * size).tolist(), strict=True)
        slots: list[Encoded | None] = [data[begin:end] for begin, end in bounds]
        for row in np.flatnonzero(~self.is_direct).tolist():
            slots[row] = None
        return slots

    def convert(self, row: int, payload: Encoded) -> None:
        """Write a sample that has no slot, or whose payload became empty."""
        begin = int(self.starts[row])
        end = begin + int(self.counts[row])
        if not len(payload):
            self.flat[begin:end] = 0
        else:
            codec = ARRAY_CODECS[self._codecs[row]]
            shape: Sequence[int] = self._form.fixed_shape
            if self._lengths is not None:
                shape = self._lengths[row].tolist()
            self.flat[begin:end] = decode_array(payload, codec, shape).reshape(-1)


class DirectArrays:
    """The slots of a batch. of_spans: the slot of each span, in a visit's order; None if it isn't
    read into one."""

    def __init__(self, visit: BatchRows, choice: BatchFields, blocks: Blocks) -> None:
        self._positions, self._width = visit.positions, len(choice.spans)
        self._fields: dict[int, tuple[str, _Arrays]] = {}
        self.of_spans: list[Encoded | None] = [None] * (len(visit.rows) * self._width)
        for number, (name, place) in enumerate(choice.spans.items()):
            if name in choice.arrays:
                arrays = _Arrays(visit, place, choice.arrays[name], blocks)
                self._fields[number] = name, arrays
                self.of_spans[number :: self._width] = arrays.slots()

    def fill(
        self, unread: list[Unread], *, threads: CopyThreads, marks: dict[int, str] | None
    ) -> tuple[list[Encoded], list[int]]:
        """Read spans into their slots. Returns the bytes of all spans and their CRC-32C; no bytes
        and 0 for spans without a slot. marks: collects the reasons against unreadable files, by
        span, instead of raising. Raises as reading a span does."""
        crcs = [0] * len(unread)
        payloads = [NO_BYTES if slot is None else slot for slot in self.of_spans]
        slots = [(span, slot) for span, slot in enumerate(self.of_spans) if slot is not None]

        def read(part: tuple[int, Encoded]) -> None:
            span, slot = part
            try:
                crcs[span] = _copy(unread[span], slot)
            except DatasetError as error:
                if marks is None:
                    raise
                marks[span] = str(error)

        if sum(len(slot) for _, slot in slots) >= SHARED_BYTES:
            threads.run(read, slots)
        else:
            for part in slots:
                read(part)
        return payloads, crcs

    def columns(self, payloads: Sequence[Encoded], bad: Collection[int]) -> dict[str, Column]:
        """Return the columns after all spans were read, and convert samples without a slot.
        payloads: of all spans of the batch, sample by sample. bad: samples of the visit, whose
        values become empty or 0."""
        columns: dict[str, Column] = {}
        for number, (name, arrays) in self._fields.items():
            for row in {*np.flatnonzero(~arrays.is_direct).tolist(), *bad}:
                arrays.convert(row, payloads[row * self._width + number])
            column = arrays.column
            if bad and isinstance(column, RaggedColumn):
                column = column.emptied(self._positions[[*bad]].tolist())
            columns[name] = column
        return columns


def _copy(source: Unread, slot: Encoded) -> int:
    """Copy bytes into a slot; return the CRC-32C of the copied bytes."""
    if not isinstance(source, np.ndarray):
        return source.copy(slot)
    crc = 0
    for at in range(0, len(slot), STEP_BYTES):
        step = slot[at : at + STEP_BYTES]
        step[:] = source[at : at + len(step)]
        crc = crc32c(step, crc)
    return crc
