"""Common layouts of folders, indexed and read, local and remote, with the right values."""

from __future__ import annotations

import json
import logging
import os
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest

from penstock.cache import ConfigError, DatasetError, IndexChangedError, PenstockWarning
from penstock.readers import Dataset, build_index, open_index, pack
from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    ClassLabel,
    Image,
    Mask,
    MultiLabel,
    Text,
    Value,
)
from tests import images
from tests.field_sets import column_values
from tests.files import npy, quarantine, upload
from tests.readers.remote_sets import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


JPEGS = [images.jpeg(i, 16 + i, 20) for i in range(6)]


def png(seed: int, height: int = 16, width: int = 20) -> bytes:
    """A mask of class numbers, of the size of JPEGS[seed]."""
    return images.encoded(images.picture(seed, height + seed, width, "L"), "PNG")


class Place:
    """The place of a dataset: a local folder, or fsspec's memory."""

    def __init__(self, root: Path, *, is_remote: bool) -> None:
        self.root, self.is_remote = root, is_remote
        self.url = f"memory://{root.name}-{root.parent.name}" if is_remote else str(root)

    def write(self, files: dict[str, bytes | str]) -> Place:
        data = {k: v.encode() if isinstance(v, str) else v for k, v in files.items()}
        images.write_folder(self.root, data)
        if self.is_remote:
            upload(self.root, fsspec.filesystem("memory"), self.url.removeprefix("memory:/"))
        return self

    def open(self, **arguments: Any) -> Dataset:
        if self.is_remote:
            arguments["cache"] = self.root.with_name("cache")
        dataset = Dataset(self.url, allow_left_out=1, **arguments)
        dataset.open(verify=images.verify)
        return dataset


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "set", is_remote=request.param == "remote")
    yield made
    if made.is_remote:
        memory = fsspec.filesystem("memory")
        name = made.url.removeprefix("memory:/")
        if memory.exists(name):
            memory.rm(name, recursive=True)


def read(dataset: Dataset) -> dict[str, dict[str, Any]]:
    """Return the values of all fields, by the samples' names."""
    names = dataset.names(range(len(dataset)))
    batch = dataset.read(rows_of(dataset), fields=tuple(dataset.schema))
    columns = {
        field: column_values(column, decode=False) for field, column in batch.columns.items()
    }
    columns |= {f"{f}.present": values.tolist() for f, values in batch.present.items()}
    return {
        name: {field: values[i] for field, values in columns.items()}
        for i, name in enumerate(names)
    }


def text(value: Any) -> str:
    return value if isinstance(value, str) else bytes(value).decode()


def test_captions_next_to_images_in_class_folders(place: Place) -> None:
    place.write({"a/1.jpg": JPEGS[0], "a/1.txt": "ein Löwe", "b/2.jpg": JPEGS[1]})
    with place.open() as dataset:
        assert list(dataset.schema) == ["image", "label", "caption"]
        assert dataset.fields == ("image", "label")
        found = read(dataset)
    assert found["a/1.jpg"]["image"] == JPEGS[0]
    assert text(found["a/1.jpg"]["caption"]) == "ein Löwe"
    assert [each["label"] for each in found.values()] == [0, 1]
    assert [each["caption.present"] for each in found.values()] == [True, False]


def test_arrays_and_json_next_to_images(place: Place) -> None:
    vector = np.arange(3, dtype=np.float32)
    place.write(
        {
            "1.jpg": JPEGS[0],
            "1.npy": npy(vector),
            "1.json": '{"age": 3, "tags": ["sea"], "box": [0, 0, 5, 5.5]}',
            "2.jpg": JPEGS[1],
            "2.npy": npy(vector + 1),
            "2.json": '{"age": 4, "tags": [], "box": [1, 1, 2, 2]}',
        }
    )
    with place.open(schema={"tags": MultiLabel(("sea", "city"))}) as dataset:
        assert dataset.schema["array"] == Array("float32", (3,))
        assert dataset.schema["box"] == Array("float32", (4,))
        found = read(dataset)
    assert found["2.jpg"]["age"] == 4
    assert found["1.jpg"]["tags"] == [1, 0]
    assert found["1.jpg"]["box"] == [0, 0, 5, 5.5]
    bytes_or_list = found["2.jpg"]["array"]
    if isinstance(bytes_or_list, bytes):
        bytes_or_list = np.frombuffer(bytes_or_list, np.float32).tolist()
    assert bytes_or_list == [1, 2, 3]


