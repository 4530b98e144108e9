"""Other fields of samples with resident images come from memory unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock import DataLoader
from penstock.augment import Normalize, RandomHorizontalFlip, RandomResizedCrop
from penstock.pipeline.feed import KeptColumns
from penstock.readers.fieldtypes import Array, Boxes, Bytes, Image, Mask, Text, Value
from tests.pipeline.feed.memory import Memory

N, SIDE = 20, 12
TYPES: dict[str, Any] = {
    "image": Image(),
    "mask": Mask(of="image", dtype="uint8"),
    "boxes": Boxes(of="image"),
    "volume": Array("int16", (None, None)),
    "vector": Array("float32", (3,)),
    "caption": Text(),
    "raw": Bytes(),
    "label": Value("int64"),
}


def pixels(i: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(i).integers(0, 99, (SIDE, SIDE + i % 3)).astype(np.uint8)


COLUMNS: dict[str, list[Any]] = {
    "image": [np.stack([pixels(i)] * 3, axis=2) for i in range(N)],
    "mask": [pixels(i) for i in range(N)],
    "boxes": [np.full((i % 4, 4), i % 9, np.float32) for i in range(N)],
    "volume": [np.full((i % 3, 1 + i % 2), i, np.int16) for i in range(N)],
    "vector": [np.full(3, i, np.float32) for i in range(N)],
    "caption": [f"sample {i}" for i in range(N)],
    "raw": [bytes([i] * (i % 5)) for i in range(N)],
    "label": list(range(N)),
}
TRAIN = [RandomResizedCrop(8), RandomHorizontalFlip(), Normalize()]


def epochs(source: Memory, *, resident: Any, count: int = 4) -> list[Any]:
    options: dict[str, Any] = {"shuffle": True, "seed": 4, "augment": TRAIN}
    with DataLoader(source, 5, resident=resident, **options) as loader:
        return [batch for _ in range(count) for batch in loader]


@pytest.mark.parametrize("lacking", ["", "image", "caption"])
def test_all_fields_are_the_same_and_not_read_again(lacking: str) -> None:
    columns = dict(COLUMNS)
    fields = [*TYPES, "id"]
    # An index has no mask without its image.
    for name in ("image", "mask") if lacking == "image" else (lacking,) if lacking else ():
        columns[name] = [None if i % 4 == 1 else v for i, v in enumerate(columns[name])]
        fields.append(f"{name}.present")
    source, other = (Memory(TYPES, columns, fields=fields) for _ in range(2))
    for ours, theirs in zip(
        epochs(source, resident=True), epochs(other, resident=False), strict=True
    ):
        for a, b in zip(ours, theirs, strict=True):
            if isinstance(a, list):
                assert a == b
            else:
                assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    # Threads that read ahead may read a sample of the second epoch before the first one's is kept.
    again = {i for i in source.read_ids if source.read_ids.count(i) > 2}
    assert again == ({i for i in range(N) if i % 4 == 1} if lacking == "image" else set())


def test_nothing_kept_holds_what_was_read() -> None:
    source = Memory(TYPES, COLUMNS, fields=("image", "raw", "boxes"))
    content = source.read(source.contents.rows(np.arange(4)))
    kept = KeptColumns(samples=N)
    kept.keep(content, [0, 3], without="image")
    columns, present = kept.take(np.array([3, 1, 0]))
    assert not present
    assert "image" not in columns
    for row, sample in enumerate(columns["raw"].samples):  # type: ignore[union-attr]
        assert sample.tobytes() == (b"" if row == 1 else COLUMNS["raw"][[3, 1, 0][row]])
        assert not any(np.shares_memory(sample, each) for each in content.columns["raw"].samples)  # type: ignore[union-attr]
    assert [len(columns["boxes"].sample(row)) for row in range(3)] == [3, 0, 0]  # type: ignore[union-attr]


def test_parts_of_which_nobody_lacks_a_field_have_it_behind_others_that_lack_it() -> None:
    """Of datasets end to end only some say who has a field: those kept before said nothing."""
    whole = Memory(TYPES, COLUMNS, fields=("image", "caption"))
    content = whole.read(whole.contents.rows(np.arange(4)))
    there = replace(content, ids=content.ids + 4, present={"caption": np.arange(4) % 2 == 0})
    kept = KeptColumns(samples=8)
    kept.keep(content, [0, 1, 2, 3], without="image")
    kept.keep(there, [0, 1, 2, 3], without="image")
    _, present = kept.take(np.arange(8))
    assert present["caption"].tolist() == [True] * 4 + [True, False] * 2
    for some, others, wanted in ((content, there, [1, 1, 1, 0]), (there, content, [1, 0, 1, 1])):
        patched = some.patched([2, 3], others.take([2, 3]))
        assert patched.present["caption"].tolist() == [bool(each) for each in wanted]
