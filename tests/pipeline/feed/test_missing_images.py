"""Images that some samples lack become zeros, whatever else is in the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.augment import Decode, RandomHorizontalFlip, RandomResizedCrop, Resize
from penstock.pipeline import DataLoader
from penstock.readers import Dataset
from tests import images, tars

if TYPE_CHECKING:
    from pathlib import Path

N = 24
FIELDS = ("left", "right", "right.present", "id")
CROPS = [RandomResizedCrop(16), RandomHorizontalFlip()]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images a sample; every third has no right one, and the first six have none."""
    place, files = tmp_path_factory.mktemp("pairs"), dict[str, bytes]()
    for number in range(N):
        files[f"{number:02d}.left.jpg"] = images.jpeg(number, 24, 32)
        if number % 3 and number >= 6:
            files[f"{number:02d}.right.jpg"] = images.jpeg(number + N, 20, 30 + number)
    (place / "pairs.tar").write_bytes(tars.archive(files))
    return place


def right_by_id(place: Path, *, fields: tuple[str, ...] = FIELDS, **options: Any) -> dict[int, Any]:
    with (
        Dataset(place, fields=fields) as dataset,
        DataLoader(dataset, seed=4, as_dict=True, **options) as loader,
    ):
        found: dict[int, Any] = {}
        for _ in range(2):  # of two epochs the second stays
            for batch in loader:
                found |= dict(
                    zip(
                        batch["id"].tolist(),
                        zip(batch["right"], batch["right.present"].tolist(), strict=True),
                        strict=True,
                    )
                )
        assert loader.statistics().bad == 0
    return found


@pytest.mark.parametrize("size", [3, 8, 24])
def test_what_is_missing_is_zeros_and_changes_no_other(pairs: Path, size: int) -> None:
    """In batches of 3 all may be missing."""
    options: dict[str, Any] = {"shuffle": False, "augment": CROPS}
    found = right_by_id(pairs, batch_size=size, **options)
    alone = right_by_id(pairs, batch_size=1, **options)
    assert found.keys() == alone.keys() == set(range(N))
    for number, (pixels, present) in found.items():
        assert present == bool(number % 3 and number >= 6)
        assert bool(pixels.any()) == present
        assert torch.equal(pixels, alone[number][0])


def test_from_memory_too(pairs: Path) -> None:
    fields, recipe = ("right", "right.present", "id"), [Decode(), Resize((16, 16))]
    options: dict[str, Any] = {"fields": fields, "batch_size": 8, "shuffle": True}
    options |= {"augment": recipe}
    kept = right_by_id(pairs, resident=True, **options)
    read = right_by_id(pairs, **options)
    assert kept.keys() == read.keys()
    for number, (pixels, present) in kept.items():
        assert bool(pixels.any()) == present == read[number][1]
        assert (pixels.float() - read[number][0].float()).abs().max() <= 1
