"""One field of all samples of a source, to choose by: labels, groups, lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.cache.errors import ConfigError
from penstock.readers.fields.columns import DenseColumn, RaggedColumn, joined_columns
from penstock.readers.fields.field_types import PRESENT, has_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.readers.contents import Contents
    from penstock.readers.fields.columns import Column, SampleBatch
    from penstock.readers.fields.schema import Schema

    Ints = NDArray[np.int64]


class Valued(Protocol):
    """What has values by field, such as a source."""

    url: str

    @property
    def schema(self) -> Schema: ...
    @property
    def contents(self) -> Contents: ...
    def values(self, name: str, rows: Ints) -> SampleBatch: ...
    def ids(self, rows: Ints) -> Ints: ...
    def names(self, ids: Ints) -> list[str]: ...
    def __len__(self) -> int: ...


_AT_ONCE = 2**14  # samples whose values or names are asked for together


def whole_column(source: Valued, name: str) -> NDArray[Any] | list[Any]:
    """One field of all samples in the order of their ids, as `Source.column`."""
    field = name.removesuffix(PRESENT) if isinstance(name, str) else name
    type = source.schema.get(field)
    if type is None or not (has_values(type) or name != field):
        said = "no field" if type is None else f"a field of {type!r}"
        raise ConfigError(
            f'"{name}": {said} of {source.url}, wanted one of values: '
            f"{[n for n, t in source.schema.items() if has_values(t)]}."
        )
    columns, present = [], [np.empty(0, np.bool_)]
    for places in runs(len(source)):
        batch = source.values(field, source.contents.rows(places))
        present.append(batch.present.get(field, np.ones(len(batch), np.bool_)))
        columns.append(batch.columns[field])
    has = np.concatenate(present)
    if name != field:
        return has
    if not has.all():
        places = np.flatnonzero(~has)[:3]
        lacking = source.names(source.ids(source.contents.rows(places)))
        raise ConfigError(
            f'"{name}": {np.count_nonzero(~has):,} samples of {source.url} lack it, such as '
            f"{', '.join(lacking)}. Take those that have it: "
            f'dataset.subset(dataset.column("{name}{PRESENT}")).'
        )
    return _plain(joined_columns(columns))


def lengths_of(column: Column, name: str, *, url: str) -> Ints:
    """The first length of each sample of a column. Raises ConfigError where it has none."""
    if not isinstance(column, RaggedColumn):
        raise ConfigError(f'"{name}" of {url}: its samples don\'t differ in length.')
    return np.diff(column.offsets) if column.shapes is None else column.shapes[:, 0]


def runs(count: int) -> Iterator[Ints]:
    """The numbers up to count, some at a time."""
    for start in range(0, count, _AT_ONCE):
        yield np.arange(start, min(count, start + _AT_ONCE), dtype=np.int64)


def _plain(column: Column) -> NDArray[Any] | list[Any]:
    """A column as numpy and Python have such values."""
    if isinstance(column, DenseColumn):
        return column.values
    if isinstance(column, RaggedColumn):
        return [column.sample(row) for row in range(len(column))]
    from penstock.readers.fields.decode import decode_text

    samples: list[Any] = list(column.samples)
    return [each if isinstance(each, str | bytes) else decode_text(each) for each in samples]
