"""The samples of a table equal pyarrow's `to_pylist`, for columns of every type that is read."""

from __future__ import annotations

import datetime
import decimal
import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError, CorruptSampleError, DatasetError, PenstockWarning
from penstock.readers import Dataset
from penstock.readers.fieldtypes import Array, ClassLabel, Image, Value
from tests.properties import examples
from tests.readers.formats.tables import plain

EPOCH = datetime.datetime(1970, 1, 1)
INTEGERS = [getattr(pa, f"{kind}int{bits}")() for kind in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]
NUMBERS = [*INTEGERS, *FLOATS, pa.bool_()]
TIMES = [
    *(pa.timestamp(unit) for unit in ("s", "ms", "us")),
    pa.timestamp("us", "Europe/Paris"),
    *(pa.duration(unit) for unit in ("s", "ms", "us")),
    pa.time32("s"),
    pa.time32("ms"),
    pa.time64("us"),
    pa.date32(),
    pa.date64(),
]
DECIMALS = [
    pa.decimal32(9, 2),
    pa.decimal64(18, 5),
    pa.decimal128(38, 9),
    pa.decimal256(60, 20),
    pa.decimal128(20, -3),
]
BYTES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
]
LISTS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]


def value_of(draw: st.DrawFn, kind: Any) -> Any:
    """Draw one value of a type that isn't null."""
    types = pa.types
    if types.is_boolean(kind):
        return draw(st.booleans())
    if types.is_integer(kind):
        limits = np.iinfo(kind.to_pandas_dtype())
        return draw(st.integers(int(limits.min), int(limits.max)))
    if types.is_floating(kind):
        return draw(st.floats(width=kind.bit_width, allow_nan=False, allow_subnormal=False))
    if types.is_decimal(kind):
        most = 10**kind.precision - 1
        with decimal.localcontext(prec=80):
            return decimal.Decimal(draw(st.integers(-most, most))).scaleb(-kind.scale)
    if types.is_temporal(kind):
        return draw(st.integers(0, 86_399)) * (86_400_000 if kind == pa.date64() else 1)
    if types.is_fixed_size_binary(kind):
        return draw(st.binary(min_size=kind.byte_width, max_size=kind.byte_width))
    if kind in (pa.string(), pa.large_string(), pa.string_view()):
        return draw(st.text(st.characters(codec="utf-8"), max_size=20))
    if kind in BYTES:
        return draw(st.binary(max_size=20))
    size = kind.list_size if types.is_fixed_size_list(kind) else draw(st.integers(0, 3))
    return [value_of(draw, kind.value_type) for _ in range(size)]


@st.composite
def arrays(draw: st.DrawFn, kind: Any, *, most: int = 12, nulls: bool = True) -> Any:
    """Draw an array of a type, sliced out of a larger one."""
    can_lack = st.booleans() if nulls and draw(st.booleans()) else st.just(True)
    count = draw(st.integers(1, most))
    values = [value_of(draw, kind) if draw(can_lack) else None for _ in range(count + 2)]
    if pa.types.is_temporal(kind):
        whole = pa.array(values, pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)
    else:
        whole = pa.array(values, kind)
    first = draw(st.integers(0, 2))
    return whole.slice(first, count)


