"""The facts of unchanged files in an index are reused only if they are still sufficient."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from penstock.readers import Dataset
from penstock.readers.fields import Boxes, Image, Mask
from tests import images

JPEGS = [images.jpeg(i) for i in range(2)]
MASK = images.encoded(images.picture(3, mode="L"), "PNG")


class Place:
    """A folder with a table, and the number of images that each of its indexes decoded."""

    def __init__(self, root):
        self.root, self.clock = root, 10**18
        images.write_folder(root, {"1.jpg": JPEGS[0], "2.jpg": JPEGS[1]})

    def open(self, rows, **options):
        path = self.root / "metadata.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        self.clock += 10**9
        os.utime(path, ns=(self.clock, self.clock))
        decoded = []

        def verify(samples):
            decoded.extend(samples)
            return images.verify(samples)

        with Dataset(self.root, allow_left_out=1, **options) as dataset:
            index = dataset.open(verify=verify, workers=1)
            batch = dataset.read(np.array([(0, 0)], np.int64), fields=("image",))
            assert len(batch.columns["image"].samples[0])
            return index, len(decoded)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "set")


def test_boxes_that_a_table_moves_out_of_their_image_are_found(place):
    def rows(x):
        return [{"file_name": f"{i}.jpg", "boxes": [[x * (i - 1), 0, 9, 9]]} for i in (1, 2)]

    schema = {"boxes": Boxes(of="image", format="xywh")}
    index, decoded = place.open(rows(5), schema=schema)
    assert (index.samples, index.quarantined, decoded) == (2, 0, 2)
    index, decoded = place.open(rows(50), schema=schema)
    assert (index.samples, index.quarantined, decoded) == (1, 1, 0)
    with open(os.path.join(os.fsdecode(index.place), "quarantine.jsonl")) as lines:
        (line,) = map(json.loads, lines)
    assert line["name"] == "2.jpg"
    assert line["reason"].startswith("boxes: box 0 lies outside its image: (50, 0, 9, 9)")
    index, decoded = place.open(rows(0), schema=schema)
    assert (index.samples, index.quarantined, decoded) == (2, 0, 1)


def test_a_file_that_was_a_mask_is_decoded_as_an_image(place):
    def rows(*names):
        return [
            {"file_name": f"{i}.jpg", **{f"{name}_file_name": f"m{i}.png" for name in names}}
            for i in (1, 2)
        ]

    images.write_folder(place.root, {"m1.png": MASK, "m2.png": MASK})
    index, decoded = place.open(rows("mask"))
    assert (index.schema["mask"], decoded) == (Mask(of="image", dtype="uint8"), 2)
    index, decoded = place.open(rows("mask", "depth"))
    assert (index.schema["mask"], index.schema["depth"], decoded) == (Image(), Image(), 6)
    index, decoded = place.open(rows("mask"))
    assert (index.schema["mask"], index.samples) == (Mask(of="image", dtype="uint8"), 2)
