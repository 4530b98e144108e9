"""A sample with one bad field is replaced or marked as a whole, and reported."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock import DataLoader, Pad
from penstock.augment import CenterCrop, RandomHorizontalFlip, Resize, SanitizeBoxes
from penstock.cache import PenstockWarning
from penstock.readers.fieldtypes import Array, Boxes, Bytes, Image, Mask, Text
from tests.pipeline.feed.memory import Memory, png

if TYPE_CHECKING:
    from collections.abc import Iterator

N, SIDE = 24, 16
TYPES: dict[str, Any] = {
    "left": Image(),
    "right": Image(),
    "mask": Mask(of="left", dtype="uint8"),
    "boxes": Boxes(of="left"),
    "caption": Text(),
    "raw": Bytes(),
}
BAD = 5
AUGMENT = [CenterCrop(8), RandomHorizontalFlip(), Pad("boxes")]


COLUMNS: dict[str, list[Any]] = {
    "left": [np.full((SIDE, SIDE, 3), 3 * i, np.uint8) for i in range(N)],
    "right": [np.full((SIDE, SIDE, 3), 5 * i, np.uint8) for i in range(N)],
    "mask": [np.full((SIDE, SIDE), i, np.uint8) for i in range(N)],
    "boxes": [np.full((1 + i % 3, 4), 8, np.float32) for i in range(N)],
    "caption": [str(i) for i in range(N)],
    "raw": [bytes([i]) for i in range(N)],
}


def damaged_image() -> bytes:
    """Its header is well, what is behind it isn't."""
    noise = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), np.uint8)
    data = bytearray(png(noise))
    data[60:90] = bytes(30)
    return bytes(data)


def source_of(field: str, columns: dict[str, list[Any]] = COLUMNS, **more: Any) -> Memory:
    """Samples of which BAD is broken in one field."""
    said = {BAD: "raw: its CRC-32C is wrong"} if field == "raw" else {}
    source = Memory(TYPES, columns, **{"fields": (*TYPES, "id"), **more}, bad=said)
    if field in ("left", "right"):
        source.spoil(field, BAD, damaged_image())
    elif field == "mask":
        source.spoil(field, BAD, png(COLUMNS[field][BAD])[:48])
    elif field == "caption":
        source.spoil(field, BAD, b"\xff\xfe\xff")
    return source


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)
        yield


def whose(batch: tuple[Any, ...]) -> list[set[int]]:
    """Of each row, whose sample each of its fields is."""
    left, right, mask, _, caption, raw, ids = batch
    return [
        {
            int(left[row].float().mean()) // 3,
            int(right[row].float().mean()) // 5,
            int(mask[row].float().mean()),
            int(caption[row] or -1),
            raw[row][0] if raw[row] else -1,
            int(ids[row]),
        }
        for row in range(len(ids))
    ]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("field", ["left", "right", "mask", "caption", "raw"])
def test_a_substitute_is_one_sample_in_all_fields(field: str) -> None:
    source = source_of(field)
    options: dict[str, Any] = {"shuffle": True, "seed": 2, "augment": AUGMENT, "max_bad": 1.0}
    with DataLoader(source, 6, **options) as loader:
        for _ in range(2):  # epochs
            rows = [row for batch in loader for row in whose(batch)]
            assert all(len(row) == 1 for row in rows)
            assert len(rows) == N
            assert {BAD} not in rows
        found = loader.statistics()
        assert found.bad == 2
        lines = [json.loads(line) for line in Path(found.quarantine).read_text().splitlines()]
    assert [line["id"] for line in lines] == [BAD]
    assert lines[0]["name"] == f"sample-{BAD}"
    assert lines[0]["reason"].startswith(f"{field}: ")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("field", ["left", "right", "mask", "caption", "raw"])
def test_in_a_padded_batch_it_is_marked(field: str) -> None:
    options: dict[str, Any] = {"pad": "mask", "augment": AUGMENT, "max_bad": 1.0, "as_dict": True}
    with DataLoader(source_of(field), 7, **options) as loader:
        batches = list(loader)
        assert loader.statistics().bad == 1
    valid = torch.cat([batch["valid"] for batch in batches]).tolist()
    assert valid == [i != BAD for i in range(N)] + [False] * (-N % 7)
    captions = [text for batch in batches for text in batch["caption"]]
    others = [i for i in range(N) if i != BAD]
    assert [captions[i] for i in others] == [str(i) for i in others]


@pytest.mark.usefixtures("quiet")
def test_damage_of_two_fields_is_one_bad_sample() -> None:
    source = source_of("left")
    source.spoil("right", BAD, damaged_image())
    options: dict[str, Any] = {"augment": [Resize((8, 8))], "max_bad": 1.0}
    with DataLoader(source, 6, **options) as loader:
        rows = [row for batch in loader for row in whose(batch)]
        assert loader.statistics().bad == 1
    assert all(len(row) == 1 for row in rows)


@pytest.mark.usefixtures("quiet")
def test_a_missing_image_beside_a_bad_one_is_zeros() -> None:
    right = [None if i == BAD - 1 else each for i, each in enumerate(COLUMNS["right"])]
    fields = ("left", "right", "right.present", "id")
    source = source_of("left", {**COLUMNS, "right": right}, fields=fields)
    with DataLoader(source, 6, augment=[CenterCrop(8)], max_bad=1.0) as loader:
        batches = list(loader)
        assert loader.statistics().bad == 1
    left, other, present, ids = (torch.cat(parts) for parts in zip(*batches, strict=True))
    missing = torch.tensor([i == BAD - 1 for i in ids.tolist()])
    assert torch.equal(present, ~missing)
    assert not other[missing].any()
    assert left[missing].any()
    whole = other[~missing].float().mean(dim=(1, 2, 3)) / 5
    assert whole.tolist() == ids[~missing].float().tolist()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("of", ["boxes", "scores"])
def test_what_belongs_to_boxes_agrees_with_them_in_a_bad_sample_too(of: str) -> None:
    """One of the two may lie in the file that is bad, the other in a table."""
    types = {
        "left": Image(),
        "boxes": Boxes(of="left"),
        "scores": Array("float32", (None,), of="boxes"),
    }
    scores = [np.ones(1 + i % 3, np.float32) for i in range(N)]
    columns = {"left": COLUMNS["left"], "boxes": COLUMNS["boxes"], "scores": scores}
    columns[of] = [each[:0] if i == BAD else each for i, each in enumerate(columns[of])]
    source = Memory(types, columns, bad={BAD: f"{of}: its CRC-32C is wrong"})
    options: dict[str, Any] = {"augment": [SanitizeBoxes()], "pad": "mask", "max_bad": 1.0}
    with DataLoader(source, 6, **options) as loader:
        valid = [bool(v) for batch in loader for v in batch[-1]]
    assert valid == [i != BAD for i in range(N)]
