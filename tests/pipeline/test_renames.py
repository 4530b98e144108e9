"""Fields are renamed in every format; sound and video have labels; labels have a number."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import Array, Bytes, ClassLabel, DataLoader, Dataset, Map, Mask, Resize, concat
from penstock.cache import ConfigError
from penstock.pipeline.cli import main
from penstock.readers import build_index, open_index, pack
from tests import images, tars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAMES = {"pixel_values": "image", "labels": "label"}
COUNT = 8
FILES = {f"{'ab'[i % 2]}/{i}.jpg": images.jpeg(i) for i in range(COUNT)}


def folder(root: Path) -> dict[str, Any]:
    return {"url": images.write_folder(root, FILES)}


def metadata(root: Path) -> dict[str, Any]:
    rows = "".join(f"{name},{name[0]}\n" for name in FILES)
    table = f"file_name,label\n{rows}".encode()
    return {"url": images.write_folder(root, FILES | {"metadata.csv": table})}


def listed(root: Path) -> dict[str, Any]:
    rows = "".join(f"{name},{name[0]}\n" for name in FILES)
    table = f"path,label\n{rows}".encode()
    return {"url": images.write_folder(root, FILES | {"list.csv": table}), "manifest": "list.csv"}


def tar(root: Path) -> dict[str, Any]:
    members = {name.rpartition("/")[2]: data for name, data in FILES.items()}
    members |= {f"{i}.cls": str(i % 2).encode() for i in range(COUNT)}
    return {
        "url": images.write_folder(root, {"0.tar": tars.archive(dict(sorted(members.items())))})
    }


def parquet(root: Path) -> dict[str, Any]:
    root.mkdir()
    table = pa.table({"image": list(FILES.values()), "label": [i % 2 for i in range(COUNT)]})
    pq.write_table(table, root / "x.parquet")
    return {"url": root}


def packed(root: Path) -> dict[str, Any]:
    pack(folder(root.with_name("source"))["url"], root, shuffle=False)
    return {"url": root}


def remote(root: Path) -> dict[str, Any]:
    fsspec.filesystem("memory").put(str(packed(root)["url"]), "/renames-pack", recursive=True)
    return {"url": "memory://renames-pack", "cache": root.with_name("cache")}


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    memory = fsspec.filesystem("memory")
    if memory.exists("/renames-pack"):
        memory.rm("/renames-pack", recursive=True)


def batches(dataset: Any) -> list[dict[str, Any]]:
    image = next(name for name in ("pixel_values", "image") if name in dataset.schema)
    recipe = {image: [Resize((8, 8))]}
    with dataset, DataLoader(dataset, 4, augment=recipe, as_dict=True, shuffle=False) as loader:
        assert loader.statistics().left_out == {}
        return [{name: np.asarray(value) for name, value in b.items()} for b in loader]


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [list(each) for each in found] == [["pixel_values", "labels"]] * len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(one["pixel_values"], other["image"])
        assert np.array_equal(one["labels"], other["label"])


EVERY = [folder, metadata, listed, tar, parquet, packed, remote]


@pytest.mark.parametrize("write", EVERY)
def test_every_format(tmp_path: Path, write: Callable[[Path], dict[str, Any]]) -> None:
    place = write(tmp_path / "set")
    wanted = batches(Dataset(**place, fields=("image", "label")))
    same(batches(Dataset(**place, fields=NAMES)), wanted)
    plain = Dataset(**place, fields=("image", "label"))
    renamed = plain.rename({"image": "pixel_values", "label": "labels"})
    assert renamed.fields == ("pixel_values", "labels")
    same(batches(pickle.loads(pickle.dumps(renamed))), wanted)
    with plain, Dataset(**place, fields=NAMES) as other:
        assert plain.fields == ("image", "label")
        assert (other.classes, other.num_classes) == (plain.classes, 2)
        assert other.column("labels").tolist() == plain.column("label").tolist()
        parts = other.split(0.5, 0.5, seed=0, by="labels") if other.classes else None
        assert parts is None or [len(part) for part in parts] == [4, 4]


@pytest.mark.parametrize("write", EVERY)
def test_what_is_packed(tmp_path: Path, write: Callable[[Path], dict[str, Any]]) -> None:
    place = write(tmp_path / "set")
    wanted = batches(Dataset(**place, fields=("image", "label")))
    url = place.pop("url")
    pack(url, tmp_path / "one", fields=NAMES, shuffle=False, **place)
    with Dataset(url, fields=NAMES, **place) as dataset:
        pack(dataset, tmp_path / "two", shuffle=False)
    for name in ("one", "two"):
        same(batches(Dataset(tmp_path / name)), wanted)


def test_a_renamed_dataset_has_the_index_of_the_data_as_they_lie(tmp_path: Path) -> None:
    root = folder(tmp_path / "set")["url"]
    place = build_index(root).place
    with Dataset(root) as plain, Dataset(root, fields=NAMES) as renamed:
        assert renamed.index.place == place
        assert renamed.contents.fingerprint == plain.contents.fingerprint
    assert open_index(root, fields=NAMES).place == place
    assert [each.name for each in tmp_path.iterdir() if "penstock" in each.name] == ["set.penstock"]
    report = "pixel_values=image,labels=label"
    assert main(["inspect", str(root), "--fields", report]) == 0
    assert main(["pack", str(root), str(tmp_path / "pack"), "--fields", report]) == 0
    assert list(open_index(tmp_path / "pack").schema) == ["pixel_values", "labels"]


def test_data_that_belongs_to_an_image_is_resized_with_it(tmp_path: Path) -> None:
    grey = images.encoded(images.picture(1, mode="L"), "PNG")
    pictures = {f"images/{i}.jpg": images.jpeg(i) for i in range(4)}
    root = images.write_folder(
        tmp_path / "set", pictures | {f"masks/{i}.png": grey for i in range(4)}
    )
    pack(root, tmp_path / "pack", fields={"image": "images", "mask": "masks"})
    for dataset in (
        Dataset(
            root,
            fields={"pixel_values": "images", "labels": "masks"},
            schema={"labels": Mask(of="pixel_values")},
        ),
        Dataset(tmp_path / "pack", fields={"pixel_values": "image", "labels": "mask"}),
        Dataset(tmp_path / "pack").rename({"image": "pixel_values", "mask": "labels"}),
        Dataset(tmp_path / "pack")
        .rename({"image": "x"})
        .rename({"x": "pixel_values", "mask": "labels"}),
    ):
        with dataset:
            mask = dataset.schema["labels"]
            assert isinstance(mask, Mask)
            assert mask.of == "pixel_values"
            (batch,) = batches(dataset)
            assert {name: each.shape for name, each in batch.items()} == {
                "pixel_values": (4, 3, 8, 8),
                "labels": (4, 8, 8),
            }


def test_parts_and_datasets_end_to_end(tmp_path: Path) -> None:
    with Dataset(folder(tmp_path / "set")["url"]) as dataset:
        halves = [dataset.subset(range(4)), dataset.subset(range(4, 8))]
        names = {"image": "pixel_values", "label": "labels"}
        whole = concat(halves).rename(names)
        assert [each.shape[0] for each in (b["labels"] for b in batches(whole))] == [4, 4]
        assert whole.fields == ("pixel_values", "labels")
        assert len({id(each) for each in whole._datasets()}) == 1
        part = halves[0].rename(names)
        assert part.ids(part.contents.rows(np.arange(4))).tolist() == [0, 1, 2, 3]


def test_tokens_and_a_schema_under_the_new_names(tmp_path: Path) -> None:
    images.write_folder(tmp_path / "t", {"a.bin": np.arange(100, dtype="<u2").tobytes()})
    report: dict[str, Any] = {"format": "tokens", "dtype": "uint16", "sample": (10,)}
    with Dataset(tmp_path / "t", fields={"input_ids": "tokens"}, **report) as dataset:
        assert dataset.column("input_ids").shape == (10, 10)
    root = folder(tmp_path / "set")["url"]
    with Dataset(root, fields=NAMES, schema={"labels": ClassLabel(("b", "a"))}) as dataset:
        assert dataset.classes == ("b", "a")
        assert sorted(dataset.column("labels").tolist()) == [0] * 4 + [1] * 4


@pytest.mark.parametrize("write", [folder, packed])
@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"x": "nowhere"}, r"got 'nowhere', but .* has \['image', 'label'\]"),
        ({"label": "image"}, "gives two fields of .* one name"),
        ({"x": "image", "y": "image"}, "wanted each field"),
    ],
)
def test_names_that_cant_be(
    tmp_path: Path, write: Callable[[Path], dict[str, Any]], names: dict[str, str], words: str
) -> None:
    place = write(tmp_path / "set")
    with pytest.raises(ConfigError, match=words):
        Dataset(**place, fields=names).open()


@pytest.mark.parametrize("names", [{"image": 3}, ["image"], {3: "image"}, {"image": "a/b"}, None])
def test_new_names_that_cant_be(tmp_path: Path, names: Any) -> None:
    with pytest.raises(ConfigError, match="rename: got"):
        Dataset(tmp_path).rename(names)
    with pytest.raises(ConfigError, match="'nowhere', but"):
        Dataset(folder(tmp_path / "set")["url"]).rename({"nowhere": "x"}).open()


def sound(number: int) -> bytes:
    data = np.full(50, number, "<i2").tobytes()
    return b"RIFF" + (36 + len(data)).to_bytes(4, "little") + b"WAVEfmt " + bytes(20) + data


def loudness(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data[36:], "<i2").astype(np.float32)[:1]


def test_class_folders_of_sound_and_of_video(tmp_path: Path) -> None:
    files = {f"{('cat', 'dog')[i % 2]}/{i}.wav": sound(i) for i in range(6)}
    root = images.write_folder(tmp_path / "sounds", files | {"README.md": b"x", "cat/LICENSE": b""})
    dataset = Dataset(root, fields=("audio", "label"))
    with dataset, DataLoader(dataset, 6, shuffle=False) as loader:
        ((found, labels),) = loader
        assert (dataset.classes, dataset.left_out) == (("cat", "dog"), {})
    assert sorted(found) == sorted(files.values())
    assert [data[-2] % 2 for data in found] == labels.tolist()
    pack(root, tmp_path / "pack", schema={"audio": Bytes()})
    recipe = {"audio": [Map(loudness, returns={"audio": Array("float32", (1,))})]}
    with DataLoader(Dataset(tmp_path / "pack"), 6, augment=recipe) as loader:
        ((values, labels),) = loader
    assert (values[:, 0] % 2).tolist() == labels.tolist()
    film = b"\0\0\0\x18ftypmp42" + bytes(40)
    films = images.write_folder(tmp_path / "films", {"a/1.mp4": film, "b/2.mp4": film})
    with Dataset(films, fields=("video", "label"), schema={"video": Bytes()}) as dataset:
        assert dataset.column("label").tolist() == [0, 1]
    with Dataset(films, fields={"clip": "video", "labels": "label"}, schema={"clip": Bytes()}) as d:
        assert d.column("labels").tolist() == [0, 1]


def test_integer_labels_have_a_number_of_classes(tmp_path: Path) -> None:
    members = {f"{i}.jpg": images.jpeg(i) for i in range(6)}
    members |= {f"{i}.cls": str(i % 3).encode() for i in range(6)}
    archive = tars.archive(dict(sorted(members.items())))
    root = images.write_folder(tmp_path / "tars", {"0.tar": archive})
    with Dataset(root) as dataset:
        assert (dataset.classes, dataset.num_classes) == ((), 3)
        assert dataset.subset([0]).num_classes == concat([dataset, dataset]).num_classes == 3
    pack(root, tmp_path / "pack")
    pq.write_table(pa.table({"x": [1.0, 2.0], "label": [0, 6]}), tmp_path / "x.parquet")
    np.savez(tmp_path / "x.npz", x=np.zeros((3, 2)), labels=np.array([4, 0, 1], np.uint8))
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((3, 2)))
    images.write_folder(tmp_path / "none", {"x.npy": buffer.getvalue()})
    for name, count in (("pack", 3), ("x.parquet", 7), ("x.npz", 5), ("none", None)):
        with Dataset(tmp_path / name) as dataset:
            assert dataset.num_classes == count
