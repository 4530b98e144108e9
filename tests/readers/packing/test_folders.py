"""Pack a folder of images with masks, boxes and points at a smaller size: all of them keep their
places."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image as Pillow

from penstock.cache import DestinationError
from penstock.readers import Dataset, pack
from penstock.readers.fields import (
    Boxes,
    DenseColumn,
    EncodedColumn,
    Keypoints,
    ListColumn,
    RaggedColumn,
    decode_mask,
)
from tests import images

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.readers.fields import FieldType, SampleBatch

SAMPLES = 12
SCHEMA: dict[str, FieldType] = {
    "boxes": Boxes("image", format="xywh"),
    "points": Keypoints("image"),
}


def folder(root: Path) -> Path:
    """Images of one colour with a bright square, and a mask, a box, a point and a text about it."""
    files: dict[str, bytes] = {}
    lines = []
    for i in range(SAMPLES):
        height, width = 40 + 4 * (i % 3), 48 + 4 * (i % 2)
        x, y, side = 8 + i, 6 + i % 5, 16
        picture = np.full((height, width, 3), 20, np.uint8)
        mask = np.zeros((height, width), np.uint8)
        picture[y : y + side, x : x + side] = 240
        mask[y : y + side, x : x + side] = 7
        for name, pixels, codec in (("image", picture, "JPEG"), ("mask", mask, "PNG")):
            buffer = io.BytesIO()
            Pillow.fromarray(pixels).save(buffer, codec)
            files[f"{name}s/{i:03d}.{'jpg' if codec == 'JPEG' else 'png'}"] = buffer.getvalue()
        told: dict[str, Any] = {
            "file_name": f"images/{i:03d}.jpg",
            "mask_file_name": f"masks/{i:03d}.png",
            "caption": f"a square at {x}, {y}",
            "boxes": [[x, y, side, side]] * (1 + i % 2),
            "points": [[x + side / 2, y + side / 2], [-1, -1]],
            "vector": [x / 8, y / 8, side / 8],
            "label": i % 4,
        }
        if i % 4 == 2:
            del told["caption"]
        lines.append(json.dumps(told))
    files["metadata.jsonl"] = "\n".join(lines).encode()
    return images.write_folder(root, files)


def read(path: Path, **options: Any) -> tuple[list[str], SampleBatch]:
    with Dataset(path, **options) as dataset:
        dataset.open(verify=images.verify)
        fields = ("image", "mask", "caption", "boxes", "points", "vector", "label")
        batch = dataset.read(dataset.contents.rows(np.arange(len(dataset))), fields=fields)
        return dataset.names(range(len(dataset))), batch


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folder(tmp_path / "set")


def test_everything_stays_with_its_pixels(source: Path, tmp_path: Path) -> None:
    pack(
        source,
        tmp_path / "pack",
        schema=SCHEMA,
        short_side=20,
        quality=95,
        shard_bytes=4000,
        verify=images.verify,
    )
    names, batch = read(tmp_path / "pack")
    assert len(names) == SAMPLES
    columns = batch.columns
    pictures, masks, boxes, points = (
        columns[name] for name in ("image", "mask", "boxes", "points")
    )
    assert isinstance(pictures, EncodedColumn)
    assert isinstance(masks, EncodedColumn)
    assert isinstance(boxes, RaggedColumn)
    assert isinstance(points, RaggedColumn)
    for row in range(SAMPLES):
        picture = np.asarray(Pillow.open(io.BytesIO(bytes(pictures.samples[row]))).convert("L"))
        mask = decode_mask(masks.samples[row])
        assert mask.shape == picture.shape
        assert min(mask.shape) == 20
        assert pictures.dims is not None
        assert pictures.dims[row].tolist() == list(mask.shape)
        is_bright = picture > 130
        assert (is_bright != (mask == 7)).mean() < 0.05
        x, y, width, height = boxes.sample(row)[0]
        found = np.argwhere(mask == 7)
        assert np.allclose(found.min(axis=0), (y, x), atol=1)
        assert np.allclose(found.max(axis=0) + 1, (y + height, x + width), atol=1)
        assert np.allclose(points.sample(row), [[x + width / 2, y + height / 2], [-1, -1]])


def test_undeclared_boxes_cause_a_warning(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "penstock"):
        pack(source, tmp_path / "declared", schema=SCHEMA, verify=images.verify, short_side=16)
        assert "isn't resized" not in caplog.text
        pack(source, tmp_path / "whole", verify=images.verify)
        assert "isn't resized" not in caplog.text
        pack(source, tmp_path / "pack", verify=images.verify, short_side=16)
    assert '"boxes" isn\'t resized with the images' in caplog.text


def test_without_transcoding_nothing_changes(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "pack", schema=SCHEMA, verify=images.verify, shuffle=False)
    (names, before), (packed_names, after) = read(source, schema=SCHEMA), read(tmp_path / "pack")
    assert names == packed_names
    assert before.present["caption"].tolist() == after.present["caption"].tolist()
    for name, column in before.columns.items():
        other = after.columns[name]
        for row in range(SAMPLES):
            if isinstance(column, EncodedColumn | ListColumn):
                sample = column.samples[row]
                wanted = sample.encode() if isinstance(sample, str) else bytes(sample)
                assert isinstance(other, EncodedColumn)
                assert bytes(other.samples[row]) == wanted
            elif isinstance(column, DenseColumn):
                assert isinstance(other, DenseColumn)
                assert np.array_equal(column.values[row], other.values[row])
            else:
                assert isinstance(other, RaggedColumn)
                assert np.array_equal(column.sample(row), other.sample(row))


def test_a_pack_of_other_types_is_another_pack(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "pack", schema=SCHEMA, verify=images.verify)
    again = pack(source, tmp_path / "pack", schema=SCHEMA, verify=images.verify)
    assert again.samples == SAMPLES
    with pytest.raises(DestinationError, match="another"):
        pack(source, tmp_path / "pack", verify=images.verify)
