"""Instance masks equal those of pycocotools, and follow a recipe as torchvision's masks do, bit for
bit."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from benchmarks.detection import make_set
from penstock import DataLoader, Dataset, Normalize
from penstock.augment import CropMove, FlipMove, ImageMoves, ScaleMove
from penstock.readers.fieldtypes import InstanceMasks, Segmentations

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

tool = pytest.importorskip("pycocotools.mask")

Size = tuple[int, int]


def polygon(rng: np.random.Generator, size: Size) -> list[float]:
    """A polygon of any form, partly outside, with numbers of several kinds."""
    count, side = int(rng.integers(3, 40)), max(size)
    points = rng.uniform(-0.2 * side, 1.2 * side, 2 * count)
    if rng.random() < 0.6:  # a usual form
        angles = np.sort(rng.uniform(0, 2 * np.pi, count))
        radius = rng.uniform(1, side / 2) * rng.uniform(0.8, 1.2, count)
        center = rng.uniform(0, side, 2)
        points = (center + radius[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)).ravel()
    kind = rng.integers(4)
    if kind == 0:
        points = points.round()
    elif kind == 1:
        points = (5 * points).round() / 5
    elif kind == 2:
        points = points.round(2)
        points[2:4] = points[:2]
    return [float(each) for each in points]


def sample(rng: np.random.Generator, size: Size) -> list[Any]:
    """Polygons, and runs of random bits, plain and compressed."""
    found: list[Any] = []
    for _ in range(int(rng.integers(1, 4))):
        kind = rng.integers(4)
        if kind < 2:
            found.append([polygon(rng, size) for _ in range(int(rng.integers(1, 4)))])
            continue
        bits = np.asfortranarray(rng.random(size) < rng.choice([0.0, 0.02, 0.5, 0.98, 1.0]))
        code = tool.encode(bits.astype(np.uint8, order="F"))
        counts: Any = code["counts"].decode()
        if kind == 3:
            flat = bits.T.ravel().astype(int)
            edges = np.flatnonzero(np.diff(flat, prepend=0))
            counts = np.diff(edges, prepend=0, append=flat.size).tolist()
        found.append({"size": [*size], "counts": counts})
    return found


def theirs(values: list[Any], size: Size) -> np.ndarray[Any, Any]:
    """Return the masks of pycocotools."""
    found = []
    for each in values:
        if isinstance(each, dict) and isinstance(each["counts"], str):
            code = each
        else:
            codes = tool.frPyObjects(each, *size)
            code = tool.merge(codes) if isinstance(each, list) else codes
        found.append(tool.decode(code))
    return np.stack(found)


@pytest.mark.parametrize("seed", range(4))
def test_masks_equal_those_of_pycocotools(seed: int) -> None:
    rng, drawn = np.random.default_rng(seed), 0
    for _ in range(1000):
        size = int(rng.integers(1, 120)), int(rng.integers(1, 120))
        values = sample(rng, size)
        found = np.zeros((len(values), *size), np.uint8)
        rows, columns = np.arange(size[0]), np.arange(size[1])
        Segmentations.of(values).draw(size, rows, columns, found)
        assert np.array_equal(found, theirs(values, size)), values
        drawn += len(values)
    assert drawn > 1500


def moves_of(
    rng: np.random.Generator, masks: torch.Tensor
) -> tuple[list[CropMove | ScaleMove | FlipMove], torch.Tensor]:
    """Draw moves of one image, and apply torchvision's operations to its masks."""
    vision: Any = pytest.importorskip("torchvision.transforms.v2.functional")
    moves: list[CropMove | ScaleMove | FlipMove] = []
    for _ in range(int(rng.integers(1, 6))):
        height, width = masks.shape[1:]
        size, kind = np.array([[height], [width]]), rng.integers(4)
        if kind == 0:
            # torchvision gives windows that lie wholly outside another size than it was asked for.
            rows, columns = int(rng.integers(1, 2 * height)), int(rng.integers(1, 2 * width))
            top, left = int(rng.integers(1 - rows, height)), int(rng.integers(1 - columns, width))
            masks = vision.crop(masks, top, left, rows, columns)
            where = np.array([[top], [left]]), np.array([[rows], [columns]])
            moves.append(CropMove(size=size, start=where[0], length=where[1]))
        elif kind == 1:
            to = [int(each) for each in rng.integers(1, 150, 2)]
            masks = vision.resize(masks, to)
            moves.append(ScaleMove(size=size, to=np.array(to)[:, None]))
        else:
            axis = 1 if kind == 2 else 0
            masks = vision.horizontal_flip(masks) if axis else vision.vertical_flip(masks)
            moves.append(FlipMove(size=size, on=np.array([True]), axis=axis))  # type: ignore[arg-type]
    return moves, masks


def test_masks_follow_a_thousand_recipes_as_those_of_torchvision_do() -> None:
    vision = pytest.importorskip("torchvision.tv_tensors")
    rng, type = np.random.default_rng(9), InstanceMasks(of="boxes")
    for _ in range(1000):
        size = int(rng.integers(1, 100)), int(rng.integers(1, 100))
        values = sample(rng, size)
        stored = vision.Mask(torch.from_numpy(theirs(values, size)))
        moves, wanted = moves_of(rng, stored)
        sides = np.array(wanted.shape[1:])[:, None]
        image = np.array([size[0]]), np.array([size[1]])
        canvas = (int(sides[0, 0]), int(sides[1, 0]))
        found = type.follow(
            type.column([Segmentations.of(values)]),
            ImageMoves(size=image, moves=tuple(moves), sizes=sides, canvas=canvas),
            size=None,
        )
        assert np.array_equal(found.sample(0), wanted.numpy()), (size, moves)


def test_a_dataset_of_annotations_has_the_masks_of_cocos_own_tool(tmp_path: Path) -> None:
    coco_api = pytest.importorskip("pycocotools.coco")
    annotations = make_set(tmp_path, images=24)
    with redirect_stdout(io.StringIO()):
        coco = coco_api.COCO(str(annotations))
    fields = ("image_id", "image", "annotation_ids", "masks")
    dataset = Dataset(annotations.parent / "images", manifest=annotations, fields=fields)
    with DataLoader(dataset, 8, augment=[Normalize()]) as loader:
        for image_ids, images, ids, masks in loader:
            for image_id, image, own, found in zip(image_ids, images, ids, masks, strict=True):
                wanted = [coco.annToMask(each) for each in coco.loadAnns(own.tolist())]
                assert own.tolist() == coco.getAnnIds(imgIds=[int(image_id)])
                assert found.shape[1:] == image.shape[1:]
                assert np.array_equal(found.numpy(), wanted)
