"""Formats in chunks are indexed from metadata and read by rows, locally and through the cache."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache import CorruptSampleError, DatasetError, DiskCache
from penstock.pipeline import DataLoader
from penstock.readers import Dataset
from penstock.readers.fieldtypes import PRESENT, ColumnCrop, DenseColumn, RaggedColumn
from penstock.readers.formats import ChunkedShard, Extents
from penstock.readers.index import check_manifest
from tests.readers.formats import blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import SampleBatch


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from blocks.install(monkeypatch)


@pytest.fixture
def remote_url(tmp_path: Path) -> Iterator[str]:
    place = f"/blocks-{tmp_path.name}"
    memory = blocks.upload(blocks.write(tmp_path / "sent"), place)
    yield f"memory:/{place}"
    memory.rm(place, recursive=True)


@pytest.fixture(params=["local", "remote"])
def dataset(tmp_path: Path, remote_url: str, request: pytest.FixtureRequest) -> Iterator[Dataset]:
    where: Any = blocks.write(tmp_path / "set") if request.param == "local" else remote_url
    with Dataset(where, cache=tmp_path / "cache") as opened:
        yield opened


def shuffled(dataset: Dataset) -> NDArray[np.int64]:
    places = np.random.default_rng(3).permutation(len(dataset))
    return dataset.contents.rows(places)


def check(batch: SampleBatch, fields: Sequence[str]) -> None:
    ids = batch.ids.tolist()
    assert list(batch.columns) == list(fields)
    for field in fields:
        column = batch.columns[field]
        wanted = [blocks.value(field, i) for i in ids]
        if isinstance(column, RaggedColumn):
            assert [column.sample(row).tolist() for row in range(len(ids))] == wanted
        else:
            assert isinstance(column, DenseColumn)
            assert column.values.tolist() == wanted


def test_chunks_are_read_by_rows_and_indexing_reads_no_sample(dataset: Dataset) -> None:
    index = dataset.open(verify=None)
    assert index.units is not None
    assert [units.tolist() for units in index.units] == blocks.SHARD_UNITS
    assert dataset.contents.units is not None
    assert dataset.fields == blocks.FIELDS
    assert index.summary("y").bounds == (0.0, 4.0)
    rows = shuffled(dataset)
    batch = dataset.read(rows)
    assert batch.ids.tolist() == dataset.ids(rows).tolist()
    check(batch, blocks.FIELDS)
    chunks = 2 * sum(map(len, blocks.UNITS))  # of two fields
    assert len(blocks.DECODED) == len(set(blocks.DECODED)) == chunks
    assert dataset.chunks[0].counts().chunks == chunks
    assert dataset.names([4, 8]) == ["row 4", "row 8"]
    assert not len(dataset.read(rows[:0]).columns["t"])


def test_the_rows_of_a_damaged_chunk_are_bad(tmp_path: Path) -> None:
    root = blocks.write(tmp_path / "set")
    with Dataset(root) as dataset:
        rows = shuffled(dataset)
        with (root / "0.blocks").open("r+b") as file:
            file.seek(4 * blocks.X_BYTES)
            file.write(b"\0\0\0\0")
        bad: dict[int, str] = {}
        batch = dataset.read(rows, bad=bad)
        ids = batch.ids.tolist()
        assert sorted(ids[place] for place in bad) == [0, 1, 2, 3]
        with pytest.raises(CorruptSampleError, match=r"row \d .*: Error -3 while decompressing"):
            dataset.read(rows)


def test_the_fingerprint_of_an_index_of_chunks_follows_its_metadata(tmp_path: Path) -> None:
    root = blocks.write(tmp_path / "set")
    with Dataset(root) as dataset:
        first = dataset.open()
    os.utime(root / "1.blocks", ns=(7, 7))
    with Dataset(root) as dataset:
        assert dataset.open().fingerprint == first.fingerprint
    (root / "1.blocks").unlink()
    with Dataset(root) as dataset:
        assert dataset.open().fingerprint != first.fingerprint
        assert len(dataset) == blocks.ROWS - 5


def test_a_blob_holds_the_selected_fields_and_others_can_still_be_read(
    remote_url: str, tmp_path: Path
) -> None:
    sizes = {}
    for fields in (("y",), ("x", "t"), blocks.FIELDS):
        with Dataset(remote_url, fields=fields, cache=tmp_path / "cache") as dataset:
            index = dataset.index
            manifest = index.manifest
            assert index.shard_bytes.tolist() == manifest.bytes_of(fields).tolist()
            assert dataset.contents.shard_bytes.tolist() == index.shard_bytes.tolist()
            sources = [index.source(shard) for shard in range(len(index.sizes))]
            sizes[fields] = [source.size_bytes for source in sources]
            assert sizes[fields] == index.shard_bytes.tolist()
            assert index.keys == tuple(source.key for source in sources)
            assert len({source.key for source in sources}) == len(blocks.SHARD_UNITS)
            for source in sources:
                assert sum(each.size_bytes for each in source.segments) == source.size_bytes
            before = dataset.bytes_fetched
            check(dataset.read(shuffled(dataset)), fields)
            fetched = dataset.bytes_fetched - before
            assert fetched == sum(sizes[fields])
            check(dataset.read(shuffled(dataset)), fields)
            assert dataset.bytes_fetched - before == fetched
            # Fields that aren't selected are fetched by exact ranges, each time.
            for _ in range(2):
                before = dataset.bytes_fetched
                check(dataset.values("t", shuffled(dataset)), ["t"])
                wanted = 0 if "t" in fields else int(manifest.bytes_of(["t"]).sum())
                assert dataset.bytes_fetched - before == wanted
            check(dataset.read(shuffled(dataset), fields=blocks.FIELDS), blocks.FIELDS)
            assert dataset.column("y").tolist() == [row / 4 for row in range(blocks.ROWS)]
    both = zip(sizes[("y",)], sizes[("x", "t")], strict=True)
    assert [a + b for a, b in both] == sizes[blocks.FIELDS]


def test_without_room_only_the_bytes_that_are_read_are_fetched(
    remote_url: str, tmp_path: Path
) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes=1)
    with Dataset(remote_url, fields=("x", "y"), cache=cache) as dataset:
        wanted = int(dataset.index.shard_bytes.sum())
        before = dataset.bytes_fetched
        check(dataset.read(shuffled(dataset)), ("x", "y"))
        assert dataset.bytes_fetched - before == wanted
    cache.close()


def test_a_manifest_records_the_bytes_of_each_field(tmp_path: Path) -> None:
    with Dataset(blocks.write(tmp_path / "set")) as dataset:
        manifest = dataset.index.manifest
    assert manifest.field_bytes is not None
    each = [manifest.bytes_of([name]) for name in blocks.FIELDS]
    assert sum(each).tolist() == manifest.shard_bytes.tolist()
    assert manifest.bytes_of([]).tolist() == [0] * len(manifest.names)
    whole = list(manifest.field_bytes)
    large = [np.frombuffer(row, "<u4").astype("<u8").tobytes() for row in whole]
    again = replace(manifest, field_bytes=large)
    check_manifest(again)
    assert again.bytes_of(["x", "y"]).tolist() == manifest.bytes_of(["x", "y"]).tolist()
    for wrong in (whole[0][:-4], b"", bytes(len(whole[0])), b"\xff" * 8 * len(blocks.FIELDS)):
        with pytest.raises(ValueError, match=r"field"):
            check_manifest(replace(manifest, field_bytes=[wrong, *whole[1:]]))
    with pytest.raises(ValueError, match="fields"):
        check_manifest(replace(manifest, field_bytes=None))


class Lacking(blocks.Reader):
    """A reader of samples that lack "y" if their number is a multiple of 5, and "t" if it is one of
    7. A shard in which no sample lacks a field doesn't report it."""

    def read_rows(self, rows: Any, fields: Any, **more: Any) -> Any:
        found = dict(super().read_rows(rows, fields, **more))
        for field, every in (("y", 5), ("t", 7)):
            has = (rows + self._first) % every != 0
            if field in found and not has.all():
                found[field + PRESENT] = DenseColumn(has)
        return found


