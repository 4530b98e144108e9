"""Any schema goes from a listing to batches: every kind of field, wherever it lies."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.cache import ConfigError, CorruptShardError, IndexChangedError
from penstock.readers import Dataset, build_index
from penstock.readers.fieldtypes import Array, DenseColumn, EncodedColumn, ListColumn, Mask
from penstock.readers.files import write_batch
from penstock.readers.formats import format_registry, read_sidecar, sidecar_etag
from tests import images
from tests.files import uploaded
from tests.readers.any_schema import SAMPLES, SCHEMA, SPANS, content, write_archives, write_files
from tests.readers.formats.guests import install
from tests.readers.remote_sets import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.readers.fieldtypes import Column, SampleBatch

KINDS = {"any-files": write_files, "any-archives": write_archives}
KNOWN = (("any-files", "FILES"), ("any-archives", "ARCHIVES"), ("any-noted", "NOTED"))
LACKING = ("mask", "caption", "points", "score", "note")
ALL = (*SCHEMA, "id", *(f"{name}.present" for name in LACKING))


@pytest.fixture(autouse=True)
def _formats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(monkeypatch, **{name: f"tests.readers.any_schema:{value}" for name, value in KNOWN})
    yield
    format_registry.format_named.cache_clear()


@pytest.fixture(params=["any-files", "any-archives"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["local", "remote"])
def dataset(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Dataset]:
    root = KINDS[kind](tmp_path / "set")
    with uploaded(root) as url:
        where: Any = root if request.param == "local" else url
        with Dataset(where, format=kind, fields=ALL, cache=tmp_path / "cache") as opened:
            opened.open(verify=images.verify)
            yield opened


def stored(row: int, name: str) -> Any:
    """Return a sample of a batch: bytes of encoded fields, arrays of others."""
    value = content(row)[name]
    if name in ("flow", "points", "grid"):
        if value is None:
            return np.zeros((0, 2), np.int16)
        import io

        return np.load(io.BytesIO(value))
    if name in SPANS:
        return b"" if value is None else value
    return {"score": 0.0, "note": ""}.get(name, 0) if value is None else value


def sample(column: Column, row: int) -> Any:
    if isinstance(column, EncodedColumn):
        return bytes(column.samples[row])
    if isinstance(column, ListColumn):
        return column.samples[row]
    return column.values[row] if isinstance(column, DenseColumn) else column.sample(row)


def check(batch: SampleBatch, ids: list[int], *, but: tuple[int, ...] = ()) -> None:
    assert batch.ids.tolist() == ids
    for name, column in batch.columns.items():
        for place, row in enumerate(ids):
            if place in but:
                continue
            wanted, got = stored(row, name), sample(column, place)
            if isinstance(wanted, np.ndarray):
                assert got.dtype.isnative, name
                assert np.array_equal(got, wanted), (name, row)
            elif name == "note":
                assert bytes(got if isinstance(got, bytes) else got.encode()) == wanted.encode()
            else:
                assert got == wanted, (name, row)
    for name, present in batch.present.items():
        assert present.tolist() == [content(row)[name] is not None for row in ids], name


@pytest.mark.parametrize("mode", ["copy", "pread", "mmap"])
def test_every_field_comes_as_it_was_stored(dataset: Dataset, mode: Any) -> None:
    rng = np.random.default_rng(1)
    for count in (SAMPLES, 4, 1, 0):
        rows = rows_of(dataset)[rng.permutation(SAMPLES)][:count]
        batch = dataset.read(rows, mode=mode)
        assert tuple(batch.columns) == tuple(SCHEMA)
        assert set(batch.present) == set(LACKING)
        check(batch, dataset.ids(rows).tolist())
        if count == SAMPLES:
            depth = batch.columns["depth"]
            assert isinstance(depth, EncodedColumn)
            assert depth.dims is not None
            assert depth.dims.tolist() == [[8, 9]] * SAMPLES


def test_a_selection_reads_nothing_else(dataset: Dataset) -> None:
    rows = rows_of(dataset)
    for fields in itertools.chain(
        itertools.combinations(SCHEMA, 1), [("note", "image"), ("flow", "label", "caption")]
    ):
        batch = dataset.read(rows, fields=fields)
        assert tuple(batch.columns) == fields
        check(batch, list(range(SAMPLES)))
        if not set(fields) & set(SPANS):
            assert batch.bytes_read <= sum(c.size_bytes for c in batch.columns.values())


def test_the_schema_is_settled_and_the_manifest_sums_it_up(dataset: Dataset) -> None:
    index = dataset.index
    assert index.schema["flow"] == Array("float32", (2, 3))
    assert index.schema["grid"] == Array("float64", (None, None))
    assert index.schema["mask"] == Mask(of="image", dtype="uint8")
    assert index.lacking == {"mask": 3, "caption": 2, "points": 3, "score": 3, "note": 5}
    assert index.summary("points").lengths == ((0, 3), (2, 2))
    assert index.summary("image").images is not None
    assert index.summary("image").images != index.summary("depth").images
    assert index.summary("label").bounds == (0, 2)
    assert (
        index.schema.class_names() == ()
    )  # tags are classes too: there isn't the one field of them
    assert index.about.icc is not None


def test_files_and_archives_and_remotes_have_one_fingerprint(tmp_path: Path) -> None:
    found = set()
    for kind, write in KINDS.items():
        with Dataset(write(tmp_path / kind), format=kind, fields="id") as dataset:
            found.add(dataset.open(verify=images.verify).fingerprint)
    assert len(found) == 1


def test_wrong_bytes_of_any_field_mark_the_sample(tmp_path: Path) -> None:
    root = write_files(tmp_path / "set")
    rows = [(row // 3, row % 3) for row in range(SAMPLES)]
    with Dataset(root, format="any-files", fields=ALL) as dataset:
        dataset.open(verify=images.verify)
        for name in ("04.jpg", "05.png", "07.flow.npy", "08.grid.npy"):
            data = bytearray((root / name).read_bytes())
            data[-1] ^= 1
            (root / name).write_bytes(data)
        (root / "01.jpg").unlink()
        (root / "02.raw").write_bytes(b"longer than it was")
        bad: dict[int, str] = {}
        batch = dataset.read(np.array(rows, np.int64), bad=bad)
        assert sorted(bad) == [1, 2, 4, 5, 7, 8]
        assert bad[1].startswith("image: 01.jpg: changed since it was listed: it is gone")
        assert bad[2].startswith("raw: 02.raw: changed")
        for row, field in ((4, "image"), (5, "mask"), (7, "flow"), (8, "grid")):
            assert bad[row] == (
                f"{field}: its bytes aren't those that were indexed: its CRC-32C is wrong"
            )
        check(batch, list(range(SAMPLES)), but=tuple(bad))
        for name in SPANS:
            for row in bad:
                assert not np.any(sample(batch.columns[name], row)), (name, row)
        assert batch.columns["label"].values.tolist() == [0, 1, 2] * 3  # type: ignore[union-attr]
        with pytest.raises(IndexChangedError, match="07"):
            dataset.read(np.array([(2, 1)], np.int64), fields=("flow",))


def test_a_field_that_some_lack_is_asked_for_with_its_companion(tmp_path: Path) -> None:
    root = write_files(tmp_path / "set")
    build_index(root, format="any-files", verify=images.verify)
    with pytest.raises(ConfigError, match=r'2 samples.*"caption.present"'):
        Dataset(root, format="any-files", fields=("image", "caption")).open()
    with pytest.raises(ConfigError, match="'caption'"):
        Dataset(root, format="any-files", fields=("image", "kaption")).open()
    with Dataset(root, format="any-files") as dataset:
        assert dataset.fields == ("image", "label")
    with Dataset(root, format="any-files", fields=("note", "note.present")) as dataset:
        batch = dataset.read(rows_of(dataset))
        assert batch.present["note"].tolist() == [row % 2 == 1 for row in range(SAMPLES)]


def test_an_index_keeps_the_facts_of_samples_whose_files_stay(tmp_path: Path) -> None:
    root = write_files(tmp_path / "set")
    with Dataset(root, format="any-files", fields="id") as dataset:
        first = dataset.open(verify=images.verify).fingerprint
    (root / "03.raw").write_bytes(b"abc")  # as long as it was
    (root / "04.points.npy").write_bytes((root / "04.points.npy").read_bytes())
    decoded: list[int] = []

    def verify(samples: Any) -> Any:
        decoded.append(len(samples))
        return images.verify(samples)

    with Dataset(root, format="any-files", fields="id") as dataset:
        assert dataset.open(verify=verify).fingerprint != first
    assert sum(decoded) == 4  # image and depth of two samples: an array's header has no CRC


def test_parts_that_are_damaged_in_the_cache_are_fetched_again(tmp_path: Path, kind: str) -> None:
    root = KINDS[kind](tmp_path / "set")
    with (
        uploaded(root) as url,
        Dataset(url, format=kind, fields=ALL, cache=tmp_path / "c") as dataset,
    ):
        dataset.open(verify=images.verify)
        (place,) = (tmp_path / "c" / "indexes").iterdir()
        for sidecar in (place / "sidecars").iterdir():
            sidecar.write_bytes(sidecar.read_bytes()[:-300])
        with pytest.warns(match="rebuilt"):
            check(dataset.read(rows_of(dataset)), list(range(SAMPLES)))


def test_samples_that_are_only_noted_are_read_without_files(tmp_path: Path) -> None:
    root = write_files(tmp_path / "set")
    noted = ("label", "score", "tags", "note", "vector")
    fields = (*noted, "score.present", "note.present")
    with uploaded(root) as url:
        for place in (root, url):
            cache = tmp_path / "cache" if place is url else None
            with Dataset(place, format="any-noted", fields=fields, cache=cache) as dataset:
                index = dataset.open()
                assert tuple(index.schema) == noted
                assert (index.files, int(index.shard_bytes.sum())) == (0, 0)
                rows = rows_of(dataset)[::-1].copy()
                batch = dataset.read(rows)
                assert len(batch.columns) == 5
                check(batch, dataset.ids(rows).tolist())


def put(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets the first value of a list."""

    def change(columns: dict[str, Any]) -> None:
        values = columns[name].to_pylist()
        values[0][0] = value
        columns[name] = pa.array(values, columns[name].type)

    return change


