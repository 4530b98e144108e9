"""Formats as another package would bring them: one module each, by the base of simple ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.fields import Array, ClassLabel, Image, Schema
from penstock.readers.formats import RecordFormat, Records, RecordSpans

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.formats import DataFile
    from penstock.readers.origin import Entry, Origin

RECORD_BYTES = 3073


class Cifar(RecordFormat):
    """A byte of class, then 3 x 32 x 32 of pixels: CIFAR-10's binary version."""

    name = "cifar"
    suffix = ".bin"
    least_sample_bytes = RECORD_BYTES

    def schema(self, origin: Origin) -> Schema:
        del origin
        return Schema({"pixels": Array("uint8", (3, 32, 32)), "label": ClassLabel()})

    def records(self, file: DataFile, entry: Entry, beside: Mapping[str, bytes]) -> Records:
        del beside
        data = np.frombuffer(file.read_at(0, entry.size_bytes), np.uint8)
        data = data.reshape(-1, RECORD_BYTES)
        starts = RECORD_BYTES * np.arange(len(data)) + 1
        sizes = np.full(len(data), RECORD_BYTES - 1)
        return Records(
            spans={"pixels": RecordSpans(starts, sizes, codec="|u1")}, values={"label": data[:, 0]}
        )


class Strip(RecordFormat):
    """Images end to end, and a text file beside them with a start, a size and a label each."""

    name = "strip"
    suffix = ".strip"
    beside = (".txt",)

    def schema(self, origin: Origin) -> Schema:
        del origin
        return Schema({"image": Image(), "label": ClassLabel()})

    def records(self, file: DataFile, entry: Entry, beside: Mapping[str, bytes]) -> Records:
        del file, entry
        rows = np.array([line.split() for line in beside[".txt"].splitlines()], np.int64)
        return Records(
            spans={"image": RecordSpans(rows[:, 0], rows[:, 1])}, values={"label": rows[:, 2]}
        )
