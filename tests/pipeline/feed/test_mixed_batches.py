"""MixUp and CutMix in the loader: the same pixels and targets at any world size and restart."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.augment import CutMix, MixUp, Normalize, Operation, RandAugment, RandomResizedCrop
from penstock.cache import ConfigError
from penstock.pipeline import DataLoader, Order, World
from penstock.pipeline.plan import LaneOrder
from penstock.readers import Dataset
from tests.conftest import CLASSES, SAMPLES
from tests.images import jpeg

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:Labels cluster inside shards")

SIZE = 24
PLAIN: tuple[Operation, ...] = (RandomResizedCrop(SIZE), RandAugment(), Normalize())
BOTH: tuple[Operation, ...] = (*PLAIN, MixUp(alpha=1.0), CutMix())
Sample = tuple[bytes, bytes]


def make(path: Path, **options: Any) -> DataLoader:
    settings: dict[str, Any] = {
        "global_batch_size": 15,
        "shuffle": True,
        "seed": 7,
        "drop_last": True,
        "augment": BOTH,
        "num_workers": 1,
        **options,
    }
    fields = settings.pop("fields", ("image", "label", "id"))
    return DataLoader(Dataset(str(path), fields=fields), **settings)


def samples(batches: Iterable[Any]) -> list[tuple[int, Sample]]:
    return [
        (int(i), (image.numpy().tobytes(), target.numpy().tobytes()))
        for images, targets, ids in batches
        for image, target, i in zip(images, targets, ids, strict=True)
    ]


def by_id(batches: Iterable[Any]) -> dict[int, Sample]:
    found = samples(batches)
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.fixture(scope="module")
def whole(pack: Path) -> dict[int, Sample]:
    """Two epochs of one rank: what every other way must give."""
    with make(pack) as loader:
        first = by_id(loader)
        second = by_id(loader)
    assert len(first) == SAMPLES // 15 * 15
    assert any(first[i] != second[i] for i in first.keys() & second.keys())
    return first


@pytest.mark.parametrize(
    "world", [2, 3, *(pytest.param(world, marks=pytest.mark.grid) for world in (4, 7, 15))]
)
def test_every_world_size_gives_the_same_samples(
    pack: Path, whole: dict[int, Sample], world: int
) -> None:
    """15 slots on 2 or 3 ranks: pairs lie across ranks, and the odd one's partner on rank 0."""
    found: dict[int, Sample] = {}
    for rank in range(world):
        with make(pack, world=World(rank=rank, size=world)) as loader:
            part = by_id(loader)
            assert loader.statistics().samples == len(part)
        assert not found.keys() & part.keys()
        found |= part
    assert found == whole


def test_a_restart_in_mid_epoch_gives_the_same_samples(
    pack: Path, whole: dict[int, Sample]
) -> None:
    with make(pack) as loader:
        iterator = iter(loader)
        seen = by_id(next(iterator) for _ in range(5))
        state = loader.state_dict()
    for world in (1, 2):
        found = dict(seen)
        for rank in range(world):
            with make(pack, world=World(rank=rank, size=world)) as loader:
                loader.load_state_dict(state)
                found |= by_id(loader)
        assert found == whole


def test_the_last_short_batch_is_mixed_within_itself(pack: Path) -> None:
    with make(pack, drop_last=False) as loader:
        batches = list(loader)
    images, targets, ids = batches[-1]
    assert len(images) == len(targets) == len(ids) == SAMPLES % 15
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(len(ids)))


@pytest.mark.parametrize(
    ("lanes", "partner"),
    [
        (1, [1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 13]),
        (3, [1, 0, 3, 2, 3, 6, 5, 8, 7, 8, 11, 10, 13, 12, 13]),  # five of each lane
    ],
)
def test_mixed_batches_are_what_one_mixes_by_hand(
    pack: Path, lanes: int, partner: list[int]
) -> None:
    """Targets say how much of each of two plain images a mixed one has."""
    augment = (*PLAIN, MixUp(alpha=1.0, num_classes=SAMPLES))
    with make(pack, augment=PLAIN, order=Order(lanes=lanes)) as loader:
        plain, labels, ids = next(iter(loader))
    with make(pack, augment=augment, order=Order(lanes=lanes)) as loader:
        mixed, targets, again = next(iter(loader))
    assert torch.equal(ids, again)
    assert targets.dtype == torch.float32
    assert targets.shape == (15, SAMPLES)
    for row in range(15):
        if labels[row] == labels[partner[row]]:
            continue
        share = targets[row, labels[row]]
        wanted = plain[row] * share + plain[partner[row]] * (1 - share)
        torch.testing.assert_close(mixed[row], wanted, atol=1e-5, rtol=1e-5)


def test_classes_come_from_the_dataset(pack: Path) -> None:
    with make(pack) as loader:
        _, targets, _ = next(iter(loader))
    assert targets.shape == (15, CLASSES)


@pytest.mark.filterwarnings("ignore:Sample .* is bad")
def test_a_bad_sample_is_mixed_as_its_substitute_at_any_world_size(tmp_path: Path) -> None:
    """Files lose their bytes: they are replaced as own samples and as partners of others."""
    folder = tmp_path / "photographs"
    for number in range(30):
        place = folder / f"class-{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:02d}.jpg").write_bytes(jpeg(number, 64, 64))
    with make(folder) as loader:
        next(iter(loader))  # indexed while all were well
    for path in sorted(folder.rglob("*.jpg"))[1::7]:
        times = path.stat()
        path.write_bytes(bytes(times.st_size))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    found: dict[int, list[tuple[int, Sample]]] = {}
    for world in (1, 2, 5):
        found[world], bad = [], 0
        for rank in range(world):
            with make(folder, world=World(rank=rank, size=world), max_bad=1.0) as loader:
                found[world] += samples(loader)
                bad += loader.statistics().bad
        assert bad == 5
    assert sorted(found[1]) == sorted(found[2]) == sorted(found[5])
    assert len({sample_id for sample_id, _ in found[1]}) < 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop_last": False, "pad": "mask"}, r'Got MixUp and pad="mask"'),
        ({"fields": ("image", "id")}, r"MixUp mixes labels .* add \"label\""),
        ({"augment": (*PLAIN, MixUp(num_classes=3), CutMix(num_classes=4))}, "it is 3 or 4"),
    ],
)
def test_what_can_not_be_mixed_is_refused_at_once(
    pack: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(pack, **options)


def test_too_few_classes_are_told_with_the_batch(pack: Path) -> None:
    with (
        make(pack, augment=(*PLAIN, MixUp(num_classes=2))) as loader,
        pytest.raises(ConfigError, match="wanted 0 to 1"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("places", [(2, 0, 1), (3, 1, *range(4, 15), 0, 2)])
def test_no_order_of_lanes_changes_a_pixel(pack: Path, places: tuple[int, ...]) -> None:
    """Also where a lane has one sample of a batch, whose partner may be anywhere."""
    lanes = len(places)
    with make(pack, order=Order(lanes=lanes)) as loader:
        state = loader.state_dict()
        before = by_id(loader)
    state["lane_order"] = LaneOrder(places, len(places)).text
    found: dict[int, Sample] = {}
    for rank in range(2):
        with make(pack, order=Order(lanes=lanes), world=World(rank=rank, size=2)) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict()["lane_order"] == state["lane_order"]
            part = by_id(loader)
        if rank == 0:
            with make(pack, order=Order(lanes=lanes), world=World(rank=0, size=2)) as loader:
                own = {int(i) for _, _, ids in loader for i in ids}
            assert part.keys() != own  # it does read other slots
        found |= part
    assert found == before
