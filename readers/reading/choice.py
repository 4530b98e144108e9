"""The fields that a batch gets, sorted by how they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError
from penstock.readers.fields.arrays import ArrayForm, array_form, from_bits, number_dtype
from penstock.readers.fields.columns import DenseColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.readers.formats.layout import Layout, SpanPlace

    Ints = NDArray[np.int64]


class Choice:
    """The fields that a batch gets.

    fields: all, in order. names, places, forms: of those that are spans. dense: those by rows whose
    samples have one shape; rows: the others by rows, with their forms where they are arrays.
    has_arrays: some spans are arrays. has_chunks: some lie in chunks. told: those of them that some
    samples lack, which are among rows. are_never_empty: each span has bytes. needs_table: something
    is in the shards' tables.
    """

    def __init__(self, layout: Layout, fields: Sequence[str]) -> None:
        """Raises ConfigError for fields that aren't there."""
        for name in fields:
            if name not in layout.schema:
                raise ConfigError(f"fields: got {name!r}, wanted some of {list(layout.schema)}.")
        self.fields, self._layout = tuple(fields), layout
        spans = [name for name in fields if layout.storage[name] == "span"]
        self.names = tuple(spans)
        self.places: tuple[SpanPlace, ...] = tuple(layout.table.spans[name] for name in spans)
        self.forms: tuple[ArrayForm | None, ...] = tuple(
            array_form(layout.schema[name]) for name in spans
        )
        self.has_arrays = any(form is not None for form in self.forms)
        by_rows = [name for name in fields if layout.is_by_rows(name)]
        forms = {name: _dense_form(layout, name) for name in by_rows}
        self.has_chunks = any(layout.storage[name] == "chunks" for name in by_rows)
        # Who has a field that lies in chunks is told where these are read by rows.
        self.told = tuple(
            name for name in by_rows if name in layout.lacking and layout.storage[name] == "chunks"
        )
        self.dense = {
            name: form for name, form in forms.items() if form is not None and name not in self.told
        }
        self.rows = {
            name: array_form(layout.schema[name]) if form is None else form
            for name, form in forms.items()
            if name not in self.dense
        }
        self._values = {
            name: (at, number_dtype(layout.schema[name]))
            for name in fields
            if (at := layout.table.values.get(name)) is not None
        }
        self.are_never_empty = all(place.height is not None for place in self.places) and not (
            layout.lacking.intersection(spans)
        )
        self._lacking = tuple(
            name for name in fields if name in layout.lacking and name not in self.told
        )
        self.needs_table = bool(self.places or self._values or self._lacking)
        self._columns = tuple(
            [getattr(place, what) for place in self.places] for what in ("start", "end", "crc")
        )

    def dimensions(self, span: int) -> int:
        """How many an array of a span field has."""
        form = self.forms[span]
        return 0 if form is None else len(form.shape)

    def spans(self, table: Ints) -> tuple[Ints, Ints, Ints]:
        """Start, end and CRC of the samples' spans, those of one sample side by side. table: of the
        samples, shape (n, columns); each int64, shape (n * spans,)."""
        if len(self.places) == 1:
            (place,) = self.places
            return table[:, place.start], table[:, place.end], table[:, place.crc]
        starts, ends, crcs = (table[:, columns].reshape(-1) for columns in self._columns)
        return starts, ends, crcs

    def values(self, table: Ints) -> dict[str, DenseColumn]:
        """The columns of numbers."""
        return {
            name: DenseColumn(from_bits(table[:, at], dtype))
            for name, (at, dtype) in self._values.items()
            if dtype is not None
        }

    def present(self, table: Ints) -> dict[str, NDArray[np.bool_]]:
        """Which samples have a field, of those that some lack and that the table tells of."""
        found = {}
        for name in self._lacking:
            span = self._layout.table.spans.get(name)
            found[name] = (
                table[:, self._layout.table.present[name]] != 0
                if span is None
                else table[:, span.start] >= 0
            )
        return found


def _dense_form(layout: Layout, name: str) -> ArrayForm | None:
    """The form of a field whose samples have one shape."""
    type = layout.schema[name]
    dtype = number_dtype(type)
    if dtype is not None:
        return ArrayForm(dtype, ())
    form = array_form(type)
    return None if form is None or form.is_ragged else form
