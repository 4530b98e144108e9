"""Formats as another package provides them, built on the base of simple formats."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.fieldtypes import Array, ClassLabel, Image, Schema
from penstock.readers.formats import RecordFormat, Records, RecordSpans, format_registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

    from penstock.readers.formats import DataFile
    from penstock.readers.origin import Entry, Origin

RECORD_BYTES = 3073


def install(monkeypatch: pytest.MonkeyPatch, **formats: str) -> None:
    """Register formats as the entry points of other packages do. formats: their places by name."""
    points = {
        name: EntryPoint(name=name, value=value, group=format_registry.GROUP)
        for name, value in formats.items()
    }
    format_registry.format_named.cache_clear()
    monkeypatch.setattr(format_registry, "external_entry_points", lambda: points)


class Cifar(RecordFormat):
    """CIFAR-10's binary version: one byte for the class, then 3 x 32 x 32 pixels."""

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
    """Images end to end, and a text file with the start, size and label of each."""

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