@st.composite
def columns(draw: st.DrawFn) -> Any:
    """Draw a column: plain values, a dictionary, runs, views in any order, or structs."""
    scalar = st.sampled_from([*NUMBERS, *TIMES, *DECIMALS, *BYTES, pa.binary(3)])
    number = st.sampled_from(NUMBERS)
    kind = draw(
        st.one_of(
            scalar,
            number.map(lambda one: pa.list_(one, 2)),
            number.map(lambda one: pa.list_(pa.list_(one, 2), 3)),
            st.builds(lambda make, one: make(one), st.sampled_from(LISTS), number),
            st.builds(lambda make, one: make(pa.list_(one, 2)), st.sampled_from(LISTS), number),
        )
    )
    way = draw(st.sampled_from(("plain", "dictionary", "runs", "views", "struct")))
    if way == "views":
        inside = draw(arrays(draw(number), nulls=False))
        count = draw(st.integers(1, 8))
        starts = [draw(st.integers(0, len(inside))) for _ in range(count)]
        sizes = [draw(st.integers(0, len(inside) - start)) for start in starts]
        mask = pa.array([draw(st.booleans()) for _ in range(count)])
        make = draw(st.sampled_from((pa.ListViewArray, pa.LargeListViewArray)))
        ints = pa.int32() if make is pa.ListViewArray else pa.int64()
        return make.from_arrays(pa.array(starts, ints), pa.array(sizes, ints), inside, mask=mask)
    array = draw(arrays(kind, nulls=not pa.types.is_nested(kind) or kind.num_fields == 1))
    if way == "dictionary":
        places = [draw(st.none() | st.integers(0, len(array) - 1)) for _ in range(9)]
        indices = draw(st.sampled_from((pa.int8(), pa.uint16(), pa.int64())))
        return pa.DictionaryArray.from_arrays(pa.array(places, indices), array).slice(1)
    if way == "runs":
        lengths = [draw(st.integers(1, 3)) for _ in range(len(array))]
        ends = pa.array(np.cumsum(lengths), draw(st.sampled_from((pa.int16(), pa.int64()))))
        runs = pa.RunEndEncodedArray.from_arrays(ends, array)
        return runs.slice(draw(st.integers(0, len(runs) - 1)))
    if way == "struct":
        mask = pa.array([draw(st.booleans()) for _ in range(len(array))])
        return pa.StructArray.from_arrays([array], ["inner"], mask=mask)
    return array


def wanted(value: Any, kind: Any) -> Any:
    """Return a value of `to_pylist` in the form of a sample."""
    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return wanted(value, kind.value_type)
    if types.is_struct(kind):
        return wanted(None if value is None else value["inner"], kind.field(0).type)
    if value is None:
        is_ragged = kind.num_fields and not types.is_fixed_size_list(kind)
        return [] if is_ragged else None  # as documented: a null list counts as an empty one
    if types.is_fixed_size_binary(kind) and not types.is_decimal(kind):
        return list(value)
    if types.is_decimal(kind):
        return float(value)
    if kind.num_fields:
        return [wanted(each, kind.value_type) for each in value]
    return value.encode() if isinstance(value, str) else value


