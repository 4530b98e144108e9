"""Boxes in pixels and in shares of their image give the same pixels; a wrong unit is rejected."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Picture

from penstock import DataLoader, Dataset, pack
from penstock.augment import RandomHorizontalFlip, RandomResizedCrop, Resize, SanitizeBoxes
from penstock.cache import DatasetError, PenstockError, PenstockWarning, RecipeError
from penstock.readers.fieldtypes import Boxes, FieldType, Image, Keypoints
from tests import tars
from tests.pipeline.feed.memory import Memory

HEIGHT, WIDTH, N = 40, 80, 12
PIXELS = (
    np.array([[[8, 4, 40, 20], [16, 10, 72, 36]]] * N, np.float32) + np.arange(N)[:, None, None] % 3
)
NORM = PIXELS / np.array([WIDTH, HEIGHT] * 2, np.float32)


def stored(format: str) -> Any:
    corners = NORM if format.endswith("_norm") else PIXELS
    low, sides = corners[..., :2], corners[..., 2:] - corners[..., :2]
    parts = {
        "xyxy": corners,
        "xywh": np.concatenate([low, sides], axis=-1),
        "cxcywh": np.concatenate([low + sides / 2, sides], axis=-1),
    }
    return parts[format.removesuffix("_norm")].astype(np.float32)


def jpeg(*, turned: bool = False) -> bytes:
    """An upright image of 40 x 80. turned: stored on its side, with EXIF's 6."""
    size, exif, buffer = (
        (HEIGHT, WIDTH) if turned else (WIDTH, HEIGHT),
        Picture.Exif(),
        io.BytesIO(),
    )
    if turned:
        exif[0x0112] = 6
    Picture.new("RGB", size, (90, 120, 30)).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


def parquet(folder: Path, boxes: Any, *, turned: bool = False) -> str:
    folder.mkdir()
    table = pa.table(
        {
            "image": [jpeg(turned=turned)] * len(boxes),
            "boxes": pa.array([[list(map(float, b)) for b in each] for each in boxes]),
        }
    )
    pq.write_table(table, folder / "a.parquet")
    return str(folder)


def memory(boxes: Any, format: Any, *fields: str) -> Memory:
    types: dict[str, FieldType] = {"image": Image(), "boxes": Boxes(of="image", format=format)}
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    columns = {"image": [pixels] * len(boxes), "boxes": list(boxes)}
    return Memory(types, columns, fields=fields or ("image", "boxes"))


def epoch(dataset: Any, augment: Any = None, batch_size: int = 4) -> list[Any]:
    with DataLoader(dataset, batch_size, augment=augment, seed=3, as_dict=True) as loader:
        return [row.numpy() for batch in loader for row in batch["boxes"]]


RECIPES: dict[str, Any] = {
    "as stored": None,
    "resized": [Resize((60, 60)), SanitizeBoxes()],
    "cropped": [RandomResizedCrop(32, scale=(0.5, 1)), RandomHorizontalFlip(), SanitizeBoxes()],
}


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("format", ["xyxy_norm", "xywh_norm", "cxcywh_norm"])
def test_normalised_boxes_are_the_pixel_boxes(format: Any, recipe: str) -> None:
    ours = epoch(memory(stored(format), format), RECIPES[recipe])
    theirs = epoch(memory(PIXELS, "xyxy"), RECIPES[recipe])
    assert sum(map(len, ours)) > N
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)


def test_normalised_boxes_without_their_image_are_in_its_pixels() -> None:
    ours = epoch(memory(stored("cxcywh_norm"), "cxcywh_norm", "boxes"))
    np.testing.assert_allclose(np.stack(ours), PIXELS, atol=1e-3)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_table_of_normalised_boxes_and_its_pack(
    tmp_path: Path, *, turned: bool, packed: bool
) -> None:
    schema = {"image": Image(), "boxes": Boxes(of="image", format="cxcywh_norm")}
    root = parquet(tmp_path / "set", stored("cxcywh_norm"), turned=turned)
    url, arguments = root, {"schema": schema}
    if packed:
        url, arguments = str(tmp_path / "pack"), {}
        pack(root, url, schema=schema, shuffle=False, short_side=20)
    with Dataset(url, fields=("image", "boxes"), **arguments) as dataset:
        found = epoch(dataset, [Resize((HEIGHT, WIDTH)), SanitizeBoxes()])
    np.testing.assert_allclose(np.stack(found), PIXELS, atol=1e-3)


