"""Test that `penstock inspect --batch` shows the loader's batch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.augment import Normalize, imagenet_train
from penstock.cache import ConfigError
from penstock.pipeline import DataLoader
from penstock.pipeline.cli import load_batch, main, value_ranges
from penstock.readers import Dataset, displayed_pixels
from tests import warm
from tests.conftest import SAMPLES, write_photographs

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

FIELDS = ("image", "label", "id")


def inspect(*arguments: object) -> subprocess.CompletedProcess[str]:
    return warm.run(["-m", "penstock.pipeline.cli", "inspect", *arguments])


def test_it_is_the_batch_that_the_loader_gives(pack: Path) -> None:
    pytest.importorskip("nvidia.dali")
    report, pictures = load_batch(
        Dataset(pack, fields=FIELDS), size=6, recipe="imagenet", seed=3, epoch=2
    )
    dataset = Dataset(pack, fields=FIELDS)
    with DataLoader(dataset, 6, shuffle=True, seed=3, augment=imagenet_train()) as loader:
        loader.set_epoch(2)
        tensors = next(iter(loader))
    assert [sample["id"] for sample in report["samples"]] == tensors[2].tolist()
    names = dataset.classes
    assert [s["values"]["label"] for s in report["samples"]] == [
        names[i] for i in tensors[1].tolist()
    ]
    assert [sample["name"] for sample in report["samples"]] == dataset.names(tensors[2].tolist())
    assert report["fields"][0]["shape"] == list(tensors[0].shape) == [6, 3, 224, 224]
    channels = report["values"][:3]
    assert [c["name"] for c in channels] == ["image 0", "image 1", "image 2"]
    assert [c["max"] for c in channels] == pytest.approx(tensors[0].amax((0, 2, 3)).tolist())
    assert [c["mean"] for c in channels] == pytest.approx(
        tensors[0].double().mean((0, 2, 3)).tolist()
    )
    scaling = (Normalize().mean, Normalize().std)
    for picture, image in zip(pictures, tensors[0].numpy(), strict=True):
        wanted = displayed_pixels(image, scaling=scaling).transpose(1, 2, 0)
        assert np.array_equal(picture.pixels, wanted)


def test_a_seed_shuffles(pack: Path) -> None:
    dataset, orders = Dataset(pack, fields=("label", "id")), []
    for seed in (None, 0, 1):
        report, _ = load_batch(dataset, size=6, recipe="none", seed=seed, epoch=0)
        orders.append([each["id"] for each in report["samples"]])
    assert orders[0] == list(range(6))
    assert orders[1] != orders[2] != orders[0] != orders[1]


def test_the_contents_begin_with_the_fields(pack: Path, capsys: Any) -> None:
    assert main(["inspect", str(pack)]) == 0
    first, _, heads, *rest = capsys.readouterr().out.splitlines()
    assert f" {SAMPLES} samples in " in first
    assert heads.startswith("field ")
    assert rest[0].startswith("image ")
    assert any("(ICC)" in line or line.startswith("similarity of labels") for line in rest)


def test_values_are_those_of_numpy() -> None:
    images = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).reshape(2, 3, 4, 5)
    vectors = torch.tensor([[0.5, -2.0], [1.0, 7.0]])
    batch = {"view": images, "id": torch.tensor([1, 2]), "speed": vectors, "text": ["a", "b"]}
    (red, _, blue, speed) = value_ranges(batch, ["view"], number="id")
    assert (red["name"], red["min"], blue["max"]) == ("view 0", 0, 119)
    assert red["mean"] == images[:, 0].double().mean()
    assert blue["std"] == pytest.approx(images[:, 2].numpy().std())
    assert (speed["name"], speed["min"], speed["max"]) == ("speed", -2.0, 7.0)


@pytest.mark.parametrize("size", [0, 1025])
def test_a_size_out_of_range_is_refused(pack: Path, size: int) -> None:
    with pytest.raises(ConfigError, match="--batch"):
        load_batch(Dataset(pack, fields=FIELDS), size=size, recipe="none", seed=0, epoch=0)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali")
    out = tmp_path / "contact.png"
    run = inspect(folder, "--batch", 5, "--augment", "imagenet", "--out", out, "--json")
    report: dict[str, Any] = json.loads(run.stdout)
    assert [field["name"] for field in report["fields"]] == ["image", "label", "id"]
    assert len(report["samples"]) == 5
    assert len({sample["id"] for sample in report["samples"]} - set(range(SAMPLES))) == 0
    with Image.open(out) as sheet:
        assert min(sheet.size) > 200


def test_wrong_use_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_photographs(tmp_path / "in", samples=4, classes=2)
    for arguments, report in (
        (("--out", tmp_path / "x.png"), "--batch"),
        (("--batch", 2, "--augment", "imagenet", "--out", tmp_path / "x.nope"), ".png"),
        (("--batch", 2, "--augment", "sepia"), "imagenet-eval"),
    ):
        assert main(["inspect", *map(str, (folder, *arguments))]) == 2
        shown = capsys.readouterr().err
        assert report in shown
        assert "Traceback" not in shown


def test_images_of_different_sizes_are_shown_without_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock.pipeline.cli import main
    from tests import images

    root = images.class_folder(tmp_path / "set", samples=6)
    assert main(["inspect", str(root), "--batch", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fields"][0]["shape"] == [4, 3, 224, 224]
    assert "sizes differ" in report["augment"]


def test_many_numbers_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for count in (3, 5):
        np.save(tmp_path / "rows.npy", np.arange(2 * count).reshape(2, count))
        assert main(["inspect", str(tmp_path / "rows.npy"), "--batch", "1", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        shown = "0 1 2" if count == 3 else "5 numbers"
        assert report["samples"][0]["values"] == {"array": shown}


@pytest.mark.parametrize("command", ["", "pack", "index", "inspect", "warm", "cache", "doctor"])
def test_short_help_is_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.pipeline.cli import main

    texts = []
    for flag in ("-h", "--help"):
        assert main([*command.split(), flag]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
    if not command:
        assert "--install-completion" in texts[0]
