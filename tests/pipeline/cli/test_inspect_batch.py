"""`penstock inspect --batch` shows what the loader gives."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from penstock.augment import Normalize, imagenet_train
from penstock.cache.errors import ConfigError
from penstock.pipeline.cli import main
from penstock.pipeline.cli.inspect_batch import channels, contact_sheet, look, pictures
from penstock.pipeline.loader import DataLoader
from penstock.readers import Dataset
from tests.conftest import SAMPLES, write_photographs
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

FIELDS = ("image", "label", "id")


def inspect(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.pipeline.cli", "inspect", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def test_it_is_the_batch_that_the_loader_gives(pack: Path) -> None:
    pytest.importorskip("nvidia.dali")
    report, images = look(Dataset(pack, fields=FIELDS), size=6, recipe="imagenet", seed=3, epoch=2)
    dataset = Dataset(pack, fields=FIELDS)
    with DataLoader(dataset, 6, shuffle=True, seed=3, augment=imagenet_train()) as loader:
        loader.set_epoch(2)
        tensors = next(iter(loader))
    assert [sample.id for sample in report.samples] == tensors[2].tolist()
    assert [sample.label for sample in report.samples] == tensors[1].tolist()
    assert [sample.name for sample in report.samples] == dataset.names(tensors[2].tolist())
    assert report.tensors[0].shape == list(tensors[0].shape) == [6, 3, 224, 224]
    assert [c.max for c in report.channels] == pytest.approx(tensors[0].amax((0, 2, 3)).tolist())
    assert [c.mean for c in report.channels] == pytest.approx(
        tensors[0].double().mean((0, 2, 3)).tolist()
    )
    assert np.array_equal(images, pictures(tensors[0].numpy(), Normalize()))


def test_pictures_undo_normalize() -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (4, 3, 8, 5), np.uint8)
    norm = Normalize()
    mean, std = (np.array(each, np.float32)[:, None, None] for each in (norm.mean, norm.std))
    seen = ((raw / np.float32(255) - mean) / std).astype(np.float32)
    assert np.array_equal(pictures(seen, norm), raw.transpose(0, 2, 3, 1))
    assert np.array_equal(pictures(raw, None), raw.transpose(0, 2, 3, 1))


def test_channels_are_those_of_numpy() -> None:
    images = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5)
    (red, _, blue) = channels(images)
    assert (red.min, blue.max) == (0, 119)
    assert red.mean == images[:, 0].mean()
    assert blue.std == pytest.approx(images[:, 2].std())


@pytest.mark.parametrize(
    "shape", [(1, 8, 8, 3), (7, 32, 20, 1), (40, 224, 224, 3), (3, 16, 300, 3)]
)
def test_a_contact_sheet_holds_every_image(shape: tuple[int, int, int, int]) -> None:
    count = shape[0]
    images = np.zeros(shape, np.uint8)
    sheet = np.asarray(contact_sheet(images, ["a caption that is much too long"] * count))
    assert sheet.shape[1] < 2200
    black = (sheet == 0).all(-1).mean()
    assert black > 0.3
    assert (sheet == 255).all(-1).any()


@pytest.mark.parametrize("size", [0, 1025])
def test_a_size_out_of_range_is_refused(pack: Path, size: int) -> None:
    with pytest.raises(ConfigError, match="--batch"):
        look(Dataset(pack, fields=FIELDS), size=size, recipe="none", seed=0, epoch=0)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali")
    out = tmp_path / "contact.png"
    run = inspect(folder, "--batch", 5, "--augment", "imagenet", "--out", out, "--json")
    told: dict[str, Any] = json.loads(run.stdout)
    assert [tensor["name"] for tensor in told["tensors"]] == ["image", "label", "id"]
    assert len(told["samples"]) == 5
    assert len({sample["id"] for sample in told["samples"]} - set(range(SAMPLES))) == 0
    with Image.open(out) as sheet:
        assert min(sheet.size) > 200


def test_wrong_use_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_photographs(tmp_path / "in", samples=4, classes=2)
    for arguments, told in (
        (("--out", tmp_path / "x.png"), "--batch"),
        (("--batch", 2, "--augment", "imagenet", "--out", tmp_path / "x.nope"), ".png"),
        (("--batch", 2, "--augment", "sepia"), "imagenet-eval"),
    ):
        assert main(["inspect", *map(str, (folder, *arguments))]) == 2
        shown = capsys.readouterr().err
        assert told in shown
        assert "Traceback" not in shown


def test_images_of_different_sizes_are_shown_without_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock.pipeline.cli.main import main
    from tests import images

    root = images.class_folder(tmp_path / "set", samples=6)
    assert main(["inspect", str(root), "--batch", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tensors"][0]["shape"] == [4, 3, 224, 224]
    assert "sizes differ" in told["augment"]


@pytest.mark.parametrize("command", ["", "pack", "index", "inspect", "warm", "cache", "doctor"])
def test_short_help_is_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.pipeline.cli.main import main

    texts = []
    for flag in ("-h", "--help"):
        assert main([*command.split(), flag]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
    if not command:
        assert "--install-completion" in texts[0]
