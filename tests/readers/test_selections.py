"""Test that selections and splits have the right samples and ids, and reject invalid arguments."""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError, DatasetError, IndexChangedError
from penstock.readers import Dataset, Selection, concat
from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    ClassLabel,
    ClassLabels,
    DenseColumn,
    FieldType,
    Image,
    Text,
    jsonl_table,
)
from penstock.readers.formats.folder import ListedTable, listed_samples, parse_field_place
from tests import images
from tests.properties import examples
from tests.sources import Values, classes

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.readers import Source


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def all_rows(source: Source) -> np.ndarray:
    return source.contents.rows(np.arange(len(source), dtype=np.int64))


def ids_of(source: Source) -> list[int]:
    """Return the ids in the order of shards and rows."""
    ids: list[int] = source.ids(all_rows(source)).tolist()
    return ids


def check_source(source: Source, wanted: list[int]) -> None:
    """Check the contract of every source, for one with these ids."""
    contents = source.contents
    assert ids_of(source) == wanted
    assert len(source) == contents.samples == len(wanted)
    assert (contents.sizes > 0).all()
    assert len(contents.shard_bytes) == len(contents.sizes)
    assert max(wanted) < contents.id_end
    ids = np.array(wanted, np.int64)
    rng = np.random.default_rng(len(wanted))
    some = rng.permutation(len(ids))[: len(ids) // 2 + 1]
    rows = source.rows(ids[some])
    np.testing.assert_array_equal(contents.places(rows), some)
    batch = source.read(rows)
    assert batch.ids.tolist() == ids[some].tolist()
    assert set(batch.columns) == set(source.schema)
    values = source.values("value", rows)
    assert set(values.columns) == {"value"}
    assert isinstance(column := values.columns["value"], DenseColumn)
    assert isinstance(read := batch.columns["value"], DenseColumn)
    assert column.values.tolist() == read.values.tolist()
    assert len(source.names(ids[some])) == len(some)
    nothing = np.empty((0, 2), np.int64)
    assert len(source.read(nothing)) == len(source.ids(nothing)) == 0


@examples(80)
@given(sizes=sizes, data=st.data())
def test_a_selection_has_the_requested_samples(sizes: list[int], data: st.DataObject) -> None:
    base = Values(sizes)
    mask = data.draw(st.lists(st.booleans(), min_size=len(base), max_size=len(base)))
    ids = [i for i, chosen in enumerate(mask) if chosen]
    if not ids:
        with pytest.raises(ConfigError, match="no samples"):
            base.subset(mask)
        return
    by_mask = base.subset(mask)
    check_source(by_mask, ids)
    by_ids = base.subset(data.draw(st.permutations(ids)))
    assert by_ids.contents.fingerprint == by_mask.contents.fingerprint
    assert by_mask.read(all_rows(by_mask)).columns["value"].values.tolist() == [  # type: ignore[union-attr]
        1000 + i for i in ids
    ]
    assert by_mask.names(ids) == base.names(ids)


@examples(50)
@given(sizes=sizes, data=st.data())
def test_a_selection_of_a_selection_selects_from_the_dataset(
    sizes: list[int], data: st.DataObject
) -> None:
    base = Values(sizes)
    outer = data.draw(st.sets(st.integers(0, len(base) - 1), min_size=1))
    inner = data.draw(st.sets(st.sampled_from(sorted(outer)), min_size=1))
    found = base.subset(outer).subset(inner)
    check_source(found, sorted(inner))
    assert found.contents.fingerprint == base.subset(inner).contents.fingerprint
    mask = [i in inner for i in sorted(outer)]
    assert ids_of(base.subset(outer).subset(mask)) == sorted(inner)


def test_any_kind_of_list_is_accepted() -> None:
    base = Values([4, 4])
    ours = base.subset([1, 5, 6])
    for which in (
        np.array([6, 1, 5]),
        (5, 6, 1),
        {1, 5, 6},
        (i for i in (1, 5, 6)),
        np.array([1, 5, 6], np.uint8),
        np.isin(np.arange(8), [1, 5, 6]),
    ):
        assert ids_of(base.subset(which)) == ids_of(ours) == [1, 5, 6]
    assert ids_of(base.subset(range(2, 4))) == [2, 3]


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ([], "got no samples of memory:values, wanted at least one"),
        ([8], "ids: got 8"),
        ([-1], "ids: got"),
        ([3, 1, 3], "sample 3 twice, wanted each once"),
        ([True, False], "a mask of 2 bools, and memory:values has 8 samples"),
        ([0.5], "got float64 of shape"),
        ([[1, 2]], r"of shape \(1, 2\), wanted sample ids"),
        (["a"], "wanted sample ids"),
        (3, "wanted sample ids"),
    ],
)
def test_invalid_selections_are_rejected(which: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Values([4, 4]).subset(which)


def test_a_sample_that_was_not_selected_has_no_row() -> None:
    some = Values([4, 4]).subset([1, 5])
    for ids in ([2], [7], [1, 2]):
        with pytest.raises(ConfigError, match="not one of the 2 that were selected"):
            some.rows(np.array(ids))
        with pytest.raises(ConfigError, match="selected"):
            some.names(ids)
    with pytest.raises(ConfigError, match="not one of the 2"):
        some.subset([2])


def test_indexing_by_several_is_an_error_that_names_subset() -> None:
    for source in (Values([3]), Values([3]).subset([0])):
        with pytest.raises(ConfigError, match=r"dataset\.subset\(ids\)"):
            source[0:2]  # type: ignore[index]


def test_repr_and_pickle() -> None:
    base = Values([4, 4])
    some = base.subset([1, 5])
    assert repr(some).startswith("Selection(<2 samples>, ")
    again = pickle.loads(pickle.dumps(some))
    assert ids_of(again) == [1, 5]
    assert again.contents.fingerprint == some.contents.fingerprint
    other = Selection(Values([4, 4], name="later"), np.array([1]), fingerprint="before")
    with pytest.raises(IndexChangedError, match="Take the selection again"):
        _ = other.contents


def test_closing_a_selection_closes_nothing() -> None:
    class Closed(Values):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    base = Closed([3])
    with base.subset([1]) as some:
        some.close()
    assert not base.is_closed
    with base:
        pass
    assert base.is_closed


def test_units_without_selected_samples_are_dropped() -> None:
    base = Values([10, 6], units=[np.array([4, 4, 2]), np.array([3, 3])])
    some = base.subset([0, 1, 9, 13, 15])
    assert some.contents.units is not None
    assert [units.tolist() for units in some.contents.units] == [[2, 1], [2]]
    whole = base.subset(range(16)).contents.units
    assert whole is not None
    assert [units.tolist() for units in whole] == [[4, 4, 2], [3, 3]]


# -- splits


@examples(80)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=8),
    shares=st.sampled_from([(0.5, 0.5), (0.7, 0.2, 0.1), (1 / 3, 1 / 3, 1 / 3), (0.4, 0.3)]),
    seed=st.integers(-5, 2**65),
)
def test_a_split_is_exact_disjoint_and_reproducible(
    sizes: list[int], shares: tuple[float, ...], seed: int
) -> None:
    base = Values(sizes)
    n = len(base)
    if min(round(n * share) for share in shares) <= 1:  # one may be empty
        return
    parts = base.split(*shares, seed=seed)
    ids = [ids_of(part) for part in parts]
    for share, mine in zip(shares, ids, strict=True):
        assert abs(len(mine) - share * n) < 1 + 1e-6
    together = [i for mine in ids for i in mine]
    assert len(set(together)) == len(together)
    if abs(sum(shares) - 1) < 1e-9:
        assert sorted(together) == list(range(n))
    assert [ids_of(part) for part in Values(sizes).split(*shares, seed=seed)] == ids