def numbers(array: Any) -> Any:
    """Return an array with its times as numbers, as fields have them."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(array.indices, numbers(array.dictionary))
    if pa.types.is_run_end_encoded(kind):
        runs = pa.RunEndEncodedArray.from_arrays(array.run_ends, numbers(array.values))
        return runs.slice(array.offset, len(array))
    if pa.types.is_struct(kind):
        inner = numbers(array.field(0))
        return pa.StructArray.from_arrays([inner], ["inner"], mask=array.is_null())
    if not pa.types.is_temporal(kind):
        return array
    return array.view(pa.int32() if kind.bit_width == 32 else pa.int64())


def write(root: Path, batches: list[Any], kind: str) -> None:
    table = pa.Table.from_batches(batches)
    if kind == "parquet":
        pq.write_table(table, root / "a.parquet", row_group_size=3)
        return
    make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    codec = kind if kind in ("lz4", "zstd") else None
    options = pa.ipc.IpcWriteOptions(compression=codec, emit_dictionary_deltas=True)
    with make(str(root / "a.arrow"), table.schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def check(array: Any, kind: str, *, cut: int) -> None:
    """Write an array as two record batches, and compare the samples with `to_pylist`."""
    batches = [
        pa.record_batch({"x": part, "k": pa.array(range(len(part)))})
        for part in (array.slice(0, cut), array.slice(cut))
        if len(part)
    ]
    inner = array.type
    while pa.types.is_dictionary(inner) or pa.types.is_run_end_encoded(inner):
        inner = inner.value_type
    name = "x.inner" if pa.types.is_struct(inner) else "x"
    leaf = inner.field(0).type if name != "x" else inner
    schema = {name: Value("float64")} if pa.types.is_decimal(leaf) else None
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "set"
        root.mkdir()
        write(root, batches, kind)
        if kind == "parquet":  # Parquet has fewer units of time
            array = pq.read_table(root / "a.parquet").column("x").combine_chunks()
        expected = [wanted(value, array.type) for value in numbers(array).to_pylist()]
        with Dataset(root, schema=schema) as dataset:
            order = np.random.default_rng(0).permutation(len(dataset))
            batch = dataset.read(dataset.rows(order), fields=(name,))
            found, there = plain(batch.columns[name]), batch.has(name).tolist()
            lacking = dataset.index.lacking.get(name, 0)
    assert [expected[row] is not None for row in order] == there
    assert bool(lacking) >= (not all(there))
    for place, row in enumerate(order.tolist()):
        if there[place]:
            assert found[place] == expected[row], (row, found[place], expected[row])


@examples(60)
@given(columns(), st.sampled_from(("file", "stream", "lz4", "zstd")), st.integers(0, 6))
def test_samples_of_arrow_files_equal_pyarrows_values(array: Any, kind: str, cut: int) -> None:
    check(array, kind, cut=cut)


def _is_written(kind: Any) -> bool:
    """Return True if pyarrow writes a type to Parquet."""
    types = pa.types
    if types.is_dictionary(kind):
        inner = kind.value_type
        return not (inner.num_fields or types.is_decimal(inner) or inner in TIMES)
    return not types.is_run_end_encoded(kind)


@examples(60)
@given(columns().filter(lambda array: _is_written(array.type)), st.integers(0, 6))
def test_samples_of_parquet_files_equal_pyarrows_values(array: Any, cut: int) -> None:
    parts = [part for part in (array.slice(0, cut), array.slice(cut)) if len(part)]
    table = pa.table({"x": pa.chunked_array(parts)})
    try:
        pq.write_table(table, pa.BufferOutputStream(), row_group_size=3)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, OSError):
        return
    check(array, "parquet", cut=cut)


ORDERS = [order for count in (2, 3) for order in itertools.permutations(range(count))]


@pytest.mark.parametrize("kind", ["file", "parquet"])
@pytest.mark.parametrize("axes", [None, *ORDERS])
def test_tensors_have_the_declared_shape_and_axes(
    root: Path, kind: str, axes: tuple[int, ...] | None
) -> None:
    shape = (2, 3, 4)[: 2 if axes is None else len(axes)]
    size = math.prod(shape)
    flat = pa.array([None if k % 4 == 3 else [*range(k, k + size)] for k in range(9)])
    stored = flat.cast(pa.list_(pa.int16(), size))
    tensors = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int16(), shape, permutation=axes), stored
    )
    write(root, [pa.record_batch({"x": tensors.slice(2), "k": range(7)})], kind)
    with Dataset(root, fields=("x", "x.present")) as dataset:
        batch = dataset.read(dataset.rows(np.arange(7)), fields=("x",))
        there = batch.has("x").tolist()
        found = plain(batch.columns["x"])
    rows = [np.arange(k, k + size).reshape(shape) for k in range(2, 9)]
    expected = [row.transpose(axes or (0, 1)).tolist() for row in rows]
    assert there == [k % 4 != 3 for k in range(2, 9)]
    assert [f for f, is_here in zip(found, there, strict=True) if is_here] == [
        t for t, is_here in zip(expected, there, strict=True) if is_here
    ]


def opened(root: Path, kind: str, columns: dict[str, Any], **options: Any) -> Dataset:
    """Return a dataset of one file."""
    root.mkdir()
    write(root, [pa.record_batch(columns)], kind)
    return Dataset(root, **options)


KINDS = ["file", "parquet"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_doesnt_fit_the_schema_is_named(tmp_path: Path, kind: str) -> None:
    columns = {
        "small": pa.array([1, 300, 3]),
        "real": pa.array([0.5, 1e300, None]),
        "label": pa.array([0, 1, 7]),
        "animal": pa.array(["cat", "dgo", "dog"]).dictionary_encode(),
        "list": pa.array([[1], [2, -129], []]),
        "huge": pa.array([1, 2**63, 3], pa.uint64()),
        "free": pa.array([0, 2, -1]),
    }
    schema: dict[str, Any] = {
        "small": Value("int8"),
        "real": Value("float32"),
        "label": ClassLabel(("cat", "dog", "bird")),
        "animal": ClassLabel(("cat", "dog")),
        "list": Array("int8", (None,)),
        "huge": Value("int64"),
        "free": ClassLabel(),
    }
    reasons: dict[str, tuple[int, str, list[Any]]] = {
        "small": (1, "300 doesn't fit Value(dtype='int8')", [1, 3]),
        "real": (1, "1e+300 doesn't fit Value(dtype='float32')", [0.5, 0]),
        "label": (2, "7 is none of the 3 classes ('cat', 'dog', 'bird'), numbered from 0", [0, 1]),
        "animal": (1, "'dgo' is none of the 2 classes ('cat', 'dog'), numbered from 0", [0, 1]),
        "list": (1, "-129 doesn't fit Array(dtype='int8', shape=(None,), of=None)", [[1], []]),
        "huge": (1, "9223372036854775808 doesn't fit Value(dtype='int64')", [1, 3]),
        "free": (2, "-1 isn't a class number: classes are numbered from 0", [0, 2]),
    }
    with opened(tmp_path / "set", kind, columns, schema=schema) as dataset:
        for name, (row, reason, others) in reasons.items():
            bad: dict[int, str] = {}
            batch = dataset.read(dataset.rows(np.arange(3)), fields=(name,), bad=bad)
            assert list(bad) == [row]
            assert bad[row].startswith(f"{name}: {reason}. Correct the value")
            found = plain(batch.columns[name])
            assert [found[other] for other in range(3) if other != row] == others
            with pytest.raises(CorruptSampleError) as caught:
                dataset.read(dataset.rows(np.array([row])), fields=(name,))
            assert reason in str(caught.value)
            assert "damage" not in str(caught.value)
            assert "Get that file again" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_keeps_its_name_if_a_part_of_a_struct_has_the_same(
    tmp_path: Path, kind: str
) -> None:
    struct = pa.array([{"b": 10, "c": 5}, {"b": 20, "c": 6}])
    for number, names in enumerate((("a.b", "a"), ("a", "a.b"))):
        columns = {name: struct if name == "a" else pa.array([1, 2]) for name in names}
        with opened(tmp_path / f"{number}", kind, columns) as dataset:
            batch = dataset.read(dataset.rows(np.arange(2)), fields=("a.b", "a['b']", "a.c"))
        assert plain(batch.columns["a.b"]) == [1, 2]
        assert plain(batch.columns["a['b']"]) == [10, 20]
        assert plain(batch.columns["a.c"]) == [5, 6]
    columns = {"a.b": pa.array([1, 2]), "a": struct, "a['b']": pa.array([3, 4])}
    with opened(tmp_path / "both", kind, columns) as dataset:
        batch = dataset.read(dataset.rows(np.arange(2)), fields=("a.b", "a['b']", "['a']['b']"))
    assert [plain(column) for column in batch.columns.values()] == [[1, 2], [3, 4], [10, 20]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("column", "remedy"),
    [
        (pa.array([[{"a": 1}], [{"a": 2}]]), "read it as JSON, schema="),
        (
            pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64())),
            "for each part or key, or one text a row",
        ),
        (pa.array([[], []], pa.list_(pa.int32(), 0)), "leave it out of the file"),
        (pa.array([["a"], ["b"]]), "read it as JSON, schema="),
        (pa.array([[b"a"], [b"b"]], pa.list_(pa.binary(1))), "or one text a row, joined"),
        (pa.array([decimal.Decimal("1.5"), decimal.Decimal("2.5")]), "float64"),
        (pa.array([[decimal.Decimal("1.5")], []]), r'Array\("float64", \(None,\)\)'),
        (pa.nulls(2), "leave it out of the file"),
    ],
)
def test_columns_that_cant_be_tensors_are_refused_at_open(
    tmp_path: Path, kind: str, column: Any, remedy: str
) -> None:
    """Such a column is refused alone or if it is requested; else it is left out with a warning."""
    alone = opened(tmp_path / "alone", kind, {"x": column})
    with alone as dataset, pytest.raises(DatasetError, match=f'"x".*{remedy}'):
        dataset.open()
    with opened(tmp_path / "both", kind, {"x": column, "k": range(2)}) as dataset:
        assert list(dataset.index.schema) == ["k"]
    with (
        Dataset(tmp_path / "both", fields=("x",)) as dataset,
        pytest.raises(ConfigError, match=f"x.*{remedy}"),
    ):
        dataset.open()


def test_dictionaries_inside_lists_are_refused_and_never_read_as_indices(tmp_path: Path) -> None:
    """Arrow files store them apart from the lists; Parquet files store the values themselves."""
    column = pa.ListArray.from_arrays([0, 2, 3], pa.array([10, 20, 10]).dictionary_encode())
    structs = pa.DictionaryArray.from_arrays(pa.array([1, 0]), pa.array([{"a": 1}, {"a": 2}]))
    runs = pa.RunEndEncodedArray.from_arrays([1, 2], pa.array(["a", "b"]).dictionary_encode())
    columns = {"x": column, "y": structs, "z": runs, "k": range(2)}
    with opened(tmp_path / "arrow", "file", columns) as dataset:
        assert list(dataset.index.schema) == ["k"]
    with opened(tmp_path / "parquet", "parquet", {"x": column}) as dataset:
        batch = dataset.read(dataset.rows(np.arange(2)), fields=("x",))
        assert plain(batch.columns["x"]) == [[10, 20], [10]]


def written(root: Path, kind: str, columns: dict[str, Any], **options: Any) -> Path:
    """Write a file with units of two rows. options: of pyarrow's Parquet writer."""
    root.mkdir()
    table = pa.table(columns)
    if kind == "parquet":
        pq.write_table(table, root / "a.parquet", row_group_size=2, **options)
    else:
        with pa.ipc.new_file(str(root / "a.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return root


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, None, 3, 4, None]),
        pa.array(["a", None, "b", "c", None]),
        pa.array([b"a" * 2000, None, b"b", b"c", None]),
        pa.array([{"p": 1}, None, {"p": 2}, {"p": 3}, {"p": None}]),
        pa.array([[1, 2], None, [3, 4], [5, 6], None], pa.list_(pa.int8(), 2)),
    ],
)
def test_nulls_are_counted_with_and_without_statistics(
    tmp_path: Path, column: Any, statistics: bool
) -> None:
    columns = {"x": column, "k": range(5), "full": ["a"] * 5}
    root = written(tmp_path / "set", "parquet", columns, write_statistics=statistics)
    name = "x.p" if pa.types.is_struct(column.type) else "x"
    with Dataset(root, fields=(name, f"{name}.present", "full")) as dataset:
        batch = dataset.read(dataset.rows(np.arange(5)))
        assert batch.has(name).tolist() == [True, False, True, True, False]
        assert dataset.index.lacking == {name: 2}
    with Dataset(root) as dataset:
        assert dataset.fields == ("k", "full")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["", "x" * 3000])
