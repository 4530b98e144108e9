"""Fills and batches ahead on real datasets: each byte is fetched once, at the consumer's pace."""

from __future__ import annotations

import itertools
import shutil
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest

from penstock.augment import imagenet_eval
from penstock.cache import PenstockWarning
from penstock.cache.base import RequestError
from penstock.cache.disk import DiskCache, admin
from penstock.pipeline import DataLoader, Order, World
from penstock.pipeline.feed import Filler
from penstock.readers import Dataset
from tests.pipeline.feed.test_fill_sources import wait_for_fills

if TYPE_CHECKING:
    from collections.abc import Iterator


RECIPE = imagenet_eval(16)


class Watched:
    """The one way to the remote's bytes: what was read, and a switch that fails every read."""

    def __init__(self, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
        dataset.open()
        assert dataset.remote is not None
        store = dataset.remote.fetcher.store
        self._lock = threading.Lock()
        self.bytes, self.broken = 0, False
        read = store.read

        def watched(path: str, span: Any = None, **rest: Any) -> Any:
            if self.broken:
                raise RequestError("denied", "no longer allowed")
            answer = read(path, span, **rest)
            with self._lock:
                self.bytes += len(memoryview(answer.data))
            return answer

        monkeypatch.setattr(store, "read", watched)


@pytest.fixture
def remote(pack: Path, tmp_path: Path) -> Iterator[Dataset]:
    """The small pack as a remote dataset, and a cache that holds it."""
    files = fsspec.filesystem("file", skip_instance_cache=True)
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
    with Dataset(str(pack), fields=("label", "id"), filesystem=files, cache=cache) as found:
        yield found


@pytest.fixture
def remote_images(pack: Path, tmp_path: Path) -> Iterator[Dataset]:
    """The same, with what takes bytes: labels alone are noted beside the images, and so few bytes
    are consumed for them that hardly a shard is filled."""
    files = fsspec.filesystem("file", skip_instance_cache=True)
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
    with Dataset(str(pack), fields=("image", "id"), filesystem=files, cache=cache) as found:
        yield found


def data_bytes(pack: Path) -> int:
    return sum(file.stat().st_size for file in pack.glob("*.arrow"))


def prefetch_of(loader: DataLoader) -> Any:
    return loader._engine.assembly.runner.prefetch  # type: ignore[union-attr]


def store_of(dataset: Dataset) -> Any:
    dataset.open()
    return dataset.remote


def make(dataset: Dataset, **options: Any) -> DataLoader:
    return DataLoader(
        dataset, **{"batch_size": 8, "shuffle": True, "seed": 5, "drop_last": True, **options}
    )


def test_every_byte_comes_once_and_the_loader_notices_that_all_is_here(
    remote_images: Dataset, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = remote_images
    watched = Watched(remote, monkeypatch)
    with make(remote, augment=RECIPE) as loader:
        for _ in range(3):
            ids = np.concatenate([batch[1].numpy() for batch in loader])
            assert len(np.unique(ids)) == len(ids) == 8 * len(loader)
        assert watched.bytes <= 1.02 * data_bytes(pack)
        index = remote.index
        assert all(store_of(remote).is_whole(index.source(n)) for n in range(len(index.sizes)))
        found = loader.statistics()
    assert found.hit_ratio > 0.5
    assert found.bytes_filled >= watched.bytes  # the manifest came before anybody watched


def test_nothing_is_filled_before_the_first_batch_was_handed_out(
    remote: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(remote) as loader:
        fills: list[Any] = []

        def fill(source: Any, **_: Any) -> int:
            fills.append(source.key)
            return 0

        monkeypatch.setattr(store_of(remote), "fill", fill)
        batches = iter(loader)
        assert not fills
        next(batches)
        wait_for_fills(prefetch_of(loader)._filler)
        assert fills
        assert len(set(fills)) == len(fills)


def test_the_same_batches_as_from_the_disk(remote: Dataset, pack: Path) -> None:
    with make(remote) as loader, make(Dataset(str(pack), fields=("label", "id"))) as local:
        both = zip(itertools.chain(loader, loader), itertools.chain(local, local), strict=True)
        for ours, theirs in both:
            assert [t.tolist() for t in ours] == [t.tolist() for t in theirs]


@pytest.mark.parametrize("reshuffle", [0.0, 0.5])
def test_the_ranks_of_a_node_fill_their_shards_only(remote: Dataset, reshuffle: float) -> None:
    options: dict[str, Any] = {"order": Order(lanes=4, window=2, reshuffle=reshuffle)}
    options["global_batch_size"] = 16
    world = World(1, 4, local_rank=0, local_size=1)
    with make(remote, batch_size=1, world=world, **options) as loader:
        for _ in range(3):
            for _ in loader:
                pass
        filler = prefetch_of(loader)._filler
        share = prefetch_of(loader)._share
        everything = len(share.shards) == len(remote.index.sizes)
        assert everything == (reshuffle > 0)
        assert set(filler.queue.pinned) <= set(share.shards.tolist())


def test_a_remote_that_fails_stops_batches_and_not_close(
    remote: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(remote, monkeypatch)
    with make(remote, order=Order(lanes=2, window=1)) as loader:
        batches = iter(loader)
        next(batches)
        watched.broken = True
        with pytest.raises(OSError, match="no longer allowed"):
            list(batches)
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-fill")]


def test_close_does_not_wait_for_a_remote_that_hangs(
    remote: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.open()
    assert remote.remote is not None
    store, go_on, answers = store_of(remote).fetcher.store, threading.Event(), list[bool]()
    read, asked = store.read, threading.Event()

    def hangs(*args: Any, **rest: Any) -> Any:
        asked.set()
        answers.append(go_on.wait(50))
        return read(*args, **rest)

    monkeypatch.setattr(store, "read", hangs)
    loader = make(remote)
    iter(loader)
    assert asked.wait(30)
    loader.close()
    assert answers == []
    go_on.set()


def test_a_limit_below_two_windows_is_told_and_read_all_the_same(
    pack: Path, tmp_path: Path
) -> None:
    files = fsspec.filesystem("file", skip_instance_cache=True)
    limit = int(0.4 * data_bytes(pack))
    cache = DiskCache(tmp_path / "cache", max_bytes=limit)
    wide: dict[str, Any] = {"order": Order(window=20, lanes=1)}
    with Dataset(str(pack), fields=("label", "id"), filesystem=files, cache=cache) as dataset:
        with (
            pytest.warns(PenstockWarning, match=r"two open windows of .* \(window=20, lanes=1\)"),
            make(dataset, **wide) as loader,
        ):
            ours = [batch[1].tolist() for batch in itertools.chain(loader, loader)]
        assert admin.stat(tmp_path / "cache").used_bytes <= limit
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # each node says it once: by its first rank
            make(
                dataset, batch_size=1, world=World(1, 2, local_rank=1, local_size=2), **wide
            ).close()
    with make(Dataset(str(pack), fields=("label", "id")), **wide) as local:
        assert ours == [batch[1].tolist() for batch in itertools.chain(local, local)]
    cache.close()


def test_closing_leaves_the_cache(remote: Dataset) -> None:
    with make(remote) as loader:
        assert len(store_of(remote).jobs) == 0  # a loader that nobody reads wants no room
        next(iter(loader))
        assert len(store_of(remote).jobs) == 1
    assert len(store_of(remote).jobs) == 0


def test_each_loader_of_a_dataset_has_a_share_of_its_own(remote: Dataset) -> None:
    cache = store_of(remote).cache
    assert cache is not None

    def live() -> tuple[Any, ...]:
        return admin.stat(cache.path).jobs

    with make(remote) as first:
        next(iter(first))
        pinned = prefetch_of(first)._share.kept_bytes
        (before,) = live()
        with make(remote, shuffle=False) as second:
            next(iter(second))
            assert prefetch_of(first)._share.kept_bytes == pinned
            assert [job.share_bytes for job in live()] == [before.share_bytes] * 2
        assert live() == (before,)
        assert not prefetch_of(first)._share.refresh()
        assert prefetch_of(first)._share.kept_bytes == pinned > 0


def test_a_second_job_has_half_of_the_cache_within_an_epoch_of_the_first(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Filler, "refresh_s", 0.0)  # the test's epochs are short
    places = [pack, Path(shutil.copytree(pack, tmp_path / "other"))]
    limit = 768 * 2**10 + data_bytes(pack)
    caches = [DiskCache(tmp_path / "cache", max_bytes=limit) for _ in places]
    files = fsspec.filesystem("file", skip_instance_cache=True)
    one, two = (
        Dataset(str(place), fields=("image", "id"), filesystem=files, cache=cache)
        for place, cache in zip(places, caches, strict=True)
    )

    def epoch(loader: DataLoader) -> None:
        for _ in loader:
            wait_for_fills(prefetch_of(loader)._filler)

    def kept(dataset: Dataset) -> int:
        index = dataset.index
        sizes = enumerate(index.shard_bytes.tolist())
        return sum(size for n, size in sizes if store_of(dataset).is_whole(index.source(n)))

    # One window over all shards: every batch has nearly all of them mapped.
    options: dict[str, Any] = {"order": Order(lanes=1, window=99), "augment": RECIPE}
    with one, two, make(one, **options) as first, make(two, **options) as second:
        for _ in range(2):
            epoch(first)
        assert kept(one) == data_bytes(pack)
        epoch(second)
        epoch(first)
        epoch(second)
        fair = prefetch_of(second)._share.kept_bytes
        assert fair > 0.4 * data_bytes(pack)
        assert prefetch_of(first)._share.kept_bytes > 0.4 * data_bytes(pack)
        assert kept(two) >= 0.85 * fair  # files, without the rest of their last blocks
        before = two.traffic().bytes_disk
        epoch(second)
        assert two.traffic().bytes_disk - before > 0.3 * data_bytes(pack)
        assert admin.stat(tmp_path / "cache").used_bytes <= limit
    for cache in caches:
        cache.close()


def test_loaders_of_two_worlds_share_as_two_jobs(remote: Dataset) -> None:
    options: dict[str, Any] = {"order": Order(lanes=4, window=2), "global_batch_size": 16}
    worlds = [World(rank, 2, local_rank=0, local_size=1) for rank in range(2)]
    with (
        make(remote, batch_size=1, world=worlds[0], **options) as first,
        make(remote, batch_size=1, world=worlds[1], **options) as second,
    ):
        for loader in (first, second):
            next(iter(loader))
        shares = [prefetch_of(loader)._share for loader in (first, second)]
        keys = remote.index.keys
        for share in shares:
            kept = [shard for shard in share.shards.tolist() if share.keeps(shard)]
            assert kept == share.shards.tolist()
        assert all(store_of(remote).keeps(key) for key in keys)
