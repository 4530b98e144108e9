"""max_pixels= limits images in verification and in training alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import DataLoader, Dataset, Image, Resize
from penstock.cache import ConfigError, DatasetNotFoundError, TooManyBadSamplesError
from penstock.pipeline.cli import main
from penstock.readers import build_index, pack
from tests import images

if TYPE_CHECKING:
    from pathlib import Path

PLACES = {"image": "images", "mask": "masks"}


def sizes(dataset: Any) -> list[tuple[int, ...]]:
    with dataset, DataLoader(dataset, 2, augment={"image": [Resize((8, 8))]}) as loader:
        return [tuple(each.shape) for batch in loader for each in batch]


def folder(root: Path) -> Path:
    pictures = {f"images/{i}.jpg": images.jpeg(i, 100, 120) for i in range(2)}
    grey = images.encoded(images.picture(1, 100, 120, "L"), "PNG")
    return images.write_folder(root, pictures | {f"masks/{i}.png": grey for i in range(2)})


def test_images_and_masks_of_a_folder_and_of_its_pack(tmp_path: Path) -> None:
    root = folder(tmp_path / "set")
    for limit in (11_999, 1):
        with pytest.raises(DatasetNotFoundError, match=rf"1 to {limit:,} in total.*max_pixels="):
            Dataset(root, fields=PLACES, max_pixels=limit).open()
        with pytest.raises(DatasetNotFoundError, match="max_pixels="):
            pack(root, tmp_path / f"none-{limit}", fields=PLACES, max_pixels=limit)
    wanted = [(2, 3, 8, 8), (2, 8, 8)]
    assert sizes(Dataset(root, fields=PLACES, max_pixels=12_000)) == wanted
    assert sizes(Dataset(root, fields=PLACES)) == wanted
    assert pack(root, tmp_path / "pack", fields=PLACES, max_pixels=12_000).samples == 2
    with Dataset(tmp_path / "pack") as packed:
        assert packed.contents.max_pixels == 12_000
    assert sizes(Dataset(tmp_path / "pack")) == wanted


def test_unverified_images_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"image": [images.jpeg(i, 100, 120) for i in range(2)]}), path)
    schema = {"image": Image()}
    assert sizes(Dataset(path, schema=schema)) == [(2, 3, 8, 8)]
    with pytest.raises(TooManyBadSamplesError, match="120 x 100 pixels; wanted 1 to 11,999"):
        sizes(Dataset(path, schema=schema, max_pixels=11_999))


def test_the_command_line(tmp_path: Path) -> None:
    root = folder(tmp_path / "set") / "images"
    assert main(["index", str(root), "--max-pixels", "100"]) == 1
    assert main(["index", str(root), "--max-pixels", "12000"]) == 0
    assert main(["pack", str(root), str(tmp_path / "pack"), "--max-pixels", "12000"]) == 0
    assert main(["inspect", str(root), "--max-pixels", "12000"]) == 0
    classes = images.write_folder(tmp_path / "classes", {"a/1.jpg": images.jpeg(1)})
    (classes / "b").mkdir()
    assert main(["index", str(classes)]) == 1
    for command in (["index"], ["inspect"], ["pack"]):
        more = [str(tmp_path / "labelled")] if command == ["pack"] else []
        assert main([*command, str(classes), *more, "--allow-empty"]) == 0
    assert Dataset(tmp_path / "labelled").classes == ("a", "b")


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "big", True])
def test_an_invalid_limit(wrong: object) -> None:
    with pytest.raises(ConfigError, match="max_pixels: got"):
        Dataset("nowhere", max_pixels=wrong)  # type: ignore[arg-type]


def test_an_executor_passes_the_limit_on(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    root = folder(tmp_path / "set")
    with ThreadPoolExecutor(2) as workers, pytest.raises(DatasetNotFoundError, match="max_pixels="):
        build_index(root, fields=PLACES, max_pixels=11_999, executor=workers)
