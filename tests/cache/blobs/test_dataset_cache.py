"""What a dataset uses of the node's cache: nothing without one, and nothing once it is closed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from penstock.cache import ClosedError, PenstockWarning, StalledError
from penstock.cache.blobs import DatasetCache, DatasetJobs, ProcessFolder
from penstock.cache.disk import DiskCache
from tests.cache.blobs.remotes import single

if TYPE_CHECKING:
    from pathlib import Path

    from tests.stores import MemoryStore


def test_without_a_cache_nothing_is_done_and_no_error_is_the_disks(store: MemoryStore) -> None:
    cache = DatasetCache(None, group="g", label="mem://set")
    assert cache.use(lambda _: 1) is None
    assert cache.look(lambda _: 1) is None
    assert not cache.has(single(store, 0))
    assert not cache.drop(single(store, 0))
    with pytest.raises(OSError, match="full"):
        cache.give_up(OSError("full"))
    memberships = DatasetJobs(None, group="g", label="mem://set")
    assert memberships.join(["0" * 40], [5]) is None
    assert not memberships.keeps("0" * 40)


def test_a_disks_error_rests_the_folder_and_others_are_raised(tmp_path: Path) -> None:
    disk = DiskCache(tmp_path, max_bytes="2MB")
    cache = DatasetCache(disk, group="g", label="mem://set")
    assert cache.use(lambda _: 1) == 1
    with pytest.raises(StalledError, match="mine"):
        cache.give_up(StalledError("mine"))
    with pytest.warns(PenstockWarning, match="can't be used"):
        cache.give_up(OSError(28, "No space left on device"))
    assert cache.use(lambda _: 1) is None
    assert cache.look(lambda _: 1) == 1
    cache.close()
    for act in (cache.use, cache.look):
        with pytest.raises(ClosedError, match="mem://set: closed"):
            act(lambda _: 1)
    disk.close()


def test_a_dataset_keeps_what_one_of_its_jobs_pins(tmp_path: Path) -> None:
    disk = DiskCache(tmp_path, max_bytes="8MiB")
    memberships = DatasetJobs(disk, group="g", label="mem://set")
    keys = [f"{i:040x}" for i in range(4)]
    assert memberships.keeps(keys[3])  # nobody has said what is needed
    one = memberships.join(keys[:2], [5, 5])
    two = memberships.join(keys[1:3], [5, 5])
    assert [memberships.keeps(key) for key in keys] == [True, True, True, False]
    assert len(memberships) == 2
    assert one is not None
    assert two is not None
    for _ in range(2):
        memberships.leave(one)
    assert [memberships.keeps(key) for key in keys] == [False, True, True, False]
    memberships.close()
    assert len(memberships) == 0
    disk.close()


def test_a_process_folder_is_made_late_and_goes() -> None:
    folder = ProcessFolder()
    folder.remove("a")
    folder.close()
    path = folder.write("a", memoryview(b"one"))
    assert folder.write("a", memoryview(b"two")) == path == folder.path("a")
    with open(path, "rb") as file:
        assert file.read() == b"two"
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.listdir(os.path.dirname(path)) == ["a"]
    folder.remove("a")
    assert not os.path.exists(path)
    folder.close()
    folder.close()
    assert not os.path.exists(os.path.dirname(path))
