"""Tables become fields: values are kept, and ambiguous columns are reported."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    ClassLabel,
    DenseColumn,
    Image,
    Keypoints,
    MultiLabel,
    RaggedColumn,
    TableFields,
    Text,
    Tokens,
    Value,
    csv_table,
    fields_of,
    jsonl_table,
    object_table,
    text_tables,
)
from tests.field_sets import column_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.fieldtypes import FieldType

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=32)


def from_csv(text: str, schema: Mapping[str, FieldType] | None = None) -> TableFields:
    return fields_of(csv_table(text.encode(), source="list.csv"), schema)


def from_json(*objects: Any, schema: Mapping[str, FieldType] | None = None) -> TableFields:
    data = "\n".join(map(json.dumps, objects)).encode()
    return fields_of(jsonl_table(data, source="list.jsonl"), schema)


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@given(st.lists(st.tuples(INTEGERS, FLOATS, TEXT), min_size=1, max_size=8))
def test_rows_are_read_from_csv(table: list[tuple[int, float, str]]) -> None:
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(["i", "f", "t"])
    # The mark keeps texts that are empty or look like numbers texts.
    writer.writerows((i, repr(f), f"t{t}") for i, f, t in table)
    found = from_csv(file.getvalue())
    assert found.types["i"] == Value("int64")
    assert column_values(found.values["i"]) == [i for i, _, _ in table]
    assert found.types["t"] == Text()
    assert column_values(found.values["t"]) == [f"t{t}" for _, _, t in table]
    assert found.types["f"] == Value("float32")
    assert all(map(same, column_values(found.values["f"]), [f for _, f, _ in table]))
    assert (found.present, found.rejected, found.left_out) == ({}, {}, {})


@given(st.lists(st.tuples(INTEGERS, FLOATS, TEXT, st.booleans()), min_size=1, max_size=8))
def test_rows_are_read_from_json_lines(table: list[tuple[int, float, str, bool]]) -> None:
    found = from_json(*({"i": i, "f": f, "t": t, "b": b} for i, f, t, b in table))
    assert list(found.types) == ["i", "f", "t", "b"]
    assert found.types["i"] == Value("int64")
    assert column_values(found.values["i"]) == [i for i, _, _, _ in table]
    assert found.types["f"] == Value("float32")
    assert all(map(same, column_values(found.values["f"]), [f for _, f, _, _ in table]))
    assert column_values(found.values["t"]) == [t for _, _, t, _ in table]
    assert found.types["b"] == Value("bool")
    assert column_values(found.values["b"]) == [b for _, _, _, b in table]


@given(st.lists(st.lists(st.integers(-9, 9), max_size=3), min_size=1, max_size=6))
def test_lists_are_read(lists: list[list[int]]) -> None:
    found = from_json(*({"v": each} for each in lists))
    assert column_values(found.values["v"]) == lists
    is_dense = isinstance(found.values["v"], DenseColumn)
    assert is_dense is (len(set(map(len, lists))) == 1 and len(lists[0]) > 0)


@given(
    st.lists(st.lists(st.lists(FLOATS, min_size=4, max_size=4), max_size=3), min_size=1, max_size=5)
)
def test_lists_of_lists_are_read(lists: list[list[list[float]]]) -> None:
    found = from_json(*({"v": each} for each in lists), schema={"v": Array("float32", (None, 4))})
    column = found.values["v"]
    assert isinstance(column, RaggedColumn)
    assert column.values.shape[1:] == (4,)
    for row, each in enumerate(lists):
        wanted = np.array(each, np.float32).reshape(-1, 4)
        np.testing.assert_array_equal(column.sample(row), wanted)


def test_labels_of_integers_and_of_texts_are_classes() -> None:
    assert from_csv("path,label\na,3\nb,0\n").types["label"] == ClassLabel()
    found = from_csv("path,label\na,dog\nb,cat\nc,dog\n")
    assert found.types["label"] == ClassLabel(("cat", "dog"))
    assert column_values(found.values["label"]) == [1, 0, 1]
    assert "2 classes" in found.notes[0]
    assert from_json({"label": "b"}, {"label": "a"}).types["label"] == ClassLabel(("a", "b"))


def test_labels_that_are_fractions_stay_fractions() -> None:
    assert from_csv("label\n0.5\n1\n").types["label"] == Value("float32")
    assert from_json({"label": 0.5}, {"label": 1}).types["label"] == Value("float32")


def test_digits_after_a_leading_zero_are_a_name() -> None:
    found = from_csv("zip,label\n007,01\n010,02\n")
    assert column_values(found.values["zip"]) == ["007", "010"]
    assert found.types["label"] == ClassLabel(("01", "02"))


def test_integers_beyond_64_bits_keep_their_digits() -> None:
    digits = "123456789012345678901234567890"
    assert column_values(from_csv(f"n\n{digits}\n1\n").values["n"]) == [digits, "1"]
    assert "64 bits" in from_json({"n": int(digits)}).left_out["n"]


def test_integers_among_fractions_keep_their_value() -> None:
    found = from_csv("n\n16777217\n0.5\n")
    assert found.types["n"] == Value("float64")
    assert column_values(found.values["n"]) == [16777217, 0.5]
    assert from_json({"n": 1e300}).types["n"] == Value("float64")


def test_empty_cells_and_nulls_are_missing() -> None:
    found = from_csv("n,t\n,a\n2,\n")
    assert column_values(found.values["n"]) == [0, 2]
    assert found.present["n"].tolist() == [False, True]
    assert found.present["t"].tolist() == [True, False]
    found = from_json({"v": [1, 2]}, {"v": None}, {})
    assert found.types["v"] == Array("int64", (2,))
    assert column_values(found.values["v"]) == [[1, 2], [0, 0], [0, 0]]
    assert found.present["v"].tolist() == [True, False, False]


def test_mixed_kinds_in_json_are_an_error_that_names_rows_and_the_remedy() -> None:
    objects = [{"n": i} for i in range(6)] + [{"n": "six"}]
    with pytest.raises(DatasetError, match=r"integers \(0, line 1\) and text \('six', line 7\)"):
        from_json(*objects)
    found = from_json(*objects, schema={"n": Value("int64")})
    assert found.rejected == {6: "n: 'six' isn't an integer (line 7)"}
    assert column_values(found.values["n"]) == [0, 1, 2, 3, 4, 5, 0]


def test_mixed_kinds_in_csv_are_text_and_reported() -> None:
    text = "n\n" + "".join(f"{i}\n" for i in range(6)) + "n/a\n"
    found = from_csv(text)
    assert found.types["n"] == Text()
    assert "'n/a' in line 8" in found.doubts[0]
    found = from_csv(text, {"n": Value("float32")})
    assert found.rejected == {6: "n: 'n/a' isn't a number (line 8)"}


@pytest.mark.parametrize(
    ("type", "value", "reason"),
    [
        (Value("int64"), 1.0, "1.0 isn't an integer"),
        (Value("uint8"), 256, "doesn't fit into uint8"),
        (Value("float16"), 1e6, "doesn't fit into float16"),
        (Value("float32"), 10**400, "doesn't fit into float32"),
        (Value("float32"), True, "True isn't a number"),
        (Value("bool"), 1, "1 isn't true or false"),
        (Text(), 3, "3 isn't a text"),
        (Text(), "\ud800", "half of a character"),
        (ClassLabel(("a", "b")), "c", "isn't a class of the list"),
        (ClassLabel(("a", "b")), 2, "there are 2"),
        (ClassLabel(("a", "b")), 0.0, "0.0 isn't an integer"),
        (MultiLabel(("a", "b")), ["a", "a"], "occurs twice"),
        (MultiLabel(("a", "b")), "a", "isn't a list of classes"),
        (Array("int64", (2,)), [1, 2.5], "doesn't fit into int64"),
        (Array("float32", (2,)), [1, 2, 3], r"shape \(3,\), wanted \(2,\)"),
        (Array("float32", (2,)), [], r"shape \(0,\), wanted \(2,\)"),
        (Array("float32", (None,)), ["a"], "isn't a list of numbers"),
        (Array("float32"), [[1], [1, 2]], "different lengths"),
        (Boxes(of="image"), [[1, 2, 3]], "wanted"),
        (Boxes(of="image"), [[5, 2, 3, 4]], r"box 0 is inverted: \(5, 2, 3, 4\)"),
        (Boxes(of="image", format="xywh"), [[5, 2, 3, -4]], "inverted"),
        (Boxes(of="image"), [[5, 2, float("nan"), 4]], "isn't finite"),
        (Keypoints(of="image"), [[5, float("inf")]], "isn't finite"),
        (Keypoints(of="image"), [1, 2], "wanted"),
        (Tokens("uint8"), [1, 300], "doesn't fit into uint8"),
    ],
)
def test_values_that_do_not_fit_a_schema_are_rejected(
    type: FieldType, value: Any, reason: str
) -> None:
    found = from_json({"x": value}, schema={"x": type})
    assert list(found.rejected) == [0]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found.rejected[0])


def test_schemas_of_every_kind() -> None:
    schema: dict[str, FieldType] = {
        "boxes": Boxes(of="image"),
        "points": Keypoints(of="image"),
        "tags": MultiLabel(("a", "b", "c")),
        "tokens": Tokens("uint16"),
        "species": ClassLabel(),
    }
    found = from_json(
        {"boxes": [[0, 0, 1, 2.5]], "points": [[1, 2]], "tags": ["c", 0], "tokens": [5]}
        | {"species": "owl"},
        {"boxes": [], "points": [], "tags": [], "tokens": [], "species": "emu"},
        schema=schema,
    )
    assert found.rejected == {}
    assert column_values(found.values["boxes"]) == [[[0, 0, 1, 2.5]], []]
    assert column_values(found.values["points"]) == [[[1, 2]], []]
    assert column_values(found.values["tags"]) == [[1, 0, 1], [0, 0, 0]]
    assert column_values(found.values["tokens"]) == [[5], []]
    assert found.types["species"] == ClassLabel(("emu", "owl"))


def test_cells_of_a_csv_hold_lists_if_a_schema_wants_them() -> None:
    schema: dict[str, FieldType] = {
        "tags": MultiLabel(("a", "b", "traffic light")),
        "vector": Array("float32", (3,)),
        "boxes": Boxes(of="image"),
    }
    found = from_csv(
        "tags,vector,boxes\n"
        'a|b,1 2 3,"[[0, 0, 1, 1], [0, 0, 2, 2]]"\n'
        'traffic light,"1, 2.5, 3",[]\n'
        '"[""b""]","[1, 2, 3]",\n',
        schema,
    )
    assert found.rejected == {}
    assert column_values(found.values["tags"]) == [[1, 1, 0], [0, 0, 1], [0, 1, 0]]
    assert column_values(found.values["vector"]) == [[1, 2, 3], [1, 2.5, 3], [1, 2, 3]]
    assert [len(each) for each in column_values(found.values["boxes"])] == [2, 0, 0]
    assert found.present["boxes"].tolist() == [True, True, False]


def test_objects_are_flattened_with_dots() -> None:
    found = from_json(
        {"objects": [{"bbox": [0, 0, 1, 1], "category": 3}, {"bbox": [1, 1, 2, 2], "category": 5}]},
        {"objects": []},
    )
    assert column_values(found.values["objects.bbox"]) == [[[0, 0, 1, 1], [1, 1, 2, 2]], []]
    assert column_values(found.values["objects.category"]) == [[3, 5], []]
    assert found.types["objects.bbox"] == Array("int64", (None, 4))
    assert column_values(from_json({"a": {"b": {"c": 1}}}).values["a.b.c"]) == [1]


def test_columns_that_no_field_can_hold_are_named() -> None:
    found = from_json(
        {"captions": ["a", "b"], "polygons": [[1, 2], [1, 2, 3]], "id": 3, "none": None, "a/b": 1}
    )
    assert found.types == {"id": Value("int64")}
    assert list(found.left_out) == ["captions", "polygons", "none", "a/b"]


def test_the_depth_of_lists_is_bounded() -> None:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    assert "isn't a list of numbers" in from_json({"v": deep}).left_out["v"]


def test_a_type_of_files_is_no_type_of_a_column() -> None:
    with pytest.raises(ConfigError, match="holds values, not files"):
        from_csv("thumb\na.jpg\n", {"thumb": Image()})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no header"),
        (b"a,a\n1,2\n", "occurs twice"),
        (b"a,b\n1\n", "line 2: got 1 cells, but the header has 2"),
        (b'a\n"x"y\n', "isn't CSV"),
        (b'a\n"x\n', "isn't CSV"),
        (b"a\n" + b"x" * 200_000, "isn't CSV"),
        (b"a\n\xff\n", "line 2: isn't UTF-8"),
        (",".join(map(str, range(5000))).encode(), "at most 4,096"),
    ],
)
def test_invalid_csv_raises_one_clear_error(data: bytes, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        csv_table(data, source="list.csv")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "line 1: isn't JSON"),
        (b'{"a": 1}\n[1]\n', r"line 2: got \[1\], wanted a JSON object"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b'{"a.b": 1, "a": {"b": 2}}', "'a.b' occurs twice"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "objects nested more than 32 deep"),
        (b"[" * 100_000, "isn't JSON"),
        (json.dumps(dict.fromkeys(map(str, range(5000)), 1)).encode(), "more than 4,096 columns"),
    ],
)
def test_invalid_json_lines_raise_one_clear_error(data: bytes, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        jsonl_table(data, source="list.jsonl")


def test_large_tables_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tables, "MAX_TABLE_BYTES", 3)
    with pytest.raises(DatasetError, match="wanted at most 3"):
        csv_table(b"a\n1\n", source="list.csv")


@pytest.mark.parametrize("text", ["a,b\n1,x\n", "a;b\n1;x\n", "a\tb\r\n1\tx\r\n", "\ufeffa,b\n1,x"])
def test_separators_and_line_ends_of_common_programs(text: str) -> None:
    found = from_csv(text)
    assert column_values(found.values["a"]) == [1]
    assert column_values(found.values["b"]) == ["x"]


def test_rows_of_tar_members_are_named_by_their_keys() -> None:
    table = object_table([{"n": 1}, None], source="json", places=["a/1", "a/2"], unit="sample")
    found = fields_of(table, {"n": Text()})
    assert found.rejected == {0: "n: 1 isn't a text (sample a/1)"}
    assert found.present["n"].tolist() == [False, False]
