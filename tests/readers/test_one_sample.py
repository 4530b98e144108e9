"""Test `dataset[i]`: one sample, decoded as a batch without a recipe has it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image as Pillow

from penstock import Boxes, DataLoader, Dataset, Image, Text, concat, mix
from penstock.errors import ConfigError, CorruptSampleError
from tests import annotated_sets, field_sets
from tests.field_sets import SCHEMA, street

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COUNT = 13


@pytest.fixture(scope="module")
def streets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("streets")
    field_sets.write_folder(place / "folder", COUNT)
    field_sets.write_tars(place / "tars", COUNT)
    return place


def opened(place: Path, *fields: str) -> Dataset:
    dataset = Dataset(str(place), schema=SCHEMA)
    return dataset.select(*(fields or [*dataset.schema, "id"]))


def rows_of(dataset: Any) -> list[dict[str, Any]]:
    with DataLoader(dataset, batch_size=4, as_dict=True) as loader:
        batches = list(loader)
    return [
        {name: column[row] for name, column in batch.items()}
        for batch in batches
        for row in range(len(batch["id"]))
    ]


def check_equal(sample: dict[str, Any], row: dict[str, Any]) -> None:
    assert list(sample) == list(row)
    for name, value in row.items():
        if isinstance(value, torch.Tensor):
            assert sample[name].dtype == value.dtype, name
            assert torch.equal(sample[name], value), name
        else:
            assert sample[name] == value, name


@pytest.mark.parametrize("kind", ["folder", "tars"])
def test_a_sample_is_a_row_of_a_batch(streets: Path, kind: str) -> None:
    with opened(streets / kind) as dataset:
        rows = rows_of(dataset)
        assert len(rows) == COUNT
        for number, row in enumerate(rows):
            check_equal(dataset[number], row)
            check_equal(dataset[number - COUNT], row)
        assert sorted(dataset[0]) == sorted([*dataset.schema, "id"])
        first = dataset[np.int64(1)]
        number = int(first["number"])
        assert torch.equal(first["image"], torch.from_numpy(street(number).pixels.copy()))


def test_boxes_need_their_image_only_inside(streets: Path) -> None:
    schema = {"boxes": Boxes(of="image", format="cxcywh_norm")}
    (streets / "one").mkdir()
    (streets / "one" / "a.png").write_bytes(street(1).image)
    text = '{"file_name": "a.png", "boxes": [[0.5, 0.5, 0.5, 1.0]]}\n'
    (streets / "one" / "metadata.jsonl").write_text(text)
    with Dataset(str(streets / "one"), schema=schema, fields=("boxes",)) as dataset:
        assert list(dataset[0]) == ["boxes"]
        assert dataset[0]["boxes"].tolist() == [[8.0, 0.0, 24.0, 24.0]]


SETS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "coco": lambda root: {
        "url": annotated_sets.coco_set(root, annotated_sets.instances()),
        "manifest": "annotations/instances_train2017.json",
    },
    "voc": lambda root: {
        "url": annotated_sets.voc_set(
            root,
            {
                "a": [{"name": "dog", "box": (3, 4, 20, 22), "difficult": 1, "truncated": 0}],
                "b": [],
                "c": [{"name": "cat", "box": (1, 1, 9, 9), "difficult": 0, "truncated": 1}] * 2,
            },
            train=["a", "b", "c"],
        ),
        "format": "voc",
    },
    "yolo": lambda root: {
        "url": annotated_sets.yolo_set(
            root / "yolo",
            {"a": "0 0.1 0.2 0.5 0.2 0.5 0.9\n1 0.5 0.5 0.9 0.5 0.9 0.9 0.5 0.9", "b": None},
            "path: .\ntrain: images/train\nnames: [cat, dog]\n",
        )
    },
}


@pytest.mark.parametrize("kind", SETS)
def test_annotations_are_those_of_a_batch(kind: str, tmp_path: Path) -> None:
    arguments = SETS[kind](tmp_path)
    with Dataset(**arguments) as whole:
        dataset = whole.select(*whole.schema, "image.size", "image.mask", "id")
        with dataset, DataLoader(dataset, batch_size=1, as_dict=True) as loader:
            rows = [{name: column[0] for name, column in batch.items()} for batch in loader]
            samples = [dataset[number] for number in range(len(dataset))]
        for row, sample in zip(rows, samples, strict=True):
            seen, decoded = row.pop("image").float(), sample.pop("image").float()
            assert (seen - decoded).abs().mean() < 3  # DALI and Pillow round differently
            check_equal(sample, row)


def test_parts_count_their_own_samples(streets: Path) -> None:
    with opened(streets / "folder", "number", "id") as dataset:
        part = dataset.subset([7, 3, 11])
        numbers = [int(part[place]["id"]) for place in range(3)]
        assert sorted(numbers) == [3, 7, 11]
        both = concat([part, dataset])
        assert int(both[4]["number"]) == int(dataset[1]["number"])
        assert len(list(both)) == 3 + COUNT  # type: ignore[call-overload]  # as a sequence
        mixed = mix({"a": dataset, "b": part}, weights={"a": 0.5, "b": 0.5}, epoch=20)
        assert int(mixed[COUNT + 1]["number"]) == int(part[1]["number"])
        with pytest.raises(IndexError):
            mixed[COUNT + 3]


def test_arrays_are_the_callers_own(tmp_path: Path) -> None:
    np.save(tmp_path / "all.npy", np.arange(24.0).reshape(4, 2, 3))
    with Dataset(str(tmp_path / "all.npy")) as arrays:
        assert torch.equal(arrays[2]["array"], torch.arange(12.0, 18.0).view(2, 3).double())
        arrays[2]["array"].fill_(7)  # the caller's own
        assert arrays[2]["array"][0, 0] == 12


def test_images_of_any_size_and_kind(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "a").mkdir()
    pictures = {
        "grey": Pillow.fromarray(rng.integers(0, 255, (9, 7), np.uint8)),
        "wide": Pillow.fromarray(rng.integers(0, 65535, (5, 6), np.uint16)),
        "alpha": Pillow.fromarray(rng.integers(0, 255, (4, 3, 4), np.uint8)),
    }
    for name, picture in pictures.items():
        picture.save(tmp_path / "a" / f"{name}.png")
    turned = Pillow.fromarray(rng.integers(0, 255, (8, 16, 3), np.uint8))
    exif = Pillow.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "a" / "turned.jpg", exif=exif)
    with Dataset(str(tmp_path), fields=("image",)) as dataset:
        found = {
            name.rpartition("/")[2].partition(".")[0]: dataset[number]["image"]
            for number, name in enumerate(dataset.names(range(4)))
        }
    assert {name: tuple(each.shape) for name, each in found.items()} == {
        "grey": (3, 9, 7),
        "wide": (3, 5, 6),
        "alpha": (3, 4, 3),
        "turned": (3, 16, 8),
    }
    assert all(each.dtype == torch.uint8 for each in found.values())
    assert (
        found["alpha"].numpy() == np.asarray(pictures["alpha"])[..., :3].transpose(2, 0, 1)
    ).all()
    wide = np.asarray(pictures["wide"]) / 257
    assert abs(found["wide"].numpy() - wide).max() <= 0.5


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        (COUNT, IndexError, rf"has {COUNT} samples, and \[{COUNT}\] isn't one of them"),
        (-COUNT - 1, IndexError, "isn't one of them"),
        (slice(0, 2), ConfigError, "wanted the number of one sample"),
        ("a", ConfigError, "wanted the number of one sample"),
        (True, ConfigError, "wanted the number of one sample"),
        (0.0, ConfigError, "wanted the number of one sample"),
    ],
)
def test_other_indices_are_refused(
    streets: Path, index: Any, error: type[Exception], words: str
) -> None:
    with opened(streets / "folder") as dataset, pytest.raises(error, match=words):
        dataset[index]


def test_what_a_sample_lacks_is_none_and_what_doesnt_decode_is_named(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Pillow.new("RGB", (8, 8)).save(buffer, "PNG")
    whole = buffer.getvalue()
    images = [whole, whole[:-30], b"text"]
    table = pa.table({"image": images, "caption": ["a", None, "c"], "score": [1.5, 2.5, 3.5]})
    pq.write_table(table, tmp_path / "all.parquet")
    fields = ("image", "caption", "caption.present", "score")
    schema = {"image": Image(), "caption": Text()}
    with Dataset(str(tmp_path / "all.parquet"), schema=schema, fields=fields) as dataset:
        sample = dataset[0]
        assert (sample["caption"], bool(sample["caption.present"])) == ("a", True)
        assert (sample["score"].dtype, float(sample["score"])) == (torch.float64, 1.5)
        for number, words in ((1, r'"image": it doesn.t decode'), (2, "no image|known format")):
            with pytest.raises(CorruptSampleError, match=words) as caught:
                dataset[number]
            assert caught.value.sample_id == number
        lacking = dataset.select("caption", "caption.present")[1]
        assert lacking["caption"] is None
        assert not lacking["caption.present"]


def test_torch_s_own_loader_is_refused(streets: Path) -> None:
    with opened(streets / "folder") as dataset:
        loader: Any = torch.utils.data.DataLoader(dataset, batch_size=2)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="Penstock's DataLoader"):
            next(iter(loader))