def test_texts_in_class_folders(place: Place) -> None:
    place.write({"neg/1.txt": "bad", "pos/2.txt": "good"})
    with place.open() as dataset:
        assert dict(dataset.schema) == {"text": Text(), "label": ClassLabel(("neg", "pos"))}
        found = read(dataset)
    assert [text(each["text"]) for each in found.values()] == ["bad", "good"]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_hugging_face_metadata(place: Place, kind: str) -> None:
    rows = [("1.jpg", "a cat", 3), ("deep/2.jpg", "a dog", 5)]
    if kind == "csv":
        table = "file_name,text,n\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows)
    else:
        lines = (json.dumps({"file_name": a, "text": b, "n": c}) for a, b, c in rows)
        table = "\n".join(lines)
    place.write(
        {"train/1.jpg": JPEGS[0], "train/deep/2.jpg": JPEGS[1], f"train/metadata.{kind}": table}
    )
    with place.open() as dataset:
        assert dict(dataset.schema) == {"image": Image(), "text": Text(), "n": Value("int64")}
        found = read(dataset)
    assert found["train/deep/2.jpg"]["image"] == JPEGS[1]
    assert [text(each["text"]) for each in found.values()] == ["a cat", "a dog"]
    assert [each["n"] for each in found.values()] == [3, 5]


def test_metadata_with_objects_and_further_images(place: Place) -> None:
    lines = [
        {
            "file_name": "1.jpg",
            "seg_file_name": "seg/1.png",
            "objects": {"bbox": [[0, 0, 4, 4], [1, 1, 2, 2]], "categories": [3, 4]},
        },
        {
            "file_name": "2.jpg",
            "seg_file_name": "seg/2.png",
            "objects": {"bbox": [], "categories": []},
        },
    ]
    place.write(
        {
            "1.jpg": JPEGS[0],
            "2.jpg": JPEGS[1],
            "seg/1.png": png(0),
            "seg/2.png": png(1),
            "metadata.jsonl": "\n".join(map(json.dumps, lines)),
        }
    )
    schema = {"objects.bbox": Boxes(of="image", format="xywh")}
    with place.open(schema=schema) as dataset:
        assert dataset.schema["objects.bbox"] == schema["objects.bbox"]
        assert isinstance(dataset.schema["seg"], Mask)
        assert dataset.schema["objects.categories"] == Array("int64", (None,))
        found = read(dataset)
    assert found["1.jpg"]["objects.categories"] == [3, 4]
    assert found["1.jpg"]["objects.bbox"] == [[0, 0, 4, 4], [1, 1, 2, 2]]
    assert found["2.jpg"]["objects.bbox"] == []
    assert found["2.jpg"]["seg"] == png(1)


def test_metadata_replaces_class_folders_unless_disabled(place: Place) -> None:
    place.write(
        {
            "a/1.jpg": JPEGS[0],
            "b/2.jpg": JPEGS[1],
            "metadata.csv": "file_name,text\na/1.jpg,x\nb/2.jpg,y\n",
        }
    )
    with place.open() as dataset:
        assert list(dataset.schema) == ["image", "text"]
    with (
        pytest.warns(PenstockWarning, match=r"1 \.csv are left out"),
        place.open(manifest=False) as dataset,
    ):
        assert list(dataset.schema) == ["image", "label"]


def test_parquet_metadata_raises_an_error_with_a_remedy(place: Place) -> None:
    place.write({"1.jpg": JPEGS[0], "metadata.parquet": b"PAR1"})
    with pytest.raises(DatasetError, match=r"metadata\.parquet isn't supported yet"):
        place.open()


def test_metadata_of_several_splits_raises_an_error_with_a_remedy(place: Place) -> None:
    table = "file_name,n\n1.jpg,1\n"
    place.write(
        {
            "train/1.jpg": JPEGS[0],
            "train/metadata.csv": table,
            "test/1.jpg": JPEGS[1],
            "test/metadata.csv": table,
        }
    )
    with pytest.raises(DatasetError, match=r"parts of a dataset.*Give one of them: .*/test"):
        place.open()
    place.url += "/train"
    with place.open() as dataset:
        assert len(dataset) == 1