def test_nulls_of_structs_reach_their_parts_that_are_dictionaries(
    root: Path, kind: str, text: str
) -> None:
    """pyarrow's statistics of such a part don't count null structs."""
    values = [None if k % 3 == 0 or k > 15 else f"{text}{k % 2}" for k in range(18)]
    parts = pa.array([v and {"p": v} for v in values], pa.struct({"p": pa.string()}))
    category = parts.field(0).dictionary_encode()
    struct = pa.StructArray.from_arrays([category], ["p"], mask=parts.is_null())
    write(root, [pa.record_batch({"x": struct}).slice(a, 9) for a in (0, 9)], kind)
    with Dataset(root, fields=("x.p", "x.p.present")) as dataset:
        batch = dataset.read(dataset.rows(np.arange(18)))
        there = batch.has("x.p").tolist()
        found = plain(batch.columns["x.p"])
    assert there == [value is not None for value in values]
    assert [f for f, v in zip(found, values, strict=True) if v] == [v.encode() for v in values if v]


def test_a_null_struct_may_contain_an_index_outside_of_its_dictionary(tmp_path: Path) -> None:
    empty = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int8()), ["a"])
    struct = pa.StructArray.from_arrays([empty], ["p"], mask=pa.array([True, True]))
    struct = pa.array(struct.to_pylist(), pa.struct({"p": pa.dictionary(pa.int8(), pa.string())}))
    with opened(
        tmp_path / "set", "file", {"x": struct, "k": range(2)}, fields=("x.p", "x.p.present")
    ) as dataset:
        assert not dataset.read(dataset.rows(np.arange(2))).has("x.p").any()


