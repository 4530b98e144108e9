"""Folders and tar files of real users that have small faults: a warning or an error reports
each."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError, PenstockWarning
from penstock.readers import Dataset
from penstock.readers.fields import Bytes, ClassLabel, Image, Mask
from tests import images, tars

if TYPE_CHECKING:
    from pathlib import Path

JPEG = images.jpeg(1, 16, 20)
MASK = images.encoded(images.picture(2, 16, 20, "L"), "PNG")


def test_a_column_of_text_that_names_files_is_warned_about(tmp_path: Path) -> None:
    files = {"a/1.jpg": JPEG, "b/1.png": MASK, "list.csv": b"image,mask\na/1.jpg,b/1.png\n"}
    root = images.write_folder(tmp_path / "set", files)
    with pytest.warns(PenstockWarning, match=r'"mask" of list.csv is text, and names files'):
        Dataset(root, manifest="list.csv").open(verify=images.verify)
    masks = Dataset(root, manifest="list.csv", schema={"mask": Mask(of="image")})
    assert masks.open(verify=images.verify).schema["mask"] == Mask(of="image", dtype="uint8")


def test_rows_with_invalid_values_are_warned_about(tmp_path: Path) -> None:
    table = b"path,label\n1.jpg,cat\n2.jpg,cow\n"
    root = images.write_folder(tmp_path / "set", {"1.jpg": JPEG, "2.jpg": JPEG, "list.csv": table})
    schema = {"label": ClassLabel(("dog", "cat"))}
    dataset = Dataset(root, manifest="list.csv", schema=schema, allow_left_out=1)
    with pytest.warns(PenstockWarning, match=r"1 samples are left out.*such as 2\.jpg.*cow"):
        assert dataset.open(verify=images.verify).samples == 1


def test_samples_that_fail_the_check_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"1.jpg": JPEG, "1.txt": b"caf\xe9", "2.jpg": JPEG, "2.txt": b"tea"}
    root = images.write_folder(tmp_path / "set", files)
    with caplog.at_level(logging.WARNING, "penstock"):
        assert Dataset(root, allow_left_out=1).open(verify=images.verify).samples == 1
    assert "1 samples are left out" in caplog.text
    assert "1.jpg: caption: " in caplog.text


def test_a_missing_label_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize("name", ["cat", "caf\u00e9 au lait", "a" * 60])
def test_classes_of_tar_members_by_name(tmp_path: Path, name: str) -> None:
    members = {"1.jpg": JPEG, "1.cls": f"{name}\n".encode(), "2.jpg": JPEG, "2.cls": b"0"}
    root = images.write_folder(tmp_path / "set", {"0.tar": tars.archive(members)})
    dataset = Dataset(root, fields=("label",), schema={"label": ClassLabel(("dog", name))})
    dataset.open(verify=images.verify)
    assert np.asarray(dataset.column("label")).tolist() == [1, 0]


def test_names_of_classes_in_tar_members_need_a_schema(tmp_path: Path) -> None:
    members = {"1.jpg": JPEG, "1.cls": b"cat"}
    root = images.write_folder(tmp_path / "set", {"0.tar": tars.archive(members)})
    with pytest.raises(DatasetNotFoundError, match=r'schema=\{"label": ClassLabel'):
        Dataset(root).open(verify=images.verify)
    other = Dataset(root, schema={"label": ClassLabel(("dog", "cow"))})
    with pytest.raises(ConfigError, match=r"'cat', which isn't one of the classes"):
        other.open(verify=images.verify)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"f.0001.jpg": JPEG, "f.0002.jpg": JPEG}, "a key ends at the first dot of a name"),
        (
            {"1.jpg": JPEG, "1.cls": b"1", "2.jpg": JPEG},
            "1 keys or members are left out, such as 0.tar/2.jpg: no label",
        ),
    ],
)
def test_samples_that_tar_files_lose_are_logged(
    tmp_path: Path, members: dict[str, bytes], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = images.write_folder(tmp_path / "set", {"0.tar": tars.archive(members)})
    with caplog.at_level(logging.WARNING, "penstock"):
        assert Dataset(root, allow_left_out=1).open(verify=images.verify).samples == 1
    assert words in caplog.text


def test_images_next_to_class_folders_are_warned_about(tmp_path: Path) -> None:
    files = {"a/1.jpg": JPEG, "b/2.jpg": JPEG, "3.jpg": JPEG, "README.txt": b"x"}
    root = images.write_folder(tmp_path / "set", files)
    with pytest.warns(PenstockWarning, match=r"1 images are left out, such as 3\.jpg: not in a"):
        assert Dataset(root, allow_left_out=1).open(verify=images.verify).samples == 2


def test_full_paths_below_the_root(tmp_path: Path) -> None:
    root = tmp_path / "set"
    table = f"path,score\n{root}/a/1.jpg,0.5\n./a//2.jpg,1\n".encode()
    images.write_folder(root, {"a/1.jpg": JPEG, "a/2.jpg": JPEG, "list.csv": table})
    dataset = Dataset(root, manifest="list.csv")
    dataset.open(verify=images.verify)
    assert dataset.names([0, 1]) == ["a/1.jpg", "a/2.jpg"]
    images.write_folder(root, {"list.csv": f"path\n{root}/../x.jpg\n".encode()})
    with pytest.raises(DatasetError, match=r"x\.jpg', wanted a path relative"):
        Dataset(root, manifest="list.csv").open(verify=images.verify)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a/1", r"a/1\.jpg exists: write names with their extension"),
        ("1.jpg", r"a/1\.jpg exists: give .*/set/a as the URL"),
        (r"a\1.jpg", r"Write / instead of"),
        ("b/2.jpg", r"to its folder\.$"),
    ],
)
def test_names_that_resemble_existing_files(tmp_path: Path, name: str, words: str) -> None:
    table = f"path,label\n{name},cat\n".encode()
    root = images.write_folder(tmp_path / "set", {"a/1.jpg": JPEG, "list.csv": table})
    with pytest.raises(DatasetError, match=words):
        Dataset(root, manifest="list.csv").open(verify=images.verify)


def test_masks_and_images_in_one_folder(tmp_path: Path) -> None:
    files = {"1.jpg": JPEG, "1_mask.png": MASK, "2.jpg": JPEG, "2_mask.png": MASK}
    root = images.write_folder(tmp_path / "set", files)
    places = {"image": "*.jpg", "mask": "*_mask.png"}
    message = r'1_mask.png to 1.jpg, but each is.*fields={"image": "\*.jpg", "mask": "\*_mask.png"}'
    with pytest.warns(PenstockWarning, match=message):
        assert Dataset(root).open(verify=images.verify).samples == 4
    assert Dataset(root, fields=places).open(verify=images.verify).samples == 2


@pytest.mark.parametrize("folder", ["images", "train"])
def test_one_folder_that_may_be_no_class(tmp_path: Path, folder: str) -> None:
    files = {f"{folder}/a/1.jpg": JPEG, f"{folder}/b/2.jpg": JPEG}
    root = images.write_folder(tmp_path / "set", files)
    with pytest.warns(PenstockWarning, match=rf"every label is 0.*give .*/set/{folder} as"):
        Dataset(root).open(verify=images.verify)
    asked = Dataset(root, schema={"label": ClassLabel()}).open(verify=images.verify)
    assert asked.schema["label"] == ClassLabel((folder,))


def test_images_whose_name_suggests_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"rgb/1.jpg": JPEG, "depth/1.png": MASK}
    root = images.write_folder(tmp_path / "set", files)
    with caplog.at_level(logging.WARNING, "penstock"):
        Dataset(root, fields={"image": "rgb", "depth": "depth"}).open(verify=images.verify)
    assert '"depth" is read as pictures, which are decoded to 8 bits' in caplog.text
    assert 'schema={"depth": Mask(of="image")}' in caplog.text


def test_audio_that_cant_be_decoded_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    members = {"1.wav": b"RIFF\x24\0\0\0WAVEfmt ", "1.txt": b"yes"}
    root = images.write_folder(tmp_path / "set", {"0.tar": tars.archive(members)})
    with caplog.at_level(logging.WARNING, "penstock"):
        assert Dataset(root).fields == ("caption",)
    assert '"audio" is Audio, which nothing decodes yet' in caplog.text
    assert Dataset(root, schema={"audio": Bytes()}).fields == ("audio", "caption")


def test_masks_in_a_format_that_loses_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {f"images/{i}.jpg": JPEG for i in range(20)} | {"masks/0.jpg": JPEG}
    few = {"images/0.jpg": JPEG, "masks/0.jpg": JPEG}
    blurred = images.write_folder(tmp_path / "blurred", few)
    with caplog.at_level(logging.WARNING, "penstock"):
        dataset = Dataset(blurred, fields={"image": "images", "mask": "masks"})
        assert dataset.open(verify=images.verify).schema["mask"] == Image()
    assert '"mask" is read as pictures' in caplog.text
    assert "its files are .jpg" in caplog.text
    # One JPEG among the masks is rejected, and doesn't turn the others into pictures.
    mixed = images.write_folder(
        tmp_path / "mixed", files | {f"masks/{i}.png": MASK for i in range(1, 20)}
    )
    with caplog.at_level(logging.WARNING, "penstock"):
        opened = Dataset(mixed, fields={"image": "images", "mask": "masks"}).open(
            verify=images.verify
        )
    assert opened.schema["mask"] == Mask(of="image", dtype="uint8")
    assert opened.samples == 19
    assert "images/0.jpg: mask: a mask in JPEG" in caplog.text


@pytest.mark.parametrize("cells", [("0.0", "10.0"), ("0.5", "1")])
def test_classes_that_are_no_integers(tmp_path: Path, cells: tuple[str, str]) -> None:
    table = f"path,label\n1.jpg,{cells[0]}\n2.jpg,{cells[1]}\n".encode()
    files = {"1.jpg": JPEG, "2.jpg": JPEG, "list.csv": table}
    root = images.write_folder(tmp_path / "set", files)
    with pytest.raises(DatasetError, match=rf"{cells[0]}' \(line 2\) is no integer"):
        Dataset(root, manifest="list.csv", schema={"label": ClassLabel()}).open()
    named = Dataset(root, manifest="list.csv", schema={"label": ClassLabel(cells)})
    named.open(verify=images.verify)
    assert np.asarray(named.column("label")).tolist() == [0, 1]
