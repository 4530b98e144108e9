"""Sources of numbers in memory, which a loader reads without files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import ConfigError
from penstock.readers import Contents, Source
from penstock.readers.fieldtypes import ClassLabel, DenseColumn, SampleBatch, Schema, Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import ColumnCrop, FieldType

    Ints = NDArray[np.int64]


def values_of(sizes: Sequence[int], **more: object) -> Contents:
    """Return the contents of a source with one number per sample, in shards of these sizes."""
    counts = np.array(sizes, np.int64)
    said: dict[str, object] = {
        "schema": Schema({"value": Value("int64")}),
        "sizes": counts,
        "shard_bytes": 8 * counts,
        "id_end": int(counts.sum()),
        "fingerprint": f"values {list(sizes)}",
        "icc": None,
        "shuffled": False,
        "images": {},
        "files": len(sizes),
        "is_file_per_sample": False,
        **more,
    }
    return Contents(**said)  # type: ignore[arg-type]


class Values(Source):
    """Columns of numbers, one per sample, in shards of some sizes."""

    def __init__(
        self,
        sizes: Sequence[int],
        columns: dict[str, NDArray[np.int64]] | None = None,
        *,
        types: dict[str, FieldType] | None = None,
        name: str = "values",
        **more: object,
    ) -> None:
        total = int(np.sum(sizes))
        self.url = f"memory:{name}"
        self._columns = columns or {"value": 1000 + np.arange(total, dtype=np.int64)}
        known = types or {}
        schema = {n: known.get(n, Value("int64")) for n in self._columns}
        self._contents = values_of(
            sizes, schema=Schema(schema), fingerprint=f"{name} {list(sizes)}", **more
        )
        self.reads: list[int] = []

    @property
    def contents(self) -> Contents:
        return self._contents

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self._columns, "id")

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
        del mode, bad, crops, blocks
        ids = self.ids(rows)
        if fields is None:
            self.reads.append(len(ids))
        columns = {
            name: DenseColumn(values[ids])
            for name, values in self._columns.items()
            if fields is None or name in fields
        }
        return SampleBatch(ids=ids, columns=columns)

    def _names_of(self, rows: Ints) -> list[str]:
        return [f"{self.url}/{i}" for i in self.ids(rows).tolist()]

    def image_dims(self, shard: int, name: str) -> NDArray[np.int32]:
        raise ConfigError(f"{self.url} has no images: shard {shard}, field {name}.")

    def give_back(self) -> None:
        pass

    def close(self) -> None:
        pass


def classes(*names: str) -> ClassLabel:
    """Return a field of these classes."""
    return ClassLabel(names)
