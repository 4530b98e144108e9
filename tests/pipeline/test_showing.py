"""Test `penstock.show` and what notebooks show of datasets and statistics."""

from __future__ import annotations

import base64
import html
import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

import penstock
from penstock import DataLoader, Dataset, Normalize, Ragged, imagenet_eval
from penstock.errors import ConfigError
from tests import annotated_sets
from tests.conftest import CLASSES

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("coco")
    annotated_sets.coco_set(place, annotated_sets.instances())
    return place / "train2017"


def opened(coco: Path, *fields: str) -> Dataset:
    manifest = "annotations/instances_train2017.json"
    return Dataset(str(coco), manifest=manifest, fields=fields or None)


def colors(sheet: Pillow.Image) -> int:
    """How many bright pixels of the first class's colour a sheet has."""
    return int((np.asarray(sheet) == penstock.readers.class_color(1)).all(-1).sum())


def test_a_dataset_a_sample_and_a_list_are_shown(coco: Path) -> None:
    with opened(coco) as dataset:
        whole = penstock.show(dataset, count=6, width=600)
        assert isinstance(whole, Pillow.Image)
        assert 400 < whole.width < 700
        assert colors(whole) > 100
        one = penstock.show(dataset[5], dataset=dataset)
        assert one.width > 600
        several = penstock.show([dataset[number] for number in (5, 6)], classes=dataset.classes)
        assert colors(several) > 100


@pytest.mark.parametrize("scale", ["uint8", "unit", "255", "imagenet", "other"])
def test_a_batch_is_shown_whatever_its_pixels_are(scale: str) -> None:
    rng = np.random.default_rng(0)
    raw = torch.from_numpy(rng.integers(0, 256, (2, 3, 24, 32), np.uint8))
    raw[0, :, 0, :2] = torch.tensor([0, 255])
    mean, std = (torch.tensor(each)[:, None, None] for each in (Normalize().mean, Normalize().std))
    images = {
        "uint8": raw,
        "unit": raw / 255,
        "255": raw.float(),
        "imagenet": (raw / 255 - mean) / std,
        "other": raw.double() / 51 - 20,
    }[scale]
    seen = np.asarray(penstock.show({"image": images}, width=70))
    wanted = np.asarray(penstock.show({"image": raw}, width=70))
    assert np.abs(seen.astype(int) - wanted).max() <= 1
    given = penstock.show({"image": (raw / 255 - 0.5) / 0.5}, normalize=((0.5,), (0.5,)), width=70)
    assert np.array_equal(np.asarray(given), wanted)


def test_a_loader_s_batch_is_shown_as_a_tuple_and_as_a_dict(pack: Path) -> None:
    with Dataset(str(pack), fields=("image", "label", "id")) as dataset:
        shown = []
        for as_dict in (False, True):
            with DataLoader(
                dataset, 6, augment=imagenet_eval(64), as_dict=as_dict, pad="mask"
            ) as loader:
                batch = next(iter(loader))
            shown.append(np.asarray(penstock.show(batch, dataset=dataset, normalize=Normalize())))
            penstock.show(batch)
        assert np.array_equal(*shown)
        with pytest.raises(ConfigError, match="a batch of 2 values for a dataset of the fields"):
            penstock.show((torch.zeros(2, 3, 8, 8), torch.zeros(2)), dataset=dataset)


def test_boxes_of_ragged_batches_and_of_torchvision_are_the_same() -> None:
    images = [torch.full((3, 60, 80), 30, dtype=torch.uint8), torch.zeros(3, 50, 40).byte()]
    boxes = torch.tensor([[10, 10, 40.0, 40], [5, 5, 30, 30], [20, 12, 39, 49]])
    labels = torch.tensor([0, 1, 0])
    offsets = torch.tensor([0, 1, 3])
    batch = {"image": images, "boxes": Ragged(boxes, offsets), "labels": Ragged(labels, offsets)}
    targets = [
        {"boxes": boxes[:1], "labels": labels[:1]},
        {"boxes": boxes[1:], "labels": labels[1:]},
    ]
    ours = penstock.show(batch, classes=("cat", "dog"))
    theirs = penstock.show((images, targets), classes=("cat", "dog"))
    assert np.array_equal(np.asarray(ours), np.asarray(theirs))
    assert colors(ours) > 500


def test_several_views_of_a_sample_are_a_row() -> None:
    batch = {"global": torch.zeros(5, 2, 3, 32, 32), "local": torch.zeros(5, 6, 3, 16, 16)}
    sheet = penstock.show(batch, width=960)
    columns = (np.asarray(sheet) == 0).all(-1).any(0)
    rows = (np.asarray(sheet) == 0).all(-1)[:, 10]
    assert [int(np.diff(line.astype(int)).clip(min=0).sum()) for line in (columns, rows)] == [8, 5]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (None, "got NoneType, wanted a batch"),
        ("text", "got str"),
        ([], "got list"),
        ((torch.zeros(3),), "got tuple"),
        ({"vector": torch.zeros(3)}, r"no images among the fields \['vector'\]"),
    ],
)
def test_what_has_no_images_is_refused(what: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        penstock.show(what)


@pytest.mark.parametrize("options", [{"count": 0}, {"count": 300}, {"width": 9}, {"colour": 1}])
def test_wrong_arguments_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        penstock.show({"image": torch.zeros(1, 3, 8, 8)}, **options)


def test_a_notebook_shows_a_dataset_once_it_is_open(coco: Path) -> None:
    with opened(coco) as dataset:
        text = dataset._repr_html_()
        assert "opens at its first use" in text
        assert "<img" not in text
        assert len(dataset) == annotated_sets.SAMPLES
        text = dataset._repr_html_()
        assert "toothbrush" in text
        assert "ClassLabels(" in text
        part = dataset.subset([1, 2])._repr_html_()
        assert "<img" in part
    (picture,) = re.findall(r"base64,([^\"]+)", text)
    with Pillow.open(io.BytesIO(base64.b64decode(picture))) as sheet:
        assert sheet.width > 300


def test_a_notebook_shows_what_html_would_change(tmp_path: Path) -> None:
    for name in ("a<b", "c&d"):
        (tmp_path / name).mkdir()
        Pillow.new("RGB", (9, 9)).save(tmp_path / name / "x.png")
    with Dataset(str(tmp_path)) as dataset:
        assert dataset.classes == ("a<b", "c&d")
        text = dataset._repr_html_()
    assert "a&lt;b, c&amp;d" in text
    assert "a<b" not in text


def test_a_notebook_shows_statistics(pack: Path) -> None:
    with Dataset(str(pack), fields=("label",)) as dataset, DataLoader(dataset, 8) as loader:
        assert len(list(loader)) > CLASSES
        statistics = loader.statistics()
    text = statistics._repr_html_()
    assert f"<b>{html.escape(statistics.verdict)}</b>" in text
    assert "samples delivered to the training loop" in text
