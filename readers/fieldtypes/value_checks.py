"""Find the samples of batches whose values are invalid, if no index has checked them: tables and
chunks are indexed without reading their samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fieldtypes.columns import DenseColumn, EncodedColumn, RaggedColumn
from penstock.readers.types import UNFIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes.columns import SampleBatch
    from penstock.readers.fieldtypes.field_type import FieldType


class ValueChecks:
    """Checks the values of fields whose type has rules for them, such as boxes. Safe on any
    thread."""

    def __init__(self, types: Mapping[str, FieldType], *, samples: int) -> None:
        """samples: of the dataset."""
        from penstock.readers.fieldtypes.boxes import BoxUnits

        self._types = types
        self._units = BoxUnits(enough=min(8, samples))

    @classmethod
    def of(
        cls, schema: Mapping[str, FieldType], fields: Sequence[str], *, samples: int
    ) -> ValueChecks | None:
        """Return checks of those of the fields that have rules; None if there are none."""
        types = {name: schema[name] for name in fields if name in schema}
        types = {name: t for name, t in types.items() if t.checks_values and not t.is_encoded}
        return cls(types, samples=samples) if types else None

    def __call__(self, content: SampleBatch) -> dict[int, str]:
        """Return why rows are bad, by row. content: as stored. Raises DatasetError if all boxes
        have the wrong unit."""
        found: dict[int, str] = {}
        for name, type in self._types.items():
            column = content.columns[name]
            assert isinstance(column, DenseColumn | RaggedColumn), name
            self._units.add(name, type, column.values)
            image = content.columns.get(type.reference or "")
            dims = image.dims if isinstance(image, EncodedColumn) else None
            if isinstance(column, RaggedColumn) and column.shapes is None:
                # Rows of several samples together are rows of a sample, too.
                sizes = None if dims is None else np.repeat(dims, np.diff(column.offsets), axis=0)
                if type.check_values(column.values, sizes) is None:
                    continue
            for row in np.flatnonzero(content.has(name)).tolist():
                values: NDArray[Any] = column.sample(row)
                size = None if dims is None else np.repeat(dims[row : row + 1], len(values), axis=0)
                if (refusal := type.check_values(values, size)) is not None:
                    found.setdefault(row, f"{name}: {refusal.reason}. {UNFIT}")
        return found
