"""Test schemas: samples settle open types, fields are selected, bad types rejected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError, DatasetError
from penstock.readers import Facts, Rejection
from penstock.readers.fieldtypes import (
    Array,
    Audio,
    Boxes,
    Bytes,
    ClassLabel,
    Image,
    Keypoints,
    Mask,
    MultiLabel,
    Schema,
    Settling,
    Text,
    Value,
    Video,
    check_names,
    check_selection,
    csv_table,
    default_fields,
    examine,
    fields_of,
    jsonl_table,
    stored_fields,
)

if TYPE_CHECKING:
    from penstock.readers.fieldtypes import FieldType


UNKNOWN = Schema({"x": Array()})


def settle(schema, samples):
    settling = Settling(schema)
    for name, facts in samples:
        settling.add(facts, sample=name)
    return settling.schema()


def array(shape, dtype="<f4"):
    return {"x": Facts(0, 0, 4 * int(np.prod(shape)), shape, dtype)}


@given(
    shapes=st.integers(0, 3).flatmap(
        lambda n: st.lists(st.tuples(*[st.integers(0, 3)] * n), min_size=1, max_size=6)
    )
)
def test_lengths_that_differ_are_ragged(shapes):
    settled = settle(UNKNOWN, [(str(i), array(shape)) for i, shape in enumerate(shapes)])
    lengths = zip(*shapes, strict=True)
    wanted = tuple(each[0] if len(set(each)) == 1 else None for each in lengths)
    assert settled == Schema({"x": Array("float32", wanted)})


def test_byte_orders_are_one_dtype():
    assert settle(UNKNOWN, [("a", array((2,), ">f4")), ("b", array((2,), "<f4:F"))]) == Schema(
        {"x": Array("float32", (2,))}
    )


@pytest.mark.parametrize("other", [array((2,), "<f8"), array((2,), "<i4"), array((2, 1))])
def test_drift_names_both_samples_and_what_to_pass(other):
    with pytest.raises(DatasetError) as caught:
        settle(UNKNOWN, [("a.npy", array((2,))), ("b.npy", other)])
    for words in ("float32 of shape (2,) in a.npy", "in b.npy", 'schema={"x": Array("float32"'):
        assert words in str(caught.value)


def test_the_types_of_the_user_are_kept():
    known = Schema({"t": Text(), "x": Array("float32", (None, 3))})
    assert settle(known, [("a", array((4, 3)))]) == known
    half = Schema({"x": Array(shape=(None, 3))})
    assert settle(half, [("a", array((4, 3)))]) == Schema({"x": Array("float32", (None, 3))})


def test_masks_are_as_wide_as_the_widest():
    schema = Schema({"image": Image(), "mask": Mask(of="image")})

    def mask(codec):
        return {"mask": Facts(0, 0, 0, (1, 1, 1), codec)}

    def dtype(*codecs):
        settled = settle(schema, [("", mask(codec)) for codec in codecs])
        return settled["mask"].dtype

    assert dtype() == dtype("png", "npy") == "uint8"
    assert dtype("png", "png:i4", "png") == dtype("npy:i4") == "int32"


FIVE = ("1", "2", "3", "4", "5")


def _npy(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    return np.frombuffer(head, np.uint8)


@pytest.mark.parametrize("type", [Boxes("image"), Array("float32", (None, None, None))])
def test_lengths_next_to_a_length_of_0_are_bounded(type: Any) -> None:
    """numpy can't make such arrays: one such file ended the index instead of being rejected."""
    schema = Schema({"x": type, "image": Image()})
    (verdict,) = examine({"x": [_npy((0, 2**40, 2**40))]}, schema, None)
    assert isinstance(verdict, Rejection)
    assert "shape" in verdict.reason


def test_many_class_names_with_a_duplicate_are_rejected_fast() -> None:
    """It was quadratic: 200,000 names took minutes."""
    names = [*map(str, range(300_000)), "299999"]
    with pytest.raises(ValueError, match="'299999' twice"):
        Schema.from_json([{"name": "a", "kind": "class_label", "names": names}])


@pytest.mark.parametrize("kind", [[], {}, None, 3])
def test_a_kind_that_is_no_text_raises_a_value_error(kind: Any) -> None:
    with pytest.raises(ValueError, match="isn't a field's type"):
        Schema.from_json([{"name": "a", "kind": kind}])


@pytest.mark.parametrize("dtype", [("i4", -1), None, "(2", {"names": ["a"], "formats": ["x"]}])
def test_an_invalid_dtype_raises_a_config_error(dtype: Any) -> None:
    """numpy reads None as float64."""
    with pytest.raises(ConfigError, match="Value: got dtype="):
        Value(dtype)


@pytest.mark.parametrize("type", [Boxes, Mask, Keypoints])
def test_of_is_a_fields_name(type: Any) -> None:
    for of in (3, None, ["image"], ""):
        with pytest.raises(ConfigError, match=f"{type.__name__}: got of="):
            type(of=of)


