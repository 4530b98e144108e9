"""Types of annotations: classes and keypoints of boxes, sizes of images, lists of texts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache import ConfigError
from penstock.readers import Dataset
from penstock.readers.fieldtypes import (
    Boxes,
    ClassLabels,
    Image,
    ImageSize,
    InstanceKeypoints,
    RaggedColumn,
    Schema,
    Texts,
)
from tests import images
from tests.files import quarantine
from tests.readers.remote_sets import rows_of

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("cat", "dog")
SCHEMA = {
    "boxes": Boxes(of="image"),
    "labels": ClassLabels(NAMES, of="boxes"),
    "points": InstanceKeypoints(of="boxes", points=1),
}


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (ClassLabels, {"names": NAMES, "ids": (1,)}, "got 1 ids for 2 names"),
        (ClassLabels, {"names": NAMES, "ids": (1, 1)}, "a different id for each class"),
        (ClassLabels, {"names": NAMES, "ids": (1, True)}, "wanted a list of integers"),
        (ClassLabels, {"names": ("cat", "cat")}, "got 'cat' twice"),
        (InstanceKeypoints, {"of": "boxes", "points": 0}, "got points=0"),
        (InstanceKeypoints, {"of": "boxes", "points": 2, "names": ("a",)}, "one for each of the 2"),
        (InstanceKeypoints, {"of": "boxes", "points": 2, "mirrored": (0, 0)}, "number from 0 to 1"),
        (InstanceKeypoints, {"of": "boxes", "points": 1, "names": (3,)}, "wanted texts"),
        (InstanceKeypoints, {"of": "boxes", "points": 1, "format": "yx"}, '"xy" or "xy_norm"'),
        (InstanceKeypoints, {"of": 3, "points": 1}, "of="),
        (ImageSize, {"of": ""}, "of="),
    ],
)
def test_wrong_arguments_are_refused(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**arguments)


def test_a_schema_of_them_is_json() -> None:
    points = InstanceKeypoints(
        of="boxes", points=2, names=("left", "right"), mirrored=(1, 0), format="xy_norm"
    )
    schema = Schema(
        {
            "image": Image(),
            "boxes": Boxes(of="image"),
            "labels": ClassLabels(NAMES, of="boxes", ids=(7, 9)),
            "points": points,
            "size": ImageSize(of="image"),
            "captions": Texts(),
        }
    )
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    assert schema.class_names() == NAMES
    with pytest.raises(ConfigError, match='"image" is no field of type Boxes'):
        Schema({"image": Image(), "labels": ClassLabels(NAMES, of="image")})


def table(tmp_path: Path, rows: list[dict[str, Any]]) -> Dataset:
    files = {f"{n}.jpg": images.jpeg(n) for n in range(len(rows))}
    lines = [json.dumps({"path": name, **row}) for name, row in zip(files, rows, strict=True)]
    files["list.jsonl"] = "\n".join(lines).encode()
    root = images.write_folder(tmp_path / "set", files)
    dataset = Dataset(root, manifest="list.jsonl", schema=SCHEMA, allow_left_out=1)
    dataset.open(verify=images.verify)
    return dataset


@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
def test_a_table_may_hold_names_or_numbers(tmp_path: Path) -> None:
    box, point = [1, 2, 3, 4], [[1, 2, 2]]
    rows = [
        {"boxes": [box, box], "labels": ["dog", "cat"], "points": [point, point]},
        {"boxes": [], "labels": [], "points": []},
        {"boxes": [box], "labels": [1], "points": [point]},
        {"boxes": [box], "labels": ["cow"], "points": [point]},
        {"boxes": [box], "labels": [2], "points": [point]},
        {"boxes": [box], "labels": [0, 0], "points": [point]},
        {"boxes": [box], "labels": [0], "points": [[[1, 2]]]},
        {"boxes": [box], "labels": [0], "points": [point, point]},
    ]
    with table(tmp_path, rows) as dataset:
        assert dataset.fields == ("image", "boxes", "labels", "points")
        columns = dataset.read(rows_of(dataset)).columns
        reasons = quarantine(dataset.index.place)
    labels, points = columns["labels"], columns["points"]
    assert isinstance(labels, RaggedColumn)
    assert isinstance(points, RaggedColumn)
    assert labels.values.tolist() == [1, 0, 1]
    assert labels.offsets.tolist() == points.offsets.tolist() == [0, 2, 2, 3]
    assert points.values.shape == (3, 1, 3)
    expected = {
        "3.jpg": "'cow' isn't a class",
        "4.jpg": "2 isn't a class",
        "5.jpg": '2 rows for the 1 boxes of "boxes"',
        "6.jpg": "points",
        "7.jpg": '2 rows for the 1 boxes of "boxes"',
    }
    assert sorted(reasons) == sorted(expected)
    for name, reason in expected.items():
        assert reason in reasons[name]


def test_values_are_checked_by_their_types() -> None:
    labels = ClassLabels(NAMES)
    assert labels.check_values(np.array([0, 1])) is None
    refusal = labels.check_values(np.array([0, 5, -1]))
    assert refusal is not None
    assert "box 1 has the class 5, which is none of the 2 classes" in refusal.reason
    points = InstanceKeypoints(of="boxes", points=2)
    assert points.check_values(np.zeros((0, 2, 3), np.float32)) is None
    refusal = points.check_values(np.array([[[1, 2, 3]] * 2, [[1, np.nan, 3]] * 2]))
    assert refusal is not None
    assert refusal.reason == "box 1 has a keypoint that isn't finite"


def test_texts_are_lists_of_str() -> None:
    texts = Texts()
    payload = np.frombuffer(texts.encode(["a\n", "ü"]), np.uint8)
    assert texts.decode(payload) == ["a\n", "ü"]
    assert texts.decode(payload[:0]) == texts.empty == []
    assert texts.returned(("a", "b")) == ["a", "b"]
    for wrong in ("a", [1]):
        with pytest.raises(ValueError, match="list of str"):
            texts.returned(wrong)
    for data in (b'["a"', b'{"a": 1}', b"[1]"):
        with pytest.raises(ValueError, match="not a JSON list of texts"):
            texts.decode(np.frombuffer(data, np.uint8))