def test_a_table_without_its_image_has_no_sizes(tmp_path: Path) -> None:
    schema = {"image": Image(), "boxes": Boxes(of="image", format="xyxy_norm")}
    root = parquet(tmp_path / "set", NORM)
    with (
        Dataset(root, fields=("boxes",), schema=schema) as dataset,
        pytest.raises(RecipeError, match='select "image" too'),
    ):
        epoch(dataset)


@pytest.mark.parametrize("format", ["xyxy", "xywh", "cxcywh"])
def test_pixel_boxes_within_one_pixel_are_refused_with_the_format_to_give(format: Any) -> None:
    with pytest.raises(DatasetError, match=f'format="{format}_norm"'):
        epoch(memory(stored(f"{format}_norm"), format), [Resize(20)])


def test_normalised_boxes_that_are_pixels_are_refused() -> None:
    with pytest.raises(DatasetError, match=r'format="xyxy"'):
        epoch(memory(PIXELS, "xyxy_norm"))


@pytest.mark.parametrize("work", ["load", "pack"])
def test_a_table_of_the_wrong_unit_is_refused(tmp_path: Path, work: str) -> None:
    root = parquet(tmp_path / "set", NORM)
    schema = {"image": Image(), "boxes": Boxes(of="image")}
    works = {
        "load": lambda: epoch(
            Dataset(root, fields=("image", "boxes"), schema=schema), [Resize((20, 20))]
        ),
        "pack": lambda: pack(root, str(tmp_path / "pack"), schema=schema),
    }
    with pytest.raises(PenstockError, match="xyxy_norm"):
        works[work]()


