"""The columns of a batch's span fields, from their payloads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.fields.columns import EncodedColumn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from penstock.readers.fields.columns import Column
    from penstock.readers.reading.choice import Choice
    from penstock.readers.types import Encoded

EMPTY = np.empty(0, np.uint8)
"""In place of bytes that a sample lacks, or that are bad."""
EMPTY.flags.writeable = False


def span_columns(
    choice: Choice,
    payloads: list[Encoded],
    table: NDArray[np.int64],
    back: NDArray[np.int64] | None,
    arrays: Mapping[str, Column],
) -> dict[str, Column]:
    """The columns of n samples. payloads: of all spans, those of a sample side by side; back: where
    each sample stands in there, int64, shape (n,), None: in order; table: of the samples, in
    order. arrays: columns that are made already."""
    columns = dict(arrays)
    fields = len(choice.names)
    if back is None and fields > 1:
        back = np.arange(len(table))
    for field, (name, place, form) in enumerate(
        zip(choice.names, choice.places, choice.forms, strict=True)
    ):
        if name in arrays:
            continue
        if back is None:
            samples = payloads
        else:
            at = back if fields == 1 else back * fields + field
            samples = [payloads[i] for i in at.tolist()]
        if form is None:
            dims = None
            if place.height is not None:
                dims = table[:, place.height : place.height + 2].astype(np.int32)
            columns[name] = EncodedColumn(samples, dims)
            continue
        from penstock.readers.reading.arrays import array_column  # images need none of it

        assert place.codec is not None
        lengths = None
        if place.lengths is not None:
            lengths = table[:, place.lengths : place.lengths + len(form.shape)]
        columns[name] = array_column(samples, form, codecs=table[:, place.codec], lengths=lengths)
    return columns
