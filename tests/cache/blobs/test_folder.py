"""Test a cache's folder (limit, format, catalogue, disk), and the cache that a dataset uses."""

from __future__ import annotations

import json
import os
import random
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ClosedError, ConfigError, ForkedError, PenstockWarning, StalledError
from penstock.cache.base import BlobSpans, file_system
from penstock.cache.blobs import CachedBlob, DatasetCache
from penstock.cache.disk import SLACK_BYTES, CacheFolder, DiskCache, JobRow, admin, fair_shares
from tests.cache.blobs.remotes import MIB, SIZES, cache_of, content, job_of, many, single

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


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:25 / /data rw shared:2 - nfs4 server:/x rw
31 30 0:26 / /data/my\\040disk rw - xfs /dev/sdb rw
32 22 0:27 / /data/over rw - ext4 /dev/sdc rw
33 22 0:28 / /data/over rw - tmpfs none rw
not a line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/me", "ext4"),
        ("/data", "nfs4"),
        ("/data/x/y", "nfs4"),
        ("/database", "ext4"),
        ("/data/my disk/x", "xfs"),
        ("/data/over", "tmpfs"),
    ],
)
def test_the_file_system_is_that_of_the_longest_mount(
    path: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    monkeypatch.setattr("penstock.cache.base.folders._MOUNTS", str(tmp_path / "mounts"))
    assert file_system(path) == kind


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_system("/proc") == "proc"
    monkeypatch.setattr("penstock.cache.base.folders.file_system", lambda _: "nfs4")
    with pytest.raises(ConfigError, match=r"network file system \(nfs4\)"):
        DiskCache(tmp_path, max_bytes="2MB").open()


def test_a_damaged_catalogue_is_rebuilt(store: MemoryStore, remotes: Callable[..., Remote]) -> None:
    remote = remotes(store)
    remote.fill(single(store, 0))
    remote.close()
    cache_of(remote).close()
    catalogue = Path(cache_of(remote).path) / "catalogue.db"
    catalogue.write_bytes(b"not a database at all" * 300)
    again = remotes(store)
    with pytest.warns(PenstockWarning, match=r"damaged \(catalogue.db .*rebuilt") as report:
        assert again.is_whole(single(store, 0))
    assert len(report) == 1
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
    assert admin.gc(path)[1] > 0  # the abandoned fill
    assert admin.list_blobs(path)[0].state == "ready"
    assert os.listdir(path / "fills") == []


def test_trouble_with_the_disk_is_one_warning(
    store: MemoryStore, remotes: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = remotes(store)

    def full(_fd: int, _start: int, _length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.warns(PenstockWarning, match=r"can't be used \(No space left.*doctor") as report:
        blobs = [remote.open(single(store, i)) for i in range(3)]
    assert len(report) == 1
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


def test_a_forked_child_is_refused(
    store: MemoryStore, remotes: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, pid = remotes(store), os.getpid()
    cache_of(remote).open()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: pid + 1)  # as in a child
        with pytest.raises(ForkedError, match="forkserver"):
            remote.open(single(store, 0))


def test_temporary_caches_go() -> None:
    cache = DiskCache.temporary()
    cache.open()
    assert os.path.isdir(cache.path)
    assert cache.is_temporary
    cache.close()
    assert not os.path.exists(cache.path)
    cache.close()


def test_without_a_cache_nothing_is_done_and_no_error_is_the_disks(store: MemoryStore) -> None:
    cache = DatasetCache(None, group="g", label="mem://set")
    assert cache.use(lambda _: 1) is None
    assert cache.look(lambda _: 1) is None
    assert not cache.remove(single(store, 0))
    with pytest.raises(OSError, match="full"):
        cache.give_up(OSError("full"))
    assert cache.join(["0" * 40], [5]) is None
    assert not cache.keeps("0" * 40)


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
    memberships = DatasetCache(disk, group="g", label="mem://set")
    keys = [f"{i:040x}" for i in range(4)]
    assert memberships.keeps(keys[3])  # no needs are known
    one = memberships.join(keys[:2], [5, 5])
    two = memberships.join(keys[1:3], [5, 5])
    assert [memberships.keeps(key) for key in keys] == [True, True, True, False]
    assert len(memberships.jobs) == 2
    assert one is not None
    assert two is not None
    for _ in range(2):
        memberships.leave(one)
    assert [memberships.keeps(key) for key in keys] == [False, True, True, False]
    memberships.close()
    assert len(memberships.jobs) == 0
    disk.close()


def test_small_objects_without_a_cache_are_in_a_private_folder_that_goes(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    remote, sizes = remotes(store, max_bytes=None), {"size_bytes": SIZES[4], "version": "1"}
    remote.drop_object("o4", **sizes)  # of no folder yet
    path = remote.object("o4", **sizes)
    assert remote.object("o4", **sizes) == path
    assert len(store.reads) == 1
    assert Path(os.fsdecode(path)).read_bytes() == store.objects["o4"]
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
    remote.drop_object("o4", **sizes)
    assert not os.path.exists(path)
    remote.close()
    remote.close()
    assert not os.path.exists(os.path.dirname(path))


@given(wants=st.lists(st.integers(0, 1000), min_size=1, max_size=6), budget=st.integers(0, 3000))
def test_shares_are_fair(wants: list[int], budget: int) -> None:
    jobs = [
        JobRow(id=i, group="g", reads=f"g{i}", wanted_bytes=want, share_bytes=0, below="", pid=1)
        for i, want in enumerate(wants)
    ]
    shares = fair_shares(jobs, budget)
    assert sum(shares.values()) <= budget
    for i, want in enumerate(wants):
        assert shares[f"g{i}"] <= want
    if sum(wants) <= budget:
        assert [shares[f"g{i}"] for i in range(len(wants))] == wants
    else:
        short = [shares[f"g{i}"] for i, want in enumerate(wants) if shares[f"g{i}"] < want]
        assert max(short) - min(short) <= len(wants)


def test_half_a_dataset_is_pinned_and_stays(remotes: Callable[..., Remote]) -> None:
    store = many(64, 100_000)
    sources = [single(store, i) for i in range(64)]
    keys, sizes = [s.key for s in sources], [s.size_bytes for s in sources]
    remote = remotes(store, max_bytes=SLACK_BYTES + 40_000 + 33 * 102_400)
    membership = job_of(remote, keys, sizes)
    pinned = {key for key in keys if membership.pins(key)}
    assert 25 <= len(pinned) <= 33
    assert pinned == set(sorted(keys)[: len(pinned)])
    rng = random.Random(3)
    for epoch in range(3):
        before = store.bytes_read
        for source in rng.sample(sources, 64):
            blob = remote.open(source)
            assert blob.is_cached == (source.key in pinned)
            remote.load([BlobSpans(blob=blob, starts=[0], ends=[100_000])])
            del blob
        passed = 64 if epoch == 0 else 64 - len(pinned)
        assert store.bytes_read - before == passed * 100_000
    assert membership.pinned_bytes == len(pinned) * 102_400


def test_two_jobs_share_and_a_dead_ones_part_is_free(remotes: Callable[..., Remote]) -> None:
    first, second = many(40, 100_000), many(41, 90_000)
    limit = SLACK_BYTES + 60_000 + 40 * 102_400
    one = remotes(first, max_bytes=limit, group="one")
    sources = [single(first, i) for i in range(40)]
    mine = job_of(one, [s.key for s in sources], [s.size_bytes for s in sources])
    alone = mine.pinned_bytes
    for source in sources:
        one.fill(source)
    second.url = "mem://other"
    two = remotes(second, max_bytes=limit, group="two")
    others = [single(second, i) for i in range(41)]
    theirs = job_of(two, [s.key for s in others], [s.size_bytes for s in others])
    assert theirs.pinned_bytes > 0
    assert mine.refresh()
    assert mine.pinned_bytes < 0.6 * alone
    fills = [two.fill(source) for source in others]
    assert fills.count(-1) < len(fills)
    assert admin.stat(cache_of(one).path).used_bytes <= limit
    theirs.leave()
    assert mine.refresh()
    assert mine.pinned_bytes == alone


def test_what_a_job_has_mapped_beyond_its_share_makes_room_once_it_is_let_go(
    remotes: Callable[..., Remote],
) -> None:
    first, second = many(40, 100_000), many(41, 90_000)
    limit = SLACK_BYTES + 60_000 + 40 * 102_400
    one = remotes(first, max_bytes=limit, group="one")
    sources = [single(first, i) for i in range(40)]
    mine = job_of(one, [s.key for s in sources], [s.size_bytes for s in sources])
    for source in sources:
        one.fill(source)
    held = {s.key: one.open(s) for s in sources if one.is_whole(s)}
    second.url = "mem://other"
    two = remotes(second, max_bytes=limit, group="two")
    others = [single(second, i) for i in range(41)]
    theirs = job_of(two, [s.key for s in others], [s.size_bytes for s in others])
    wanted = [s for s in others if theirs.pins(s.key)]
    assert len(wanted) > 15
    assert {two.fill(source) for source in wanted} <= {-1, 90_000}
    # The first job's reads go on, from maps that have no name any more, in both ways.
    assert mine.refresh()
    for source in sources:
        for mode in ("mmap", "pread"):
            if source.key in held:
                want = BlobSpans(blob=held[source.key], starts=[7], ends=[50_000])
                (found,) = one.load([want], mode=mode)  # type: ignore[arg-type]
                assert found[0].tobytes() == content(first, source)[7:50_000]
    for key, blob in held.items():
        assert isinstance(blob, CachedBlob)
        assert blob.has_name or not mine.pins(key)
    assert admin.stat(cache_of(one).path).used_bytes <= limit
    again = {s.key: one.open(s) for s in sources}  # what was taken isn't found, so isn't mapped
    assert sum(blob.is_cached for blob in again.values()) < len(held)
    del held, again, blob, want, found
    assert all(two.fill(source) >= 0 for source in wanted)
    assert sum(map(two.is_whole, wanted)) == len(wanted)
    kept = [s for s in sources if mine.pins(s.key)]
    assert all(map(one.is_whole, kept))
    assert admin.stat(cache_of(one).path).used_bytes <= limit


def test_a_job_enters_books_that_were_rebuilt(remotes: Callable[..., Remote]) -> None:
    store = many(4, 100_000)
    remote = remotes(store)
    sources = [single(store, i) for i in range(4)]
    job = job_of(remote, [s.key for s in sources], [s.size_bytes for s in sources])
    with sqlite3.connect(f"{cache_of(remote).path}/catalogue.db") as books:
        books.execute("DELETE FROM members")
    books.close()
    assert admin.stat(cache_of(remote).path).jobs == ()
    assert not job.refresh()
    assert len(admin.stat(cache_of(remote).path).jobs) == 1
    assert job.pinned_bytes == 4 * 102_400


def test_what_is_mapped_is_never_evicted_and_counts(remotes: Callable[..., Remote]) -> None:
    store = many(30, 100_000)
    limit = SLACK_BYTES + 40_000 + 10 * 104_000
    remote = remotes(store, max_bytes=limit)
    held = []
    for number in range(30):
        blob = remote.open(single(store, number))
        remote.load([BlobSpans(blob=blob, starts=[0], ends=[100_000])])
        held.append(blob)
        assert admin.stat(cache_of(remote).path).used_bytes <= limit - SLACK_BYTES
    cached = [blob for blob in held if isinstance(blob, CachedBlob)]
    assert 5 <= len(cached) <= 10
    for blob in cached:
        assert blob.has_name
    assert admin.evict(cache_of(remote).path)[0] == 0
    del held, cached, blob
    assert admin.evict(cache_of(remote).path)[0] >= 5
    assert admin.stat(cache_of(remote).path).blobs == 0


def test_least_recently_used_goes_first(remotes: Callable[..., Remote]) -> None:
    store = many(12, 100_000)
    remote = remotes(store, max_bytes=SLACK_BYTES + 40_000 + 8 * 104_000)
    for number in (*range(6), 0, 1):
        blob = remote.open(single(store, number))
        remote.load([BlobSpans(blob=blob, starts=[0], ends=[100_000])])
        del blob
    for number in range(6, 9):
        remote.fill(single(store, number))
    there = [n for n in range(12) if remote.is_whole(single(store, n))]
    assert {0, 1, 6, 7, 8} <= set(there)


def test_a_lower_limit_evicts(remotes: Callable[..., Remote]) -> None:
    store = many(20, 100_000)
    remote = remotes(store, max_bytes=4 * MIB)
    for number in range(20):
        remote.fill(single(store, number))
    remote.close()
    cache_of(remote).close()
    small = DiskCache(cache_of(remote).path, max_bytes=SLACK_BYTES + MIB)
    small.open()
    assert admin.stat(small.path).used_bytes <= MIB
    small.close()


def test_evicting_by_dataset(store: MemoryStore, remotes: Callable[..., Remote]) -> None:
    remote = remotes(store)
    remote.leave(job_of(remote, [], []))
    remote.fill(single(store, 0))
    remote.fill(single(store, 4))
    with pytest.raises(ConfigError, match=r"no dataset 'x'.*mem://set"):
        admin.evict(cache_of(remote).path, label="x")
    blobs, size, _ = admin.evict(cache_of(remote).path, to_bytes=SIZES[0] + 4096, label="mem://set")
    assert (blobs, size) == (1, 303_104)
    assert admin.evict(cache_of(remote).path, to_bytes=0) == (1, 200_704, 0)
