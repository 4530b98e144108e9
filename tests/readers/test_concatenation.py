"""Concatenations keep ids, values and names of each part, and reject parts that don't fit."""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import ConfigError
from penstock.readers import Dataset, concat
from penstock.readers.fields import ClassLabel
from tests import images
from tests.readers.test_selections import all_rows, check_source, ids_of, sizes
from tests.sources import Values, classes

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.readers import Source


@settings(max_examples=60, deadline=None)
@given(several=st.lists(sizes, min_size=1, max_size=4), data=st.data())
def test_samples_come_part_after_part(several: list[list[int]], data: st.DataObject) -> None:
    parts = [Values(each, name=f"part{n}") for n, each in enumerate(several)]
    found = concat(parts)
    total = sum(map(len, parts))
    check_source(found, list(range(total)))
    values = found.read(all_rows(found)).columns["value"].values  # type: ignore[union-attr]
    assert values.tolist() == [1000 + i for part in parts for i in range(len(part))]
    assert found.names(range(total)) == [n for p in parts for n in p.names(range(len(p)))]
    chosen = data.draw(st.sets(st.integers(0, total - 1), min_size=1))
    some = found.subset(chosen)
    check_source(some, sorted(chosen))
    assert values[sorted(chosen)].tolist() == (
        some.read(all_rows(some)).columns["value"].values.tolist()  # type: ignore[union-attr]
    )


def test_a_selection_reserves_the_ids_of_its_dataset() -> None:
    """Its ids keep their gaps, and those of the next part follow the whole dataset's."""
    first, second = Values([5, 5], name="a"), Values([4], name="b")
    found = concat([first.subset([2, 7]), second])
    check_source(found, [2, 7, 10, 11, 12, 13])
    with pytest.raises(ConfigError, match="selected"):
        found.rows(np.array([3]))
    with pytest.raises(ConfigError, match="wanted 0 to 13"):
        found.rows(np.array([14]))


def test_concatenations_of_concatenations_are_flat_and_order_counts() -> None:
    a, b, c = (Values([3], name=name) for name in "abc")
    flat = concat([a, b, c]).contents.fingerprint
    assert concat([concat([a, b]), c]).contents.fingerprint == flat
    assert concat([a, c, b]).contents.fingerprint != flat
    assert concat([a, b]).contents.fingerprint != a.contents.fingerprint
    assert concat([a]).contents.fingerprint == a.contents.fingerprint


def test_the_same_dataset_twice_is_two_parts() -> None:
    a = Values([3])
    check_source(concat([a, a]), [0, 1, 2, 3, 4, 5])


def test_repr_and_pickle() -> None:
    found = concat([Values([3], name="a"), Values([4], name="b").subset([1])])
    assert repr(found).startswith("concat([<tests.sources.Values object")
    assert found.url == "memory:a + memory:b"
    again = pickle.loads(pickle.dumps(found))
    assert ids_of(again) == ids_of(found)


def test_bad_samples_are_reported_by_their_position_in_the_request() -> None:
    class Bad(Values):
        def read(self, rows: Any, *, bad: Any = None, **more: Any) -> Any:
            bad.update({n: "torn" for n, (_, row) in enumerate(rows.tolist()) if row == 1})
            return super().read(rows, **more)

    found = concat([Bad([2, 2], name="a"), Bad([3], name="b")])
    bad: dict[int, str] = {}
    found.read(found.rows(np.array([5, 0, 3, 4, 1, 6])), bad=bad)
    assert sorted(bad) == [0, 2, 4]


def test_units_of_parts_stand_end_to_end() -> None:
    with_units = Values([4], units=[np.array([3, 1])], name="a")
    units = concat([with_units, Values([2, 3], name="b")]).contents.units
    assert units is not None
    assert [each.tolist() for each in units] == [[3, 1], [2], [3]]
    assert concat([Values([4]), Values([2])]).contents.units is None


def labels(*names: str, name: str = "x", **columns: Any) -> Values:
    given = {"value": np.arange(4), "label": np.zeros(4, np.int64), **columns}
    return Values([4], given, types={"label": classes(*names)}, name=name)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Values([3], name="y"), 'memory:x has a field "label" and memory:y has none'),
        (labels("a", "b", name="y", extra=np.zeros(4)), 'memory:y has a field "extra"'),
        (labels("b", "a", name="y"), "the same classes in another order"),
        (
            labels("a", "c", name="y"),
            r"only one has the classes \['b', 'c'\].*schema={\"label\": ClassLabel",
        ),
        (
            Values([4], {"value": np.arange(4), "label": np.arange(4)}, name="y"),
            r'the field "label" of memory:x and memory:y differs: ClassLabel.* and Value',
        ),
    ],
)
def test_parts_that_do_not_fit_are_rejected(other: Source, message: str) -> None:
    assert isinstance(labels("a", "b").schema["label"], ClassLabel)
    with pytest.raises(ConfigError, match=message):
        concat([labels("a", "b"), other])


def test_fields_that_differ_and_are_not_selected_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = {"1.jpg": images.jpeg(1), "list.csv": b"path,label,age,name\n1.jpg,3,7,x\n"}
    other = {"2.jpg": images.jpeg(2), "list.csv": b"path,label,age\n2.jpg,4,7.5\n"}
    roots = [
        images.write_folder(tmp_path / name, files)
        for name, files in (("first", first), ("other", other))
    ]
    parts = [Dataset(root, manifest="list.csv", fields=("label", "id")) for root in roots]
    for part in parts:
        part.open(verify=images.verify)
    with caplog.at_level(logging.INFO, "penstock"):
        both = concat(parts)
    assert "fields 'age', 'name' differ" in caplog.text
    assert list(both.schema) == ["image", "label"]
    assert np.asarray(both.column("label")).tolist() == [3, 4]
    chosen = [Dataset(root, manifest="list.csv", fields=("age",)) for root in roots]
    with pytest.raises(ConfigError, match=r'the field "age" of .* differs'):
        concat(chosen)
    named = [Dataset(root, manifest="list.csv", fields=("name",)) for root in roots[:1]]
    with pytest.raises(ConfigError, match=r'"name" and .* has none.*Pass the same fields='):
        concat([*named, Dataset(roots[1], manifest="list.csv", fields=("label",))])


@pytest.mark.parametrize("sources", [[], None, "ab", [1], Values([2])])
def test_only_lists_of_datasets_are_accepted(sources: Any) -> None:
    with pytest.raises(ConfigError, match="concat: got"):
        concat(sources)
