"""Test Parquet files of many writers and options against the tables they were written from."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError, PenstockWarning
from penstock.readers import Dataset
from penstock.readers.fieldtypes import (
    Array,
    Audio,
    Boxes,
    Bytes,
    ClassLabel,
    EncodedColumn,
    Image,
    Text,
    Tokens,
    Value,
)
from penstock.readers.formats import candidates
from penstock.readers.formats.tables import table_files
from tests.readers.formats.tables import check, features, jpeg, many_types, plain
from tests.readers.formats.zarr.hierarchies import Requests

WRITERS: dict[str, dict[str, Any]] = {
    "default": {},
    "1.0": {"version": "1.0", "compression": "gzip", "use_dictionary": False},
    "2.4": {"version": "2.4", "compression": "zstd", "data_page_version": "2.0"},
    "lz4": {"compression": "lz4", "write_page_checksum": True, "write_page_index": True},
    "brotli": {"compression": "brotli", "data_page_version": "2.0", "use_dictionary": False},
    "plain": {"compression": "none", "use_dictionary": False, "data_page_size": 300},
    "bare": {"compression": "none", "write_statistics": False, "store_schema": False},
}


def write(root: Path, table: Any, *, files: int = 1, rows: int = 40, **options: Any) -> Path:
    root.mkdir(exist_ok=True)
    each = -(-len(table) // files)
    for number in range(files):
        part = table.slice(number * each, each)
        if options.get("version") == "1.0":
            part = part.drop_columns(["float16"])
        pq.write_table(part, root / f"part-{number}.parquet", row_group_size=rows, **options)
    return root


@pytest.mark.parametrize("writer", WRITERS)
def test_each_type_comes_back_as_it_was_written(tmp_path: Path, writer: str) -> None:
    table = many_types(230)
    root = write(tmp_path / "set", table, files=2, **WRITERS[writer])
    with Dataset(root, format="parquet") as dataset:
        schema = dataset.index.schema
        names = [name for name in schema if name != "point"]
        assert {"point.x", "point.name"} < set(names)
        check(dataset, table, names)
        assert schema["label"] == ClassLabel()
        assert schema["int8"] == Value("int8")
        assert schema["text"] == schema["category"] == schema["point.name"] == Text()
        assert schema["bytes"] == Bytes()
        assert schema["digest"] == Array("uint8", (4,))
        assert schema["ragged"] == Array("int32", (None,))
        assert schema["input_ids"] == Tokens("int64")
        assert schema["matrix"] == Array("float64", (None, None))
        assert schema["when"] == Value("int64")
        if WRITERS[writer].get("store_schema", True):
            assert schema["fixed"] == Array("float32", (3,))
            assert schema["grid"] == Array("int16", (3, 2))
            assert schema["boxes"] == Array("float32", (None, 4))
        assert dataset.contents.units is not None
        assert [units.tolist() for units in dataset.contents.units] == [[40, 40, 35, 40, 40, 35]]
        assert dataset.names([0, 229]) == ["part-0.parquet, row 0", "part-1.parquet, row 114"]


def test_a_large_file_becomes_several_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (candidates, table_files):
        monkeypatch.setattr(module, "PART_BYTES", 2**16)
    monkeypatch.setattr(table_files, "ROW_BYTES", 1)
    table = many_types(3000)
    root = write(tmp_path / "set", table, rows=100, compression="none")
    pq.write_table(table.slice(0, 50), root / "small.parquet")
    pq.write_table(table.slice(0, 0), root / "empty.parquet")
    with Dataset(root) as dataset:
        assert len(dataset.contents.sizes) > 4
        assert dataset.contents.units is not None
        assert {len(units) for units in dataset.contents.units} > {1}
        check(dataset, pa.concat_tables([table, table.slice(0, 50)]), ["int8", "text", "grid"])


def test_users_declare_types_and_names(tmp_path: Path) -> None:
    table = many_types(60).rename_columns(
        [{"int8": "id", "text": "a/b"}.get(n, n) for n in many_types(1).column_names]
    )
    root = write(tmp_path / "set", table)
    schema = {
        "boxes": Boxes(of="image"),
        "image": Image(),
        "ragged": Array("float32", (None,)),
        "category": ClassLabel(("c2", "c1", "c0")),
        "float64": Value("float32"),
    }
    places = {"image": "bytes", "number": "id", "words": "a/b", "x": "point.x"}
    with Dataset(root, fields=places, schema=schema) as dataset:
        index = dataset.open()
        assert index.schema["boxes"] == Boxes(of="image")
        assert {"number", "words", "x", "point.name"} < set(index.schema)
        assert not {"id", "a/b", "bytes", "point.x"} & set(index.schema)
        rows = dataset.rows(np.arange(60))
        batch = dataset.read(rows, fields=("number", "category", "ragged", "words", "boxes"))
        assert plain(batch.columns["number"]) == list(range(60))
        assert plain(batch.columns["category"]) == [2 - i % 3 for i in range(60)]
        assert plain(batch.columns["ragged"])[4] == [0.0, 1.0, 2.0, 3.0]
        assert batch.columns["ragged"].values.dtype == np.float32


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fields": {"x": "nowhere"}}, ConfigError, "nowhere"),
        ({"schema": {"nowhere": Text()}}, ConfigError, "nowhere"),
        ({"schema": {"text": Value("float32")}}, ConfigError, "string"),
        ({"schema": {"ragged": Array("float32", (None, 3))}}, ConfigError, "ragged"),
        ({"fields": {"price": "price"}}, DatasetError, "decimal"),
        ({"fields": {"m": "map"}}, DatasetError, "map"),
        ({"fields": {"p": "pairs"}}, DatasetError, "struct"),
    ],
)
def test_columns_that_cant_be_fields_are_refused_by_name(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    table = many_types(20)
    table = table.append_column("price", pa.array([1] * 20, pa.decimal128(9, 2)))
    table = table.append_column("map", pa.array([[(1, 2)]] * 20, pa.map_(pa.int8(), pa.int8())))
    table = table.append_column("pairs", pa.array([[{"a": 1, "b": 2}]] * 20))
    root = write(tmp_path / "set", table)
    with Dataset(root, **arguments) as dataset, pytest.raises(error, match=message):
        dataset.open()
    with Dataset(root) as dataset:  # the other columns stay readable
        assert not {"price", "map", "pairs"} & set(dataset.index.schema)
        check(dataset, table, ["int8", "text"])


def test_files_may_lack_or_reorder_columns_but_not_change_their_types(root: Path) -> None:
    a = pa.table({"x": pa.array([1, 2], pa.int32()), "y": ["p", "q"]})
    b = pa.table({"y": ["r"], "x": pa.array([3], pa.int32()), "z": pa.array([0.5])})
    pq.write_table(a, root / "a.parquet")
    pq.write_table(b, root / "b.parquet")
    with Dataset(root, fields=("x", "y")) as dataset:
        batch = dataset.read(dataset.rows(np.arange(3)))
        assert plain(batch.columns["x"]) == [1, 2, 3]
        assert plain(batch.columns["y"]) == [b"p", b"q", b"r"]
        assert dataset.index.schema["z"] == Value("float64")
    pq.write_table(pa.table({"x": pa.array([1], pa.int64()), "y": ["p"]}), root / "c.parquet")
    with (
        Dataset(root) as dataset,
        pytest.raises(DatasetError, match=r'c\.parquet.*"x".*a\.parquet'),
    ):
        dataset.open()
    with Dataset(root, schema={"x": Value("int64")}, fields=("x",)) as dataset:
        assert plain(dataset.read(dataset.rows(np.arange(4))).columns["x"]) == [1, 2, 3, 1]


def test_the_schema_follows_hugging_faces_features(root: Path) -> None:
    sizes = [(24, 40), (30, 20), (25, 25), (8, 9)]
    kinds = ["JPEG", "PNG", "WEBP", "JPEG"]
    pictures = [
        jpeg(i, height=h, width=w, kind=k)
        for i, ((h, w), k) in enumerate(zip(sizes, kinds, strict=True))
    ]
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {
            "image": pa.array([{"bytes": each, "path": None} for each in pictures], picture),
            "sound": pa.array([{"bytes": b"RIFF\0\0\0\0WAVEfmt ", "path": "a.wav"}] * 4, picture),
            "label": pa.array([0, 1, 1, 0]),
            "grid": pa.array([[[1, 2], [3, 4], [5, 6]]] * 4, pa.list_(pa.list_(pa.int32()))),
            "said": pa.array([{"en": "a", "fr": "b"}] * 4),
        }
    ).replace_schema_metadata(
        features(
            image={"_type": "Image"},
            sound={"_type": "Audio", "sampling_rate": 16000},
            label={"_type": "ClassLabel", "names": ["cat", "dog"]},
            grid={"_type": "Array2D", "shape": [3, 2], "dtype": "int32"},
            said={"_type": "Translation", "languages": ["en", "fr"]},
        )
    )
    pq.write_table(table, root / "train.parquet")
    with Dataset(root) as dataset:
        assert dict(dataset.index.schema) == {
            "image": Image(),
            "sound": Audio(),
            "label": ClassLabel(("cat", "dog")),
            "grid": Array("int32", (3, 2)),
        }
        assert dataset.fields == ("image", "label")
        batch = dataset.read(dataset.rows(np.array([3, 0, 2, 1])))
        images = batch.columns["image"]
        assert isinstance(images, EncodedColumn)
        assert images.dims is not None
        assert images.dims.tolist() == [list(sizes[i]) for i in (3, 0, 2, 1)]
        assert plain(images) == [pictures[i] for i in (3, 0, 2, 1)]
        assert batch.columns["label"].values.tolist() == [0, 0, 1, 1]
        assert dataset.read(dataset.rows(np.arange(4)), fields=("grid",)).columns[
            "grid"
        ].values.shape == (4, 3, 2)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_warning_names_columns_that_are_only_in_names_of_folders(
    tmp_path: Path, form: str
) -> None:
    for label in (0, 1):
        folder = tmp_path / "set" / "split=train" / f"label={label}"
        folder.mkdir(parents=True)
        table = pa.table({"x": [label, 2], "split": ["train"] * 2})
        if form == "parquet":
            pq.write_table(table, folder / "part.parquet")
        else:
            with pa.ipc.new_file(folder / "part.arrow", table.schema) as writer:
                writer.write_table(table)
    for url, options in (
        (tmp_path / "set", {"format": form}),
        (tmp_path / "set/**" / f"*.{form}", {}),
        (sorted(map(str, (tmp_path / "set").rglob(f"*.{form}"))), {}),
    ):
        with (
            pytest.warns(PenstockWarning, match=r"partitioned \(label=0\).*: label\."),
            Dataset(url, **options) as dataset,
        ):
            assert dataset.read(dataset.rows(np.arange(4)), fields=("x",)).columns[
                "x"
            ].values.tolist() == [0, 2, 1, 2]


@pytest.mark.filterwarnings("ignore:.*holds paths of files")
def test_binary_columns_get_their_type_from_their_first_values(root: Path) -> None:
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {
            "jpg": [jpeg(1), jpeg(2)],
            "raw": [b"abc", b""],
            "img": pa.array([{"bytes": jpeg(3), "path": ""}] * 2, picture),
            "lost": pa.array([{"path": "a.jpg"}] * 2, pa.struct([("path", pa.string())])),
        }
    )
    pq.write_table(table, root / "a.parquet")
    with Dataset(root) as dataset:
        found = dataset.index.schema
        assert found["jpg"] == found["img"] == Image()
        assert found["raw"] == Bytes()
        bad: dict[int, str] = {}
        dataset.read(dataset.rows(np.arange(2)), fields=("jpg", "img"), bad=bad)
        assert not bad
    with Dataset(root, schema={"raw": Image()}, fields=("raw",)) as dataset:
        dataset.read(dataset.rows(np.arange(2)), bad=bad)
        assert sorted(bad) == [0, 1]
        assert "doesn't begin as an image" in bad[0]


def test_datasets_without_rows_or_files_raise(root: Path) -> None:
    pq.write_table(many_types(0), root / "a.parquet")
    with Dataset(root) as dataset, pytest.raises(DatasetNotFoundError, match="no rows"):
        dataset.open()
    (root / "a.parquet").unlink()
    (root / "b.txt").write_text("nothing")
    with Dataset(root, format="parquet") as dataset, pytest.raises(DatasetNotFoundError):
        dataset.open()


def with_nulls(count: int) -> Any:
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    i = range(count)
    return pa.table(
        {
            "x": pa.array([None if k % 7 == 0 else k for k in i], pa.int32()),
            "t": pa.array([None if k % 5 == 0 else f"t{k}" for k in i]),
            "f": pa.array([None if k % 3 == 0 else [k, k] for k in i], pa.list_(pa.int16(), 2)),
            "image": pa.array(
                [None if k % 11 == 3 else {"bytes": jpeg(k, height=8 + k % 5)} for k in i], picture
            ),
            "y": pa.array(i, pa.int64()),
        }
    )


def test_statistics_show_which_samples_lack_a_field(tmp_path: Path) -> None:
    table = with_nulls(100)
    root = write(tmp_path / "set", table)
    with Dataset(root) as dataset:
        assert dataset.fields == ("y",)
        assert dataset.index.lacking == {"x": 15, "t": 20, "f": 34, "image": 9}
        check(dataset, table, ["x", "t", "f", "y"])
        batch = dataset.read(dataset.rows(np.array([3, 4])), fields=("image",))
        assert batch.has("image").tolist() == [False, True]
        images = batch.columns["image"]
        assert isinstance(images, EncodedColumn)
        assert images.dims is not None
        assert images.dims.tolist() == [[0, 0], [12, 40]]


def test_nulls_that_nothing_counted_make_bad_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column may be larger than what is read when a dataset is opened."""
    monkeypatch.setattr(table_files, "MAX_CHECKED_BYTES", 0)
    root = write(tmp_path / "set", with_nulls(20), write_statistics=False)
    with Dataset(root, fields=("x", "y")) as dataset:
        bad: dict[int, str] = {}
        dataset.read(dataset.rows(np.arange(20)), bad=bad)
        assert sorted(bad) == [0, 7, 14]
        assert "null" in bad[0]


