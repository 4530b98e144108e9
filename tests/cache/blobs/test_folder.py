"""The folder of a cache: its limit, its format, its books, its disk."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.cache import ConfigError, PenstockWarning
from penstock.cache.base import BlobSpans, file_system
from penstock.cache.disk import CacheFolder, DiskCache, admin
from tests.cache.blobs.remotes import SIZES, cache_of, single

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.blobs import Remote
    from tests.stores import MemoryStore


def test_one_folder_one_limit(tmp_path: Path) -> None:
    one = DiskCache(tmp_path, max_bytes="2MB")
    one.open()
    with pytest.raises(ConfigError, match=r"max_bytes: got .*use this folder with .*one limit"):
        DiskCache(tmp_path, max_bytes="3MB").open()
    same = DiskCache(tmp_path, max_bytes=2_000_000)
    same.open()
    taken = DiskCache.at(tmp_path)
    taken.open()
    assert taken.max_bytes == 2_000_000
    for cache in (one, same, taken):
        cache.close()
    later = DiskCache(tmp_path, max_bytes="3MB")
    later.open()
    assert admin.stat(tmp_path).max_bytes == 3_000_000
    later.close()


@pytest.mark.parametrize("size", ["1.5 parsecs", 0, -3, "lots", True, 2.5, None])
def test_nonsense_sizes(tmp_path: Path, size: object) -> None:
    with pytest.raises(ConfigError, match="max_bytes: got"):
        DiskCache(tmp_path / "x", max_bytes=size)  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


def test_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "format.json").write_text(json.dumps({"format": 2}))
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "precious").write_text("x")
    with pytest.raises(ConfigError, match=r"format 2, wanted 1.*Upgrade"):
        DiskCache(tmp_path, max_bytes="2MB").open()
    assert sorted(os.listdir(tmp_path)) == ["blobs", "format.json"]
    with pytest.raises(ConfigError, match="isn't a cache folder"):
        admin.stat(tmp_path / "blobs")


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_system("/proc") == "proc"
    monkeypatch.setattr("penstock.cache.base.folders.file_system", lambda _: "nfs4")
    with pytest.raises(ConfigError, match=r"network file system \(nfs4\)"):
        DiskCache(tmp_path, max_bytes="2MB").open()


def test_a_damaged_catalogue_is_made_anew(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    remote = remotes(store)
    remote.fill(single(store, 0))
    remote.close()
    cache_of(remote).close()
    catalogue = Path(cache_of(remote).path) / "catalogue.db"
    catalogue.write_bytes(b"not a database at all" * 300)
    again = remotes(store)
    with pytest.warns(PenstockWarning, match=r"damaged \(catalogue.db .*rebuilt") as told:
        assert again.is_whole(single(store, 0))
    assert len(told) == 1
    assert admin.stat(cache_of(again).path).used_bytes >= SIZES[0]
    assert admin.verify(cache_of(again).path).bad == ()


def test_books_and_files_are_brought_together(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    remote = remotes(store)
    for number in (0, 1, 4):
        remote.fill(single(store, number))
    blob = remote.open(single(store, 5))
    remote.load([BlobSpans(blob=blob, starts=[0], ends=[10])])  # a fill that stays
    del blob
    path = Path(cache_of(remote).path)
    remote.close()
    cache_of(remote).close()
    (path / "blobs" / single(store, 0).key).unlink()
    os.rename(path / "blobs" / single(store, 1).key, path / "trash" / "beef-7")
    (path / "fills" / "00ff.part").write_bytes(b"leftover")
    folder = CacheFolder(str(path), max_bytes=None)
    with sqlite3.connect(path / "catalogue.db") as books:
        books.execute("DELETE FROM blobs WHERE key = ?", (single(store, 4).key,))
    books.close()
    folder.reconcile()
    folder.close()
    records = {one.key: one.state for one in admin.list_blobs(path)}
    assert records == {single(store, 4).key: "ready", single(store, 5).key: "fill"}
    assert os.listdir(path / "trash") == []
    assert admin.gc(path)[1] > 0  # the fill that nobody works on
    assert admin.list_blobs(path)[0].state == "ready"
    assert os.listdir(path / "fills") == []


def test_trouble_with_the_disk_is_one_warning(
    store: MemoryStore, remotes: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = remotes(store)

    def full(_fd: int, _start: int, _length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.warns(PenstockWarning, match=r"can't be used \(No space left.*doctor") as told:
        blobs = [remote.open(single(store, i)) for i in range(3)]
    assert len(told) == 1
    for number, blob in enumerate(blobs):
        (found,) = remote.load([BlobSpans(blob=blob, starts=[0], ends=[SIZES[number]])])
        assert found[0].tobytes() == store.objects[f"o{number}"]


def test_a_write_that_fails_is_read_past(
    store: MemoryStore, remotes: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = remotes(store)
    blobs = [remote.open(single(store, i)) for i in (0, 4)]

    def broken(_fd: int, _data: object, _at: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.warns(PenstockWarning, match="Input/output error"):
        found = remote.load([BlobSpans(blob=blob, starts=[5], ends=[9000]) for blob in blobs])
    assert found[0][0].tobytes() == store.objects["o0"][5:9000]
    assert found[1][0].tobytes() == store.objects["o4"][5:9000]


def test_a_forked_child_is_refused(store: MemoryStore, remotes: Callable[..., Remote]) -> None:
    remote = remotes(store)
    cache_of(remote).open()
    cache_of(remote)._access.owner = os.getpid() + 1  # as in a child
    with pytest.raises(ConfigError, match="forkserver"):
        remote.open(single(store, 0))
    cache_of(remote)._access.owner = os.getpid()


def test_temporary_caches_go() -> None:
    cache = DiskCache.temporary()
    cache.open()
    assert os.path.isdir(cache.path)
    assert cache.is_temporary
    cache.close()
    assert not os.path.exists(cache.path)
    cache.close()