def test_seeds_split_differently_and_shards_do_not_matter() -> None:
    first, _ = Values([50, 50]).split(0.5, 0.5, seed=1)
    second, _ = Values([50, 50]).split(0.5, 0.5, seed=2)
    other, _ = Values([10] * 10).split(0.5, 0.5, seed=1)
    assert ids_of(first) != ids_of(second)
    assert ids_of(first) == ids_of(other)
    assert 15 < sum(i < 50 for i in ids_of(first)) < 35


def test_splits_and_fingerprints_do_not_change() -> None:
    """A different split would mix training and test data of old runs."""
    base = Values([5, 7, 8])
    assert [ids_of(part) for part in base.split(0.5, 0.3, 0.2, seed=1)] == [
        [0, 5, 7, 8, 10, 11, 12, 14, 16, 17],
        [1, 3, 4, 6, 18, 19],
        [2, 9, 13, 15],
    ]
    patients = [number % 6 for number in range(20)]
    texts, _ = base.split(0.5, 0.5, seed=1, by=[f"p{patient}" for patient in patients])
    assert ids_of(texts) == [0, 3, 4, 6, 9, 10, 12, 15, 16, 18]
    numbers, _ = base.split(0.5, 0.5, seed=1, by=patients)
    assert ids_of(numbers) == [2, 4, 5, 8, 10, 11, 14, 16, 17]
    assert base.subset([3, 1, 19]).contents.fingerprint.startswith("bec4ff4d0f72169a0ebcd80d")


