"""Metadata of Zarr arrays and groups: parsing it, and rejecting hostile documents."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.storage import MemoryStore

from penstock.cache import DatasetError
from penstock.readers import Rejection
from penstock.readers.formats.zarr import (
    MAX_DOCUMENT_BYTES,
    ArrayMetadata,
    Node,
    consolidated_nodes,
    data_type,
    fill_value,
    parse_array,
    read_document,
    read_node,
)
from tests.readers.formats.zarr.zarr_files import key_of, metadata_of, written

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

pytestmark = pytest.mark.filterwarnings(
    "ignore:Consolidated metadata.*", "ignore:.*not have a Zarr.*"
)

V3: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [10, 4],
    "data_type": "float32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 4]}},
    "chunk_key_encoding": {"name": "default"},
    "fill_value": 0,
    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
}
V2: dict[str, Any] = {
    "zarr_format": 2,
    "shape": [10, 4],
    "chunks": [3, 4],
    "dtype": "<f4",
    "compressor": None,
    "fill_value": None,
    "filters": None,
    "order": "C",
}


def node_of(files: Mapping[str, Any], name: str = "group/x") -> Node:
    found = read_node(name, files.get)
    assert found is not None
    return found


def v3(**changes: Any) -> Node:
    return node_of({"zarr.json": {**V3, **changes}})


def v2(attributes: dict[str, Any] | None = None, **changes: Any) -> Node:
    return node_of({".zarray": {**V2, **changes}, ".zattrs": attributes})


def parsed(node: Node) -> ArrayMetadata:
    found = parse_array(node)
    assert isinstance(found, ArrayMetadata)
    return found


def test_an_array_has_a_shape_chunks_and_names() -> None:
    for found in (
        parsed(v3(dimension_names=["time", None])),
        parsed(v2({"_ARRAY_DIMENSIONS": ["time", "x"]})),
    ):
        assert found.name == "group/x"
        assert found.shape == (10, 4)
        assert found.grid.chunk == found.files.chunk == (3, 4)
        assert found.grid.counts == found.files.counts == (4, 1)
        assert found.dtype == np.float32
        assert found.dimension_names is not None
        assert found.dimension_names[0] == "time"
        assert found.sharding is None
        assert found.fill_value == 0
    assert parsed(v2({"_ARRAY_DIMENSIONS": ["only one"]})).dimension_names is None


def test_a_chunk_has_a_key() -> None:
    def key(name: str, **configuration: str) -> str:
        encoding = {"name": name, "configuration": configuration}
        return key_of(parsed(v3(chunk_key_encoding=encoding)), (2, 0))

    assert key("default") == "c/2/0"
    assert key("default", separator=".") == "c.2.0"
    assert key("v2") == "2.0"
    assert key("v2", separator="/") == "2/0"
    assert key_of(parsed(v2()), (2, 0)) == "2.0"
    assert key_of(parsed(v2(dimension_separator="/")), (2, 0)) == "2/0"


def test_an_array_that_is_empty_may_have_empty_chunks() -> None:
    assert parsed(v2(shape=[0, 4], chunks=[0, 4])).grid.counts == (0, 1)


@pytest.mark.parametrize("version", [2, 3])
def test_times_are_integers(version: int) -> None:
    for dtype in ("M8[ns]", "m8[10s]"):
        files, _ = written(np.zeros(4, dtype), chunks=(2,), zarr_format=version)
        assert metadata_of(files).dtype == np.int64


REFUSED = [
    (v2(dtype="|O", filters=[{"id": "vlen-utf8"}]), "|O"),
    *((v2(dtype=dtype), dtype) for dtype in ("<U7", "|S7", "|V7", "<f16", "<f3", "<q8", "<f")),
    *((v2(dtype=dtype), dtype) for dtype in ("float", "<M7[ns]", "<M8[nn]", "i4,i4", "(2,)f4")),
    (v2(dtype=[["a", "<i4"], ["b", "<f4"]]), "'a', '<i4'"),
    (v2(filters=[{"id": "pickle"}]), "pickle"),
    (v2(filters=[{"id": "json2"}]), "json2"),
    *((v3(data_type=name), name) for name in ("string", "variable_length_utf8", "r16", "bytes")),
    *((v3(data_type=name), name) for name in ("bfloat16", "int4", "float8_e4m3")),
    (v3(data_type={"name": "fixed_length_utf32", "configuration": {"length_bytes": 4}}), "utf32"),
    (v3(data_type={"name": "structured", "configuration": {"fields": []}}), "structured"),
    (v3(data_type={"name": "numpy.datetime64"}), "numpy.datetime64"),
    (v3(chunk_grid={"name": "rectilinear", "configuration": {}}), "rectilinear"),
    (v3(storage_transformers=[{"name": "x"}]), "storage transformers"),
    (v3(shape=[], chunk_grid={"name": "regular", "configuration": {"chunk_shape": []}}), "single"),
    (v2(shape=[4, 0]), "its samples are empty"),
    (v3(chunk_key_encoding={"name": "fanout"}), "fanout"),
    (v3(later={"a": 1}), "later"),
    (v3(codecs=[{"name": "vlen-utf8"}]), "vlen-utf8"),
]


@pytest.mark.parametrize(("node", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_an_array_that_cant_be_a_tensor_is_refused_by_name(node: Node, reason: str) -> None:
    found = parse_array(node)
    assert isinstance(found, Rejection)
    assert reason in found.reason


def test_unknown_keys_that_neednt_be_understood_are_ignored() -> None:
    assert parsed(v3(later={"must_understand": False, "a": 1})).shape == (10, 4)


SHARDS = {"index_codecs": [{"name": "bytes"}], "codecs": [{"name": "bytes"}]}


def sharded(**changes: Any) -> list[dict[str, Any]]:
    configuration = {"chunk_shape": [1, 4], **SHARDS, **changes}
    return [{"name": "sharding_indexed", "configuration": configuration}]


def each(make: Callable[..., Node], key: str, *values: Any) -> list[Node]:
    return [make(**{key: value}) for value in values]


HOSTILE: list[Node] = [
    *each(v2, "shape", None, 5, [10], ["a", 4], [-1, 4], [1.0, 4], [True, 4]),
    *each(v2, "shape", [2**62, 4], [2**61, 4], [1] * 33, [10, 4, 1]),
    *each(v2, "chunks", None, [0, 4], [3], [3, -4], [3, 4, 5], [2**63, 1]),
    v2(chunks=[2**40, 4]),
    v2(shape=[2**50, 4], chunks=[2**38, 1]),
    *each(v2, "dtype", None, 3, {}),
    *each(v2, "fill_value", "x", [1], [1, 2], {}, "0x00", True),
    *(v2(dtype="<i4", fill_value=fill) for fill in list[Any]([2**31, 0.5, "1.5", [0], True])),
    *(v2(dtype="|u1", fill_value=fill) for fill in list[Any]([-1, 256, "NaN"])),
    *(v2(dtype="<c8", fill_value=fill) for fill in list[Any]([[1, 2, 3], ["a", 1], {}])),
    *(v2(dtype="|b1", fill_value=fill) for fill in list[Any]([2, "true", []])),
    *each(v2, "filters", 3, [3], [{}], [{"id": 3}], [{"id": "delta"}] * 99),
    *each(v2, "compressor", 3, "zlib", {}, []),
    v2(order="X"),
    v2(dimension_separator="-"),
    *each(v3, "shape", None, [10], [2**61, 4]),
    *each(v3, "chunk_grid", None, {}, {"name": "regular"}, "regular"),
    v3(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [2**40, 4]}}),
    *each(v3, "codecs", None, [], 3, [3], [{}], [{"name": 3}], V3["codecs"] * 99),
    *each(v3, "data_type", None, 3, {}),
    *each(v3, "chunk_key_encoding", None, {}, {"name": "v2", "configuration": 3}),
    v3(chunk_key_encoding={"name": "default", "configuration": {"separator": "-"}}),
    *each(v3, "dimension_names", ["a"], "ab", [1, 2]),
    v3(fill_value="0x7fc0"),
    v3(fill_value=10**400),
    *(v3(codecs=sharded(chunk_shape=shape)) for shape in ([2, 4], [0, 4], [1], None, ["a", 4])),
    v3(codecs=sharded(index_location="middle")),
    v3(codecs=sharded(index_codecs=None)),
    v3(codecs=sharded(codecs=None)),
    v3(codecs=sharded(index_codecs=[{"name": "bytes", "configuration": {"endian": "x"}}])),
    v3(
        shape=[2**40, 1],
        chunk_grid={"name": "regular", "configuration": {"chunk_shape": [2**40, 1]}},
        codecs=sharded(chunk_shape=[1, 1]),
    ),
]


@pytest.mark.parametrize("node", HOSTILE, ids=[str(number) for number in range(len(HOSTILE))])
def test_hostile_metadata_raises_an_error_that_names_the_array(node: Node) -> None:
    with pytest.raises(DatasetError, match=r"group/x: its metadata is damaged"):
        parse_array(node)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "configuration", "id", "endian"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@given(
    key=st.sampled_from(sorted(set(V3) | set(V2))), value=anything, version=st.sampled_from([2, 3])
)
def test_any_metadata_is_read_or_refused(key: str, value: Any, version: int) -> None:
    try:
        node = v2(**{key: value}) if version == 2 else v3(**{key: value})
        found = parse_array(node)
    except DatasetError:
        return
    if isinstance(found, ArrayMetadata):
        assert math.prod(found.grid.chunk) * found.dtype.itemsize <= 2**31
        assert math.prod(found.shape) < 2**62


FILLS: list[tuple[str, str, Any, Any]] = [
    ("<f4", "float32", "NaN", np.nan),
    ("<f4", "float32", "-Infinity", -np.inf),
    ("<f4", "float32", "0x7fc00000", np.nan),
    ("<f8", "float64", "0x3ff8000000000000", 1.5),
    ("<f2", "float16", 2, 2),
    ("<f8", "float64", "2.5", 2.5),
    (">i4", "int32", -3.0, -3),
    ("<i8", "int64", "-7", -7),
    ("<c8", "complex64", [1, "NaN"], complex(1, np.nan)),
    ("<c16", "complex128", [1, 2], 1 + 2j),
    ("|b1", "bool", True, True),
    ("|b1", "bool", 0, False),
    ("<f4", "float32", None, 0),
]


@pytest.mark.parametrize(("old", "new", "value", "wanted"), FILLS)
def test_a_fill_value_is_a_number_of_the_arrays_type(
    old: str, new: str, value: Any, wanted: Any
) -> None:
    for dtype in (data_type(old).newbyteorder("="), data_type(new)):
        found = fill_value(value, dtype)
        assert found.dtype == np.dtype(new)
        np.testing.assert_array_equal(found, wanted)


def test_not_a_time_is_the_least_integer() -> None:
    assert fill_value("NaT", data_type("<M8[ns]")) == -(2**63)


@pytest.mark.parametrize("dtype", ["bool", "i4", "u8", "f2", "f8", "c8"])
@pytest.mark.parametrize("version", [2, 3])
def test_fill_values_are_zarrs(dtype: str, version: int) -> None:
    for value in (1, 0) if dtype == "bool" else (7, 0):
        files, wanted = written(
            np.full(3, value, dtype), chunks=(2,), zarr_format=version, fill_value=value
        )
        assert metadata_of(files).fill_value == wanted[0]


def test_a_document_is_bounded() -> None:
    for data, why in (
        (b"[]", "a list"),
        (b"{", "JSON"),
        (b"\xff\xfe{", "JSON"),
        (b'{"a":' + b"[" * 100_000, "JSON"),
        (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "deeper"),
        (b'{"a":' + b"1" * 5000 + b"}", "JSON"),
        (b" " * (MAX_DOCUMENT_BYTES + 1), "at most"),
    ):
        with pytest.raises(DatasetError, match=rf"x/zarr.json.*{why}"):
            read_document(data, name="x/zarr.json")


@pytest.mark.parametrize("version", [2, 3])
def test_consolidated_metadata_has_all_nodes(version: int) -> None:
    store = MemoryStore()
    group = zarr.create_group(store, zarr_format=version, attributes={"who": "us"})
    group.create_array("x", shape=(4, 2), chunks=(2, 2), dtype="f4", attributes={"u": "K"})
    group.create_array("deep/y", shape=(4,), chunks=(2,), dtype="i2")
    files = {name: data.to_bytes() for name, data in store._store_dict.items()}
    zarr.consolidate_metadata(store)
    files = {name: data.to_bytes() for name, data in store._store_dict.items()}
    file = "zarr.json" if version == 3 else ".zmetadata"
    document = read_document(files[file], name=file, is_consolidated=True)
    if version == 3:
        document = document["consolidated_metadata"]
    nodes = consolidated_nodes(document, version=version, name=file)
    if version == 2:
        assert nodes.pop("").attributes["who"] == "us"
    assert {name: node.kind for name, node in nodes.items()} == {
        "deep": "group",
        "deep/y": "array",
        "x": "array",
    }
    assert nodes["x"].attributes["u"] == "K"
    assert parsed(nodes["deep/y"]).dtype == np.int16


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/../b", ".", "a\0b", "x" * 9999])
def test_paths_of_nodes_dont_leave_the_hierarchy(name: str) -> None:
    for version, metadata in ((2, {f"{name}/.zarray": V2}), (3, {name: V3})):
        with pytest.raises(DatasetError, match="names a node"):
            consolidated_nodes({"metadata": metadata}, version=version, name="set.zarr")


def test_documents_that_arent_nodes_are_rejected() -> None:
    wrong_kind: dict[str, Any] = {"zarr_format": 3, "node_type": "x"}
    for document, expected in (
        ({}, "3"),
        ({"zarr_format": 2}, "3"),
        (wrong_kind, "'array' or 'group'"),
    ):
        with pytest.raises(DatasetError, match=rf"group/x: this isn't valid.*expected {expected}"):
            node_of({"zarr.json": document})
    with pytest.raises(DatasetError, match="zarr_format"):
        v2(zarr_format=3)
    with pytest.raises(DatasetError, match="attributes"):
        v3(attributes=[1])
    assert read_node("x", {".zattrs": {}}.get) is None
    for nothing in list[Any]([{}, {"metadata": {".zarray": 3}}, {"metadata": [3]}]):
        for version in (2, 3):
            with pytest.raises(DatasetError, match=r"set\.zarr: this isn't valid"):
                consolidated_nodes(nothing, version=version, name="set.zarr")
