"""YOLO's labels: boxes, segments and poses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache import ConfigError, DatasetError
from penstock.readers import Dataset, is_mixture_file, pack
from penstock.readers.fieldtypes import InstanceKeypoints, InstanceMasks
from tests import images
from tests.annotated_sets import size_of, yolo_set
from tests.files import quarantine, uploaded
from tests.images import write_folder
from tests.readers.formats.test_coco import samples_of

if TYPE_CHECKING:
    from pathlib import Path

LABELS = {
    "a": "1 0.5 0.5 0.25 0.5\n0 0.1 0.2 0.1 0.125\n",
    "b": "",
    "c": None,
    "d": "0 0.75 0.5 0.5 1",
}
BOXES = "train: images/train\nval: images/train\nnames: {0: cat, 1: dog}\n"


def opened(url: Any, **arguments: Any) -> Dataset:
    dataset = Dataset(url, **arguments)
    dataset.open(verify=images.verify)
    return dataset


def found_in(dataset: Dataset) -> dict[str, dict[str, Any]]:
    return {sample["image_id"]: sample for sample in samples_of(dataset)}


def check(dataset: Dataset) -> None:
    """Check that a dataset has the images and objects of LABELS."""
    assert dataset.kind in ("yolo", "pack")
    assert dataset.fields == ("image", "boxes", "labels")
    assert dataset.classes == ("cat", "dog")
    found = found_in(dataset)
    assert sorted(found) == sorted(LABELS)
    for number, (name, text) in enumerate(LABELS.items()):
        rows = np.array([line.split() for line in (text or "").splitlines()], np.float32)
        rows = rows.reshape(-1, 5)
        assert found[name]["labels"].tolist() == rows[:, 0].astype(int).tolist()
        assert found[name]["boxes"].tolist() == rows[:, 1:].tolist()
        assert tuple(found[name]["original_size"].tolist()) == size_of(number)


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return yolo_set(tmp_path_factory.mktemp("yolo") / "pets", LABELS, BOXES)


def test_a_data_yaml_or_its_folder_is_a_dataset(described: Path, tmp_path: Path) -> None:
    for url, manifest in (
        (described, None),
        (described.parent, None),
        (described.parent, "data.yaml"),
    ):
        with opened(url, manifest=manifest, split="val") as dataset:
            check(dataset)
        with opened(url, manifest=manifest) as dataset:
            check(dataset)
    pack(described, tmp_path / "pack", verify=images.verify)
    check(Dataset(tmp_path / "pack"))


@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
@pytest.mark.parametrize("name", ["", "/data.yaml"])
def test_a_remote_dataset_is_the_same(described: Path, tmp_path: Path, name: str) -> None:
    with uploaded(described.parent) as url, opened(url + name, cache=tmp_path / "cache") as dataset:
        check(dataset)


@pytest.mark.parametrize(
    ("folder", "places"),
    [
        ("images/train", "train: ./images/train/"),
        ("images/train", "path: ../datasets/pets\ntrain: images/train"),
        ("images/train", "path: /data/of/another/machine\ntrain: [images/train]"),
        ("train/images", "train: ../train/images"),  # as Roboflow writes it
        ("images", "path: .\ntrain: images"),
        ("train", "train: train"),  # labels beside their images
        ("images/x", "train: list.txt"),
    ],
)
def test_places_are_found_as_tools_write_them(tmp_path: Path, folder: str, places: str) -> None:
    text = f"{places}\nnc: 2\nnames: ['cat', 'dog']\n"
    described = yolo_set(tmp_path / "pets", LABELS, text, images=folder)
    lines = [f"./images/x/{name}.jpg" for name in LABELS]
    (described.parent / "list.txt").write_text("\n".join(lines))
    with opened(described) as dataset:
        check(dataset)


def test_a_description_elsewhere_is_a_manifest(tmp_path: Path) -> None:
    described = yolo_set(tmp_path / "pets", LABELS, BOXES)
    described.rename(tmp_path / "pets.yaml")
    with opened(tmp_path / "pets", manifest=tmp_path / "pets.yaml") as dataset:
        check(dataset)


def test_a_list_of_classes_describes_a_folder(tmp_path: Path) -> None:
    described = yolo_set(tmp_path / "pets", LABELS, BOXES, images="images")
    described.unlink()
    (tmp_path / "pets/classes.txt").write_text("cat\ndog\n")
    with opened(tmp_path / "pets") as dataset:
        check(dataset)
    with pytest.raises(ConfigError, match="split: got 'val'"):
        opened(tmp_path / "pets", split="val")


def test_an_edited_file_of_labels_makes_a_new_index(tmp_path: Path) -> None:
    described = yolo_set(tmp_path / "pets", LABELS, BOXES)
    with opened(described) as dataset:
        check(dataset)
    (tmp_path / "pets/labels/train/b.txt").write_text("1 0.5 0.5 0.5 0.5\n")
    with opened(described) as dataset:
        assert found_in(dataset)["b"]["labels"].tolist() == [1]


def test_polygons_are_masks_with_boxes_around_them(tmp_path: Path) -> None:
    polygon = [0.1, 0.2, 0.5, 0.2, 0.5, 0.7]
    text = f"1 {' '.join(map(str, polygon))}\n0 0.5 0.5 0.25 0.25\n"
    described = yolo_set(tmp_path / "pets", {**LABELS, "e": text}, BOXES)
    with opened(described) as dataset:
        assert dataset.schema["masks"] == InstanceMasks(of="boxes", format="norm")
        batch = found_in(dataset)["e"]
    assert batch["boxes"][0].tolist() == pytest.approx([0.3, 0.45, 0.4, 0.5])
    assert json.loads(bytes(batch["masks"])) == [[polygon], None]


@pytest.mark.parametrize("width", [2, 3])
def test_poses_are_keypoints(tmp_path: Path, width: int) -> None:
    points: list[list[float]] = [[0.5, 0.25, 1], [0, 0, 0], [0.75, 0.5, 2]]
    numbers = [n for point in points for n in point[:width]]
    text = f"0 0.5 0.5 0.25 0.25 {' '.join(map(str, numbers))}"
    names = f"train: images/train\nkpt_shape: [3, {width}]\nflip_idx: [0, 2, 1]\nnames: [person]\n"
    with opened(yolo_set(tmp_path / "people", {"a": text, "b": ""}, names)) as dataset:
        wanted = InstanceKeypoints(of="boxes", points=3, mirrored=(0, 2, 1), format="xy_norm")
        assert dataset.schema["keypoints"] == wanted
        assert dataset.fields == ("image", "boxes", "labels", "keypoints")
        found = found_in(dataset)
    if width == 2:
        points = [[0.5, 0.25, 2], [0, 0, 0], [0.75, 0.5, 2]]
    assert found["a"]["keypoints"].tolist() == [points]
    assert found["b"]["keypoints"].shape == (0, 3, 3)


@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
def test_wrong_labels_are_left_out_with_reasons(tmp_path: Path) -> None:
    wrong = {
        "pixels": ("0 32 20 10 10", "isn't normalised"),
        "class": ("2 0.5 0.5 0.1 0.1", "line 1: '2' isn't a class, which is a number from 0 to 1"),
        "infinite": ("inf 0.5 0.5 0.1 0.1", "'inf' isn't a class"),
        "text": ("0 0.5 0.5 0.1 x", "isn't a list of numbers"),
        "short": ("\n0 0.5 0.5 0.1", "line 2: 4 numbers, wanted a class and a box"),
        "negative": ("0 0.5 0.5 -0.1 0.1", "box 0 isn't normalised"),
    }
    labels = {name: text for name, (text, _) in wrong.items()}
    described = yolo_set(tmp_path / "pets", {**LABELS, **labels}, BOXES)
    with opened(described, allow_left_out=1) as dataset:
        check(dataset)
        reasons = quarantine(dataset.index.place)
    assert len(reasons) == len(wrong)
    for name, (_, reason) in wrong.items():
        assert reason in reasons[f"images/train/{name}.jpg"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("names: [cat]\n", r"got the keys \['names'\], wanted YOLO's"),
        ("train: images/train\nnames: {1: cat}\n", "all numbers from 0 on"),
        ("train: images/train\nnc: 3\nnames: [a, b]\n", "got nc: 3 and the names of 2 classes"),
        ("train: images/train\nnames: [a]\nkpt_shape: [3, 4]\n", r"got kpt_shape: \[3, 4\]"),
        (
            "train: images/train\nnames: [a]\nkpt_shape: [3, 2]\nflip_idx: [0, 0, 1]\n",
            "wanted each keypoint's number once",
        ),
        ("train: elsewhere\nnames: [a]\n", "names elsewhere, but no images are there"),
        ("train: images/train\nnames: [a", "can't be parsed"),
    ],
)
def test_a_wrong_description_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        opened(yolo_set(tmp_path / "pets", LABELS, text))


def test_what_other_tools_accept_is_read(tmp_path: Path) -> None:
    """A number of classes without names, `validation`, and labels that begin with a byte-order
    mark."""
    text = "train: images/train\nvalidation: images/train\nnc: 2\n"
    described = yolo_set(tmp_path / "pets", {"a": "\ufeff1 0.5 0.5 0.1 0.1\r\n"}, text)
    with opened(described.parent, split="val") as dataset:
        assert dataset.classes == ("class_0", "class_1")
        assert dataset.column("labels")[0].tolist() == [1]


def test_a_class_without_names_is_a_number_from_0_on(tmp_path: Path) -> None:
    labels = {"images/0.jpg": images.jpeg(0), "labels/0.txt": b"-1 0.5 0.5 0.1 0.1"}
    root = write_folder(tmp_path / "pets", labels)
    with pytest.raises(DatasetError, match="'-1' isn't a class, which is a number from 0 on"):
        opened(root, format="yolo")


def test_a_missing_part_and_two_descriptions_are_refused(described: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"wanted one of the parts .* 'val', 'train'"):
        opened(described, split="test")
    root = write_folder(
        yolo_set(tmp_path / "pets", LABELS, BOXES).parent,
        {"a.yaml": BOXES.encode(), "b.yaml": BOXES.encode()},
    )
    with opened(root) as dataset:
        check(dataset)
    (root / "data.yaml").unlink()
    with pytest.raises(ConfigError, match=r"a\.yaml and b\.yaml describe datasets"):
        opened(root)


def test_commands_tell_a_description_from_a_mixture_file(described: Path, tmp_path: Path) -> None:
    mixture = tmp_path / "mix.yaml"
    mixture.write_text("parts: {a: pets}\nweights: {a: 1}\n")
    assert not is_mixture_file(str(described))
    assert is_mixture_file(str(mixture))
    assert not is_mixture_file("s3://bucket/data.yaml")