def test_a_manifest_in_the_dataset(place: Place) -> None:
    place.write(
        {
            "x/1.jpg": JPEGS[0],
            "x/2.jpg": JPEGS[1],
            "y/3.jpg": JPEGS[2],
            "list.csv": "path,label,target,note\ny/3.jpg,dog,0.5,\nx/1.jpg,cat,-2,hi\n"
            "y/3.jpg,cat,1,ho\n",
        }
    )
    with place.open(manifest="list.csv") as dataset:
        assert dataset.classes == ("cat", "dog")
        assert dataset.schema["target"] == Value("float32")
        names = dataset.names(range(3))
        batch = dataset.read(rows_of(dataset), fields=("image", "label", "target"))
        assert names == ["y/3.jpg", "x/1.jpg", "y/3.jpg"]
        assert column_values(batch.columns["image"], decode=False) == [JPEGS[2], JPEGS[0], JPEGS[2]]
        assert column_values(batch.columns["label"], decode=False) == [1, 0, 0]
        assert column_values(batch.columns["target"], decode=False) == [0.5, -2, 1]


def test_a_manifest_elsewhere(place: Place, tmp_path: Path) -> None:
    place.write({"1.jpg": JPEGS[0], "2.jpg": JPEGS[1]})
    table = tmp_path / "list.jsonl"
    table.write_text('{"file": "2.jpg", "v": [1, 2.5]}\n{"file": "1.jpg", "v": [0, 1]}\n')
    with place.open(manifest=table) as dataset:
        assert dataset.schema["v"] == Array("float32", (2,))
        assert read(dataset)["2.jpg"]["v"] == [1, 2.5]
    table.write_text('{"file": "2.jpg", "v": [3, 2.5]}\n')
    os.utime(table, ns=(1, 1))
    with place.open(manifest=table) as dataset:
        assert read(dataset) == {"2.jpg": {"image": JPEGS[1], "v": [3, 2.5]}}


def test_manifests_that_are_not_there(place: Place, tmp_path: Path) -> None:
    place.write({"1.jpg": JPEGS[0]})
    with pytest.raises(ConfigError, match=r"manifest: .*no\.csv"):
        place.open(manifest="no.csv")
    with pytest.raises(ConfigError, match=r"manifest: .*no\.csv"):
        place.open(manifest=str(tmp_path / "no.csv"))
    with pytest.raises(ConfigError, match=r"manifest: got s3://other/list\.csv"):
        place.open(manifest="s3://other/list.csv")


def test_rows_whose_file_is_missing_are_counted_and_named(place: Place) -> None:
    place.write({"1.jpg": JPEGS[0], "list.csv": "path,n\n1.jpg,1\n2.jpg,2\n3.jpg,3\n"})
    message = r"2 of 3 rows of list\.csv are left out, such as 2\.jpg"
    with pytest.warns(PenstockWarning, match=message):
        dataset = place.open(manifest="list.csv")
    with dataset:
        assert len(dataset) == 1
        assert dataset.index.about.quarantined == 2
        if not place.is_remote:
            assert set(quarantine(dataset.index.place)) == {"2.jpg", "3.jpg"}


