"""An in-memory source of any fields, to test loaders without files."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image as Picture

from penstock.cache import ConfigError
from penstock.readers import ImageRange, Source
from penstock.readers.fieldtypes import (
    DenseColumn,
    EncodedColumn,
    FieldType,
    Image,
    Mask,
    RaggedColumn,
    SampleBatch,
    Schema,
    Text,
    check_names,
    check_selection,
    cropped,
    default_fields,
    image_fields,
    stored_fields,
)
from tests.sources import values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers import Contents
    from penstock.readers.fieldtypes import Column, ColumnCrop

    Ints = NDArray[np.int64]


class Memory(Source):
    """Samples of a schema. fields: as for Dataset.

    columns: of each field, a value a sample: images and masks as arrays (they are written as PNG),
    bytes of what else is encoded (str of text too), arrays or numbers; None where a sample lacks
    it. bad: sample ids that reading calls bad, with the reason.
    """

    def __init__(
        self,
        types: Mapping[str, FieldType],
        columns: Mapping[str, Sequence[Any]],
        *,
        fields: Sequence[str] | str | None = None,
        bad: Mapping[int, str] | None = None,
    ) -> None:
        self.url = "memory:samples"
        count = len(next(iter(columns.values())))
        self._columns = {name: _encoded(types[name], values) for name, values in columns.items()}
        self._sizes = {
            name: [None if each is None else each.shape[:2] for each in columns[name]]
            for name, type in types.items()
            if isinstance(type, Image | Mask)
        }
        lacking = {n: sum(v is None for v in values) for n, values in self._columns.items()}
        self._lacking = {name: lacks for name, lacks in lacking.items() if lacks}
        schema = Schema(types)
        chosen = check_names(fields) or default_fields(schema, self._lacking)
        self._fields = check_selection(chosen, schema, self._lacking, url=self.url)
        images = {name: _range(self._sizes[name]) for name in image_fields(schema, schema)}
        sizes = [count // 2, count - count // 2]
        self._contents = values_of(sizes, schema=schema, images=images)
        self.bad = dict(bad or {})
        self.read_ids: list[int] = []

    def spoil(self, name: str, sample_id: int, data: bytes) -> None:
        """Put other bytes where an encoded sample was, whose size and all else stay noted."""
        self._columns[name][sample_id] = data

    @property
    def contents(self) -> Contents:
        return self._contents

    @property
    def fields(self) -> tuple[str, ...]:
        return self._fields

    def read(
        self,
        rows: Ints,
        *,
        mode: object = None,
        bad: dict[int, str] | None = None,
        fields: Sequence[str] | None = None,
        crops: Mapping[str, ColumnCrop] | None = None,
        blocks: object = None,
    ) -> SampleBatch:
        del mode, blocks
        ids = self.ids(rows)
        self.read_ids += ids.tolist()
        for row, sample_id in enumerate(ids.tolist()):
            if sample_id in self.bad and bad is not None:
                bad[row] = self.bad[sample_id]
        stored = stored_fields(fields or self._fields, self.schema)
        present = {
            name: np.array([self._columns[name][i] is not None for i in ids], np.bool_)
            for name in stored
            if name in self._lacking
        }
        columns = {name: self._column(name, ids, bad or {}) for name in stored}
        columns |= {name: cropped(columns[name], crop) for name, crop in (crops or {}).items()}
        return SampleBatch(ids=ids, columns=columns, present=present)

    def _column(self, name: str, ids: Ints, bad: Mapping[int, str]) -> Column:
        type, values = self.schema[name], [self._columns[name][i] for i in ids.tolist()]
        if type.is_encoded:
            gone = [row in bad or value is None for row, value in enumerate(values)]
            samples = [
                np.frombuffer(b"" if out else value, np.uint8)
                for out, value in zip(gone, values, strict=True)
            ]
            dims = None
            if name in self._sizes:
                sizes = [self._sizes[name][i] or (0, 0) for i in ids.tolist()]
                dims = np.array(sizes, np.int32).reshape(-1, 2)
            return EncodedColumn(samples, dims)
        known = next(value for value in self._columns[name] if value is not None)
        arrays = [np.zeros_like(known) if v is None else np.asarray(v) for v in values]
        shapes = {np.shape(v) for v in self._columns[name] if v is not None}
        if len(shapes) == 1:
            empty = np.zeros((0, *np.shape(known)), np.asarray(known).dtype)
            column = np.stack(arrays) if arrays else empty
            column.flags.writeable = False  # as of a mapped file
            return DenseColumn(column)
        several = len({shape[1:] for shape in shapes}) > 1
        zero = np.zeros(1, np.int64)
        count = np.empty((0, known.ndim), np.int64) if several else None
        rest = () if several else known.shape[1:]
        like = RaggedColumn(np.empty((0, *rest), known.dtype), zero, count)
        return RaggedColumn.of(arrays, like=like)

    def _names_of(self, rows: Ints) -> list[str]:
        return [f"sample-{i}" for i in self.ids(rows).tolist()]

    def image_dims(self, shard: int, name: str) -> NDArray[np.int32]:
        start = int(self._contents.starts[shard])
        end = start + int(self._contents.sizes[shard])
        return np.array([size or (0, 0) for size in self._sizes[name][start:end]], np.int32)

    def give_back(self) -> None:
        pass

    def close(self) -> None:
        pass


def png(pixels: NDArray[Any]) -> bytes:
    """Pixels as a PNG file."""
    out = io.BytesIO()
    Picture.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def _encoded(type: FieldType, values: Sequence[Any]) -> list[Any]:
    encode: Callable[[Any], Any] = lambda value: value  # noqa: E731
    if isinstance(type, Image | Mask):
        encode = lambda value: png(value) if isinstance(value, np.ndarray) else value  # noqa: E731
    elif isinstance(type, Text):
        encode = lambda value: value.encode() if isinstance(value, str) else value  # noqa: E731
    return [None if value is None else encode(value) for value in values]


def _range(sizes: Sequence[tuple[int, int] | None]) -> ImageRange:
    there = np.array([size for size in sizes if size is not None])
    if not len(there):
        raise ConfigError("no image at all")
    (min_h, min_w), (max_h, max_w) = there.min(axis=0).tolist(), there.max(axis=0).tolist()
    return ImageRange(min_height=min_h, max_height=max_h, min_width=min_w, max_width=max_w)