def test_the_samples_that_have_a_field_are_reported_with_it(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks.Blocks, "reader_class", Lacking)
    monkeypatch.setattr(blocks, "MISSING", {"y": 4, "t": 3})
    assert dataset.index.lacking == {"t": 3, "y": 4}
    assert dataset.fields == ("x",)
    fields = ("y", "x", "y.present", "t", "t.present")
    with dataset.select(*fields) as chosen:
        batch = chosen.read(shuffled(chosen))
        check(batch, ("y", "x", "t"))
        ids = batch.ids
        assert batch.present["y"].tolist() == (ids % 5 != 0).tolist()
        assert batch.present["t"].tolist() == (ids % 7 != 0).tolist()
        assert chosen.column("y.present").tolist() == [i % 5 != 0 for i in range(blocks.ROWS)]
        nothing = chosen.read(shuffled(chosen)[:0])
        assert nothing.columns["y"].values.dtype == np.float32
        assert not len(nothing.present["y"])
        with DataLoader(chosen, batch_size=5, shuffle=True, seed=1, as_dict=True) as loader:
            found = {
                float(x[0]): bool(has)
                for batch in loader
                for x, has in zip(batch["x"], batch["y.present"], strict=True)
            }
        assert found == {float(i): i % 5 != 0 for i in range(blocks.ROWS)}


def test_parts_are_cropped_from_samples_that_a_format_reads_whole(dataset: Dataset) -> None:
    rows = shuffled(dataset)
    whole = dataset.read(rows).columns["x"].values
    corners = np.random.default_rng(0).integers(0, 3, (len(rows), 1))
    crop = ColumnCrop(corners, (1,))
    found = dataset.read(rows, crops={"x": crop}).columns["x"].values
    assert found.tolist() == whole[np.arange(len(rows))[:, None], corners].tolist()


def test_a_shard_that_its_format_describes_wrongly_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = blocks.write(tmp_path / "set")
    for name, wrong in (
        ("samples", 0),
        ("units", [1, 1]),
        ("extents", Extents.of([(0, 0, 9**9, 0)])),
    ):

        def of(name: str = name, wrong: Any = wrong, **facts: Any) -> ChunkedShard:
            return ChunkedShard(**{**facts, name: wrong})

        monkeypatch.setattr(blocks, "ChunkedShard", of)
        with Dataset(root) as dataset, pytest.raises(DatasetError, match=r"0\.blocks: the shard"):
            dataset.open()