def test_images_and_masks_in_folders_of_their_own(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.write(
        {
            "images/a/1.jpg": JPEGS[0],
            "images/2.jpg": JPEGS[1],
            "images/3.jpg": JPEGS[2],
            "masks/a/1.png": png(0),
            "masks/2.png": png(1),
        }
    )
    with caplog.at_level(logging.INFO, "penstock"), pytest.warns(PenstockWarning, match="1 files"):
        dataset = place.open(fields={"image": "images", "mask": "masks"})
    assert [r.message for r in caplog.records if "is read as masks" in r.message] != []
    with dataset:
        assert dataset.fields == ("image", "mask")
        found = read(dataset)
    assert found["images/a/1.jpg"] == {"image": JPEGS[0], "mask": png(0)}
    assert found["images/2.jpg"]["mask"] == png(1)


def test_a_mask_of_another_size_is_quarantined(tmp_path: Path) -> None:
    place = Place(tmp_path / "set", is_remote=False).write(
        {
            "images/1.jpg": JPEGS[0],
            "masks/1.png": png(0, height=9),
            "images/2.jpg": JPEGS[1],
            "masks/2.png": png(1),
        }
    )
    with place.open(fields={"image": "images", "mask": "masks"}) as dataset:
        assert len(dataset) == 1
        assert quarantine(dataset.index.place)["images/1.jpg"].startswith("mask: ")


def test_two_images_a_sample(place: Place) -> None:
    place.write({"left/1.jpg": JPEGS[0], "right/1.jpg": JPEGS[1]})
    with place.open(fields={"left": "left", "right": "right"}) as dataset:
        assert read(dataset) == {"left/1.jpg": {"left": JPEGS[0], "right": JPEGS[1]}}


def test_arguments_survive_a_spawned_worker(place: Place) -> None:
    place.write({"i/1.jpg": JPEGS[0], "t/1.txt": "hi", "list.csv": "path,n\ni/1.jpg,3\n"})
    for arguments in (
        {"fields": {"image": "i", "caption": "t"}, "schema": {"caption": Text()}},
        {"manifest": "list.csv", "schema": {"n": Value("int16")}},
    ):
        with place.open(**arguments) as dataset, pickle.loads(pickle.dumps(dataset)) as other:
            other.open(verify=images.verify)
            assert dict(other.schema) == dict(dataset.schema)
            assert other.fields == dataset.fields
            assert other.index.fingerprint == dataset.index.fingerprint


def test_other_fields_of_the_same_arrangement(place: Place) -> None:
    place.write({"i/1.jpg": JPEGS[0], "m/1.png": png(0)})
    with place.open(fields={"image": "i", "mask": "m", "id": None}) as dataset:
        assert dataset.fields == ("image", "mask", "id")
        with dataset.select("mask") as other:
            other.open(verify=images.verify)
            assert (other.fields, list(other.schema)) == (("mask",), ["image", "mask"])
            assert other.index.fingerprint == dataset.index.fingerprint


def test_another_arrangement_is_another_index(place: Place) -> None:
    place.write(
        {
            "i/1.jpg": JPEGS[0],
            "m/1.png": png(0),
            "one.csv": "path,n\ni/1.jpg,1\n",
            "two.csv": "path,n\ni/1.jpg,2\n",
        }
    )
    fingerprints = set()
    for arguments in (
        {"manifest": "one.csv"},
        {"manifest": "two.csv"},
        {"manifest": "one.csv", "schema": {"n": Value("float32")}},
        {"fields": {"image": "i", "mask": "m"}},
        {"fields": {"mask": "m", "image": "i"}},
    ):
        with place.open(**arguments) as dataset:
            fingerprints.add(dataset.index.fingerprint)
            values = read(dataset)["m/1.png" if next(iter(dataset.schema)) == "mask" else "i/1.jpg"]
            if arguments.get("manifest"):
                assert values["n"] == (2 if arguments["manifest"] == "two.csv" else 1)
        with place.open(**arguments) as dataset:
            assert dataset.index.fingerprint in fingerprints
    assert len(fingerprints) == 5


def test_a_named_index_of_another_arrangement_is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path / "set", is_remote=False).write(
        {"1.jpg": JPEGS[0], "one.csv": "path,n\n1.jpg,1\n", "two.csv": "path,n\n1.jpg,2\n"}
    )
    index = tmp_path / "index"
    with place.open(manifest="one.csv", index=index) as dataset:
        assert read(dataset)["1.jpg"]["n"] == 1
    with pytest.raises(IndexChangedError, match="was built with another"):
        place.open(manifest="two.csv", index=index)
    with pytest.raises(IndexChangedError, match="was built with another"):
        place.open(index=index)


