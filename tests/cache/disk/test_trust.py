"""Test folders of other users and read-only caches.

Nothing is written, emptied or removed through files of other users, and a job without a writable
cache continues.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache import DiskCache, PenstockWarning, WriteError
from penstock.cache.base import (
    BlobSource,
    BlobSpans,
    FetchPolicy,
    Folder,
    Segment,
    StrangeFileError,
    blob_key,
)
from penstock.cache.blobs import CachedBlob, Remote
from penstock.cache.disk import CacheFolder, admin
from penstock.cache.fetch import Fetcher
from penstock.pipeline import DataLoader
from penstock.pipeline.feed import warm
from penstock.pipeline.report import QuarantineFile
from penstock.readers import Dataset
from penstock.readers.files import temp_name, write_bytes
from penstock.readers.origin import Scratch
from tests.conftest import SAMPLES
from tests.servers import serving
from tests.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator


NOBODY = 65534


MIB = 2**20


PRECIOUS = b"somebody's work\n" * 40


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")


KEY = blob_key(scope="", uri="mem://bucket/set/o0", version="1")


FILES = [
    "format.json",
    "boot",
    "catalogue.db",
    "catalogue.db-wal",
    "catalogue.db-shm",
    "catalogue.db-journal",
    "catalogue.lock",
    "jobs.lock",
    "keys.lock",
    "readers.lock",
    f"fills/{KEY}.part",
    f"fills/{KEY}.map",
    f"blobs/{KEY}",
    f"unverified/{KEY}",
    f"trash/{KEY}-7",
    "limit",
]


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A file that no cache may touch."""
    path = tmp_path / "precious"
    path.write_bytes(PRECIOUS)
    before = path.stat()
    yield path
    after = path.stat()
    assert path.read_bytes() == PRECIOUS
    assert (after.st_mode, after.st_uid, after.st_mtime) == (
        before.st_mode,
        before.st_uid,
        before.st_mtime,
    )


def play(root: Path, *, mode: int = 0o700) -> tuple[list[str], bool]:
    """A job that fills and reads through a cache: its warnings, and whether the cache kept it."""
    store = MemoryStore({"o0": os.urandom(100_000)})
    segment = Segment(path="o0", size_bytes=100_000, version=None)
    source = BlobSource(key=KEY, uri=f"{store.url}/o0", segments=(segment,), size_bytes=100_000)
    cache = DiskCache(root, max_bytes=8 * MIB, mode=mode)
    with warnings.catch_warnings(record=True) as report:
        warnings.simplefilter("always")
        remote = Remote(Fetcher(store, policy=FetchPolicy()), cache, group="g", label="x")
        with contextlib.closing(remote):
            job = remote.join([KEY], [100_000])
            assert job is not None
            remote.fill(source)
            want = BlobSpans(blob=remote.open(source), starts=[5], ends=[90_000])
            (found,) = remote.load([want])
            assert found[0].tobytes() == store.objects["o0"][5:90_000]
            remote.object("o0", size_bytes=100_000, version="m")
            kept = remote.is_whole(source)
            remote.drop(source)
            remote.find("o0")
    cache.close()
    return [str(one.message) for one in report], kept


def filled(root: Path) -> Path:
    """A cache of this user's that has been used."""
    assert play(root) == ([], True)
    return root


def put(path: Path, target: Path, how: str) -> None:
    """Leave something of another user's in a file's place."""
    path.unlink(missing_ok=True)
    if how == "link":
        path.symlink_to(target)
    elif how == "dangling":
        path.symlink_to(target.with_name("made-by-the-cache"))
    elif how == "hard link":
        os.link(target, path)
    elif how == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"mine")
        os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in FILES for how in ("link", "theirs")),
        ("boot", "dangling"),
        (f"fills/{KEY}.part", "dangling"),
        *((name, how) for name in FILES[2:4] + FILES[10:13] for how in ("hard link", "pipe")),
    ],
)
def test_nothing_is_written_through_what_stands_in_a_files_place(
    tmp_path: Path, precious: Path, name: str, how: str
) -> None:
    if how == "theirs" and os.geteuid():
        pytest.skip("only root can make files of others")
    root = filled(tmp_path / "cache")
    put(root / name, precious, how)
    report, _ = play(root)
    assert len(report) <= 1, report
    for act in (admin.gc, admin.evict, admin.verify):
        with contextlib.suppress(OSError):
            act(root)
    assert not (tmp_path / "made-by-the-cache").exists()
    # A job behind that: either the folder is refused, or all is in order again.
    report, kept = play(root)
    assert kept or "can't be used" in report[0]


