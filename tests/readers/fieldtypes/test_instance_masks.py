"""Instance masks are drawn as COCO draws them, wherever a move puts them, and nothing is lost."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError, DatasetError
from penstock.readers import Rejection
from penstock.readers.fieldtypes import InstanceMasks, Segmentations, from_json
from tests.properties import examples
from tests.readers.fieldtypes.segmentations import (
    compressed,
    decoded,
    payload,
    polygons,
    runs_of,
    samples,
)

TYPE = InstanceMasks(of="boxes")


def bits(values, size, rows=None, columns=None):
    """Draw all masks of a sample."""
    rows = np.arange(size[0]) if rows is None else rows
    columns = np.arange(size[1]) if columns is None else columns
    out = np.zeros((len(values), len(rows), len(columns)), np.uint8)
    TYPE.decode(payload(values)).draw(size, rows, columns, out)
    return out


@examples(300)
@given(sample=samples())
def test_masks_equal_those_of_a_slow_drawer(sample):
    size, values = sample
    wanted = [decoded(each, *size) for each in values]
    assert bits(values, size).tolist() == [each.tolist() for each in wanted]


@given(sample=samples(), data=st.data())
def test_masks_are_drawn_where_a_move_shows_them(sample, data):
    """A move is any window, resize and flip of each axis, with some positions outside."""
    size, values = sample

    def index(side):
        low = data.draw(st.integers(0, side - 1))
        high = data.draw(st.integers(low + 1, side))
        length = data.draw(st.integers(1, 2 * side))
        found = low + np.arange(length) * (high - low) // length
        padded = np.pad(found, data.draw(st.integers(0, 3)), constant_values=-1)
        return padded[::-1] if data.draw(st.booleans()) else padded

    rows, columns = index(size[0]), index(size[1])
    shown = (rows >= 0)[:, None] & (columns >= 0)
    found = bits(values, size, rows, columns)
    for mask, value in zip(found, values, strict=True):
        assert mask.tolist() == (decoded(value, *size)[rows][:, columns] * shown).tolist()
    ids = np.zeros((1, len(rows), len(columns)), np.int32)
    TYPE.decode(payload(values)).draw(size, rows, columns, ids)
    numbers = np.arange(1, 1 + len(values))[:, None, None]
    assert ids[0].tolist() == (found * numbers).max(axis=0, initial=0).tolist()


@given(seed=st.integers(0, 999), share=st.sampled_from([0, 0.02, 0.5, 1]))
def test_compressed_runs_are_those_of_plain_ones(seed, share):
    rng = np.random.default_rng(seed)
    wanted = (rng.random(rng.integers(1, 90, 2)) < share).astype(np.uint8)
    value = {"size": [*wanted.shape], "counts": compressed(runs_of(wanted))}
    assert (bits([value], wanted.shape)[0] == wanted).all()


@given(sample=samples(), data=st.data())
def test_segmentations_are_kept_as_they_are_stored(sample, data):
    _, values = sample
    found = TYPE.decode(payload(values))
    assert [*found] == values
    assert len(found) == len(values) == TYPE.rows_of(payload(values))
    keep = np.array([data.draw(st.booleans()) for _ in values], np.bool_)
    assert [*found[keep]] == [each for each, is_kept in zip(values, keep, strict=True) if is_kept]
    assert TYPE.returned(values)[:] == values
    assert json.loads(TYPE.cell(values, is_text=False)) == values
    assert json.loads(TYPE.cell(json.dumps(values), is_text=True)) == values


@given(polygon=polygons(8))
def test_fractions_of_the_image_are_polygons_of_it(polygon):
    shares = np.clip(np.array(polygon) / 8, 0, 1)
    pixels = (shares.reshape(-1, 2) * [40, 30]).reshape(-1).tolist()
    norm = InstanceMasks(of="boxes", format="norm")
    found = np.zeros((1, 30, 40), np.uint8)
    segmentations = norm.decode(payload([[shares.tolist()]])).in_pixels((30, 40))
    segmentations.draw((30, 40), np.arange(30), np.arange(40), found)
    assert found[0].tolist() == decoded([pixels], 30, 40).tolist()


TRIANGLE = [1, 1, 5, 1, 5, 5]
RUNS = {"size": [4, 5], "counts": [3, 17]}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "{} isn't a list: wanted a list with one COCO segmentation for each box"),
        ([3], "3 of box 0 isn't a mask"),
        ([None, []], "box 1 has no polygon"),
        ([[[]]], r"\[\] of box 0 isn't a polygon: wanted x1, y1, x2, y2, x3, y3"),
        ([[[1, 2, 3, 4]]], "at least three points"),
        ([[[*TRIANGLE, 7]]], "isn't a polygon"),
        ([[TRIANGLE, 5]], "5 of box 0 isn't a polygon"),
        ([[[*TRIANGLE[:5], "7"]]], "'7' isn't a number"),
        ([[[*TRIANGLE[:5], True]]], "True isn't a number"),
        ([None, [[*TRIANGLE[:5], float("nan")]]], "box 1 has the number nan, wanted finite"),
        ([[[*TRIANGLE[:5], 1e12]]], "at most 67108864"),
        ([[[*TRIANGLE[:5], 10**400]]], "a number of more than 67108864"),
        ([{**RUNS, "counts": [10**400]}], "a number of more than"),
        ([{**RUNS, "size": [10**400, 5]}], "wanted at most 134,217,728 pixels"),
        ([{"counts": [20]}], "have the size None"),
        ([{"size": [4, 0], "counts": [0]}], r"have the size \[4, 0\]"),
        ([{"size": [4.5, 5], "counts": [20]}], r"have the size \[4.5, 5\]"),
        ([{"size": [4, 5]}], "the runs of box 0 are None"),
        ([{"size": [4, 5], "counts": [-3, 23]}], "the runs of box 0 are"),
        ([RUNS, {**RUNS, "counts": [3, 16]}], "the runs of box 1 don't sum to their size, 4 x 5"),
        ([{**RUNS, "counts": [3, 18]}], "don't sum"),
        ([{**RUNS, "counts": [2**80]}], "box 0 has the number"),
        ([{**RUNS, "counts": ""}], "don't sum"),
        ([{**RUNS, "counts": "oooooooooooooooo"}], "can't be read"),
        ([{**RUNS, "counts": "\x7fé"}], "can't be read"),
        ([RUNS, {"size": [5, 4], "counts": [20]}], "runs of several sizes .4 x 5 and 5 x 4"),
        ([{"size": [2**20, 2**20], "counts": [2**40]}], "wanted at most 134,217,728 pixels"),
    ],
)
def test_what_is_no_mask_is_a_bad_sample_with_a_reason(values, reason):
    with pytest.raises(ValueError, match=reason):
        TYPE.decode(payload(values))


numbers = st.one_of(
    st.integers(-(2**30), 2**30),
    st.floats(-1e3, 1e3, allow_nan=False),
    st.decimals(-(10**8), 10**8, places=2).map(float),
    st.sampled_from(["1e3", "-0", "0.5", "00", "1.", "-", "-.5", "123456789012345.6", "1E-2"]),
    st.sampled_from(["0.1234567890123456789", "12345678.87654321", "1" * 40, "7.0", " 8\n"]),
)


@st.composite
def documents(draw):
    """JSON of segmentations by many writers, some of it changed in a place."""
    separator = draw(st.sampled_from([",", ", ", " ,\n\t"]))

    def listed(values):
        return f"[{separator.join(map(str, values))}]"

    entries = []
    for _ in range(draw(st.integers(0, 3))):
        polygon = st.lists(numbers, min_size=6, max_size=6)
        runs = [f'"size"{draw(st.sampled_from([":", " : "]))}[3,4]']
        text = st.sampled_from(["<", "\\\\", "0<", "a4", "\\u0041", "\\n", "ü"])
        plain = st.sampled_from([[12], [3, 9], [0, 5, 7], [12.0], [13, -1], [2.5, 9.5], [5], []])
        counts = st.one_of(plain.map(listed), text.map(json.dumps), text.map('"{}"'.format))
        runs.append(f'"counts":{draw(counts)}')
        entry = st.one_of(
            st.lists(polygon.map(listed), min_size=1, max_size=2).map(listed),
            st.permutations(runs).map(lambda each: "{" + separator.join(each) + "}"),
            st.just("null"),
        )
        entries.append(draw(entry))
    text = listed(entries)
    if draw(st.booleans()):
        at, some = draw(st.integers(0, len(text))), st.text('[]{},"0 n\0', max_size=2)
        text = text[:at] + draw(some) + text[at + draw(st.integers(0, 2)) :]
    return text


@examples(500)
@given(text=documents())
def test_any_json_is_read_as_python_reads_it_or_is_refused(text):
    data = np.frombuffer(text.encode(), np.uint8)
    try:
        found = TYPE.decode(data)
    except ValueError:
        return
    assert [*found] == json.loads(text)


def test_bytes_that_are_no_json_are_a_bad_sample():
    for data in (b"", b"[", b"\xff", b"[" * 100_000):
        with pytest.raises(ValueError, match="isn't JSON"):
            TYPE.decode(np.frombuffer(data, np.uint8))


@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=127), max_size=12))
def test_any_compressed_text_decodes_or_is_refused(text):
    value = {"size": [3, 4], "counts": text}
    try:
        found = TYPE.decode(payload([value]))
    except ValueError:
        return
    assert found[0] == value
    assert bits([value], (3, 4)).max(initial=0) <= 1


def test_masks_of_another_size_than_their_image_are_refused():
    assert TYPE.check_values(payload([RUNS]), (4, 5)) is None
    assert TYPE.check_values(payload([[TRIANGLE]]), (9, 9)) is None
    refusal = TYPE.check_values(payload([RUNS]), (5, 4))
    assert isinstance(refusal, Rejection)
    assert refusal.reason == "it is 5 wide and 4 high and its image 4 wide and 5 high"
    with pytest.raises(DatasetError, match=r"5 wide and 4 high.*Index the data again"):
        bits([RUNS], (5, 4))


def test_facts_have_the_boxes_and_the_size():
    assert TYPE.check(payload([RUNS, None])).shape == (2, 4, 5)
    assert TYPE.check(payload([[TRIANGLE]])).shape == (1, 0, 0)


def test_fractions_have_their_own_rules():
    norm = InstanceMasks(of="boxes", format="norm")
    assert from_json(norm.to_json()) == norm != TYPE
    with pytest.raises(ValueError, match=r"aren't normalised: .*format=.pixels"):
        norm.decode(payload([[TRIANGLE]]))
    with pytest.raises(ValueError, match="wanted only polygons"):
        norm.decode(payload([RUNS]))
    with pytest.raises(ConfigError, match="got format='cm'"):
        InstanceMasks(of="boxes", format="cm")


def test_an_empty_sample_has_no_boxes():
    assert len(TYPE.empty) == 0
    assert [*TYPE.empty] == []
    assert isinstance(TYPE.empty, Segmentations)
