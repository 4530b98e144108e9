"""Bad samples that come again after a rejoin at an earlier step are counted once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from penstock.augment import imagenet_eval
from penstock.pipeline import DataLoader, World
from penstock.readers import Dataset
from tests.pipeline.feed.test_bad_samples import build

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sample .* is bad"),
    pytest.mark.filterwarnings("ignore:Labels cluster inside shards"),
]
BAD, SAMPLES, BATCH = set(range(2, 40, 4)), 40, 8  # one in each rank's share of a batch in order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("bad"), BAD, SAMPLES)


def loader_of(folder: Path) -> DataLoader:
    return DataLoader(
        Dataset(str(folder), fields=("image", "id")),
        global_batch_size=BATCH,
        drop_last=True,
        shuffle=True,
        seed=1,
        max_bad=len(BAD) / SAMPLES,
        augment=imagenet_eval(16, 20),
        world=World(0, 1),
    )


def epoch(loader: DataLoader, steps: int | None = None) -> None:
    for number, _ in enumerate(loader, 1):
        if number == steps:
            break


@pytest.mark.parametrize("step", [0, 1, 3])
def test_one_rank_counts_them_once(folder: Path, step: int) -> None:
    with loader_of(folder) as loader:
        epoch(loader, 4)
        files = {loader.statistics().quarantine}
        loader.rejoin(World(0, 1), step=step)
        epoch(loader)  # to the end: one more than there are would stop the job
        files |= {loader.statistics().quarantine} - {""}
        assert sum(len(Path(file).read_text().splitlines()) for file in files) == len(BAD)
        assert loader.epoch == 1


def test_ranks_that_are_dealt_anew_count_them_once(folder: Path) -> None:
    loaders = [loader_of(folder) for _ in range(2)]  # one more than there are would stop the job

    def join(ranks: Sequence[int], *, step: int, steps: int | None) -> None:
        store = dist.HashStore()  # type: ignore[attr-defined]

        def one(number: int) -> None:
            loaders[number].rejoin(World(ranks[number], 2), step=step, store=store)
            epoch(loaders[number], steps)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(one, range(2)))

    join([0, 1], step=0, steps=4)
    join([1, 0], step=2, steps=1)
    join([0, 1], step=1, steps=2)
    join([1, 0], step=2, steps=None)
    assert [one.epoch for one in loaders] == [1, 1]
    for one in loaders:
        one.close()