@pytest.mark.parametrize("name", ["blobs", "fills", "trash", "unverified"])
def test_a_link_in_a_folders_place_is_refused(tmp_path: Path, name: str) -> None:
    root = filled(tmp_path / "cache")
    other = tmp_path / "other"
    os.rename(root / name, other)
    names = {"blobs": KEY, "fills": f"{KEY}.part", "trash": f"{KEY}-7", "unverified": KEY}
    (other / names[name]).write_bytes(PRECIOUS)
    (root / name).symlink_to(other)
    report, kept = play(root)
    assert (len(report), kept) == (1, False)
    assert "wanted a folder of the cache" in report[0]
    for act in (admin.gc, admin.evict):
        with pytest.raises(StrangeFileError):
            act(root)
    assert (other / names[name]).read_bytes() == PRECIOUS


@as_root
def test_root_refuses_a_folder_of_another_user(tmp_path: Path, precious: Path) -> None:
    root = filled(tmp_path / "cache")
    put(root / "boot", precious, "link")
    os.chown(root, NOBODY, NOBODY)
    before = sorted(root.rglob("*"))
    report, kept = play(root)
    assert (len(report), kept) == (1, False)
    assert f"belongs to another user (uid {NOBODY})" in report[0]
    for act in (admin.stat, admin.gc, admin.evict, admin.list_blobs):
        with pytest.raises(PermissionError, match="another user"):
            act(root)
    assert sorted(root.rglob("*")) == before
    os.chown(root, 0, 0)
    os.chown(root / "blobs", NOBODY, NOBODY)
    report, kept = play(root)
    assert (len(report), kept) == (1, False)


@as_root
def test_links_of_others_on_the_way_are_refused(tmp_path: Path) -> None:
    """Ones of this user's own, and root's, are what people lay out their disks with."""
    (tmp_path / "disk").mkdir()
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for link in (mine, theirs):
        link.symlink_to("disk")
    os.chown(theirs, NOBODY, NOBODY, follow_symlinks=False)
    assert play(mine / "cache") == ([], True)
    report, kept = play(theirs / "cache2")
    assert (len(report), kept) == (1, False)
    assert f"theirs is a link of another user (uid {NOBODY})" in report[0]
    assert sorted(os.listdir(tmp_path / "disk")) == ["cache"]
    (tmp_path / "loop").symlink_to("loop")
    report, kept = play(tmp_path / "loop" / "cache")
    assert (len(report), kept) == (1, False)


def test_a_folder_that_is_swapped_while_it_is_open_is_not_followed(tmp_path: Path) -> None:
    root, other = tmp_path / "cache", tmp_path / "other"
    folder = CacheFolder(str(root), max_bytes=8 * MIB)
    other.mkdir()
    os.rename(root, tmp_path / "moved")
    root.symlink_to(other)
    segment = Segment(path="x", size_bytes=5, version=None)
    source = BlobSource(key=KEY, uri="mem://x", segments=(segment,), size_bytes=5)
    assert folder.put(source, memoryview(b"hello"), group="g", kept=False)
    begun = BlobSource(key="ab", uri="y", segments=(segment,), size_bytes=5)
    assert folder.begin(begun, group="g", pinned=True) is not None
    assert folder.space.drop(KEY)
    folder.reconcile()
    folder.close()
    assert os.listdir(other) == []


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_is_reported_once(tmp_path: Path, mode: int) -> None:
    root = filled(tmp_path / "cache")
    root.chmod(mode)
    report, kept = play(root)
    assert kept
    (text,) = report
    assert "other users may write" in text
    assert "chmod go-w" in text
    root.chmod(0o700)
    (root / "blobs").chmod(mode)
    assert len(play(root)[0]) == 1