@pytest.mark.parametrize("statistics", [False, True])
def test_a_list_of_another_length_than_the_schemas_isnt_null(
    tmp_path: Path, *, statistics: bool
) -> None:
    columns = {"x": pa.array([[1, 2], [3], [4, 5], [6]])}
    schema = {"x": Array("int64", (2,))}
    root = written(tmp_path / "set", "parquet", columns, write_statistics=statistics)
    with Dataset(root, schema=schema) as dataset:
        bad: dict[int, str] = {}
        dataset.read(dataset.rows(np.arange(4)), fields=("x",), bad=bad)
        assert sorted(bad) == [1, 3]
        assert bad[1].startswith("x: its shape is (1,), not (2,)")
        assert dataset.index.lacking == {}


LISTS_THAT_ARENT_ARRAYS = {
    "a null inside": [[1], [2], [], [3, None], None],
    "differ in length": [[[1]], [[2], [3, 4]], [], [[3]], None],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("why", LISTS_THAT_ARENT_ARRAYS)
def test_lists_that_arent_arrays_are_refused_at_open(tmp_path: Path, kind: str, why: str) -> None:
    column = LISTS_THAT_ARENT_ARRAYS[why]
    root = written(tmp_path / "both", kind, {"x": column, "k": range(5)})
    with Dataset(root) as dataset:
        assert dataset.fields == ("k",)
    for options in ({"fields": ("x",)}, {"fields": {"y": "x"}}):
        with pytest.raises((ConfigError, DatasetError), match=rf"{why}.*\(a\..*, row"):
            Dataset(root, **options).open()  # type: ignore[arg-type]
    depth = 1 if why == "a null inside" else 2
    given = {"x": Array("float32", (None,) * depth)}
    with pytest.raises(ConfigError, match=why):
        Dataset(root, schema=given).open()
    alone = written(tmp_path / "alone", kind, {"x": column})
    with pytest.raises(DatasetError, match=why):
        Dataset(alone).open()


@pytest.mark.parametrize("kind", KINDS)
def test_nested_lists_of_one_length_each_are_read(tmp_path: Path, kind: str) -> None:
    column = [[[1]], [[2], [3]], [], [[3, 4]], None]
    root = written(tmp_path / "set", kind, {"x": column})
    with Dataset(root) as dataset:
        batch = dataset.read(dataset.rows(np.arange(5)))
    assert plain(batch.columns["x"])[:4] == [[[1]], [[2], [3]], [], [[3, 4]]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("statistics", [False, True])
def test_paths_instead_of_bytes_are_named(tmp_path: Path, kind: str, statistics: bool) -> None:
    options = {"write_statistics": statistics} if kind == "parquet" else {}
    both = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    structs = pa.array([{"bytes": None, "path": f"{n}.jpg"} for n in range(5)], both)
    root = written(tmp_path / "structs", kind, {"image": structs}, **options)
    with pytest.raises(DatasetError, match=r"paths of files without bytes.*manifest="):
        Dataset(root).open()
    texts = [f"images/{n}.jpg" for n in range(5)]
    root = written(tmp_path / "texts", kind, {"image": texts, "caption": texts}, **options)
    with pytest.warns(PenstockWarning, match=r'"image" holds paths.*manifest=') as warned:
        Dataset(root).open()
    assert len(warned) == 1
    with pytest.raises(ConfigError, match=r"holds string.*paths of files.*manifest="):
        Dataset(root, schema={"image": Image()}).open()


def test_a_dictionary_that_is_replaced_is_refused(tmp_path: Path) -> None:
    batches = [
        pa.record_batch({"x": pa.array(values).dictionary_encode()})
        for values in (["a", "b"], ["c", "d"])
    ]
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    with pytest.raises(DatasetError, match=r"is replaced.*unify_dictionaries"):
        Dataset(tmp_path).open()
