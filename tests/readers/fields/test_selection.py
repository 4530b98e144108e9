"""The fields of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError
from penstock.readers.fields import (
    Array,
    Audio,
    Boxes,
    Bytes,
    ClassLabel,
    Image,
    Mask,
    Schema,
    Text,
    Value,
    Video,
    check_names,
    check_selection,
    default_fields,
    stored_fields,
)

if TYPE_CHECKING:
    from penstock.readers.fields import FieldType

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
    return check_selection(check_names(fields), Schema(schema), lacking, url="set")


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
        (("left", "left"), "'left' twice"),
        (("depth",), "got 'depth', but set has"),
        (("depth.present",), "got 'depth.present', but set has"),
        (("clip",), "Video, which nothing decodes"),
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
