"""Types, names and headers that are almost right or hostile raise one clear error, fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.cache import ConfigError
from penstock.readers import Rejection
from penstock.readers.fields import (
    Array,
    Boxes,
    ClassLabel,
    Image,
    Keypoints,
    Mask,
    MultiLabel,
    Schema,
    Value,
    check_names,
    csv_table,
    examine,
    fields_of,
    jsonl_table,
)

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
    assert "no class of the list" in found.rejected[2]
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