def labelled(counts: list[int], **more: Any) -> Values:
    """Return labels of classes of these sizes, one after the other, as in a folder."""
    labels = np.repeat(np.arange(len(counts)), counts)
    columns = {"value": np.arange(len(labels)), "label": labels}
    names = [f"c{i}" for i in range(len(counts))]
    return Values([len(labels)], columns, types={"label": classes(*names)}, **more)


@examples(60)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    shares=st.sampled_from([(0.5, 0.5), (0.6, 0.3, 0.1), (0.25, 0.25)]),
    seed=st.integers(0, 9),
)
def test_a_split_by_classes_keeps_their_shares(
    counts: list[int], shares: tuple[float, ...], seed: int
) -> None:
    base = labelled(counts)
    labels = np.repeat(np.arange(len(counts)), counts)
    try:
        parts = base.split(*shares, seed=seed, by="label")
    except ConfigError:
        assert sum(counts) < 20
        return
    for share, part in zip(shares, parts, strict=True):
        mine = np.bincount(labels[ids_of(part)], minlength=len(counts))
        assert abs(len(part) - share * len(base)) < 1 + 1e-6
        assert (np.abs(mine - share * np.array(counts)) < 2 + 1e-6).all()


@examples(60)
@given(
    patients=st.lists(st.integers(-3, 12), min_size=10, max_size=80),
    seed=st.integers(0, 9),
    kind=st.sampled_from(["field", "array", "strings", "names"]),
)
def test_a_split_by_groups_never_divides_one(patients: list[int], seed: int, kind: str) -> None:
    base = Values([len(patients)], {"value": np.array(patients), "label": np.array(patients)})
    by: Any = {
        "field": "value",
        "array": np.array(patients),
        "strings": [f"p{patient}" for patient in patients],
        "names": lambda name: f"p{patients[int(name.rsplit('/')[-1])]}",
    }[kind]
    try:
        parts = base.split(0.5, 0.5, seed=seed, by=by)
    except ConfigError:
        assert max(patients.count(patient) for patient in patients) > 0.3 * len(patients)
        return
    groups = [{patients[i] for i in ids_of(part)} for part in parts]
    assert not groups[0] & groups[1]
    assert sum(map(len, parts)) == len(base)
    assert [ids_of(part) for part in base.split(0.5, 0.5, seed=seed, by=by)] == [
        ids_of(part) for part in parts
    ]


def test_sizes_of_groups_are_near_the_shares() -> None:
    patients = np.random.default_rng(0).integers(0, 500, 10_000)
    base = Values([10_000], {"value": patients})
    train, test = base.split(0.9, 0.1, seed=4, by="value")
    assert abs(len(train) - 9000) < 60
    assert len(train) + len(test) == 10_000


