"""A small format in chunks: files of units in which each field is an extent of its own.

A shard has at most UNITS_A_SHARD units of a file. The field "x" isn't encoded, so that its samples
can be read singly. Other fields are compressed.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.readers.fieldtypes import Array, DenseColumn, RaggedColumn, Schema, Tokens, Value
from penstock.readers.formats import (
    ChunkedDataset,
    ChunkedShard,
    ChunkFormat,
    ChunkReader,
    Extents,
    FieldSummary,
    format_registry,
    open_data_file,
)
from tests.readers.formats import guests

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import pytest
    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column
    from penstock.readers.formats import ChunkedShardFacts, DatasetFiles, Places, ShardData
    from penstock.readers.origin import Entry, Origin

    Ints = NDArray[np.int64]

SCHEMA = Schema({"x": Array("float32", (3,)), "t": Tokens("int32"), "y": Value("float32")})
FIELDS = tuple(SCHEMA)
UNITS = ((4, 3, 2), (5,), (1, 1, 2))
UNITS_A_SHARD = 2
SHARD_UNITS = [[4, 3], [2], [5], [1, 1], [2]]
ROWS = sum(map(sum, UNITS))
X_BYTES = 12
FOOTER_BYTES = 8
MISSING: dict[str, int] = {}  # number of samples that lack a field

DECODED: list[tuple[int, int]] = []
"""Chunks that were decoded since the format was installed, as the first sample of their shard and
their number in it."""

TAKEN: Counter[tuple[int, int, int]] = Counter()
"""Rows that were taken of each chunk, by the same key and the number of rows that it has."""


def value(field: str, row: int) -> Any:
    """Return the value of a sample."""
    return {"x": [row, row + 0.5, -row], "t": list(range(row % 4)), "y": row / 4}[field]


def encode(field: str, rows: Sequence[int]) -> bytes:
    values = [value(field, row) for row in rows]
    if field == "x":
        return np.array(values, "<f4").tobytes()
    return zlib.compress(json.dumps(values).encode(), 1)


def write(root: Path, units: Sequence[Sequence[int]] = UNITS) -> Path:
    """Write files of units, each with a footer that locates the units."""
    root.mkdir()
    first = 0
    for number, counts in enumerate(units):
        data, ends = b"", []
        for count in counts:
            for field in FIELDS:
                data += encode(field, range(first, first + count))
                ends.append(len(data))
            first += count
        footer = json.dumps({"units": counts, "ends": ends}).encode()
        tail = len(footer).to_bytes(FOOTER_BYTES, "little")
        (root / f"{number}.blocks").write_bytes(data + footer + tail)
    return root


class Reader(ChunkReader):
    def __init__(self, shard: ChunkedShardFacts) -> None:
        self._units, self._sizes = shard.units.tolist(), shard.extents.sizes
        self._bounds = np.cumsum([0, *self._units])
        self._first = shard.note

    def _unit_of(self, rows: Ints) -> Ints:
        return np.searchsorted(self._bounds, rows, side="right") - 1

    def needs(self, rows: Ints, fields: Sequence[str], crops: Mapping[str, Any]) -> list[int]:
        assert not crops
        units = np.unique(self._unit_of(rows)).tolist()
        return [len(FIELDS) * unit + FIELDS.index(field) for unit in units for field in fields]

    def _x_parts(self, rows: Ints) -> tuple[list[int], list[int], list[int]]:
        units = self._unit_of(rows)
        starts = X_BYTES * (rows - self._bounds[units])
        return (len(FIELDS) * units).tolist(), starts.tolist(), (starts + X_BYTES).tolist()

    def gather(
        self,
        field: str,
        rows: Ints,
        out: NDArray[Any],
        places: Places,
        *,
        data: ShardData,
        wrong: dict[int, str],
        corners: Ints | None = None,
    ) -> None:
        assert corners is None
        if field != "x":
            column = self.read_rows(rows, [field], data=data, wrong=wrong)[field]
            assert isinstance(column, DenseColumn)
            out[places] = column.values
            return
        parts = self._x_parts(rows)
        views = [view for extent in parts[0] if (view := data.view(extent)) is not None]
        if len(views) == len(rows):
            assert not any(view.flags.writeable for view in views)
            found = [view[a:b] for view, a, b in zip(views, *parts[1:], strict=True)]
        else:
            found = data.read_parts(*parts)
        out[places] = np.concatenate(found).view("<f4").reshape(-1, 3)

    def name(self, row: int) -> str:
        return f"row {self._first + row}"

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        units = self._unit_of(rows)
        found: dict[str, Column] = {}
        for field in fields:
            decoded: dict[int, list[Any]] = {}
            each = dict(zip(*np.unique(units, return_counts=True), strict=True))
            of_extent = {len(FIELDS) * int(unit) + FIELDS.index(field): unit for unit in each}

            def decode(extents: list[int]) -> list[Any]:
                return [self._decode(data, extent) for extent in extents]

            for extent, unit in of_extent.items():
                TAKEN[self._first, extent, self._units[unit]] += int(each[unit])
            chunks = data.decode_all(
                [*of_extent],
                decode,
                uses=[self._units[unit] for unit in of_extent.values()],
                taken=[int(each[unit]) for unit in of_extent.values()],
            )
            for extent, chunk in chunks:
                unit = int(of_extent[extent])
                if isinstance(chunk, ValueError):
                    reasons = dict.fromkeys(np.flatnonzero(units == unit).tolist(), str(chunk))
                    wrong |= reasons
                    decoded[unit] = [value(field, 0)] * self._units[unit]
                else:
                    decoded[unit] = chunk[""].to_pylist()
            values = [
                decoded[unit][row - self._bounds[unit]]
                for unit, row in zip(units.tolist(), rows.tolist(), strict=True)
            ]
            if field == "t":
                offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
                found[field] = RaggedColumn(np.array([*chain(*values)], np.int32), offsets)
            else:
                found[field] = DenseColumn(np.array(values, np.float32))
        return found

    def _decode(self, data: ShardData, extent: int) -> Any:
        DECODED.append((self._first, extent))
        (found,) = data.read([extent])
        try:
            return pa.table({"": json.loads(zlib.decompress(found.tobytes()))})
        except zlib.error as error:
            return ValueError(str(error))


class ByParts(Reader):
    """A reader that returns the bytes of "x" that it needs."""

    def needs_parts(
        self, rows: Ints, fields: Sequence[str], crops: Mapping[str, Any]
    ) -> tuple[list[int], list[int], list[int]]:
        extents, starts, ends = self._x_parts(rows) if "x" in fields else ([], [], [])
        whole = self.needs(rows, [name for name in fields if name != "x"], crops)
        return [*extents, *whole], [*starts, *(0 for _ in whole)], [*ends, *self._sizes[whole]]


def _shards(origin: Origin, entry: Entry, first: int) -> Iterator[ChunkedShard]:
    with open_data_file(origin, entry) as file:
        end = entry.size_bytes - FOOTER_BYTES
        size = int.from_bytes(file.read_at(end, FOOTER_BYTES), "little")
        footer = file.read_at(end - size, size)
    layout = json.loads(footer)
    bounds = np.array([0, *layout["ends"]], np.int64)
    for low in range(0, len(layout["units"]), UNITS_A_SHARD):
        units = layout["units"][low : low + UNITS_A_SHARD]
        mine = slice(len(FIELDS) * low, len(FIELDS) * (low + len(units)))
        starts, sizes = bounds[:-1][mine], np.diff(bounds)[mine]
        yield ChunkedShard(
            samples=sum(units),
            files=[entry],
            units=units,
            extents=Extents(
                files=np.zeros(len(starts), np.int64),
                starts=starts,
                sizes=sizes,
                fields=np.arange(len(starts)) % len(FIELDS),
            ),
            checksum=crc32c(b"%d" % low, crc32c(footer)),
            fields=_summaries(is_first=first == 0),
            note=first,
        )
        first += sum(units)


def _summaries(*, is_first: bool) -> dict[str, FieldSummary]:
    found = {"y": FieldSummary(storage="chunks", bounds=(0.0, 4.0))}
    for name, missing in MISSING.items() if is_first else ():
        found[name] = FieldSummary(storage="chunks", missing=missing)
    return found


class Blocks(ChunkFormat):
    name = "blocks"
    extensions = frozenset(("blocks",))
    reader_class: Any = Reader

    def index(self, origin: Origin, files: DatasetFiles, *, workers: int) -> ChunkedDataset:
        del workers
        shards: list[ChunkedShard] = []
        for entry in files.entries:
            shards += _shards(origin, entry, sum(shard.samples for shard in shards))
        return ChunkedDataset(schema=SCHEMA, shards=shards)

    def reader(self, shard: ChunkedShardFacts) -> ChunkReader:
        found: ChunkReader = self.reader_class(shard)
        return found


FORMAT = Blocks()


def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the format until the generator is resumed."""
    DECODED.clear()
    TAKEN.clear()
    guests.install(monkeypatch, blocks=__name__)
    yield
    format_registry.format_named.cache_clear()


def upload(root: Path, place: str) -> Any:
    """Copy a folder into fsspec's memory and return that file system."""
    memory = fsspec.filesystem("memory")
    for path in root.iterdir():
        memory.pipe(f"{place}/{path.name}", path.read_bytes())
    return memory
