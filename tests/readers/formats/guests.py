"""Formats as another package provides them, built on the base of simple formats."""

from __future__ import annotations

import json
import struct
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.fieldtypes import Array, ClassLabel, Image, Schema, Text, Value
from penstock.readers.formats import RecordFormat, Records, RecordSpans, format_registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

    from penstock.readers.fieldtypes import FieldType
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


class Frames(RecordFormat):
    """Records of two lengths, JSON and an image. Some lack a caption, a score or a second image."""

    name = "frames"
    suffix = ".frames"
    least_sample_bytes = 8

    def schema(self, origin: Origin) -> Mapping[str, FieldType]:
        del origin
        return {"image": Image(), "small": Image(), "caption": Text(), "score": Value("float32")}

    def records(self, file: DataFile, entry: Entry, beside: Mapping[str, bytes]) -> Records:
        del beside
        at, rows = 0, []
        while at < entry.size_bytes:
            head, size = struct.unpack("<II", file.read_at(at, 8))
            facts = json.loads(file.read_at(at + 8, head))
            small = facts.get("small", 0)
            start = at + 8 + head
            rows.append((start + small, size - small, start if small else -1, small, facts))
            at = start + size
        starts, sizes, small_starts, small_sizes, facts_of = zip(*rows, strict=True)
        return Records(
            spans={
                "image": RecordSpans(starts, sizes),
                "small": RecordSpans(small_starts, small_sizes),
            },
            values={name: [each.get(name) for each in facts_of] for name in ("caption", "score")},
        )


class Points(RecordFormat):
    """A text file for each sample: a title, then a line of three numbers for each point."""

    name = "points"
    suffix = ".xyz"
    is_file_per_sample = True
    shard_bytes = 300

    def schema(self, origin: Origin) -> Mapping[str, FieldType]:
        del origin
        return {"points": Array("float32", (None, 3)), "title": Text()}

    def records(self, file: DataFile, entry: Entry, beside: Mapping[str, bytes]) -> Records:
        del beside
        title, *lines = file.read_at(0, entry.size_bytes).decode().splitlines()
        points = [[float(number) for number in line.split()] for line in lines]
        return Records(values={"points": [points], "title": [title or None]})


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