def test_an_index_sees_the_whole_table(tmp_path: Path) -> None:
    for i in range(2):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg())
    lines = [f'{{"file_name": "{i}.jpg", "boxes": [[0.1, 0.2, 0.5, 0.6]]}}' for i in range(2)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    schema = {"boxes": Boxes(of="image")}
    with (
        pytest.raises(DatasetError, match="xyxy_norm"),
        Dataset(str(tmp_path), schema=schema) as dataset,
    ):
        dataset.open()


@pytest.mark.parametrize(
    "boxes",
    [
        [np.zeros((0, 4))] * 12,
        [np.zeros((2, 4))] * 12,
        [np.array([[0, 0, 1, 1]])] * 12,
        [np.array([[0, 0, 0.5, 0.5]])] + [np.array([[2, 3, 9, 9]])] * 11,
    ],
)
def test_few_empty_and_tiny_boxes_are_no_alarm(boxes: Any) -> None:
    given = [each.astype(np.float32) for each in boxes]
    assert len(epoch(memory(given, "xyxy"), batch_size=1)) == 12


@pytest.mark.parametrize(
    ("box", "words"),
    [
        ((0.1, 0.2, 1.2, 0.5), "isn't normalised"),
        ((0.1, -0.2, 0.2, 0.5), "isn't normalised"),
        ((0.1, float("nan"), 0.2, 0.5), "isn't finite"),
        ((0.5, 0.2, 0.4, 0.5), "inverted"),
        ((-0.001, 0.2, 1.001, 1.0), None),
    ],
)
def test_a_normalised_box_is_checked(box: Any, words: str | None) -> None:
    verdict = Boxes(of="image", format="xyxy_norm").check_values(np.array([box]), (40, 80))
    assert (verdict is None) == (words is None)
    if verdict is not None and words is not None:
        assert words in verdict.reason


BAD = {
    "isn't finite": (1.0, float("nan"), 9.0, 9.0),
    "is inverted": (30.0, 5.0, 10.0, 20.0),
    "lies outside its image": (WIDTH + 1.0, 5.0, WIDTH + 9.0, 20.0),
}


@pytest.fixture(params=["parquet", "arrow"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Twelve images, of which 2, 5 and 9 have a bad box behind two good ones."""
    boxes = [PIXELS[i].tolist() for i in range(N)]
    for row, box in zip((2, 5, 9), BAD.values(), strict=True):
        boxes[row].append(list(box))
    boxes[7] = []
    table = pa.table({"image": [jpeg()] * N, "boxes": pa.array(boxes), "row": range(N)})
    path = tmp_path / f"a.{request.param}"
    if request.param == "parquet":
        pq.write_table(table, path, row_group_size=5)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    return str(path)


SCHEMA: dict[str, FieldType] = {"image": Image(), "boxes": Boxes(of="image")}


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_bad_box_of_a_table_makes_a_bad_sample(damaged: str, recipe: str) -> None:
    dataset = Dataset(damaged, fields=("image", "boxes", "row"), schema=SCHEMA)
    augment = RECIPES[recipe] or [Resize((20, 20))]
    with DataLoader(dataset, 4, seed=3, shuffle=True, augment=augment, max_bad=0.5) as loader:
        with pytest.warns(PenstockWarning, match="Sample . is bad: boxes: box 2"):
            batches = list(loader)
        told = loader.statistics()
        lines = Path(str(told.quarantine)).read_text()
    rows = [row for _, _, rows in batches for row in rows.tolist()]
    assert told.bad == 3
    assert len(rows) == N
    assert not {2, 5, 9} & set(rows)
    assert all(words in lines for words in BAD)


def test_a_bad_box_without_its_image_is_bad_too(damaged: str) -> None:
    dataset = Dataset(damaged, fields=("boxes", "row"), schema=SCHEMA)
    with pytest.warns(PenstockWarning), DataLoader(dataset, 4, max_bad=0.5) as loader:
        assert sorted({row for _, rows in loader for row in rows.tolist()} & {2, 5, 9}) == [9]


def test_a_mask_has_no_bad_box(damaged: str) -> None:
    dataset = Dataset(damaged, fields=("boxes", "row"), schema=SCHEMA)
    with pytest.warns(PenstockWarning), DataLoader(dataset, 5, pad="mask", max_bad=0.5) as loader:
        batches = list(loader)
    assert sum(int(valid.sum()) for *_, valid in batches) == N - 2
    assert all(boxes.values.isfinite().all() for boxes, *_ in batches)


def test_a_pack_leaves_bad_boxes_out(damaged: str, tmp_path: Path) -> None:
    packed = pack(damaged, str(tmp_path / "pack"), schema=SCHEMA)
    assert (packed.samples, packed.quarantined) == (N - 3, 3)
    lines = (tmp_path / "pack" / "_penstock" / "quarantine.jsonl").read_text()
    assert all(words in lines for words in BAD)


def test_points_that_are_no_numbers_are_bad(tmp_path: Path) -> None:
    points = [[[1.0, 2.0]], [[float("inf"), 2.0]], [[3.0, 4.0], [-1.0, -1.0]]]
    pq.write_table(pa.table({"image": [jpeg()] * 3, "points": points}), tmp_path / "a.parquet")
    schema: dict[str, FieldType] = {"image": Image(), "points": Keypoints(of="image")}
    dataset = Dataset(str(tmp_path), fields=("points", "id"), schema=schema)
    with DataLoader(dataset, 3, max_bad=0.5) as loader:
        with pytest.warns(PenstockWarning, match="point 0 isn't finite"):
            ((points_, ids),) = list(loader)
        assert loader.statistics().bad == 1
    assert 1 not in ids.tolist()
    assert points_.values.isfinite().all()


@pytest.mark.parametrize("lies", ["in json", "in files"])
def test_a_pack_of_the_wrong_unit_is_refused(tmp_path: Path, lies: str) -> None:
    members: dict[str, bytes] = {}
    for sample, boxes in enumerate(NORM):
        members[f"{sample}.jpg"] = jpeg()
        if lies == "in json":
            members[f"{sample}.json"] = json.dumps({"boxes": boxes.tolist()}).encode()
        else:
            np.save(buffer := io.BytesIO(), boxes)
            members[f"{sample}.boxes.npy"] = buffer.getvalue()
    (tmp_path / "set.tar").write_bytes(tars.archive(members))
    schema = {"boxes": Boxes(of="image", format="xyxy")}
    with pytest.raises(DatasetError, match='format="xyxy_norm"'):
        pack(tmp_path / "set.tar", tmp_path / "pack", schema=schema)
