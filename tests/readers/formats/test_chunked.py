"""Formats of chunks: indexed by metadata alone, read by rows, through the cache too."""

from __future__ import annotations

import json
import os
import zlib
from importlib.metadata import EntryPoint
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import fsspec
import numpy as np
import pytest
from crc32c import crc32c

from penstock.cache.errors import IndexChangedError
from penstock.readers import Dataset
from penstock.readers.fields.columns import DenseColumn, RaggedColumn
from penstock.readers.fields.field_types import Array, Tokens, Value
from penstock.readers.fields.schema import Schema
from penstock.readers.formats import registry
from penstock.readers.formats.candidates import Candidates
from penstock.readers.formats.chunked import ChunkFormat
from penstock.readers.formats.chunked_shard import ChunkedShard, Extents
from penstock.readers.formats.data_file import open_data_file
from penstock.readers.formats.format import Snapshot
from penstock.readers.formats.summary import FieldSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.readers.fields.columns import Column
    from penstock.readers.formats.chunked import ShardData, ShardFacts
    from penstock.readers.formats.format import Listing
    from penstock.readers.formats.shard import Places
    from penstock.readers.origin.origin import Entry, Origin

SCHEMA = Schema({"x": Array("float32", (3,)), "t": Tokens("int32"), "y": Value("float32")})
UNITS = ((4, 3), (5,), (1, 1, 2))
FOOTER_BYTES = 8


def rows_of_unit(first: int, count: int) -> dict[str, list[Any]]:
    return {
        "x": [[i, i + 0.5, -i] for i in range(first, first + count)],
        "t": [list(range(i % 4)) for i in range(first, first + count)],
        "y": [i / 4 for i in range(first, first + count)],
    }


def write(root: Path) -> Path:
    """Files of compressed units, and a footer that says where they lie."""
    root.mkdir()
    first = 0
    for number, units in enumerate(UNITS):
        data, ends = b"", []
        for count in units:
            data += zlib.compress(json.dumps(rows_of_unit(first, count)).encode())
            ends.append(len(data))
            first += count
        footer = json.dumps({"units": units, "ends": ends}).encode()
        tail = len(footer).to_bytes(FOOTER_BYTES, "little")
        (root / f"{number}.blocks").write_bytes(data + footer + tail)
    return root


class Reader:
    def __init__(self, shard: ShardFacts) -> None:
        self._units = shard.units.tolist()
        self._bounds = np.cumsum([0, *self._units])

    def _unit_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._bounds, rows, side="right") - 1

    def needs(
        self, rows: NDArray[np.int64], fields: Sequence[str], corners: Mapping[str, Any]
    ) -> list[int]:
        del fields, corners
        return np.unique(self._unit_of(rows)).tolist()

    def gather(
        self,
        field: str,
        rows: NDArray[np.int64],
        out: NDArray[Any],
        places: Places,
        *,
        data: ShardData,
        wrong: dict[int, str],
        corners: NDArray[np.int64] | None = None,
    ) -> None:
        assert corners is None
        column = self.read_rows(rows, [field], data=data, wrong=wrong)[field]
        assert isinstance(column, DenseColumn)
        out[places] = column.values

    def name(self, row: int) -> str:
        return f"row {row}"

    def read_rows(
        self,
        rows: NDArray[np.int64],
        fields: Sequence[str],
        *,
        data: ShardData,
        wrong: dict[int, str],
    ) -> Mapping[str, Column]:
        units = self._unit_of(rows)
        decoded: dict[int, dict[str, list[Any]]] = {}
        for unit in set(units.tolist()):
            (found,) = data.read([unit])
            try:
                decoded[unit] = json.loads(zlib.decompress(found.tobytes()))
            except zlib.error as error:
                wrong |= {place: str(error) for place in np.flatnonzero(units == unit).tolist()}
                decoded[unit] = rows_of_unit(0, self._units[unit])
        found: dict[str, Column] = {}
        for field in fields:
            values = [
                decoded[unit][field][row - self._bounds[unit]]
                for unit, row in zip(units.tolist(), rows.tolist(), strict=True)
            ]
            if field == "t":
                offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
                found[field] = RaggedColumn(np.array([*chain(*values)], np.int32), offsets)
            else:
                found[field] = DenseColumn(np.array(values, np.float32))
        return found


