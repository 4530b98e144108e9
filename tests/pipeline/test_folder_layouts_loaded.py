"""A loader reads the common layouts of image folders."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from penstock import Boxes, DataLoader, Dataset, Decode, MultiLabel, Ragged, Resize
from tests import images

if TYPE_CHECKING:
    from pathlib import Path

JPEGS = {str(i): images.jpeg(i, 24, 32) for i in range(4)}
MASK = images.encoded(images.picture(9, 24, 32, "L"), "PNG")


def batch(root: Path, files: dict[str, bytes], **arguments: Any) -> tuple[Any, ...]:
    """The first batch of all four samples, in their order."""
    images.write_folder(root, files)
    dataset = Dataset(root, **arguments)
    dataset.open(verify=images.verify)
    recipe = (Decode(), Resize((12, 16))) if "image" in dataset.fields else None
    with dataset, DataLoader(dataset, batch_size=4, augment=recipe) as loader:
        return tuple(next(iter(loader)))


def test_captions_do_not_break_a_loop_over_images_and_labels(tmp_path: Path) -> None:
    files = {f"{'ab'[int(i) % 2]}/{i}.jpg": data for i, data in JPEGS.items()}
    files |= {f"a/{i}.txt": b"a caption" for i in "02"}
    pixels, labels = batch(tmp_path / "set", files)
    assert pixels.shape == (4, 3, 12, 16)
    assert labels.tolist() == [0, 0, 1, 1]
    fields = ("caption", "caption.present", "label")
    captions, present, labels = batch(tmp_path / "set", {}, fields=fields)
    assert captions == ["a caption", "a caption", "", ""]
    assert present.tolist() == [True, True, False, False]
    assert labels.tolist() == [0, 0, 1, 1]


def test_masks_in_a_folder_of_their_own_follow_their_images(tmp_path: Path) -> None:
    files = {f"images/{i}.jpg": data for i, data in JPEGS.items()}
    files |= {f"masks/{i}.png": MASK for i in JPEGS}
    pixels, masks = batch(tmp_path / "set", files, fields={"image": "images", "mask": "masks"})
    assert pixels.shape == (4, 3, 12, 16)
    assert masks.shape == (4, 12, 16)
    assert not masks.is_floating_point()


def test_a_manifest_with_targets_and_several_labels(tmp_path: Path) -> None:
    rows = "path,target,tags\n3.jpg,0.5,sea\n1.jpg,1,sea|city\n2.jpg,-2,\n0.jpg,0,city\n"
    files = {f"{i}.jpg": data for i, data in JPEGS.items()} | {"list.csv": rows.encode()}
    schema = {"tags": MultiLabel(("sea", "city"))}
    fields = ("target", "tags", "tags.present")
    target, tags, present = batch(
        tmp_path / "set", files, manifest="list.csv", schema=schema, fields=fields
    )
    assert target.dtype == torch.float32
    assert target.tolist() == [0.5, 1, -2, 0]
    assert tags.tolist() == [[1, 0], [1, 1], [0, 0], [0, 1]]
    assert present.tolist() == [True, True, False, True]


def test_metadata_with_boxes_and_texts(tmp_path: Path) -> None:
    lines = [
        {"file_name": f"{i}.jpg", "text": f"no. {i}", "objects": {"bbox": [[2, 4, 8, 8]] * int(i)}}
        for i in JPEGS
    ]
    files = {f"{i}.jpg": data for i, data in JPEGS.items()}
    files["metadata.jsonl"] = "\n".join(map(json.dumps, lines)).encode()
    schema = {"objects.bbox": Boxes(of="image", format="xywh")}
    pixels, texts, boxes = batch(
        tmp_path / "set", files, schema=schema, fields=("image", "text", "objects.bbox")
    )
    assert pixels.shape == (4, 3, 12, 16)
    assert texts == ["no. 0", "no. 1", "no. 2", "no. 3"]
    assert isinstance(boxes, Ragged)
    assert [len(each) for each in boxes] == [0, 1, 2, 3]
    # Half the size: x, y, width, height 2, 4, 8, 8 are x1, y1, x2, y2 1, 2, 5, 6.
    assert boxes[3].tolist() == [[1, 2, 5, 6]] * 3
