"""Pascal VOC's annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache import ConfigError, DatasetError
from penstock.readers import Dataset, pack
from penstock.readers.formats.annotated import VOC_CLASSES
from tests import images
from tests.annotated_sets import size_of, voc_set
from tests.files import quarantine, uploaded
from tests.images import write_folder
from tests.readers.formats.test_coco import samples_of

if TYPE_CHECKING:
    from pathlib import Path

OBJECTS: dict[str, list[dict[str, Any]]] = {
    "2008_000001": [{"name": "dog", "box": (1, 2, 30, 20), "difficult": 0, "truncated": 1}],
    "2008_000002": [
        {"name": "person", "box": (3.5, 4, 9, 9), "pose": "Left", "difficult": 1, "truncated": 0},
        {"name": "cat", "box": (5, 6, 17, 18), "difficult": 0},
    ],
    "2008_000003": [],
}
LISTS = {"train": ["2008_000002", "2008_000001"], "val": ["2008_000003"]}
LISTS |= {"dog_train": ["2008_000002 -1", "2008_000001  1"]}


def opened(root: Path | str, **arguments: Any) -> Dataset:
    dataset = Dataset(root, **arguments)
    dataset.open(verify=images.verify)
    return dataset


def found_in(dataset: Dataset) -> dict[str, dict[str, Any]]:
    return {sample["image_id"]: sample for sample in samples_of(dataset)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return voc_set(tmp_path_factory.mktemp("VOCdevkit") / "VOC2008", OBJECTS, **LISTS)


def check(dataset: Dataset, *names: str) -> None:
    """Check that a dataset has these images, and all of their objects."""
    found = found_in(dataset)
    assert sorted(found) == sorted(names)
    for name, sample in found.items():
        wanted = OBJECTS[name]
        assert sample["boxes"].tolist() == [list(each["box"]) for each in wanted]
        assert [VOC_CLASSES[n] for n in sample["labels"]] == [each["name"] for each in wanted]
        for flag in {"difficult", "truncated"} & {*sample}:  # of all objects of the part
            assert sample[flag].tolist() == [each.get(flag, 0) for each in wanted]
        size = size_of(sorted(OBJECTS).index(name))
        assert tuple(sample["original_size"].tolist()) == size


def test_the_folder_is_recognised_and_train_is_its_default_part(root: Path) -> None:
    with opened(root) as dataset:
        assert dataset.kind == "voc"
        assert dataset.fields == ("image", "boxes", "labels")
        assert dataset.classes == VOC_CLASSES
        check(dataset, "2008_000001", "2008_000002")


def test_other_parts_are_chosen_by_name(root: Path) -> None:
    with opened(root, split="val", format="voc") as dataset:
        check(dataset, "2008_000003")
    with opened(root, split="dog_train") as dataset:
        check(dataset, "2008_000001")
    with pytest.raises(ConfigError, match=r"wanted one of the parts .* 'val', 'train'"):
        opened(root, split="test")


@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
def test_a_remote_dataset_and_a_pack_are_the_same(root: Path, tmp_path: Path) -> None:
    with uploaded(root) as url, opened(url, cache=tmp_path / "cache") as dataset:
        check(dataset, "2008_000001", "2008_000002")
    pack(root, tmp_path / "pack", split="train", verify=images.verify)
    check(Dataset(tmp_path / "pack"), "2008_000001", "2008_000002")


def test_without_lists_all_annotated_images_are_samples(tmp_path: Path) -> None:
    with opened(voc_set(tmp_path / "set", OBJECTS)) as dataset:
        assert len(dataset) == 3


def test_other_classes_are_those_of_all_parts(tmp_path: Path) -> None:
    objects = {**OBJECTS, "x": [{"name": "zebra", "box": (1, 1, 2, 2)}]}
    with opened(voc_set(tmp_path / "set", objects, train=["x"], val=["2008_000001"])) as dataset:
        assert dataset.classes == ("cat", "dog", "person", "zebra")
        assert len(dataset) == 1


@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
def test_wrong_annotations_are_left_out_with_reasons(tmp_path: Path) -> None:
    box = {"name": "dog", "box": (1, 2, 3, 4)}
    root = voc_set(
        tmp_path / "set",
        {
            "good": [box],
            "inverted": [{**box, "box": (5, 2, 3, 4)}],
            "outside": [{**box, "box": (500, 2, 600, 4)}],
            "text": [{**box, "box": ("a", 2, 3, 4)}],
            "unnamed": [{**box, "name": ""}],
            "broken": [],
            "small": [],
        },
        train=["good", "inverted", "outside", "text", "unnamed", "broken", "small", "missing"],
    )
    (root / "Annotations/broken.xml").write_text("<annotation><object>")
    small = root / "Annotations/small.xml"
    small.write_text(small.read_text().replace("<width>54<", "<width>45<"))
    with opened(root, allow_left_out=1) as dataset:
        assert len(dataset) == 1
        reasons = quarantine(dataset.index.place)
    expected = {
        "inverted": "box 0 is inverted",
        "outside": "box 0 lies outside its image",
        "text": "object 0 (dog): xmin is 'a', wanted a number",
        "unnamed": "object 0 has no name",
        "broken": "can't be read",
        "small": "45 wide and 46 high, and it is 54 wide",
        "missing": "the image isn't there",
    }
    assert sorted(reasons) == sorted(f"JPEGImages/{name}.jpg" for name in expected)
    for name, reason in expected.items():
        assert reason in reasons[f"JPEGImages/{name}.jpg"]


def test_images_and_semantic_masks_are_paired_by_their_folders(tmp_path: Path) -> None:
    root = voc_set(tmp_path / "set", OBJECTS)
    masks = {
        f"SegmentationClass/{name}.png": np.full(size_of(n), n) for n, name in enumerate(OBJECTS)
    }
    write_folder(root, {name: images.png(mask.astype(np.uint8)) for name, mask in masks.items()})
    with opened(root, fields={"image": "JPEGImages", "mask": "SegmentationClass"}) as dataset:
        assert dataset.kind == "folder"
        assert list(dataset.schema) == ["image", "mask"]
        assert len(dataset) == 3


def test_another_folder_is_refused_with_advice(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"years of Pascal VOC. Give one of them: .*VOC2008"):
        opened(root.parent)
    with pytest.raises(DatasetError, match="no folder Annotations"):
        opened(root.parent, format="voc", index=tmp_path)
    with pytest.raises(ConfigError, match="files name no parts"):
        opened(images.class_folder(tmp_path / "photos", samples=3), split="train")
