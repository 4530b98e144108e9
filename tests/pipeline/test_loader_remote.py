"""Whole epochs over real servers: faults, a remote that disappears, torch's workers."""

from __future__ import annotations

import itertools
import os
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.augment import LongestSide, Pad, RandomHorizontalFlip, SanitizeBoxes, imagenet_eval
from penstock.cache import ConfigError, DiskCache, FetchError, PenstockWarning
from penstock.pipeline import DataLoader
from penstock.pipeline.cli import main
from penstock.readers import Dataset
from tests import warm
from tests.annotated_sets import coco_set, instances, voc_set, yolo_set
from tests.conftest import SAMPLES
from tests.servers import Faults, Server, serving
from tests.servers.nginx import NGINX, nginx

if TYPE_CHECKING:
    from collections.abc import Iterator

# Only what a test lets hang waits so long; a slow machine's retries may take their time.
QUICK = {"retry_timeout": 300.0, "connect_timeout": 60.0, "read_timeout": 1.0}


@pytest.fixture
def server(pack: Path) -> Iterator[Server]:
    with serving(pack.parent) as found:
        yield found


def loader(dataset: Dataset, **more: Any) -> DataLoader:
    asked = {"batch_size": 16, "shuffle": True, "drop_last": True, "seed": 7, **more}
    return DataLoader(dataset, augment=imagenet_eval(32, resize=36), **asked)


def epochs(url: str | Path, count: int, cache: DiskCache | None = None, **more: Any) -> list[Any]:
    found = []
    options = None if isinstance(url, Path) else QUICK
    with (
        Dataset(url, fields=("image", "id"), cache=cache, storage_options=options) as dataset,
        loader(dataset, **more) as one,
    ):
        for _ in range(count):
            found += [(images.clone(), ids.clone()) for images, ids in one]
    return found


def same(mine: list[Any], wanted: list[Any]) -> bool:
    return len(mine) == len(wanted) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(mine, wanted, strict=True)
    )


@pytest.mark.parametrize(
    ("mode", "share"),
    [
        ("copy", 10.0),
        ("copy", 0.5),
        ("pread", 0.5),
        ("pread", 0.0),
        pytest.param("pread", 10.0, marks=pytest.mark.grid),
        pytest.param("copy", 0.0, marks=pytest.mark.grid),
    ],
)
def test_the_same_tensors_with_any_cache(
    pack: Path, server: Server, tmp_path: Path, share: float, mode: str
) -> None:
    wanted = epochs(pack, 2)
    size = sum(path.stat().st_size for path in pack.glob("*.arrow"))
    # Small packs: what the books take is more than half of them.
    limit = int(share * size) + 400 * 2**10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)  # a temporary cache warns
        cache = DiskCache(tmp_path / "cache", max_bytes=limit) if share else None
        mine = epochs(f"{server.url}/{pack.name}", 2, cache, read=mode)
    assert same(mine, wanted)
    if cache is not None:
        cache.close()


@pytest.mark.parametrize("seed", [1])
def test_an_epoch_through_a_remote_that_fails_a_third_of_the_time(
    pack: Path, tmp_path: Path, seed: int
) -> None:
    kinds = ("500", "503", "429", "reset", "reset_body", "short", "whole", "wrong_range", "hang")
    wanted = epochs(pack, 1)
    with serving(pack.parent, Faults(p=0.3, kinds=kinds, seed=seed)) as server:
        cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
        mine = epochs(f"{server.url}/{pack.name}", 1, cache)
        assert sum(server.faulted.values()) > 5
        asked = {what for what in server.asked if what[0].endswith(".arrow")}
        requests = sum(server.asked[what] for what in asked)
        assert requests <= 3 * len(asked)
        cache.close()
    assert same(mine, wanted)


