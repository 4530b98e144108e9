"""Columns of arrays from the payloads of their samples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fields.arrays import ARRAY_CODECS, codec_number, to_array
from penstock.readers.fields.columns import DenseColumn, RaggedColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.arrays import ArrayForm
    from penstock.readers.types import Encoded


def array_column(
    payloads: Sequence[Encoded],
    form: ArrayForm,
    *,
    codecs: NDArray[np.int64],
    lengths: NDArray[np.int64] | None,
) -> DenseColumn | RaggedColumn:
    """The arrays of n samples in the dtype of their field.

    payloads: empty where a sample is missing or bad, which is then zeros. codecs: numbers in
    ARRAY_CODECS, shape (n,). lengths: of the arrays, shape (n, dimensions), where shapes differ; 0
    where a sample is missing or bad. Whether payloads have the bytes that their shapes take was
    checked with the index.
    """
    there = np.fromiter(map(len, payloads), np.int64, len(payloads)) > 0
    is_native = bool((codecs[there] == codec_number(form.dtype.str)).all())
    if lengths is None:
        return DenseColumn(_dense(payloads, form, codecs, there, is_native=is_native))
    flat = _flat(payloads, form, codecs, lengths, is_native=is_native)
    rest = form.rest
    counts = lengths[:, 0] if rest is not None else lengths.prod(axis=1)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    if rest is None:
        return RaggedColumn(flat, offsets, lengths)
    return RaggedColumn(flat.reshape(int(offsets[-1]), *rest), offsets)


def _dense(
    payloads: Sequence[Encoded],
    form: ArrayForm,
    codecs: NDArray[np.int64],
    there: NDArray[np.bool_],
    *,
    is_native: bool,
) -> NDArray[Any]:
    shape = form.fixed_shape
    is_whole = bool(there.all()) or not math.prod(shape)
    if is_native and is_whole and len(payloads):
        return np.concatenate(payloads).view(form.dtype).reshape(len(payloads), *shape)
    values = np.zeros((len(payloads), *shape), form.dtype)
    for row in np.flatnonzero(there).tolist():
        values[row] = to_array(payloads[row], ARRAY_CODECS[codecs[row]], shape, form.dtype)
    return values


def _flat(
    payloads: Sequence[Encoded],
    form: ArrayForm,
    codecs: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    is_native: bool,
) -> NDArray[Any]:
    if not len(payloads):
        return np.empty(0, form.dtype)
    if is_native:
        return np.concatenate(payloads).view(form.dtype)
    shapes = lengths.tolist()
    arrays = [
        to_array(payload, ARRAY_CODECS[codec], shape, form.dtype).reshape(-1)
        if len(payload)
        else np.empty(0, form.dtype)
        for payload, codec, shape in zip(payloads, codecs.tolist(), shapes, strict=True)
    ]
    return np.concatenate(arrays)
