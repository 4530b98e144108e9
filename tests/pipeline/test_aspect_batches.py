"""Batches of images with similar shapes in a whole job: `bucket_by="aspect"`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock import DataLoader, Dataset, LongestSide, Pad, World, concat, mix, pack
from penstock.errors import ConfigError, ResumeError
from tests import images
from tests.images import jpeg, write_folder

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = 90
SHAPES = ((24, 32), (32, 24), (20, 40), (40, 20), (28, 28))


def shape_of(number: int) -> tuple[int, int]:
    return SHAPES[number * 7 % 11 % 5]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {f"{n:03d}.jpg": jpeg(n, *shape_of(n)) for n in range(SAMPLES)}
    return write_folder(tmp_path_factory.mktemp("aspects") / "photos", files)


@pytest.fixture(scope="module")
def dataset(root: Path) -> Dataset:
    found = Dataset(root, fields=("image", "id"))
    found.open(verify=images.verify)
    return found


def loader_of(dataset: Any, **arguments: Any) -> DataLoader:
    given = {"batch_size": 4, "shuffle": True, "seed": 5, "bucket_by": "aspect", **arguments}
    return DataLoader(dataset, **given)


def ids_of(loader: DataLoader) -> list[list[int]]:
    return [ids.tolist() for _, ids in loader]  # type: ignore[misc]


RECIPE = [LongestSide(16), Pad(to_multiple=1)]


def test_batches_have_similar_shapes_and_each_sample_once(dataset: Dataset) -> None:
    shapes = dict(zip(range(SAMPLES), map(shape_of, _numbers(dataset)), strict=True))
    with loader_of(dataset, augment=RECIPE) as loader:
        batches = [(tuple(image.shape), ids.tolist()) for image, ids in loader]  # type: ignore[misc]
        assert len(loader) == len(batches) == 23
    assert sorted(id for _, ids in batches for id in ids) == list(range(SAMPLES))
    held = used = 0.0
    for shape, ids in batches:
        held += np.prod((shape[0], *shape[2:]))
        used += sum(np.prod(np.rint(np.multiply(shapes[id], 16 / max(shapes[id])))) for id in ids)
    assert 1 - used / held < 0.1


def _numbers(dataset: Dataset) -> list[int]:
    return [int(name[:3]) for name in dataset.names(range(SAMPLES))]


def test_a_job_continues_anywhere_in_another_world(dataset: Dataset) -> None:
    with loader_of(dataset, augment=RECIPE, drop_last=True) as loader:
        whole = ids_of(loader)
        steps = [loader.samples_of(step).tolist() for step in range(len(whole))]
        assert whole == steps
        loader.set_epoch(0)
        for stop in (1, 5, 21):
            passing = iter(loader)
            for _ in range(stop):
                next(passing)
            state = loader.state_dict()
            rest = []
            for rank in range(2):
                world = World(rank=rank, size=2)
                with loader_of(
                    dataset, augment=RECIPE, batch_size=2, world=world, drop_last=True
                ) as other:
                    other.load_state_dict(state)
                    rest.append(ids_of(other))
            assert [a + b for a, b in zip(*rest, strict=True)] == whole[stop:]
            loader.set_epoch(0)


def test_a_state_continues_only_with_the_same_argument(dataset: Dataset) -> None:
    with (
        loader_of(dataset, augment=RECIPE) as loader,
        loader_of(dataset, augment=RECIPE, bucket_by=None) as plain,
    ):
        states = loader.state_dict(), plain.state_dict()
        assert "aspects" not in states[1]["plan"]
        assert states[0]["plan"]["aspects"] == {"field": "image", "pool": 256, "batch": 4}
        with pytest.raises(ResumeError, match="saved without bucket_by="):
            loader.load_state_dict(states[1])
        with pytest.raises(ResumeError, match='saved with bucket_by="aspect"'):
            plain.load_state_dict(states[0])
        damaged = states[0] | {"plan": {**states[0]["plan"], "aspects": {"field": "image"}}}
        with pytest.raises(ResumeError, match="State is damaged"):
            loader.load_state_dict(damaged)


def test_packs_parts_and_joined_datasets_have_aspects_too(root: Path, tmp_path: Path) -> None:
    pack(root, tmp_path / "pack", verify=images.verify)
    packed = Dataset(tmp_path / "pack", fields=("image", "id"))
    for source, count in (
        (packed, SAMPLES),
        (packed.subset(range(0, SAMPLES, 2)), SAMPLES // 2),
        (concat([packed, packed.subset(range(9))]), SAMPLES + 9),
        (mix({"a": packed, "b": packed.subset(range(40))}, epoch=SAMPLES), SAMPLES),
    ):
        with loader_of(source, augment=RECIPE, batch_size=5) as loader:
            ids = [id for batch in ids_of(loader) for id in batch]
        assert len(ids) == count


def test_what_has_no_shapes_is_refused(root: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((9, 2), np.float32))
    with pytest.raises(ConfigError, match="none is an image"):
        loader_of(Dataset(tmp_path / "x.npy"))
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = pa.array([{"bytes": jpeg(n), "path": None} for n in range(3)])
    parquet.write_table(pa.table({"image": column}), tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="doesn't record the sizes"):
        loader_of(Dataset(tmp_path / "x.parquet", fields=("image",)))
    with pytest.raises(ConfigError, match=r"Got bucket_by= and batch_tokens="):
        loader_of(Dataset(root), batch_tokens=9)
    with pytest.raises(ConfigError, match="bucket_by must be None or 'aspect'"):
        loader_of(Dataset(root), bucket_by="size")
    with pytest.raises(ConfigError, match="bucket_by= works on native datasets"):
        loader_of([1, 2, 3])