def test_a_remote_that_is_gone_ends_the_epoch_in_time(
    pack: Path, server: Server, tmp_path: Path
) -> None:
    url = f"{server.url}/{pack.name}"
    options = {"retry_timeout": 1.0, "connect_timeout": 0.5}
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
    with Dataset(url, cache=cache, storage_options=options) as dataset, loader(dataset) as one:
        batches = iter(one)
        next(batches)
        server.go_away()
        # Also of several that wait for one range: its fetch failed for all of them.
        with pytest.raises(FetchError, match=url):
            list(batches)
    cache.close()


def test_a_warm_cache_trains_on_without_the_remote(
    pack: Path, server: Server, tmp_path: Path
) -> None:
    url, wanted = f"{server.url}/{pack.name}", epochs(pack, 2)
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
    options = {"retry_timeout": 0.5, "connect_timeout": 0.5}
    with (
        Dataset(url, fields=("image", "id"), cache=cache, storage_options=options) as dataset,
        loader(dataset) as one,
    ):
        assert dataset.remote is not None
        for shard in range(len(dataset.index.sizes)):
            dataset.remote.fill(dataset.index.source(shard))
        server.go_away()
        before = dataset.traffic().requests
        found = [(i.clone(), n.clone()) for _ in range(2) for i, n in one]
        assert dataset.traffic().requests == before
    assert same(found, wanted)
    with (
        pytest.warns(PenstockWarning, match="remote can't be reached"),
        Dataset(url, fields=("image", "id"), cache=cache, storage_options=options) as dataset,
        loader(dataset) as one,
    ):
        again = [(i.clone(), n.clone()) for _ in range(2) for i, n in one]
    assert same(again, wanted)
    cache.close()


@pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
@pytest.mark.parametrize("name", ["coco", "voc", "yolo"])
def test_an_annotated_set_that_a_command_has_warmed_trains_without_its_store(
    name: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {}
    if name == "coco":
        root = coco_set(tmp_path / "coco", instances())
        given = {"manifest": "annotations/instances_train2017.json"}
    elif name == "voc":
        root = voc_set(tmp_path / "voc", {"a": [{"name": "dog", "box": (1, 2, 9, 8)}], "b": []})
    else:
        text = "train: images/train\nnames: [cat]\n"
        labels = {"a": "0 .5 .5 .2 .2\n0 .1 .1 .5 .1 .2 .6", "b": None}
        root = yolo_set(tmp_path / "yolo", labels, text).parent

    def batches(url: Any, **more: Any) -> list[Any]:
        dataset = Dataset(url, **given, **more)
        fields = tuple({"image", "id", "boxes", "labels", "masks"} & {*dataset.schema})
        recipe = [LongestSide(32), RandomHorizontalFlip(), Pad(to_multiple=8), SanitizeBoxes()]
        options: Any = {"shuffle": True, "seed": 3, "as_dict": True, "augment": recipe}
        with DataLoader(dataset.select(*sorted(fields)), 2, **options) as one:
            return [{n: [each.tolist() for each in v] for n, v in b.items()} for b in one]

    with serving(tmp_path) as server:
        url = f"{server.url}/{root.relative_to(tmp_path)}"
        words = ["warm", url, "--cache", str(tmp_path / "cache"), "--global-batch-size", "2"]
        manifest = [f"--{key}={value}" for key, value in given.items()]
        assert main([*words, "--seed", "3", *manifest]) == 0
        server.go_away()
        options = {"retry_timeout": 0.2, "connect_timeout": 0.2}
        found = batches(url, cache=tmp_path / "cache", storage_options=options)
    assert found == batches(root)


def test_resuming_in_the_middle_from_a_cold_cache(
    pack: Path, server: Server, tmp_path: Path
) -> None:
    url, wanted = f"{server.url}/{pack.name}", epochs(pack, 1)
    cache = DiskCache(tmp_path / "one", max_bytes="64MiB")
    with (
        Dataset(url, fields=("image", "id"), cache=cache, storage_options=QUICK) as dataset,
        loader(dataset) as one,
    ):
        first = [(i.clone(), n.clone()) for i, n in itertools.islice(one, 5)]
        state = one.state_dict()
    cache.close()
    other = DiskCache(tmp_path / "two", max_bytes="64MiB")
    with (
        Dataset(url, fields=("image", "id"), cache=other, storage_options=QUICK) as dataset,
        loader(dataset) as one,
    ):
        one.load_state_dict(state)
        rest = [(i.clone(), n.clone()) for i, n in one]
    other.close()
    assert same(first + rest, wanted)


@pytest.mark.skipif(NGINX is None, reason="nginx isn't installed")
def test_over_nginx_each_byte_once_and_then_none(pack: Path, tmp_path: Path) -> None:
    wanted = epochs(pack, 3)
    size = sum(path.stat().st_size for path in pack.glob("*.arrow"))
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
    with nginx(pack.parent) as url:
        with Dataset(f"{url}/{pack.name}", fields=("image", "id"), cache=cache) as dataset:
            with loader(dataset) as one:
                mine = [(i.clone(), n.clone()) for _ in range(3) for i, n in one]
            assert dataset.traffic().bytes_filled <= 1.02 * size + 64 * 2**10
        assert same(mine, wanted)
        with Dataset(f"{url}/{pack.name}", fields=("image", "id"), cache=cache) as dataset:
            with loader(dataset) as one:
                assert sum(len(ids) for _, ids in one) == SAMPLES // 16 * 16
            assert dataset.bytes_fetched == 0
    cache.close()


class Reading(torch.utils.data.Dataset[int]):
    """A torch dataset that reads a native one in torch's workers."""

    def __init__(self, dataset: Dataset | str, cache: str) -> None:
        self.dataset, self.cache = dataset, cache

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> int:
        import numpy as np

        if isinstance(self.dataset, str):  # made in the worker, as advised
            self.dataset = Dataset(self.dataset, cache=DiskCache(self.cache, max_bytes="64MiB"))
        batch = self.dataset.read(np.array([[0, number]]))
        return len(batch.columns["image"].samples[0])


CHILD = """
    import sys, warnings
    from penstock.cache import DiskCache
    from penstock.pipeline import DataLoader
    from penstock.readers import Dataset
    from tests.pipeline.test_loader_remote import Reading

    if __name__ == "__main__":
        warnings.simplefilter("ignore")
        url, folder, how, where = sys.argv[1:]
        cache = DiskCache(folder, max_bytes="64MiB")
        used = Dataset(url, cache=cache)
        used.read(__import__("numpy").array([[0, 0]]))  # the store is in use now
        inside = Reading(url if where == "made inside" else used, folder)
        loader = DataLoader(inside, batch_size=2, num_workers=1, multiprocessing_context=how)
        with loader:
            print("lengths", sum((batch.tolist() for batch in loader), []))
"""


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("fork", "made inside"),
        ("fork", "made before"),
        ("forkserver", "made before"),
        ("spawn", "made inside"),
    ],
)
def test_torch_workers_with_a_used_store_work_or_are_refused(
    pack: Path, server: Server, tmp_path: Path, how: str, where: str
) -> None:
    program = tmp_path / "job.py"
    program.write_text(textwrap.dedent(CHILD))
    done = warm.run(
        [program, f"{server.url}/{pack.name}", tmp_path / "c", how, where],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONWARNINGS": "ignore"},
    )
    if (how, where) != ("fork", "made before"):
        with Dataset(pack) as dataset:
            import numpy as np

            rows = np.array([[0, i] for i in range(4)])
            lengths = [len(sample) for sample in dataset.read(rows).columns["image"].samples]
        assert f"lengths {lengths}" in done.stdout, done.stderr
    else:
        assert done.returncode != 0
        assert "forkserver" in done.stderr


def test_a_tiny_limit_is_an_error_at_once(pack: Path, server: Server, tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes=1000)
    with (
        Dataset(f"{server.url}/{pack.name}", cache=cache) as dataset,
        pytest.raises(ConfigError, match="max_bytes"),
    ):
        loader(dataset)
    cache.close()
