"""Small datasets with annotations, written as other tools write them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.images import jpeg, write_folder

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = 12
CATEGORIES = [
    {"id": 90, "name": "toothbrush", "supercategory": "indoor"},  # not in order, and with gaps
    {"id": 1, "name": "person", "supercategory": "person"},
    {"id": 18, "name": "dog", "supercategory": "animal"},
]
PEOPLE = [
    {
        "id": 1,
        "name": "person",
        "keypoints": ["nose", "left_eye", "right_eye"],
        "skeleton": [[1, 2], [1, 3]],
    }
]


def size_of(number: int) -> tuple[int, int]:
    """Return the height and width of an image."""
    return 40 + number, 60 - number


def pictures(samples: int = SAMPLES, folder: str = "") -> dict[str, bytes]:
    """Return images by name, as COCO calls them."""
    return {f"{folder}{i:012d}.jpg": jpeg(i, *size_of(i)) for i in range(samples)}


def image_entries(samples: int = SAMPLES) -> list[dict[str, Any]]:
    """Return the images of a file of annotations; their ids fall."""
    return [
        {
            "license": 1,
            "file_name": f"{i:012d}.jpg",
            "height": size_of(i)[0],
            "width": size_of(i)[1],
            "id": 1000 - 7 * i,
        }
        for i in range(samples)
    ]


def instances(samples: int = SAMPLES) -> dict[str, Any]:
    """Return annotations of instances: an image in four has none, and the last of three is a
    crowd, whose mask is a run-length code."""
    rng, found = np.random.default_rng(0), list[dict[str, Any]]()
    for image in image_entries(samples):
        number = int(image["file_name"][:-4])
        for k in range(number % 4):
            x, y, width, height = (rng.random(4) * 20).round(2).tolist()
            size = [image["height"], image["width"]]
            corners = [x, y, x + width, y, x + width, y + height, x, y + height]
            crowd = {"size": size, "counts": [size[0] * 3, 5, size[0] * (size[1] - 3) - 5]}
            found.append(
                {
                    "id": 900 - len(found),
                    "image_id": image["id"],
                    "category_id": (1, 18, 90)[(number + k) % 3],
                    "bbox": [x, y, width, height],
                    "area": round(width * height * 0.7, 3),
                    "iscrowd": int(k == 2),
                    "segmentation": crowd if k == 2 else [corners],
                }
            )
    return {"images": image_entries(samples), "annotations": found, "categories": CATEGORIES}


def coco_set(root: Path, content: Any, name: str = "instances_train2017.json") -> Path:
    """Write a dataset as COCO is laid out, and return the folder of images."""
    files = pictures(folder="train2017/") | {f"annotations/{name}": json.dumps(content).encode()}
    return write_folder(root, files) / "train2017"


def roboflow_set(root: Path, content: Any) -> Path:
    """Write a dataset as Roboflow exports it, and return its folder."""
    return write_folder(root, pictures() | {"_annotations.coco.json": json.dumps(content).encode()})


# -- Pascal VOC


def voc_set(root: Path, objects: dict[str, list[dict[str, Any]]], **lists: list[str]) -> Path:
    """Write a dataset as Pascal VOC is laid out, and return its folder.

    objects: of each image, with the keys name, box and any flags. lists: in ImageSets/Main.
    """
    files: dict[str, bytes] = {}
    for number, (name, found) in enumerate(objects.items()):
        height, width = size_of(number)
        rows = []
        for each in found:
            flags = "".join(f"<{k}>{v}</{k}>" for k, v in each.items() if k not in ("name", "box"))
            sides = zip(("xmin", "ymin", "xmax", "ymax"), each["box"], strict=True)
            box = "".join(f"<{side}>{value}</{side}>" for side, value in sides)
            part = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>"
            rows.append(
                f"<object><name>{each['name']}</name>{flags}<bndbox>{box}</bndbox>{part}</object>"
            )
        size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        text = f"<annotation><filename>{name}.jpg</filename>{size}{''.join(rows)}</annotation>"
        files[f"Annotations/{name}.xml"] = text.encode()
        files[f"JPEGImages/{name}.jpg"] = jpeg(number, height, width)
    files |= {f"ImageSets/Main/{k}.txt": "\n".join(v).encode() for k, v in lists.items()}
    return write_folder(root, files)


# -- YOLO


def yolo_set(
    root: Path, labels: dict[str, str | None], description: str, *, images: str = "images/train"
) -> Path:
    """Write a dataset as YOLO's tools lay it out, and return the path of its data.yaml.

    labels: the text of the file of labels of each image, None for an image without one. images: the
    folder of the images.
    """
    files: dict[str, bytes] = {"data.yaml": description.encode()}
    for number, (name, text) in enumerate(labels.items()):
        files[f"{images}/{name}.jpg"] = jpeg(number, *size_of(number))
        if text is not None:
            files[f"{images.replace('images', 'labels')}/{name}.txt"] = text.encode()
    return write_folder(root, files) / "data.yaml"
