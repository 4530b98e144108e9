"""Annotations in COCO's JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache import ConfigError, DatasetError, PenstockWarning
from penstock.readers import Dataset, concat, pack
from penstock.readers.fieldtypes import (
    Boxes,
    ClassLabels,
    EncodedColumn,
    InstanceKeypoints,
    RaggedColumn,
)
from tests import images
from tests.annotated_sets import PEOPLE, coco_set, image_entries, instances, pictures, roboflow_set
from tests.files import quarantine, uploaded
from tests.readers.remote_sets import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.readers import Source

MANIFEST = "annotations/instances_train2017.json"


def opened(url: Any, **arguments: Any) -> Dataset:
    dataset = Dataset(url, **{"manifest": MANIFEST, **arguments})
    dataset.open(verify=images.verify)
    return dataset


def samples_of(dataset: Source, *fields: str) -> Iterator[dict[str, Any]]:
    """Yield the stored samples, the texts decoded."""
    batch = dataset.read(rows_of(dataset), fields=fields or tuple(dataset.schema))
    for row in range(len(batch)):
        sample: dict[str, Any] = {}
        for name, column in batch.columns.items():
            value = column.sample(row)  # type: ignore[union-attr]
            is_text = isinstance(column, EncodedColumn) and name not in ("image", "masks")
            sample[name] = dataset.schema[name].decode(value) if is_text else value
        yield sample


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return coco_set(tmp_path_factory.mktemp("coco"), instances())


def expected() -> dict[int, list[dict[str, Any]]]:
    content = instances()
    return {
        image["id"]: [a for a in content["annotations"] if a["image_id"] == image["id"]]
        for image in content["images"]
    }


def check_equal(dataset: Source) -> None:
    """Check that a dataset has all that the annotations say."""
    wanted, sizes = expected(), {e["id"]: (e["height"], e["width"]) for e in image_entries()}
    labels = dataset.schema["labels"]
    assert isinstance(labels, ClassLabels)
    found = list(samples_of(dataset))
    assert sorted(int(sample["image_id"]) for sample in found) == sorted(wanted)
    for sample in found:
        image_id = int(sample["image_id"])
        own = wanted[image_id]
        assert sample["boxes"].tolist() == np.float32([a["bbox"] for a in own]).tolist()
        assert [labels.ids[n] for n in sample["labels"]] == [a["category_id"] for a in own]
        assert sample["iscrowd"].tolist() == [a["iscrowd"] for a in own]
        assert sample["annotation_ids"].tolist() == [a["id"] for a in own]
        assert json.loads(bytes(sample["masks"])) == [a["segmentation"] for a in own]
        assert sample["area"].tolist() == np.float32([a["area"] for a in own]).tolist()
        assert tuple(sample["original_size"].tolist()) == sizes[image_id]


def test_a_folder_and_its_annotations_are_a_dataset(root: Path) -> None:
    with opened(root) as dataset:
        assert dataset.fields == ("image", "boxes", "labels")
        assert dataset.classes == ("person", "dog", "toothbrush")
        assert len(dataset) == 12
        check_equal(dataset)
        shapes = [len(column) for column in dataset.read(rows_of(dataset)).columns.values()]
        assert shapes == [12] * 3


def test_images_have_the_order_of_their_ids_as_torchvision_reads_them(root: Path) -> None:
    with opened(root) as dataset:
        ids = [int(sample["image_id"]) for sample in samples_of(dataset, "image_id")]
    assert ids == sorted(e["id"] for e in image_entries())


@pytest.mark.parametrize("place", ["below", "beside", "absolute", "working directory"])
def test_annotations_may_lie_at_several_places(
    root: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "working directory":
        monkeypatch.chdir(root.parent / "annotations")
    url, manifest = {
        "below": (root.parent, MANIFEST),
        "beside": (root, MANIFEST),
        "absolute": (root, root.parent / MANIFEST),
        "working directory": (root, "instances_train2017.json"),
    }[place]
    with opened(url, manifest=manifest) as dataset:
        check_equal(dataset)


@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
@pytest.mark.parametrize("is_url", [False, True])
def test_annotations_lie_next_to_a_remote_folder(root: Path, tmp_path: Path, is_url: bool) -> None:
    with uploaded(root.parent) as url:
        manifest = f"{url}/{MANIFEST}" if is_url else MANIFEST
        with opened(f"{url}/train2017", manifest=manifest, cache=tmp_path / "cache") as dataset:
            check_equal(dataset)


def test_a_pack_keeps_everything(root: Path, tmp_path: Path) -> None:
    with opened(root) as dataset:
        pack(root, tmp_path / "a", manifest=MANIFEST, verify=images.verify)
        pack(dataset, tmp_path / "b", verify=images.verify)
        schema = dataset.schema
    for name in ("a", "b"):
        with Dataset(tmp_path / name) as packed:
            assert packed.schema == schema
            assert packed.fields == ("image", "boxes", "labels")
            check_equal(packed)


def test_roboflows_folder_is_recognised(tmp_path: Path) -> None:
    with opened(roboflow_set(tmp_path / "train", instances()), manifest=None) as dataset:
        check_equal(dataset)


def test_an_edited_file_of_annotations_makes_a_new_index(tmp_path: Path) -> None:
    root = coco_set(tmp_path, instances())
    with opened(root) as dataset:
        assert len(dataset) == 12
    content = instances()
    content["images"] = content["images"][:5]
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.warns(PenstockWarning, match="annotations are left out: their image_id"):
        assert len(opened(root)) == 5


def test_a_list_of_classes_gives_their_numbers(root: Path) -> None:
    names = ("toothbrush", "cat", "person", "dog")
    with opened(root, schema={"labels": ClassLabels(names, of="boxes")}) as dataset:
        assert dataset.classes == names
        found = {int(s["image_id"]): s["labels"].tolist() for s in samples_of(dataset)}
    number_of = {90: 0, 1: 2, 18: 3}
    assert found == {i: [number_of[a["category_id"]] for a in own] for i, own in expected().items()}
    ordered = ClassLabels(("toothbrush", "dog", "person"), of="boxes")
    with opened(root, schema={"labels": ordered}) as dataset:
        assert dataset.schema["labels"] == replace(ordered, ids=(90, 18, 1))
    with pytest.raises(ConfigError, match="has the class 'dog'"):
        opened(root, schema={"labels": ClassLabels(("person", "toothbrush"), of="boxes")})
    with pytest.raises(ConfigError, match="stores Boxes"):
        opened(root, schema={"boxes": Boxes(of="image", format="cxcywh")})


def test_captions_are_lists_of_texts(tmp_path: Path) -> None:
    entries = image_entries()
    captions = [
        {"id": n, "image_id": e["id"], "caption": f"é {n}\n"} for n, e in enumerate(entries[2:] * 2)
    ]
    name = "captions_train2017.json"
    root = coco_set(tmp_path, {"images": entries, "annotations": captions}, name)
    with opened(root, manifest=f"annotations/{name}") as dataset:
        assert dataset.fields == ("image", "captions")
        found = {int(s["image_id"]): s["captions"] for s in samples_of(dataset)}
    wanted = {
        e["id"]: [c["caption"] for c in captions if c["image_id"] == e["id"]] for e in entries
    }
    assert found == wanted


def test_keypoints_are_rows_of_x_y_and_visibility(tmp_path: Path) -> None:
    content = instances()
    content["categories"] = PEOPLE
    for each in content["annotations"]:
        x, y, *_ = each["bbox"]
        each |= {"category_id": 1, "keypoints": [x, y, 2, x + 1, y, 1, 0, 0, 0]}
    del content["annotations"][0]["keypoints"]
    with opened(coco_set(tmp_path, content)) as dataset:
        type = dataset.schema["keypoints"]
        assert type == InstanceKeypoints(
            of="boxes", points=3, names=("nose", "left_eye", "right_eye"), mirrored=(0, 2, 1)
        )
        assert dataset.fields == ("image", "boxes", "labels", "keypoints")
        column = dataset.read(rows_of(dataset)).columns["keypoints"]
    assert isinstance(column, RaggedColumn)
    assert column.values.shape == (len(content["annotations"]), 3, 3)
    assert (column.values == 0).all(axis=(1, 2)).sum() == 1


def test_a_file_name_may_name_another_folder_or_be_part_of_a_url(tmp_path: Path) -> None:
    content = instances()
    for number, image in enumerate(content["images"]):
        name = image.pop("file_name")
        url = {"coco_url": f"http://images.cocodataset.org/train2017/{name}"}
        image |= url if number % 2 else {"file_name": f"train2017/{name}"}
    with opened(coco_set(tmp_path, content)) as dataset:
        check_equal(dataset)


def changed(**changes: Any) -> dict[str, Any]:
    return {**instances(), **changes}


def twice(name: str) -> dict[str, Any]:
    content = instances()
    content[name] = [*content[name], content[name][0]]
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"image_id": 1, "score": 0.5}], "got a list, wanted COCO's annotations"),
        ({"info": 1}, r"got the keys \['info'\], wanted COCO's annotations"),
        (changed(annotations=[3]), "wanted COCO's annotations"),
        (changed(images=[]), "lists no images"),
        (twice("images"), "1 ids of its images occur more than once, such as 1000"),
        (twice("annotations"), "1 ids of its annotations occur more than once"),
        (twice("categories"), "1 ids of its categories occur more than once"),
        (changed(images=[{"id": "a", "file_name": "a.jpg"}]), "wanted an integer for each"),
        (changed(annotations=[{"id": 1, "image_id": 1000}]), "wanted bbox or caption"),
        (changed(annotations=[{"id": 1, "segments_info": []}]), "panoptic"),
        (changed(images=[{"id": 1, "file_name": "no.jpg"}]), "none of the 1 images"),
        (changed(categories=[]), "have categories, but it lists none"),
    ],
)
@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
def test_a_file_that_cannot_be_right_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        opened(coco_set(tmp_path, content))


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    root = coco_set(tmp_path, instances())
    places = f"neither .*, .* nor .* exists. Tables there: .*/{MANIFEST}"
    with pytest.raises(ConfigError, match=places):
        opened(root, manifest="annotations/missing.json")
    (tmp_path / MANIFEST).write_text('{"images": [')
    with pytest.raises(DatasetError, match="isn't JSON"):
        opened(root)
    with pytest.raises(DatasetError, match=r"no _annotations.coco.json. Pass the file"):
        opened(root, manifest=None, format="coco")
    with pytest.raises(ConfigError, match='pass format="coco"'):
        opened(root, format="folder")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bbox": [1, 2, -3, 4]}, "box 0 is inverted"),
        ({"bbox": [500, 2, 3, 4]}, "box 0 lies outside its image"),
        ({"bbox": [1, 2, 3]}, "wanted 4 numbers"),
        ({"bbox": [1, 2, float("nan"), 3]}, "box 0 isn't finite"),
        (
            {"category_id": 7},
            '"category_id" = 7, wanted the id of one of the categories, 1, 18, 90',
        ),
        ({"category_id": 1.5}, '"category_id" = 1.5, wanted the id'),
        ({"iscrowd": "no"}, "wanted 0 or 1"),
        ({"area": None}, "wanted a number"),
        ({"segmentation": [[1, 2, 3, 4]]}, "masks: "),
        ({"segmentation": {"size": [9, 9], "counts": [81]}}, "masks: "),
        ({"segmentation": {"size": [41, 59], "counts": [81]}}, "masks: "),
        ({"bbox": None}, "wanted 4 numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
def test_an_image_with_a_wrong_annotation_is_left_out(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    content = instances()
    content["annotations"][0] |= change
    with opened(coco_set(tmp_path, content), allow_left_out=1) as dataset:
        assert len(dataset) == 11
        (found,) = quarantine(dataset.index.place).values()
    assert reason in found


def test_whole_numbers_that_were_written_as_floats_are_ids(tmp_path: Path) -> None:
    """pandas writes 3.0 for 3 if some rows lack a value; pycocotools reads it, too."""
    content = instances()
    for each in content["annotations"]:
        each |= {key: float(each[key]) for key in ("id", "image_id", "category_id", "iscrowd")}
    for each in [*content["images"], *content["categories"]]:
        each["id"] = float(each["id"])
    for each in content["images"]:
        each |= {key: float(each[key]) for key in ("height", "width")}
    with opened(coco_set(tmp_path, content)) as dataset:
        check_equal(dataset)


def test_left_out_images_are_reported_once(tmp_path: Path) -> None:
    content = instances()
    content["annotations"][0]["category_id"] = 7
    root = coco_set(tmp_path, content)
    max(root.iterdir()).unlink()
    with pytest.warns(PenstockWarning) as caught:
        opened(root, allow_left_out=1)
    (message,) = [str(each.message) for each in caught]
    assert "2 of 12 samples" in message
    assert "category_id" in message
    assert "the image isn't there" in message


@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
def test_images_that_are_missing_or_have_another_size_are_left_out(tmp_path: Path) -> None:
    content = instances()
    content["images"][0]["height"] = 7
    content["images"][1]["width"] = None
    root = coco_set(tmp_path, content)
    next(iter(sorted(root.iterdir(), reverse=True))).unlink()
    with pytest.raises(DatasetError, match="left out"):
        opened(root)
    with opened(root, allow_left_out=0.5) as dataset:
        reasons = quarantine(dataset.index.place)
        sizes = {tuple(s["original_size"].tolist()) for s in samples_of(dataset, "original_size")}
    assert sorted(reasons) == ["000000000000.jpg", "000000000011.jpg"]
    assert "an image 60 wide and 7 high, and it is 60" in reasons["000000000000.jpg"]
    assert "the image isn't there" in reasons["000000000011.jpg"]
    assert len(sizes) == 10
    assert (0, 0) not in sizes


def test_categories_of_one_name_get_their_ids(tmp_path: Path) -> None:
    content = instances()
    content["categories"] = [{**each, "name": "thing"} for each in content["categories"]]
    with opened(coco_set(tmp_path, content)) as dataset:
        assert dataset.classes == ("thing (1)", "thing (18)", "thing (90)")


def test_datasets_of_the_same_classes_are_joined(root: Path, tmp_path: Path) -> None:
    other = roboflow_set(tmp_path / "more", instances())
    joined = concat([opened(root), opened(other, manifest=None)])
    assert len(joined) == 24
    assert joined.classes == ("person", "dog", "toothbrush")
    assert len(pictures()) == 12
