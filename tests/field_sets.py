"""Small datasets with fields of every type, in each container, and their expected values."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image as Pillow

from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    Column,
    DenseColumn,
    EncodedColumn,
    RaggedColumn,
)
from penstock.readers.packing import pack
from tests import images, tars
from tests.files import npy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

HEIGHT, WIDTH = 24, 32
SCHEMA = {"boxes": Boxes(of="image"), "vector": Array("float32", (3,))}
"""What can't be seen of the data: boxes may be in any format, and lists of any length."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Street:
    """One sample of a set with pictures. number: its number, also stored as a field."""

    number: int
    image: bytes
    mask: NDArray[np.uint8]
    boxes: NDArray[np.float32]
    caption: str
    vector: NDArray[np.float32]
    points: NDArray[np.int16]
    label: int

    @property
    def name(self) -> str:
        return f"{self.number:04d}"

    @property
    def noted(self) -> dict[str, Any]:
        """The fields that are stored in a table or a JSON file."""
        return {
            "number": self.number,
            "boxes": self.boxes.tolist(),
            "vector": self.vector.tolist(),
            "label": self.label,
        }

    @property
    def mask_png(self) -> bytes:
        """The mask as a PNG with a palette, whose colours are no class numbers."""
        picture = Pillow.fromarray(self.mask).convert("P")
        picture.putdata(self.mask.reshape(-1).tolist())
        picture.putpalette([(37 * i) % 256 for i in range(768)])
        return images.encoded(picture, "PNG")

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """The decoded image: uint8, (3, height, width)."""
        return np.asarray(Pillow.open(io.BytesIO(self.image)).convert("RGB")).transpose(2, 0, 1)


def street(number: int) -> Street:
    """Return the sample of a number; it is the same on each call."""
    rng = np.random.default_rng(number)
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    boxes = []
    for which in range(number % 4):
        top, left = int(rng.integers(0, HEIGHT - 8)), int(rng.integers(0, WIDTH - 8))
        rows, columns = (int(each) for each in rng.integers(2, 8, 2))
        mask[top : top + rows, left : left + columns] = which + 1
        boxes.append((left, top, left + columns, top + rows))
    return Street(
        number=number,
        image=images.encoded(images.picture(number, HEIGHT, WIDTH), "PNG"),
        mask=mask,
        boxes=np.array(boxes, np.float32).reshape(-1, 4),
        caption=f"street {number}, Straße «{'x' * (number % 9)}»",
        vector=rng.standard_normal(3).astype(np.float32),
        points=rng.integers(-9, 9, (number % 5, 2)).astype(np.int16),
        label=number % 3,
    )


def write_folder(folder: Path, count: int) -> Path:
    """Write files and a metadata.jsonl, like an image folder of the Hugging Face hub."""
    for place in ("images", "masks", "points"):
        (folder / place).mkdir(parents=True)
    lines = []
    for each in map(street, range(count)):
        (folder / "images" / f"{each.name}.png").write_bytes(each.image)
        (folder / "masks" / f"{each.name}.png").write_bytes(each.mask_png)
        np.save(folder / "points" / f"{each.name}.npy", each.points)
        files = {
            "file_name": f"images/{each.name}.png",
            "mask_file_name": f"masks/{each.name}.png",
            "points_file_name": f"points/{each.name}.npy",
        }
        lines.append(json.dumps({**files, "caption": each.caption, **each.noted}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def write_tars(folder: Path, count: int, *, archives: int = 3) -> Path:
    """Write WebDataset archives: the members of a sample share a key."""
    folder.mkdir(parents=True)
    for number in range(archives):
        files: dict[str, bytes] = {}
        for each in map(street, range(number, count, archives)):
            files[f"{each.name}.png"] = each.image
            files[f"{each.name}.mask.png"] = each.mask_png
            files[f"{each.name}.points.npy"] = npy(each.points)
            files[f"{each.name}.txt"] = each.caption.encode()
            files[f"{each.name}.json"] = json.dumps(each.noted).encode()
        (folder / f"street-{number}.tar").write_bytes(tars.archive(files))
    return folder


def write_numbers(folder: Path, count: int) -> Path:
    """Write a set without images: arrays of fixed and varying shapes, text and numbers."""
    folder.mkdir(parents=True)
    lines = []
    for number in range(count):
        values = numbers(number)
        np.save(folder / f"{number:04d}.npy", values["signal"])
        noted = {k: v for k, v in values.items() if k != "signal"}
        noted = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in noted.items()}
        lines.append(json.dumps({"signal_file_name": f"{number:04d}.npy", **noted}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def numbers(number: int) -> dict[str, Any]:
    """Return one sample of the set without images."""
    rng = np.random.default_rng(number)
    return {
        "signal": rng.standard_normal((2, 5)).astype(np.float32),
        "tokens": rng.integers(0, 99, number % 6),
        "text": f"sample {number}",
        "target": float(np.float32(number / 7)),
        "number": number,
    }


def pack_of(source: Path, folder: Path, **options: Any) -> Path:
    """Pack a dataset, shuffled, into several shards."""
    pack(source, folder, shard_bytes=6_000, verify=images.verify, **options)
    return folder


def plain(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of a loader's batch as nested lists, strings and bytes, for comparison."""
    count = len(next(iter(batch.values())))
    return [{name: _plain(column[row]) for name, column in batch.items()} for row in range(count)]


def _plain(value: Any) -> Any:
    if isinstance(value, str | bytes):
        return value
    array = value.cpu().numpy()
    return (str(array.dtype), array.shape, array.tobytes())


def column_values(column: Column, *, decode: bool = True) -> list[Any]:
    """Return a column's values as lists, encoded samples as text, or as bytes."""
    if isinstance(column, EncodedColumn):
        samples = map(bytes, column.samples)
        return [each.decode() for each in samples] if decode else list(samples)
    if isinstance(column, RaggedColumn):
        return [column.sample(row).tolist() for row in range(len(column))]
    assert isinstance(column, DenseColumn)
    return list(column.values.tolist())
