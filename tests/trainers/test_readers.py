"""Datasets with annotations have what pycocotools and torchvision read from the same files."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock import DataLoader, Dataset
from tests.annotated_sets import PEOPLE, coco_set, instances, voc_set

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.trainers
MANIFEST = "annotations/instances_train2017.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    content = instances()
    content["categories"] = [*content["categories"], {**PEOPLE[0], "id": 2, "name": "walker"}]
    for each in content["annotations"][::2]:
        x, y, *_ = each["bbox"]
        each |= {"category_id": 2, "keypoints": [x, y, 2, x + 3, y, 1, 0, 0, 0], "num_keypoints": 2}
    return coco_set(tmp_path, content)


def read(dataset: Dataset) -> dict[Any, dict[str, Any]]:
    """Return all fields of all samples by their image ids."""
    names = tuple(name for name in dataset.schema if name not in ("image", "masks"))
    with DataLoader(dataset.select(*names), 64, as_dict=True) as loader:
        batch: dict[str, Any] = next(iter(loader))  # type: ignore[assignment]
    ids = batch["image_id"] if isinstance(batch["image_id"], list) else batch["image_id"].tolist()
    return {id: {name: batch[name][row] for name in names} for row, id in enumerate(ids)}


def test_instances_are_those_of_pycocotools(root: Path) -> None:
    coco_api = pytest.importorskip("pycocotools.coco")
    with redirect_stdout(io.StringIO()):
        coco = coco_api.COCO(str(root.parent / MANIFEST))
    dataset = Dataset(root, manifest=MANIFEST)
    labels: Any = dataset.schema["labels"]
    assert list(labels.ids) == sorted(coco.getCatIds())
    assert list(labels.names) == [each["name"] for each in coco.loadCats(labels.ids)]
    found = read(dataset)
    assert sorted(found) == sorted(coco.getImgIds())
    for image_id, sample in found.items():
        own = coco.loadAnns(coco.getAnnIds(imgIds=[image_id]))
        boxes = np.array([each["bbox"] for each in own], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        np.testing.assert_array_equal(sample["boxes"].numpy(), boxes)
        assert [labels.ids[n] for n in sample["labels"].tolist()] == [a["category_id"] for a in own]
        assert sample["annotation_ids"].tolist() == [a["id"] for a in own]
        assert sample["iscrowd"].tolist() == [a["iscrowd"] for a in own]
        np.testing.assert_allclose(sample["area"].numpy(), [a["area"] for a in own])
        points = [np.reshape(a.get("keypoints", [0] * 9), (3, 3)) for a in own]
        np.testing.assert_allclose(sample["keypoints"].numpy().reshape(-1, 3, 3), points or 0)
        (info,) = coco.loadImgs([image_id])
        assert sample["original_size"].tolist() == [info["height"], info["width"]]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools
def test_masks_are_those_of_pycocotools(root: Path) -> None:
    coco_api = pytest.importorskip("pycocotools.coco")
    with redirect_stdout(io.StringIO()):
        coco = coco_api.COCO(str(root.parent / MANIFEST))
    dataset = Dataset(root, manifest=MANIFEST, fields=("image", "masks", "image_id", "boxes"))
    with DataLoader(dataset, 1, as_dict=True, augment=[]) as loader:
        for batch in loader:
            (image_id,) = batch["image_id"].tolist()  # type: ignore[index]
            masks = batch["masks"][0].numpy()  # type: ignore[index]
            wanted = [coco.annToMask(a) for a in coco.loadAnns(coco.getAnnIds(imgIds=[image_id]))]
            assert len(masks) == len(wanted)
            for mask, other in zip(masks, wanted, strict=True):
                np.testing.assert_array_equal(mask, other)


def test_images_are_in_torchvisions_order(root: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    pytest.importorskip("pycocotools")
    with redirect_stdout(io.StringIO()):
        other = datasets.CocoDetection(str(root), str(root.parent / MANIFEST))
    with DataLoader(Dataset(root, manifest=MANIFEST, fields=("image_id",)), 64) as loader:
        (ids,) = next(iter(loader))
    assert ids.tolist() == other.ids


def test_objects_are_those_of_torchvisions_reader_of_pascal_voc(tmp_path: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    objects: dict[str, list[dict[str, Any]]] = {
        "2008_000001": [{"name": "dog", "box": (1, 2, 30, 20), "difficult": 0}],
        "2008_000002": [
            {"name": "person", "box": (3, 4, 9, 9), "difficult": 1},
            {"name": "cat", "box": (5.5, 6, 17, 18), "difficult": 0},
        ],
        "2008_000003": [],
    }
    root = voc_set(tmp_path / "VOCdevkit/VOC2008", objects, train=sorted(objects))
    other = datasets.VOCDetection(str(tmp_path), year="2008", image_set="train")
    dataset = Dataset(root)
    found = read(dataset)
    assert len(found) == len(other) == 3
    for _, target in other:
        notes = target["annotation"]
        sample = found[notes["filename"].removesuffix(".jpg")]
        own = notes.get("object", [])
        sides = ("xmin", "ymin", "xmax", "ymax")
        wanted = [[float(each["bndbox"][side]) for side in sides] for each in own]
        assert sample["boxes"].tolist() == wanted
        assert [dataset.classes[n] for n in sample["labels"]] == [each["name"] for each in own]
        assert sample["difficult"].tolist() == [int(each["difficult"]) for each in own]
        size = [int(notes["size"][side]) for side in ("height", "width")]
        assert sample["original_size"].tolist() == size