def test_a_class_field_is_grouped_by_its_values() -> None:
    base = labelled([10, 10, 10, 10])
    left, right = base.split(0.5, 0.5, seed=0, by=base.column("label"))
    assert {i // 10 for i in ids_of(left)}.isdisjoint(i // 10 for i in ids_of(right))
    stratified, _ = base.split(0.5, 0.5, seed=0, by="label")
    assert {i // 10 for i in ids_of(stratified)} == {0, 1, 2, 3}


def test_splits_of_parts_keep_the_samples_of_the_dataset() -> None:
    base = labelled([40, 40])
    train, _ = base.split(0.5, 0.5, seed=0, by="label")
    inner, rest = train.split(0.5, 0.5, seed=1, by="label")
    assert set(ids_of(inner)) | set(ids_of(rest)) == set(ids_of(train))
    assert {i // 40 for i in ids_of(inner)} == {0, 1}


@pytest.mark.parametrize(
    ("shares", "more", "message"),
    [
        ((), {}, "got no shares"),
        ((0.0, 1.0), {}, "got the share 0.0"),
        ((1.5,), {}, "got the share 1.5"),
        ((0.9, 0.2), {}, "add up to 1.1, wanted at most 1"),
        ((True,), {}, "got the share True"),
        ((0.9, 0.02), {}, "the share 0.02 of 8 samples of memory:values holds no sample"),
        ((0.5, 0.5), {"seed": "a"}, "got seed='a', wanted an integer"),
        ((0.5, 0.5), {"by": "nothing"}, 'by="nothing" is no field'),
        ((0.5, 0.5), {"by": "array"}, r'by="array" is a field of Array.*texts or integers'),
        ((0.5, 0.5), {"by": [1, 2]}, r"keys of int64 in shape \(2,\), wanted .* each of the 8"),
        ((0.5, 0.5), {"by": np.zeros(8)}, "keys of float64"),
        ((0.5, 0.5), {"by": np.zeros(8, int)}, "1 group, which can't fill 2 parts"),
        ((0.5, 0.5), {"by": lambda _: None}, "keys of object"),
        ((0.9, 0.1), {"by": [0] * 4 + [1] * 4}, "the share 0.1 of .* holds no group"),
    ],
)
def test_invalid_splits_are_rejected(
    shares: tuple[float, ...], more: dict[str, Any], message: str
) -> None:
    columns = {"value": np.arange(8), "array": np.arange(8)}
    base = Values([4, 4], columns, types={"array": Array("int64", (1,))})
    with pytest.raises(ConfigError, match=message):
        base.split(*shares, **{"seed": 0, **more})


def test_a_column_is_read_alone() -> None:
    base = Values([4] * 5, {"value": np.arange(20), "text": np.arange(20)}, types={"text": Text()})
    some = base.subset(range(3, 17))
    column = some.column("value")
    assert isinstance(column, np.ndarray)
    assert column.tolist() == list(range(3, 17))
    assert np.all(some.column("value.present"))
    assert base.reads == []
    with pytest.raises(ConfigError, match=r'"x": no field of memory:values, wanted one of values'):
        some.column("x")


KEYS: list[Any] = [
    {
        number: f"patient {number // 2}" for number in range(8)
    },  # once made one group per sample, a leak
    {*range(8)},
    [[1], [2, 3]] * 4,
]


@pytest.mark.parametrize("by", KEYS, ids=["mapping", "set", "ragged"])
def test_keys_of_groups_are_a_list(by: Any) -> None:
    with pytest.raises(ConfigError, match="split: by="):
        Values([8]).split(0.5, 0.5, seed=0, by=by)


def test_a_group_may_be_a_lone_surrogate() -> None:
    """Names of files that aren't UTF-8 hold them."""
    parts = Values([8]).split(0.5, 0.5, seed=0, by=["\ud800", "b"] * 4)
    assert [len(part) for part in parts] == [4, 4]


def test_ids_are_numbers() -> None:
    with pytest.raises(ConfigError, match="subset: got"):
        Values([8]).subset([[1], [2, 3]])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="no field"):
        Values([8]).column(3)  # type: ignore[arg-type]


def test_names_that_no_file_can_have() -> None:
    """JSON can hold a lone surrogate."""
    with pytest.raises(ConfigError, match='fields\\["image"\\]'):
        parse_field_place("image", "im\ud800")
    table = jsonl_table(b'{"path": "\\ud800.jpg"}', source="list.jsonl")
    listed = ListedTable(table=table, folders=[b""], files={"path": "image"})
    with pytest.raises(DatasetError, match="jsonl, line 1"):
        listed_samples("here", {}, listed, {})


@examples(60)
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
    with pytest.raises(ConfigError, match="has 0 to 13"):
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


def test_repr_and_pickle_of_a_concatenation() -> None:
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
        (Values([3], name="y"), 'memory:x and memory:y has a field "label"'),
        (
            labels("a", "b", name="y", extra=np.zeros(4)),
            'memory:x and memory:y has a field "extra"',
        ),
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


def test_classes_of_boxes_that_do_not_fit_are_named_with_their_boxes() -> None:
    def boxed(*names: str) -> Values:
        types: dict[str, FieldType] = {"classes": ClassLabels(names, of="boxes")}
        types |= {"boxes": Boxes(of="image"), "image": Image()}
        return Values([4], {name: np.zeros(4, np.int64) for name in types}, types=types)

    with pytest.raises(ConfigError, match=r"ClassLabels\(\[...\], of=\"boxes\"\)"):
        concat([boxed("a", "b"), boxed("b", "a")])


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
    with pytest.raises(ConfigError, match=r'has a field "name".*Pass the same fields='):
        concat([*named, Dataset(roots[1], manifest="list.csv", fields=("label",))])


@pytest.mark.parametrize("sources", [[], None, "ab", [1], Values([2])])
def test_only_lists_of_datasets_are_accepted(sources: Any) -> None:
    with pytest.raises(ConfigError, match="concat: got"):
        concat(sources)
