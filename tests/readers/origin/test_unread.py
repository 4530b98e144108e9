"""Files next to the images that aren't read are reported once; labels are never guessed."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError, PenstockWarning
from penstock.pipeline.cli import main
from penstock.readers import Dataset, build_index, open_index, pack
from penstock.readers.fieldtypes import Array, ClassLabel, Image
from tests import images, tars

if TYPE_CHECKING:
    from pathlib import Path

JPEG = images.jpeg(1)
PNG = images.encoded(images.picture(2), "PNG")
MASK = images.encoded(images.picture(2, mode="L"), "PNG")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"images/1.jpg": JPEG, "images/2.jpg": JPEG, "labels.csv": b"1,cat"}, "labels.csv"),
        ({"images/1.jpg": JPEG, "images/labels.csv": b"1,cat"}, "labels.csv"),
        ({"data/1.jpg": JPEG, "metadata.jsonl": b"{}"}, "metadata.jsonl"),
        ({"images/1.jpg": JPEG, "masks/1.png": PNG}, "masks"),
        ({"JPEGImages/1.jpg": JPEG, "SegmentationClass/1.png": PNG}, "SegmentationClass"),
        (
            {
                "JPEGImages/1.jpg": JPEG,
                "SegmentationClass/1.png": PNG,
                "ImageSets/Main/train.txt": b"1",
            },
            r'"image": "JPEGImages", "mask": "SegmentationClass"',
        ),
        (
            {"leftImg8bit/a/1.png": PNG, "gtFine/a/1.png": MASK, "gtFine/a/1.json": b"{}"},
            r'"image": "leftImg8bit", "mask": "gtFine"',
        ),
        (
            {"train/1.jpg": JPEG, "train_masks/1_mask.png": MASK},
            r'"image": "train", "mask": "train_masks"',
        ),
        (
            {"left/1.jpg": JPEG, "right/1.jpg": JPEG, "disp/1.npy": b"x"},
            r'"left": "left", "right": "right", "array": "disp"',
        ),
        (
            {"images/1.jpg": JPEG, "annotations/1.json": b"{}"},
            'For annotations as in COCO add manifest="annotations/1.json"',
        ),
        ({"train/a/1.jpg": JPEG, "val/a/2.jpg": JPEG}, "parts of a dataset"),
        (
            {"train2017/1.jpg": JPEG, "val2017/2.jpg": JPEG, "annotations/a.json": b"{}"},
            "set/train2017. ",
        ),
        ({"train_images/1.jpg": JPEG, "test_images/2.jpg": JPEG}, "parts of a dataset"),
        ({"train/1.jpg": JPEG, "trainannot/1.png": MASK, "val/1.jpg": JPEG}, "parts of a dataset"),
    ],
)
def test_folders_that_cant_be_classes_are_refused(
    tmp_path: Path, files: dict[str, bytes], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = images.write_folder(tmp_path / "set", files)
    with pytest.raises(DatasetError, match=words):
        Dataset(root).open(verify=images.verify)
    with pytest.raises(DatasetError, match=words):
        build_index(root, verify=images.verify)
    with pytest.raises(DatasetError, match=words):
        pack(root, tmp_path / "pack", verify=images.verify)
    assert main(["inspect", str(root)]) == 1
    assert words in capsys.readouterr().err
    inner = root / next(iter(files)).partition("/")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)
        assert open_index(inner, verify=images.verify).samples >= 1


@pytest.mark.parametrize(
    "folders", [("left", "right"), ("test", "tube"), ("train", "car"), ("image", "text")]
)
def test_names_that_may_be_classes_are_classes(tmp_path: Path, folders: tuple[str, ...]) -> None:
    files = {f"{folder}/{number}.jpg": JPEG for number, folder in enumerate(folders)}
    root = images.write_folder(tmp_path / "set", files)
    schema = Dataset(root).open(verify=images.verify).schema
    assert schema["label"] == ClassLabel(tuple(sorted(folders)))


def test_folders_are_classes_on_request(tmp_path: Path) -> None:
    files = {"images/1.jpg": JPEG, "masks/1.png": PNG}
    root = images.write_folder(tmp_path / "set", files)
    with pytest.raises(DatasetError, match=r'schema=\{"label": ClassLabel\(\)\}'):
        Dataset(root).open(verify=images.verify)
    schema = Dataset(root, schema={"label": ClassLabel()}).open(verify=images.verify).schema
    assert schema["label"] == ClassLabel(("images", "masks"))


@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
@pytest.mark.parametrize("inside", [["x.xml", "y.txt"], []])
def test_a_folder_without_anything_that_can_be_a_sample_shifts_no_labels(
    tmp_path: Path, inside: list[str]
) -> None:
    root = images.write_folder(tmp_path / "set", {"a/1.jpg": JPEG, "b/2.jpg": JPEG})
    (root / "about").mkdir()
    images.write_folder(root / "about", dict.fromkeys(inside, b"x"))
    with pytest.raises(DatasetNotFoundError, match="'about' is a folder without a sample"):
        Dataset(root).open(verify=images.verify)
    for arguments, names in (
        ({"allow_empty": True}, ("a", "about", "b")),
        ({"schema": {"label": ClassLabel(("b", "a"))}}, ("b", "a")),
    ):
        with Dataset(root, **arguments) as dataset:
            index = dataset.open(verify=images.verify)
            assert index.schema["label"] == ClassLabel(names)
            assert (index.samples, index.about.quarantined) == (2, len(inside))
            assert dataset.left_out == {}
            labels = [names.index(name[0]) for name in dataset.names([0, 1])]
            assert dataset.column("label").tolist() == labels


@pytest.mark.parametrize("other", [".ipynb_checkpoints", "__MACOSX", "a.penstock", "lost+found"])
def test_folders_that_others_leave_behind_are_no_classes(tmp_path: Path, other: str) -> None:
    files = {"a/1.jpg": JPEG, "b/2.jpg": JPEG, f"{other}/b/._2.jpg": b"x"}
    root = images.write_folder(tmp_path / "set", files)
    index = Dataset(root).open(verify=images.verify)
    assert (index.schema.class_names(), index.about.quarantined) == (("a", "b"), 0)


def test_a_class_of_bad_images_keeps_its_number(tmp_path: Path) -> None:
    files = {"a/1.jpg": JPEG, "b/2.jpg": JPEG[:100], "c/3.jpg": JPEG}
    with Dataset(images.write_folder(tmp_path / "set", files), allow_left_out=0.5) as dataset:
        dataset.open(verify=images.verify)
        assert dataset.classes == ("a", "b", "c")
        assert dataset.column("label").tolist() == [0, 2]


@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
@pytest.mark.parametrize("other", ["README.md", "LICENSE", "list.csv", "config.yaml"])
def test_arrays_are_samples_with_other_files_next_to_them(tmp_path: Path, other: str) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(3))
    files = {"1.npy": array.getvalue(), other: b"x,y"}
    index = Dataset(images.write_folder(tmp_path / "set", files)).open()
    assert dict(index.schema) == {"array": Array("int64", (3,))}


@pytest.mark.parametrize(
    "files",
    [
        {"a/1.jpg": JPEG, "b/2.jpg": JPEG, "labels.csv": b"x"},
        {"a/1.jpg": JPEG, "b/2.jpg": JPEG, "a/3.json": b"{}"},
        {"1.jpg": JPEG, "list.jsonl": b"{}"},
        {"a/1.jpg": JPEG, "b/2.jpg": JPEG, "a/x.npy": b"x", "b/y.wav": b"y"},
    ],
)
def test_left_out_files_are_reported_once(tmp_path: Path, files: dict[str, bytes]) -> None:
    root = images.write_folder(tmp_path / "set", files)
    other = next(name for name in files if not name.endswith("jpg"))
    with pytest.warns(PenstockWarning, match=r"torch dataset") as report:
        index = open_index(root, verify=images.verify)
    assert len([each for each in report if "left out" in str(each.message)]) == 1
    assert other in str(report[0].message)
    assert index.about.passed_over[other.rpartition(".")[2]] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_index(root, verify=images.verify)


@pytest.mark.parametrize("name", ["x.wav", "x.mp4", "x.m4v"])
def test_the_error_for_a_file_of_sound_or_video_names_its_folder(tmp_path: Path, name: str) -> None:
    root = images.write_folder(tmp_path / "set", {name: b"data of another kind"})
    assert open_index(root).samples == 1
    with pytest.raises(ConfigError, match=r"Give its folder: (audio|video) is read as bytes"):
        open_index(root / name, verify=images.verify)


@pytest.mark.filterwarnings("ignore:.* is read as pictures:penstock.cache.errors.PenstockWarning")
@pytest.mark.parametrize(
    ("files", "message", "names"),
    [
        (
            {"images/1.jpg": JPEG, "masks/1.png": MASK},
            {"image": "images", "mask": "masks"},
            ["image", "mask"],
        ),
        (
            {"JPEGImages/1.jpg": JPEG, "SegmentationClass/1.png": MASK, "depth/1.png": MASK},
            {"image": "JPEGImages", "depth": "depth", "mask": "SegmentationClass"},
            ["image", "depth", "mask"],
        ),
        (
            {"rgb/1.jpg": JPEG, "labels/1.txt": b"0 0.5 0.5 1 1"},
            {"image": "rgb", "text": "labels"},
            ["image", "text"],
        ),
    ],
)
def test_folders_that_belong_together_are_read_by_the_advice_of_the_message(
    tmp_path: Path, files: dict[str, bytes], message: dict[str, str], names: list[str]
) -> None:
    root = images.write_folder(tmp_path / "set", files)
    with pytest.raises(DatasetError) as refused:
        Dataset(root).open(verify=images.verify)
    assert f"fields={message}".replace("'", '"') in str(refused.value)
    with Dataset(root, fields=message) as dataset:
        dataset.open(verify=images.verify)
        assert list(dataset.schema) == names


def test_a_table_next_to_one_folder_is_read_by_the_advice_of_the_message(tmp_path: Path) -> None:
    files = {"images/1.jpg": JPEG, "labels.csv": b"path,label\nimages/1.jpg,cat\n"}
    root = images.write_folder(tmp_path / "set", files)
    with pytest.raises(DatasetError, match=r'pass manifest="labels\.csv"'):
        Dataset(root).open(verify=images.verify)
    with Dataset(root, manifest="labels.csv") as dataset:
        dataset.open(verify=images.verify)
        assert list(dataset.schema) == ["image", "label"]


def test_members_of_tar_files_that_are_left_out_are_named(tmp_path: Path) -> None:
    members = {
        "a.jpg": JPEG,
        "a.pth": b"?",
        "b.jpg": JPEG,
        "b.json": b'{"odd": ["x"], "label": [1]}',
    }
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.tar").write_bytes(tars.archive(members))
    with pytest.warns(PenstockWarning) as report:
        index = open_index(tmp_path / "set", verify=images.verify)
    text = "\n".join(str(each.message) for each in report)
    assert "1 .pth members are left out" in text
    assert '"odd"' in text
    assert len(report) == 1
    assert dict(index.about.schema) == {"image": Image(), "label": Array("int64", (1,))}


def test_plain_folders_cause_no_warning(tmp_path: Path) -> None:
    root = images.class_folder(tmp_path / "set", samples=6)
    stray = ("class-0/Thumbs.db", "class-1/LICENSE", "class-1/desktop.ini", "class-1/1.jpg.bak")
    images.write_folder(root, dict.fromkeys(stray, b"x"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index = open_index(root, verify=images.verify)
    assert (index.samples, index.about.left_out) == (6, {})


def test_a_bin_without_arguments_names_the_format_of_tokens(tmp_path: Path) -> None:
    """nanoGPT's train.bin is the usual example."""
    np.arange(64, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(ConfigError, match='format="tokens", dtype="uint16"'):
        open_index(tmp_path / "train.bin", verify=images.verify)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"data/train-0.parquet": b"", "README.md": b""},
            r'/set/data\. For the table, pass format="parquet"',
        ),
        (
            {"dataset_dict.json": b"{}", "train/data.arrow": b"", "train/state.json": b"{}"},
            "For the files in it give .*/set/train",
        ),
    ],
)
def test_the_error_for_a_clone_of_the_hub_or_saved_splits_names_the_folder(
    tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    images.write_folder(tmp_path / "set", files)
    with pytest.raises(DatasetError, match=words):
        open_index(tmp_path / "set", verify=images.verify)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"__schema/a": b"x", "__fragments/a/b.tdb": b"x"}, "TileDB.*torch dataset"),
        ({"_versions/1.manifest": b"x", "data/a.lance": b"x"}, "Lance.*torch dataset"),
        ({"_delta_log/0.json": b"{}", "part-0.parquet": b"x"}, "Delta.*as a list"),
        ({"_delta_log/0.json": b"{}", "d=1/a.parquet": b"x", "d=2/a.parquet": b"x"}, "Delta"),
        ({"metadata/v1.metadata.json": b"{}", "data/a.parquet": b"x"}, "Iceberg.*as a list"),
        ({".hoodie/hoodie.properties": b"x", "a.parquet": b"x"}, "Hudi"),
        ({"index.json": b"{}", "shard.00000.mds.zstd": b"x"}, "MDS shards.*mosaicml-streaming"),
        ({"index.json": b"{}", "chunk-0-0.bin": b"x"}, "LitData.*migrate/litdata.md"),
        ({"train.tfrecord-00000-of-00002": b"x"}, "TFRecords.*tfdata.md.*torch dataset"),
        ({"train.rec": b"x", "train.idx": b"x", "train.lst": b"x"}, "RecordIO.*torch dataset"),
        ({"a.h5": b"x"}, "HDF5.*torch dataset"),
        ({"train.beton": b"x"}, "FFCV.*ffcv.md.*torch dataset"),
        ({"data.mdb": b"x", "lock.mdb": b"x"}, "LMDB.*torch dataset"),
        ({"a.safetensors": b"x"}, "SafeTensors.*Zarr"),
        ({"a.orc": b"x"}, "ORC.*to Parquet"),
        ({"a.avro": b"x"}, "Avro.*to Parquet"),
        ({"a.zarr.zip": b"x"}, "Zarr store in one zip file.*unpacked"),
        ({"a.zarr": b"x"}, "Zarr store in one zip file.*unpacked"),
        ({"a.pt": b"x"}, "never opened"),
    ],
)
def test_stores_of_other_formats_are_named(
    tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    root = images.write_folder(tmp_path / "set", files)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DatasetError, match=words):
            Dataset(root).open(verify=images.verify)
        (first, *others) = files
        if not others:
            with pytest.raises(ConfigError, match=words):
                Dataset(root / first).open(verify=images.verify)


def test_a_table_of_attributes_next_to_images_is_no_store(tmp_path: Path) -> None:
    files = {"attributes.json": b"{}", "1.jpg": JPEG, "2.jpg": JPEG}
    root = images.write_folder(tmp_path / "set", files)
    with pytest.warns(PenstockWarning, match=r"attributes\.json"), Dataset(root) as dataset:
        assert len(dataset) == 2