def test_a_list_with_a_null_or_of_odd_lengths_is_a_bad_sample(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening the dataset may not find such a list."""
    monkeypatch.setattr(table_files, "MAX_CHECKED_BYTES", 0)
    table = pa.table(
        {
            "a": pa.array([[1, 2], [1, None], [], None], pa.list_(pa.int64())),
            "b": pa.array([[[1], [2, 3]], [[1], [2]], None, [[]]], pa.list_(pa.list_(pa.int8()))),
        }
    )
    pq.write_table(table, root / "a.parquet")
    with Dataset(root) as dataset:
        bad: dict[int, str] = {}
        batch = dataset.read(dataset.rows(np.arange(4)), bad=bad)
        assert sorted(bad) == [0, 1]
        assert "differ in length" in bad[0]
        assert "null inside" in bad[1]
        assert plain(batch.columns["a"]) == [[1, 2], [], [], []]
        assert plain(batch.columns["b"])[1] == [[1], [2]]


def test_a_remote_file_is_listed_with_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, place = fsspec.filesystem("memory"), f"/parquet-many-{tmp_path.name}"
    file = io.BytesIO()
    pq.write_table(many_types(20), file)
    wide = io.BytesIO()
    pq.write_table(pa.table({f"column {k}": [k] for k in range(900)}), wide)
    for number in range(50):
        memory.pipe(f"{place}/a/{number}.parquet", file.getvalue())
    memory.pipe(f"{place}/b/wide.parquet", wide.getvalue())
    try:
        requests = Requests.watch(monkeypatch)
        cache = tmp_path / "cache"
        given = {"bytes": Bytes()}
        with Dataset(f"memory:/{place}/a", schema=given, cache=cache) as dataset:
            dataset.open()
            parts = [path for kind, path in requests if kind == "cat_file"]
            lists = 4  # one row group is read of each column of lists that may have nulls inside
            assert len(set(parts)) == 50
            assert len(parts) == 50 + lists
            # A read fetches only the column's own bytes.
            before = dataset.bytes_fetched
            dataset.read(dataset.contents.rows(np.array([7])), fields=("digest",))
            assert 0 < dataset.bytes_fetched - before < len(file.getvalue())
        requests.clear()
        with Dataset(f"memory:/{place}/b", cache=cache) as dataset:
            dataset.open()
            assert len([path for kind, path in requests if kind == "cat_file"]) == 2
    finally:
        memory.rm(place, recursive=True)


def test_remote_files_are_read_through_the_cache(tmp_path: Path) -> None:
    memory, place = fsspec.filesystem("memory"), f"/parquet-{tmp_path.name}"
    table = many_types(300)
    for number in range(3):
        file = io.BytesIO()
        pq.write_table(table.slice(100 * number, 100), file, row_group_size=30)
        memory.pipe(f"{place}/deep/{number}.parquet", file.getvalue())
    try:
        with Dataset(f"memory:/{place}", format="parquet", cache=tmp_path / "cache") as dataset:
            check(dataset, table, ["int8", "text", "ragged", "fixed", "boxes", "point.x"])
    finally:
        memory.rm(place, recursive=True)


def test_only_the_bytes_of_wanted_columns_and_row_groups_are_fetched(tmp_path: Path) -> None:
    memory, place = fsspec.filesystem("memory"), f"/parquet-bytes-{tmp_path.name}"
    file = io.BytesIO()
    pq.write_table(many_types(600), file, row_group_size=100, compression="none")
    memory.pipe(f"{place}/a.parquet", file.getvalue())
    metadata = pq.read_metadata(file)
    columns = {
        metadata.row_group(0).column(c).path_in_schema: c for c in range(metadata.num_columns)
    }
    try:
        with Dataset(
            f"memory:/{place}", cache=tmp_path / "cache", fields=("float64", "text")
        ) as dataset:
            dataset.open()
            before = dataset.bytes_fetched
            dataset.read(dataset.contents.rows(np.arange(150, 350)))
            needed = sum(
                metadata.row_group(group).column(columns[name]).total_compressed_size
                for group in (1, 2, 3)
                for name in ("float64", "text")
            )
            assert needed <= dataset.bytes_fetched - before <= 1.05 * needed
    finally:
        memory.rm(place, recursive=True)


FILES = Path(__file__).with_name("parquet_files")


LARGE: dict[str, dict[str, Any]] = {
    "dictionary, then plain": {"dictionary_pagesize_limit": 40_000},
    "dictionary": {},
    "plain": {"use_dictionary": False},
    "version 2": {"data_page_version": "2.0", "dictionary_pagesize_limit": 40_000},
    "pages": {"data_page_size": 2000, "write_batch_size": 3, "use_dictionary": False},
}


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd", "brotli", "lz4"])
@pytest.mark.parametrize("kind", LARGE)
def test_large_values_of_all_kinds_of_pages_are_read(root: Path, kind: str, codec: str) -> None:
    rng = np.random.default_rng(3)
    values = [rng.bytes(int(n)) for n in rng.integers(0, 9000, 60)] + [b"", b"short", bytes(12)] * 4
    picked = [values[i] for i in rng.integers(0, len(values), 150)]
    required = pa.schema([pa.field("a", pa.binary()), pa.field("b", pa.binary(), nullable=False)])
    pq.write_table(
        pa.table({"a": picked, "b": picked[::-1]}, required),
        root / "a.parquet",
        compression=codec,
        row_group_size=70,
        write_page_checksum=True,
        **LARGE[kind],
    )
    with Dataset(root) as dataset:
        batch = dataset.read(dataset.rows(np.arange(150)), fields=("a", "b"))
        assert plain(batch.columns["a"]) == picked
        assert plain(batch.columns["b"]) == picked[::-1]
        batch = dataset.read(dataset.rows(np.array([149, 2])), fields=("a",))  # copies
        assert plain(batch.columns["a"]) == [picked[149], picked[2]]


@pytest.mark.parametrize("name", sorted(path.name for path in FILES.iterdir()))
def test_files_of_other_writers_are_read(root: Path, name: str) -> None:
    """The files were written by fastparquet (gzip, two row groups), polars and duckdb."""
    shutil.copy(FILES / name, root / name)
    with Dataset(root) as dataset:
        fields = list(dataset.index.schema)
        batch = dataset.read(dataset.rows(np.array([4, 0, 1, 3, 2])), fields=fields)
        assert plain(batch.columns["x"]) == [5, 1, 2, 4, 3]
        assert plain(batch.columns["y"]) == [4.5, 0.5, 1.5, 3.5, 2.5]
        assert plain(batch.columns["t"]) == [b"a", b"a", "bé".encode(), b"dd", b""]
        if "l" in fields:
            assert plain(batch.columns["l"]) == [[5, 6, 7], [1], [], [4], [2, 3]]
