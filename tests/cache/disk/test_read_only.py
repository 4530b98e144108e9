"""A cache that can't be written serves its whole blobs, and the remote serves the rest."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache import DiskCache, PenstockWarning, WriteError
from penstock.cache.base import BlobSource, BlobSpans, FetchPolicy, Folder, Segment, blob_key
from penstock.cache.blobs import CachedBlob, Remote
from penstock.cache.fetch import Fetcher
from penstock.pipeline import DataLoader
from penstock.pipeline.feed import warm
from penstock.readers import Dataset
from tests.conftest import SAMPLES
from tests.servers import serving
from tests.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 2**20


@pytest.fixture(params=["mount", "refused"])
def read_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make a folder read-only: by a mount, or by refusing each os.open that would write."""
    mounts: list[Path] = []

    def by_mount(folder: Path) -> None:
        for options in (["--bind"], ["-o", "remount,bind,ro"]):
            command = ["mount", *options, *([str(folder)] if "--bind" in options else [])]
            done = subprocess.run([*command, str(folder)], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"mount: {done.stderr.strip()}")
            if options == ["--bind"]:
                mounts.append(folder)

    yield by_mount if request.param == "mount" else lambda _: refuse_writes(monkeypatch)
    for folder in mounts:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def refuse_writes(patched: pytest.MonkeyPatch, name: str | None = None) -> None:
    """Make os.open refuse to open the file of this name, or any file for writing."""
    plain = os.open
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def refused(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if path == name or (name is None and flags & writes):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return plain(path, flags, *more, **named)

    patched.setattr(os, "open", refused)


@contextlib.contextmanager
def one_warning() -> Iterator[None]:
    """Require exactly one warning inside: that the cache can't be used."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    (only,) = caught
    assert issubclass(only.category, PenstockWarning)
    assert "can't be used" in str(only.message)


def source_of(store: MemoryStore, name: str) -> BlobSource:
    size_bytes = len(store.objects[name])
    segment = Segment(path=name, size_bytes=size_bytes, version=None)
    key = blob_key(scope=store.scope, uri=name, version="1")
    return BlobSource(key=key, uri=name, segments=(segment,), size_bytes=size_bytes)


@contextlib.contextmanager
def remote_of(store: MemoryStore, folder: Path) -> Iterator[Remote]:
    cache = DiskCache(folder, max_bytes=8 * MIB)
    remote = Remote(Fetcher(store, policy=FetchPolicy()), cache, group="g", label="mem://set")
    try:
        yield remote
    finally:
        remote.close()
        cache.close()


def test_the_warning_names_the_file_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path, max_bytes=8 * MIB)
    refuse_writes(monkeypatch, "catalogue.lock")
    with pytest.warns(PenstockWarning, match=r"\(catalogue.lock: Permission denied\).*the right"):
        cache.open()


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_whole_blobs_are_served_and_nothing_else_is_kept(
    tmp_path: Path, read_only: Any, mode: Any
) -> None:
    store = MemoryStore({name: os.urandom(100_000) for name in ("held", "part", "else")})
    held, begun, other = (source_of(store, name) for name in store.objects)
    folder = tmp_path / "cache"
    with remote_of(store, folder) as remote:
        remote.fill(held)
        remote.object("held", size_bytes=100_000, version="m")
        found = remote.find("held")
        blob = remote.open(begun)
        remote.load([BlobSpans(blob=blob, starts=[0], ends=[10])])
        del blob
    before = sorted((path, path.stat().st_size) for path in folder.rglob("*"))
    read_only(folder)
    store.reads.clear()
    with one_warning(), remote_of(store, folder) as remote:
        job = remote.join([held.key, other.key], [100_000] * 2)
        assert job is not None
        for _ in range(2):
            assert remote.is_whole(held)
            assert isinstance(remote.open(held), CachedBlob)
            want = BlobSpans(blob=remote.open(held), starts=[0, 7], ends=[5, 90_000])
            (got,) = remote.load([want], mode=mode)
            assert got[1].tobytes() == store.objects["held"][7:90_000]
            assert remote.fill(held) == 0
            path = remote.object("held", size_bytes=100_000, version="m")
            assert Path(os.fsdecode(path)).read_bytes() == store.objects["held"]
        assert store.reads == []
        assert not remote.keeps(other.key)
        assert remote.fill(other) == -1
        for source in (begun, other):
            blob = remote.open(source)
            assert not blob.is_cached
            (got,) = remote.load([BlobSpans(blob=blob, starts=[5], ends=[50])])
            assert got[0].tobytes() == store.objects[source.uri][5:50]
        assert remote.find("held") == found
        del got, want, blob
    assert before == sorted((path, path.stat().st_size) for path in folder.rglob("*"))


def test_a_new_process_reads_a_whole_dataset_from_a_read_only_cache(
    pack: Path, tmp_path: Path, read_only: Any
) -> None:
    folder = tmp_path / "cache"
    with serving(pack.parent) as server:
        url = f"{server.url}/{pack.name}"
        cache = DiskCache(folder, max_bytes="64MiB")
        with Dataset(url, fields=("label", "id"), cache=cache) as dataset:
            warm(dataset)
        cache.close()
        read_only(folder)
        before = server.bytes_sent
        cache = DiskCache(folder, max_bytes="64MiB")
        with (
            one_warning(),
            Dataset(url, fields=("label", "id"), cache=cache) as dataset,
            DataLoader(dataset, batch_size=16, shuffle=True, drop_last=True, seed=7) as loader,
        ):
            for _ in range(2):
                assert sum(len(ids) for _, ids in loader) == SAMPLES // 16 * 16
            assert dataset.bytes_fetched == 0
            with pytest.raises(WriteError, match="can't be used"):
                warm(dataset)
        cache.close()
        assert server.bytes_sent == before


def test_a_folder_that_only_root_may_write_is_read_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid():
        pytest.skip("only root can make files of root's")
    place = tmp_path / "cache"
    place.mkdir(mode=0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionError, match="another user"):
        Folder.at(str(place))
    assert Folder.at(str(place), reads_roots=True).names() == []
    place.chmod(0o775)
    with pytest.raises(PermissionError, match="another user"):
        Folder.at(str(place), reads_roots=True)


def test_a_folder_that_can_be_written_again_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore({name: os.urandom(100_000) for name in ("held", "else")})
    held, other = (source_of(store, name) for name in store.objects)
    with remote_of(store, tmp_path / "cache") as remote:
        remote.fill(held)
    monkeypatch.setattr("penstock.cache.disk.disk_cache.FolderAccess.retry_s", 0.0)
    with one_warning(), remote_of(store, tmp_path / "cache") as one:
        with monkeypatch.context() as patched:
            refuse_writes(patched)
            assert one.fill(held) == 0
            assert one.fill(other) == -1
        assert one.fill(other) == 100_000
        assert one.fill(held) == 0