def test_a_group_that_was_asked_for_shares_a_cache(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    assert play(root, mode=0o770) == ([], True)
    for path in (root, *root.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o770 if path.is_dir() else 0o660), path
    assert play(root, mode=0o770) == ([], True)
    assert len(play(root)[0]) == 1  # the others are warned


@as_root
def test_in_a_shared_cache_files_of_the_group_are_as_good(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    assert play(root, mode=0o770) == ([], True)
    for path in (root, *root.rglob("*")):
        os.chown(path, NOBODY, os.getegid())
    assert play(root, mode=0o770) == ([], True)
    assert play(root) != ([], True)
    for path in (root, *root.rglob("*")):
        os.chown(path, NOBODY, NOBODY)  # of a group that this user isn't in
    report, kept = play(root, mode=0o770)
    assert (len(report), kept) == (1, False)


# -- what else is written into a cache folder


def test_temporary_files_of_indexes_are_not_written_through(tmp_path: Path, precious: Path) -> None:
    place = os.fsencode(tmp_path / "manifest")
    for how in ("link", "hard link"):
        put(Path(os.fsdecode(temp_name(place))), precious, how)
        write_bytes(place, b"new")
        assert Path(os.fsdecode(place)).read_bytes() == b"new"


def test_an_index_is_not_kept_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for cache in (DiskCache(tmp_path / "one", max_bytes=8 * MIB), str(tmp_path / "two")):
        root = Path(cache.path if isinstance(cache, DiskCache) else cache)
        root.mkdir(mode=0o700)
        (root / "indexes").symlink_to(tmp_path / "other")
        scratch: Any = Scratch(cache)
        with pytest.warns(PenstockWarning, match="indexes"):
            place = os.fsdecode(scratch.index_folder("ab"))
        assert not place.startswith(str(tmp_path))
        scratch.close()
        (root / "indexes").unlink()
        (root / "indexes").mkdir()
        (root / "indexes" / "ab").symlink_to(tmp_path / "other")
        scratch = Scratch(str(root))
        with pytest.warns(PenstockWarning, match="ab: it is a link"):
            place = os.fsdecode(scratch.index_folder("ab"))
        assert not place.startswith(str(tmp_path))
        scratch.close()


def test_the_list_of_bad_samples_is_not_written_through_a_link(
    tmp_path: Path, precious: Path
) -> None:
    root = tmp_path / "cache"
    first = QuarantineFile(str(root), name="x")
    first.append([{"id": 1}])
    assert Path(first.path).parent.parent == root
    put(Path(first.path), precious, "link")
    second = QuarantineFile(str(root), name="x")
    second.append([{"id": 2}])
    assert Path(second.path).parent.parent != root
    shutil.rmtree(Path(second.path).parent)


def test_what_is_made_is_private(tmp_path: Path) -> None:
    root = filled(tmp_path / "new" / "cache")
    for path in (root.parent, root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_folders_hand_out_nothing_strange(tmp_path: Path, precious: Path) -> None:
    folder = Folder.at(str(tmp_path / "a" / "b"), make=True)
    for how in ("link", "pipe"):
        put(tmp_path / "a" / "b" / "file", precious, how)
        for flags in (os.O_RDONLY, os.O_RDWR):
            with pytest.raises(StrangeFileError, match="file"):
                folder.open("file", flags)
        with pytest.raises(StrangeFileError):
            folder.open_or_create("file")
        with pytest.raises(FileExistsError):
            folder.create("file")
        assert not folder.has("file")
    folder.write_whole("file", b"text")
    assert folder.read("file") == b"text"
    assert folder.remove("file")
    assert not folder.remove("file")


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
    with pytest.warns(
        PenstockWarning, match=r"\(catalogue.lock: Permission denied\).*permission to"
    ):
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
    monkeypatch.setattr("penstock.cache.disk.disk_cache.RETRY_S", 0.0)
    with one_warning(), remote_of(store, tmp_path / "cache") as one:
        with monkeypatch.context() as patched:
            refuse_writes(patched)
            assert one.fill(held) == 0
            assert one.fill(other) == -1
        assert one.fill(other) == 100_000
        assert one.fill(held) == 0
