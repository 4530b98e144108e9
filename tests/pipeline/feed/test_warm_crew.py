"""An executor warms each node's share once; wrong arguments are rejected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from penstock import DiskCache, World, warm
from penstock.cache import ConfigError, OpenResources
from penstock.pipeline.feed import worker_per_host
from penstock.readers import Dataset, pack
from tests import executors, images

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _nothing_is_kept_open() -> Iterator[None]:
    """Executors that run tasks in this process keep datasets open in it, with their threads."""
    yield
    for dataset in OpenResources.made.values():
        dataset.close()  # type: ignore[attr-defined]
    OpenResources.made.clear()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A pack of many shards in a remote file system that lives in this process."""
    folder = images.class_folder(tmp_path / "set", samples=80)
    pack(folder, tmp_path / "pack", shard_bytes=4000, verify=images.verify)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "pack"), "/warm-crew", recursive=True)
    return "memory://warm-crew"


def test_each_node_has_its_share_warmed(url: str, tmp_path: Path) -> None:
    alone = warm(url, cache=DiskCache(tmp_path / "alone", max_bytes="1GB"))
    executor = executors.RecordingExecutor()
    cache = DiskCache(tmp_path / "cache", max_bytes="1GB")
    states: list[Any] = []
    told = warm(
        url, cache=cache, executor=executor, nodes=2, world=World(0, 4), progress=states.append
    )
    assert len(executor.tasks) == len(states) == 2
    assert states[0].fetched_bytes < states[1].fetched_bytes == told.bytes
    assert states[1].wanted_bytes == told.kept_bytes
    assert told.objects + told.skipped >= alone.objects
    assert (told.bytes, told.failed) == (alone.bytes, ())  # both "nodes" have one cache here
    again = warm(url, cache=cache, executor=executor, nodes=2, world=World(0, 4))
    assert (again.objects, again.bytes) == (0, 0)


def test_what_can_not_be(url: str, tmp_path: Path) -> None:
    executor, cache = executors.RecordingExecutor(), DiskCache(tmp_path / "cache", max_bytes="1GB")
    with pytest.raises(ConfigError, match="the number of the job's nodes"):
        warm(url, cache=cache, executor=executor)
    for nodes in (0, -1):
        with pytest.raises(ConfigError, match="nodes must be an integer of at least 1"):
            warm(url, cache=cache, executor=executor, nodes=nodes)
    with pytest.raises(ConfigError, match="nodes: got 1000000000, wanted at most"):
        warm(url, cache=cache, executor=executor, nodes=10**9)
    with pytest.raises(ConfigError, match="nodes: got 2 without an executor"):
        warm(url, cache=cache, nodes=2)
    with pytest.raises(ConfigError, match="a multiple of the 3 nodes"):
        warm(url, cache=cache, executor=executor, nodes=3, world=World(0, 4))
    with pytest.raises(ConfigError, match="cache: got one together with a dataset"):
        warm(Dataset(url, cache=cache), cache=cache)
    assert not executor.tasks


def test_dask_has_one_worker_a_host_pinned(url: str, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        assert len(worker_per_host(client.get_executor())) == 1
        cache = DiskCache(tmp_path / "cache", max_bytes="1GB")
        told = warm(url, cache=cache, executor=client.get_executor())
    assert told.objects > 4
    assert told.failed == ()
