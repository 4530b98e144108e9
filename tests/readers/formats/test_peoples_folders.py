"""What people have that doesn't fit quite: it is said where they see it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from penstock.cache.errors import PenstockWarning
from penstock.readers import Dataset
from penstock.readers.fields.field_types import ClassLabel, Mask
from tests import images

if TYPE_CHECKING:
    from pathlib import Path

JPEG = images.jpeg(1, 16, 20)
MASK = images.encoded(images.picture(2, 16, 20, "L"), "PNG")


def test_a_column_of_text_that_names_files_is_no_secret(tmp_path: Path) -> None:
    files = {"a/1.jpg": JPEG, "b/1.png": MASK, "list.csv": b"image,mask\na/1.jpg,b/1.png\n"}
    root = images.write_folder(tmp_path / "set", files)
    with pytest.warns(PenstockWarning, match=r'"mask" of list.csv is text, and names files'):
        Dataset(root, manifest="list.csv").open(verify=images.verify)
    masks = Dataset(root, manifest="list.csv", schema={"mask": Mask(of="image")})
    assert masks.open(verify=images.verify).schema["mask"] == Mask(of="image", dtype="uint8")


def test_rows_that_dont_fit_are_no_secret(tmp_path: Path) -> None:
    table = b"path,label\n1.jpg,cat\n2.jpg,cow\n"
    root = images.write_folder(tmp_path / "set", {"1.jpg": JPEG, "2.jpg": JPEG, "list.csv": table})
    dataset = Dataset(root, manifest="list.csv", schema={"label": ClassLabel(("dog", "cat"))})
    with pytest.warns(PenstockWarning, match=r"1 samples are left out.*such as 2\.jpg.*cow"):
        assert dataset.open(verify=images.verify).samples == 1


def test_samples_that_dont_stand_the_check_are_no_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"1.jpg": JPEG, "1.txt": b"caf\xe9", "2.jpg": JPEG, "2.txt": b"tea"}
    root = images.write_folder(tmp_path / "set", files)
    with caplog.at_level(logging.WARNING, "penstock"):
        assert Dataset(root).open(verify=images.verify).samples == 1
    assert "1 samples are left out" in caplog.text
    assert "1.jpg: caption: " in caplog.text


def test_a_label_that_a_row_lacks_is_no_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = b"path,label\n1.jpg,cat\n2.jpg,\n"
    root = images.write_folder(tmp_path / "set", {"1.jpg": JPEG, "2.jpg": JPEG, "list.csv": table})
    with caplog.at_level(logging.WARNING, "penstock"):
        dataset = Dataset(root, manifest="list.csv")
        dataset.open(verify=images.verify)
        assert dataset.fields == ("image",)
    assert 'some samples lack "label" (1)' in caplog.text
    caplog.clear()
    named = Dataset(root, manifest="list.csv", fields=("image", "label", "label.present"))
    named.open(verify=images.verify)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