@pytest.mark.parametrize("fields", [3, {"image", "label"}, frozenset(("a",)), b"image"])
def test_fields_have_an_order(fields: Any) -> None:
    """A set would give images and labels in another order in each process."""
    with pytest.raises(ConfigError, match="fields: got"):
        check_names(fields)


@pytest.mark.parametrize("type", [ClassLabel(FIVE), MultiLabel(FIVE)])
def test_a_number_is_no_class_if_names_are_other_numbers(type: Any) -> None:
    """Stars from 1 to 5: the number 1 would silently be the class "2"."""
    table = csv_table(b"stars\n1\n5\n0\n", source="s.csv")
    found = fields_of(table, {"stars": type})
    assert list(found.rejected) == [2]
    assert "isn't a class of the list" in found.rejected[2]
    rows = ("1", "0", '"1"') if isinstance(type, ClassLabel) else ("[1]", "[0]", '["1"]')
    table = jsonl_table("\n".join(f'{{"stars": {row}}}' for row in rows).encode(), source="s")
    found = fields_of(table, {"stars": type})
    assert list(found.rejected) == [0, 1]
    assert 'the class named "1" or class number 1' in found.rejected[0]


def test_numbers_are_class_numbers_if_no_name_contradicts() -> None:
    for names in (("0", "1", "2"), ("cat", "dog", "owl")):
        table = jsonl_table(b'{"x": 0}\n{"x": 2}', source="s")
        found = fields_of(table, {"x": ClassLabel(names)})
        assert not found.rejected
        assert found.values["x"].values.tolist() == [0, 2]  # type: ignore[union-attr]


EVERYTHING: dict[str, FieldType] = {
    "caption": Text(),
    "left": Image(),
    "right": Image(),
    "label": ClassLabel(("a", "b")),
    "boxes": Boxes(of="left"),
    "clip": Video(),
}


def select(
    fields: Any, schema: dict[str, FieldType] = EVERYTHING, **lacking: int
) -> tuple[str, ...]:
    chosen = check_names(fields) or default_fields(Schema(schema), lacking)
    return check_selection(chosen, Schema(schema), lacking, url="set")


@pytest.mark.parametrize(
    ("schema", "lacking", "wanted"),
    [
        (EVERYTHING, {}, ("left", "label")),
        (EVERYTHING, {"left": 1}, ("right", "label")),
        ({"x": Image(), "label": Value("float32"), "t": Text()}, {}, ("x", "label", "t")),
        ({"x": Image(), "class": ClassLabel()}, {}, ("x", "class")),
        ({"x": Image(), "m": Mask(of="x"), "t": Text()}, {"t": 3}, ("x", "m")),
        ({"v": Array("float32", (3,)), "label": ClassLabel()}, {}, ("v", "label")),
        ({"sound": Audio(), "raw": Bytes(), "v": Value("int8")}, {}, ("raw", "v")),
    ],
)
def test_default_fields(
    schema: dict[str, FieldType], lacking: dict[str, int], wanted: tuple[str, ...]
) -> None:
    assert default_fields(Schema(schema), lacking) == wanted
    assert select(None, schema, **lacking) == wanted


@given(
    names=st.permutations(["id", "label", "caption", "left", "caption.present", "boxes.present"]),
    count=st.integers(1, 6),
)
def test_the_order_is_the_users(names: list[str], count: int) -> None:
    assert select(names[:count]) == tuple(names[:count])


def test_stored_fields_are_each_read_once() -> None:
    fields = ("caption.present", "id", "left", "caption", "boxes.present")
    assert stored_fields(fields, ()) == ("caption", "left", "boxes")
    assert stored_fields(fields, ("id",)) == ("caption", "id", "left", "boxes")


def test_a_single_name_is_accepted() -> None:
    assert select("left") == ("left",)
    assert select(("clip",)) == ("clip",)


def test_a_field_that_some_samples_lack_needs_its_mask() -> None:
    with pytest.raises(ConfigError, match=r'1,200 samples of set.*"caption.present"'):
        select(("left", "caption"), caption=1200)
    chosen = ("left", "caption", "caption.present")
    assert select(chosen, caption=1200) == chosen
    assert select(("caption.present",), caption=1200) == ("caption.present",)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((), "wanted names"),
        ((3,), "wanted names"),
        (("left", "left"), "each once"),
        (("depth",), "got 'depth', but set has"),
        (("depth.present",), "got 'depth.present', but set has"),
    ],
)
def test_invalid_fields_are_rejected(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        select(fields)


def test_a_dataset_without_a_default_field_is_an_error() -> None:
    with pytest.raises(ConfigError, match="choose some with fields="):
        select(None, {"sound": Audio()})


def test_a_missing_label_names_the_layout_that_has_labels() -> None:
    with pytest.raises(ConfigError, match="one sub-folder per class"):
        select(("x", "label"), {"x": Image()})