def cut(name: str) -> Callable[[dict[str, Any]], None]:
    """Takes the last value of a list away."""

    def change(columns: dict[str, Any]) -> None:
        (values,) = columns[name].to_pylist()
        columns[name] = pa.array([values[:-1]], columns[name].type)

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("flow/shape", 7),
        put("flow/shape", -2),
        put("flow/shape", 2**62),
        put("flow/bytes", 20),
        put("flow/codec", "<f8"),
        put("flow/codec", "|O8"),
        put("grid/shape", -1),
        put("grid/start", 2**40),
        put("mask/file", 2**20),
        put("points/file", 2),
        put("boxes/counts", -1),
        put("boxes/counts", 2**40),
        cut("flow/shape"),
        cut("flow/codec"),
        cut("boxes/values"),
        cut("boxes/counts"),
        cut("vector/values"),
        cut("label/values"),
        cut("note/values"),
        cut("note/present"),
        cut("/files/bytes"),
    ],
    ids=range(21),
)
def test_a_hostile_sidecar_of_any_fields_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    root = write_files(tmp_path / "set")
    build_index(root, format="any-files", verify=images.verify)
    place = tmp_path / "set.penstock"
    sidecar = min((place / "sidecars").iterdir())
    batch = pa.ipc.open_file(sidecar).get_batch(0)
    columns = {name: batch.column(name) for name in batch.schema.names}
    change(columns)
    path = os.fsencode(tmp_path / "changed.arrow")
    write_batch(path, pa.record_batch(columns))
    with Dataset(root, format="any-files", fields="id") as dataset:
        layout = dataset.index.layout
    with pytest.raises(CorruptShardError, match="is damaged"):
        read_sidecar(path, etag=sidecar_etag(path), layout=layout, is_file_per_sample=True)