@pytest.mark.parametrize("kind", ["metadata.csv", "list.csv", "1.json", "1.txt"])
def test_an_index_follows_its_tables(tmp_path: Path, kind: str) -> None:
    """A table's values change, and no image does."""
    arguments = {"manifest": "list.csv"} if kind == "list.csv" else {}
    place = Place(tmp_path / "set", is_remote=False)
    for n in (1, 2):
        table = f'{{"n": {n}}}' if kind == "1.json" else f"file_name,n\n1.jpg,{n}\n"
        table = str(n) if kind == "1.txt" else table
        place.write({"1.jpg": JPEGS[0], kind: table})
        os.utime(tmp_path / "set" / kind, ns=(n, n))
        os.utime(tmp_path / "set" / "1.jpg", ns=(5, 5))
        os.utime(tmp_path / "set", ns=(7, 7))
        with place.open(**arguments) as dataset:
            found = read(dataset)["1.jpg"]
            assert int(text(found["caption"])) == n if kind == "1.txt" else found["n"] == n


def test_new_captions_are_indexed(tmp_path: Path) -> None:
    place = Place(tmp_path / "set", is_remote=False).write({"1.jpg": JPEGS[0]})
    with place.open() as dataset:
        assert list(dataset.schema) == ["image"]
    place.write({"1.txt": "now"})
    os.utime(tmp_path / "set", ns=(1, 1))
    with place.open() as dataset:
        assert text(read(dataset)["1.jpg"]["caption"]) == "now"


def test_a_built_index_is_opened_with_the_same_arguments(tmp_path: Path) -> None:
    place = Place(tmp_path / "set", is_remote=False).write(
        {"1.jpg": JPEGS[0], "list.csv": "path,n\n1.jpg,1\n"}
    )
    built = build_index(place.url, manifest="list.csv", verify=images.verify)
    assert built.place.startswith(str(tmp_path / "set-"))
    index = open_index(place.url, manifest="list.csv", verify=images.verify)
    assert os.fsdecode(index.place) == built.place
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)
        assert list(open_index(place.url, verify=images.verify).schema) == ["image"]


def test_unknown_fields_of_a_schema_and_bad_arguments(tmp_path: Path) -> None:
    place = Place(tmp_path / "set", is_remote=False).write({"1.jpg": JPEGS[0]})
    with pytest.raises(ConfigError, match=r'schema: got "n", but .* has \[\'image\'\]'):
        place.open(schema={"n": Value("int64")})
    for arguments, words in (
        ({"schema": {"image": "Image"}}, "wanted a field type"),
        ({"schema": {"a/b": Image()}}, "wanted a field's name"),
        ({"fields": {}}, "wanted names of fields"),
        ({"fields": {"image": 3}}, "wanted a folder such as"),
        ({"manifest": 3}, "wanted a table"),
    ):
        with pytest.raises(ConfigError, match=words):
            Dataset(place.url, **arguments).open(verify=images.verify)


def test_packs_and_tar_files_have_no_manifest(tmp_path: Path) -> None:
    place = Place(tmp_path / "set", is_remote=False).write({"1.jpg": JPEGS[0]})
    with pytest.raises(ConfigError, match=r'a table lists the files of a folder.*format="tar"'):
        place.open(manifest=False, format="tar")


def test_a_pack_of_a_folder_by_fields_and_of_a_manifest(tmp_path: Path) -> None:
    place = Place(tmp_path / "set", is_remote=False).write(
        {"i/1.jpg": JPEGS[0], "m/1.png": png(0), "list.csv": "path,n,text\ni/1.jpg,3,hi\n"}
    )
    pack(place.url, tmp_path / "one", fields={"image": "i", "mask": "m"}, verify=images.verify)
    with Dataset(tmp_path / "one") as dataset:
        assert list(dataset.schema) == ["image", "mask"]
        masks = dataset.read(rows_of(dataset)).columns["mask"]
        assert column_values(masks, decode=False) == [png(0)]
    schema = {"n": Value("int16")}
    pack(place.url, tmp_path / "two", manifest="list.csv", schema=schema, verify=images.verify)
    with Dataset(tmp_path / "two") as dataset:
        assert dict(dataset.schema) == {"image": Image(), "n": Value("int16"), "text": Text()}
    with (
        Dataset(tmp_path / "two", schema=schema) as dataset,
        pytest.raises(ConfigError, match="contains its schema"),
    ):
        dataset.open()