class _Listing:
    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._files = origin.top(lambda name: name.endswith(b".blocks")).entries

    def snapshot(self) -> Snapshot:
        return Snapshot.of(self._files, {})

    def candidates(self, *, workers: int) -> Candidates:
        del workers
        return Candidates.of_chunks(SCHEMA, [self._shard(entry) for entry in self._files])

    def _shard(self, entry: Entry) -> ChunkedShard:
        with open_data_file(self._origin, entry) as file:
            end = entry.size_bytes - FOOTER_BYTES
            size = int.from_bytes(file.read_at(end, FOOTER_BYTES), "little")
            footer = file.read_at(end - size, size)
        told = json.loads(footer)
        starts = np.array([0, *told["ends"]], np.int64)
        nothing = np.zeros(len(told["units"]), np.int64)
        return ChunkedShard(
            samples=sum(told["units"]),
            files=[entry],
            units=told["units"],
            extents=Extents(
                files=nothing, starts=starts[:-1], sizes=np.diff(starts), fields=nothing
            ),
            checksum=crc32c(footer),
            fields={"y": FieldSummary(storage="chunks", bounds=(0.0, 4.0))},
        )

    def counterparts(
        self, number: int, name: bytes, *, total: int, workers: int
    ) -> Iterator[tuple[Candidates, int]]:
        del name, total
        yield self.candidates(workers=workers), number


class _Indexing:
    keeps_facts: ClassVar[bool] = False

    def list(self, origin: Origin) -> _Listing:
        return _Listing(origin)

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        del origin
        return listing().snapshot().fingerprint == snapshot.fingerprint


class Blocks(ChunkFormat):
    name = "blocks"
    least_sample_bytes = 0
    indexing = _Indexing()

    def recognises(self, origin: Origin) -> bool:
        return bool(origin.top(lambda name: name.endswith(b".blocks")).entries)

    def open_chunks(self, shard: ShardFacts) -> Reader:
        return Reader(shard)


FORMAT = Blocks()


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    points = {"blocks": EntryPoint("blocks", __name__, registry.GROUP)}
    registry.format_named.cache_clear()
    monkeypatch.setattr(registry, "_guests", lambda: points)
    yield
    registry.format_named.cache_clear()


@pytest.fixture(params=["local", "remote"])
def dataset(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Dataset]:
    root = write(tmp_path / "set")
    memory, place = fsspec.filesystem("memory"), f"/blocks-{tmp_path.name}"
    for path in root.iterdir():
        memory.pipe(f"{place}/{path.name}", path.read_bytes())
    where: Any = root if request.param == "local" else f"memory:/{place}"
    with Dataset(where, cache=tmp_path / "cache") as opened:
        yield opened
    memory.rm(place, recursive=True)


def shuffled(dataset: Dataset) -> NDArray[np.int64]:
    places = np.random.default_rng(3).permutation(len(dataset))
    return dataset.contents.rows(places)


def test_chunks_are_read_by_rows_without_a_look_at_samples_before(dataset: Dataset) -> None:
    index = dataset.open(verify=None)
    assert index.units is not None
    assert [units.tolist() for units in index.units] == [list(units) for units in UNITS]
    assert dataset.contents.units is not None
    assert dataset.fields == ("x", "t", "y")
    assert index.summary("y").bounds == (0.0, 4.0)
    rows = shuffled(dataset)
    batch = dataset.read(rows)
    ids = dataset.ids(rows).tolist()
    assert batch.ids.tolist() == ids
    wanted = rows_of_unit(0, len(ids))
    x, t, y = batch.columns["x"], batch.columns["t"], batch.columns["y"]
    assert isinstance(x, DenseColumn)
    assert isinstance(t, RaggedColumn)
    assert isinstance(y, DenseColumn)
    assert x.values.tolist() == [wanted["x"][i] for i in ids]
    assert [t.sample(row).tolist() for row in range(len(ids))] == [wanted["t"][i] for i in ids]
    assert y.values.tolist() == [wanted["y"][i] for i in ids]
    assert dataset.names([4]) == ["row 4"]
    assert not len(dataset.read(rows[:0]).columns["t"])


def test_a_damaged_chunk_marks_its_rows(tmp_path: Path) -> None:
    root = write(tmp_path / "set")
    with Dataset(root) as dataset:
        rows = shuffled(dataset)
        with (root / "0.blocks").open("r+b") as file:
            file.write(b"\0\0\0\0")
        bad: dict[int, str] = {}
        batch = dataset.read(rows, bad=bad)
        ids = batch.ids.tolist()
        assert sorted(ids[place] for place in bad) == [0, 1, 2, 3]
        with pytest.raises(IndexChangedError, match="row"):
            dataset.read(rows)


def test_an_index_of_chunks_is_of_its_metadata(tmp_path: Path) -> None:
    root = write(tmp_path / "set")
    with Dataset(root) as dataset:
        first = dataset.open()
    os.utime(root / "1.blocks", ns=(7, 7))
    with Dataset(root) as dataset:
        assert dataset.open().fingerprint == first.fingerprint
    (root / "1.blocks").unlink()
    with Dataset(root) as dataset:
        assert dataset.open().fingerprint != first.fingerprint
        assert len(dataset) == 11
