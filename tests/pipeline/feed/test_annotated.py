"""Datasets with annotations through a whole job: fields of boxes follow their image together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock import (
    CenterCrop,
    DataLoader,
    Dataset,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    SanitizeBoxes,
)
from tests.annotated_sets import PEOPLE, coco_set, instances, yolo_set

if TYPE_CHECKING:
    from pathlib import Path

FIELDS = (
    *("image", "boxes", "labels", "masks", "keypoints", "area", "iscrowd", "annotation_ids"),
    *("image_id", "original_size"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    content = instances()
    content["categories"] = PEOPLE
    for each in content["annotations"]:
        x, y, width, height = each["bbox"]
        each |= {"category_id": 1, "keypoints": [x, y, 2, x + width, y + height, 1, 0, 0, 0]}
    return coco_set(tmp_path_factory.mktemp("coco"), content)


def batch_of(root: Path, augment: list[Any], fields: Any = FIELDS) -> dict[str, Any]:
    manifest = "annotations/instances_train2017.json"
    dataset = Dataset(root, manifest=manifest, fields=fields)
    with DataLoader(dataset, 12, augment=augment, as_dict=True, seed=3) as loader:
        return dict(next(iter(loader)))  # type: ignore[call-overload]


def test_all_rows_of_a_box_are_dropped_together(root: Path) -> None:
    batch = batch_of(root, [RandomResizedCrop(32, scale=(0.1, 0.4)), SanitizeBoxes(min_size=4)])
    boxes, total = batch["boxes"], len(instances()["annotations"])
    kept = len(boxes.values)
    assert 0 < kept < total
    assert batch["masks"].values.shape == (kept, 32, 32)
    assert batch["keypoints"].values.shape == (kept, 3, 3)
    for name in ("labels", "area", "iscrowd", "annotation_ids", "masks", "keypoints"):
        assert batch[name].offsets.tolist() == boxes.offsets.tolist()
    known = {each["id"]: each for each in instances()["annotations"]}
    owners = np.repeat(batch["image_id"].numpy(), np.diff(boxes.offsets.numpy()))
    ids = batch["annotation_ids"].values.tolist()
    assert [known[each]["image_id"] for each in ids] == owners.tolist()
    assert batch["original_size"].tolist() != [[32, 32]] * 12


@pytest.mark.parametrize(
    ("flips", "is_mirrored"),
    [
        ([], False),
        ([RandomHorizontalFlip(1)], True),
        ([RandomVerticalFlip(1)], True),
        ([RandomHorizontalFlip(1), RandomVerticalFlip(1)], False),
    ],
)
def test_left_and_right_points_are_exchanged_in_a_mirrored_image(
    root: Path, flips: list[Any], is_mirrored: bool
) -> None:
    batch = batch_of(root, [CenterCrop(32), *flips], ("image", "keypoints"))
    visible = batch["keypoints"].values[..., 2].tolist()
    assert visible == [[2, 0, 1] if is_mirrored else [2, 1, 0]] * len(visible)


def test_poses_in_fractions_are_delivered_in_pixels(tmp_path: Path) -> None:
    names = "train: images/train\nkpt_shape: [1, 3]\nnames: [person]\n"
    pose = "0 0.5 0.5 0.25 0.25 0.5 0.25 2"
    described = yolo_set(tmp_path / "people", {"a": pose, "b": f"{pose}\n{pose}"}, names)
    with DataLoader(Dataset(described), 2, augment=[Resize((40, 80))]) as loader:
        _, boxes, labels, keypoints = next(iter(loader))
    assert boxes.values.tolist() == [[30, 15, 50, 25]] * 3
    assert labels.values.tolist() == [0] * 3
    assert keypoints.values.tolist() == [[[40, 10, 2]]] * 3
