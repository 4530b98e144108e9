"""Blobs through the cache: the right bytes, each once, within the limit, whatever happens."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.base.blob import BlobSource, BlobSpans, Segment, blob_key
from penstock.cache.base.fetch_policy import FetchPolicy
from penstock.cache.base.store import RequestError
from penstock.cache.blobs.cached_blob import CachedBlob
from penstock.cache.blobs.remote import Remote
from penstock.cache.disk import admin
from penstock.cache.disk.disk_cache import DiskCache
from penstock.cache.disk.job_table import JobRow
from penstock.cache.disk.layout import file_system
from penstock.cache.disk.room import SLACK_BYTES
from penstock.cache.disk.shares import fair_shares
from penstock.cache.disk.shelf import Shelf
from penstock.cache.errors import ConfigError, FetchError, ObjectChangedError, PenstockWarning
from penstock.cache.fetch.fetcher import Fetcher
from tests.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.cache.disk.membership import Membership

SIZES = [300_000, 4096, 1, 65_537, 200_000, 123_456]
MIB = 2**20


@pytest.fixture
def store() -> MemoryStore:
    rng = np.random.default_rng(7)
    return MemoryStore({f"o{i}": rng.bytes(size) for i, size in enumerate(SIZES)})


@pytest.fixture
def remotes(tmp_path: Path) -> Iterator[Callable[..., Remote]]:
    made: list[Remote] = []

    def make(store: MemoryStore, *, max_bytes: int | None = 8 * MIB, group: str = "g") -> Remote:
        cache = DiskCache(tmp_path / "cache", max_bytes=max_bytes) if max_bytes else None
        policy = FetchPolicy(retry_timeout_s=5.0, range_bytes=65_536)
        made.append(Remote(Fetcher(store, policy=policy), cache, group=group, label="mem://set"))
        return made[-1]

    yield make
    for remote in made:
        remote.close()
        if remote.cache is not None:
            remote.cache.close()


def cache_of(remote: Remote) -> DiskCache:
    assert remote.cache is not None
    return remote.cache


def job_of(remote: Remote, keys: list[str], sizes: list[int]) -> Membership:
    job = remote.join(keys, sizes)
    assert job is not None
    return job


def single(store: MemoryStore, number: int, *, version: str | None = None) -> BlobSource:
    path = f"o{number}"
    segment = Segment(path=path, size_bytes=len(store.objects[path]), version=version)
    uri = f"{store.url}/{path}"
    key = blob_key(scope=store.scope, uri=uri, version="1")
    return BlobSource(key=key, uri=uri, segments=(segment,), size_bytes=segment.size_bytes)


def joined(store: MemoryStore) -> BlobSource:
    segments = tuple(
        Segment(path=path, size_bytes=len(data), version=store.version(path))
        for path, data in store.objects.items()
    )
    key = blob_key(scope=store.scope, uri="all", version="1")
    return BlobSource(
        key=key, uri="mem://all", segments=segments, size_bytes=sum(p.size_bytes for p in segments)
    )


def content(store: MemoryStore, source: BlobSource) -> bytes:
    return b"".join(store.objects[segment.path] for segment in source.segments)


@pytest.mark.parametrize("mode", ["mmap", "pread"])
@pytest.mark.parametrize("max_bytes", [8 * MIB, None])
def test_any_spans_of_any_blobs(
    store: MemoryStore, remotes: Callable[..., Remote], mode: str, max_bytes: int | None
) -> None:
    remote = remotes(store, max_bytes=max_bytes)
    sources = [*(single(store, i) for i in range(len(SIZES))), joined(store)]
    blobs = [remote.open(source) for source in sources]
    assert all(blob.is_cached == (max_bytes is not None) for blob in blobs)
    rng = random.Random(1)
    for _ in range(12):
        wanted = []
        for blob in rng.sample(blobs, 4):
            size = blob.source.size_bytes
            cuts = [sorted((rng.randrange(size), rng.randint(1, size))) for _ in range(5)]
            wanted.append(
                BlobSpans(blob=blob, starts=[a for a, _ in cuts], ends=[b for _, b in cuts])
            )
        for want, found in zip(wanted, remote.load(wanted, mode=mode), strict=True):
            whole = content(store, want.blob.source)
            for start, end, sample in zip(want.starts, want.ends, found, strict=True):
                assert sample.tobytes() == whole[start:end]
                assert not sample.flags.writeable or not len(sample)
    traffic = remote.traffic()
    if max_bytes is not None:
        assert store.bytes_read <= 2 * sum(SIZES)
        assert traffic.bytes_passed == 0
        assert traffic.bytes_filled == store.bytes_read
    else:
        assert traffic.bytes_filled == traffic.bytes_disk == traffic.hits == 0
    assert traffic.bytes_remote == store.bytes_read


def test_each_byte_once_then_none(store: MemoryStore, remotes: Callable[..., Remote]) -> None:
    remote = remotes(store)
    sources = [single(store, i) for i in range(len(SIZES))]
    blobs = [remote.open(source) for source in sources]
    remote.load([BlobSpans(blob=blobs[0], starts=[1000, 150_000], ends=[9000, 150_010])])
    progress: list[int] = []
    fetched = [remote.fill(source, progress=progress.append) for source in sources]
    assert sum(progress) == sum(fetched)
    assert store.bytes_read <= sum(SIZES) * 1.01
    assert all(remote.is_whole(source) for source in sources)
    assert all(blob.is_whole for blob in blobs)
    second = remotes(store, group="another job")
    before = len(store.reads)
    for number, source in enumerate(sources):
        (found,) = second.load(
            [BlobSpans(blob=second.open(source), starts=[0], ends=[SIZES[number]])]
        )
        assert found[0].tobytes() == store.objects[f"o{number}"]
    assert len(store.reads) == before
    assert second.traffic().hit_ratio == 1.0
    assert second.fill(sources[0]) == 0


def test_many_at_once_fetch_each_byte_once(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    everyone = [remotes(store) for _ in range(6)]
    sources = [single(store, 0), single(store, 4), joined(store)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        remote, rng = everyone[number], random.Random(number)
        try:
            for source in rng.sample(sources, 3):
                blob = remote.open(source)
                start = rng.randrange(source.size_bytes)
                end = min(start + 9000, source.size_bytes)
                (found,) = remote.load([BlobSpans(blob=blob, starts=[start], ends=[end])])
                assert found[0].tobytes() == content(store, source)[start:end]
                remote.fill(source)
                assert blob.is_whole
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    if failures:
        raise failures[0]
    wanted = sum(source.size_bytes for source in sources)
    assert store.bytes_read <= 1.02 * wanted
    assert os.listdir(cache_of(everyone[0]).path + "/fills") == []


def test_samples_of_parts_that_pass(store: MemoryStore, remotes: Callable[..., Remote]) -> None:
    remote = remotes(store, max_bytes=None)
    source = joined(store)
    blob = remote.open(source)
    at = SIZES[0] - 10  # over four objects
    (found,) = remote.load([BlobSpans(blob=blob, starts=[at], ends=[at + 20_000])])
    assert found[0].tobytes() == content(store, source)[at : at + 20_000]
    buffer = memoryview(blob.buffer([(at, at + 5000)]))
    assert bytes(buffer[at : at + 5000]) == content(store, source)[at : at + 5000]
    assert len(buffer) == source.size_bytes


@pytest.mark.parametrize("cached", [True, False])
def test_an_object_that_changes_is_never_mixed(
    store: MemoryStore, remotes: Callable[..., Remote], cached: bool
) -> None:
    remote = remotes(store, max_bytes=8 * MIB if cached else None)
    source = single(store, 0)
    blob = remote.open(source)
    remote.load([BlobSpans(blob=blob, starts=[0], ends=[5000])])
    store.objects["o0"] = bytes(SIZES[0])
    with pytest.raises(ObjectChangedError, match="mem://bucket/set/o0"):
        remote.load([BlobSpans(blob=blob, starts=[100_000], ends=[105_000])])
    fresh = remote.open(source)
    (found,) = remote.load([BlobSpans(blob=fresh, starts=[0, 100_000], ends=[5000, 105_000])])
    assert found[0].tobytes() == bytes(5000) == found[1].tobytes()


def test_another_size_than_indexed_is_told(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    source = single(store, 0)
    store.objects["o0"] += b"more"
    for remote in (remotes(store), remotes(store, max_bytes=None)):
        with pytest.raises(FetchError, match="mem://bucket/set/o0"):
            remote.load([BlobSpans(blob=remote.open(source), starts=[0], ends=[10])])


def test_a_remote_that_fails_says_which_object(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    def fail(_path: str, _span: object) -> None:
        raise RequestError("denied", "403")

    store.before = fail
    remote = remotes(store)
    with pytest.raises(FetchError, match="mem://bucket/set/o1"):
        remote.load([BlobSpans(blob=remote.open(single(store, 1)), starts=[0], ends=[10])])
    with pytest.raises(FetchError, match="mem://bucket/set/o0"):
        remote.fill(single(store, 0))
    store.before = lambda _path, _span: None
    assert remote.fill(single(store, 0)) == SIZES[0]


def test_dropping_fetches_again(store: MemoryStore, remotes: Callable[..., Remote]) -> None:
    remote = remotes(store)
    source = single(store, 0)
    remote.fill(source)
    blob = remote.open(source)
    path = Path(os.fsdecode(blob.path))
    damaged = bytearray(path.read_bytes())
    damaged[77] ^= 1
    path.write_bytes(damaged)
    old = remote.load([BlobSpans(blob=blob, starts=[0], ends=[100])])[0][0]
    assert old.tobytes() != store.objects["o0"][:100]
    assert isinstance(blob, CachedBlob)
    remote.drop(source, inode=blob.inode)
    remote.drop(source, inode=blob.inode)  # another thread saw the same
    again = remote.open(source)
    (found,) = remote.load([BlobSpans(blob=again, starts=[0], ends=[100])])
    assert found[0].tobytes() == store.objects["o0"][:100]
    assert remote.traffic().refetched == 1
    summary = admin.stat(cache_of(remote).path)
    assert summary.trash == 1  # still mapped, so it counts
    del blob, old
    admin.gc(cache_of(remote).path)
    assert admin.stat(cache_of(remote).path).trash == 0


def test_a_cut_file_is_dropped_at_opening(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    remote = remotes(store)
    source = single(store, 4)
    remote.fill(source)
    os.truncate(os.path.join(cache_of(remote).path, "blobs", source.key), 5000)
    blob = remote.open(source)
    (found,) = remote.load([BlobSpans(blob=blob, starts=[0], ends=[SIZES[4]])])
    assert found[0].tobytes() == store.objects["o4"]


def test_pread_tells_of_a_file_that_was_cut_under_it(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    remote = remotes(store)
    source = single(store, 4)
    remote.fill(source)
    blob = remote.open(source)
    os.truncate(os.path.join(cache_of(remote).path, "blobs", source.key), 5000)
    with pytest.raises(EOFError):
        remote.load([BlobSpans(blob=blob, starts=[4000], ends=[6000])], mode="pread")


# -- pins and limits


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


def many(count: int, size: int) -> MemoryStore:
    rng = np.random.default_rng(count)
    return MemoryStore({f"o{i}": rng.bytes(size) for i in range(count)})


def test_half_a_dataset_is_pinned_and_stays(remotes: Callable[..., Remote]) -> None:
    store = many(64, 100_000)
    sources = [single(store, i) for i in range(64)]
    keys, sizes = [s.key for s in sources], [s.size_bytes for s in sources]
    remote = remotes(store, max_bytes=SLACK_BYTES + 40_000 + 33 * 102_400)
    membership = job_of(remote, keys, sizes)
    pinned = {key for key in keys if membership.pinned(key)}
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
    wanted = [s for s in others if theirs.pinned(s.key)]
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
        assert blob.has_name or not mine.pinned(key)
    assert admin.stat(cache_of(one).path).used_bytes <= limit
    again = {s.key: one.open(s) for s in sources}  # what was taken isn't found, so isn't mapped
    assert sum(blob.is_cached for blob in again.values()) < len(held)
    del held, again, blob, want, found
    assert all(two.fill(source) >= 0 for source in wanted)
    assert sum(map(two.is_whole, wanted)) == len(wanted)
    kept = [s for s in sources if mine.pinned(s.key)]
    assert all(map(one.is_whole, kept))
    assert admin.stat(cache_of(one).path).used_bytes <= limit


def test_a_job_enters_books_that_were_made_anew(remotes: Callable[..., Remote]) -> None:
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
    assert job.fits


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
    cached = [blob for blob in held if blob.is_cached]
    assert 5 <= len(cached) <= 10
    for blob in cached:
        assert os.path.exists(os.fsdecode(blob.path))
    assert admin.clear(cache_of(remote).path)[0] == 0
    del held, cached, blob
    assert admin.clear(cache_of(remote).path)[0] >= 5
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


# -- the folder


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
    monkeypatch.setattr("penstock.cache.disk.layout.file_system", lambda _: "nfs4")
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
    with pytest.warns(PenstockWarning, match=r"damaged \(catalogue.db .*made anew") as told:
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
    shelf = Shelf(str(path), max_bytes=None)
    with sqlite3.connect(path / "catalogue.db") as books:
        books.execute("DELETE FROM blobs WHERE key = ?", (single(store, 4).key,))
    books.close()
    shelf.reconcile()
    shelf.close()
    records = {one.key: one.state for one in admin.list_blobs(path)}
    assert records == {single(store, 4).key: "ready", single(store, 5).key: "fill"}
    assert os.listdir(path / "trash") == []
    assert admin.gc(path)[1] > 0  # the fill that nobody works on
    assert admin.list_blobs(path)[0].state == "ready"
    assert os.listdir(path / "fills") == []


def test_after_a_reboot_blobs_are_verified_at_first_use(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    remote = remotes(store)
    for number in (0, 4):
        remote.fill(single(store, number))
    blob = remote.open(single(store, 5))
    remote.load([BlobSpans(blob=blob, starts=[0], ends=[10])])
    del blob
    path = Path(cache_of(remote).path)
    remote.close()
    cache_of(remote).close()
    (path / "boot").write_text("another boot")
    torn = path / "blobs" / single(store, 4).key
    torn.write_bytes(bytes(SIZES[4]))  # what a power cut leaves
    again = remotes(store)
    before = store.bytes_read
    for number in (0, 4, 5):
        size = SIZES[number]
        (found,) = again.load(
            [BlobSpans(blob=again.open(single(store, number)), starts=[0], ends=[size])]
        )
        assert found[0].tobytes() == store.objects[f"o{number}"]
    assert store.bytes_read - before == SIZES[4] + SIZES[5]


def test_small_objects_are_fetched_once_a_node(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    one, two = remotes(store), remotes(store)
    for remote in (one, two, one):
        path = remote.object("o1", size_bytes=4096, version="v")
        assert Path(os.fsdecode(path)).read_bytes() == store.objects["o1"]
    assert len(store.reads) == 1
    assert two.object("o1", size_bytes=None, version="v") == path
    one.drop_object("o1", size_bytes=4096, version="v")
    two.object("o1", size_bytes=4096, version="v")
    assert len(store.reads) == 2
    bare = remotes(store, max_bytes=None)
    own = bare.object("o1", size_bytes=None, version="v")
    assert Path(os.fsdecode(own)).read_bytes() == store.objects["o1"]
    bare.close()
    assert not os.path.exists(own)


def test_what_the_remote_said_is_remembered(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    remote = remotes(store)
    found = remote.find("o0")
    assert remote.find("nothing") is None

    def gone(_path: str, _span: object) -> None:
        raise RequestError("refused", "no route")

    store.before = gone
    with pytest.warns(PenstockWarning, match="the remote can't be asked"):
        assert remote.find("o0") == found
    assert remote.find("nothing") is None  # one warning
    with pytest.raises(FetchError):
        remote.find("o1")


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


def test_verify_finds_a_flipped_bit(store: MemoryStore, remotes: Callable[..., Remote]) -> None:
    remote = remotes(store)
    for number in (0, 4):
        remote.fill(single(store, number))
    path = Path(cache_of(remote).path)
    file = path / "blobs" / single(store, 4).key
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    seen: list[tuple[int, int]] = []
    verdict = admin.verify(path, progress=lambda done, of: seen.append((done, of)))
    assert verdict.checked == 2
    assert [one.key for one in verdict.bad] == [single(store, 4).key]
    assert seen[-1] == (SIZES[0] + SIZES[4],) * 2
    assert not remote.is_whole(single(store, 4))
    assert admin.verify(path).bad == ()


def test_evicting_by_dataset(store: MemoryStore, remotes: Callable[..., Remote]) -> None:
    remote = remotes(store)
    remote.leave(job_of(remote, [], []))
    remote.fill(single(store, 0))
    remote.fill(single(store, 4))
    with pytest.raises(ConfigError, match=r"no dataset 'x'.*mem://set"):
        admin.evict(cache_of(remote).path, label="x")
    blobs, size = admin.evict(cache_of(remote).path, to_bytes=SIZES[0] + 4096, label="mem://set")
    assert (blobs, size) == (1, 303_104)
    assert admin.evict(cache_of(remote).path, to_bytes=0) == (1, 200_704)


def test_temporary_caches_go() -> None:
    cache = DiskCache.temporary()
    cache.open()
    assert os.path.isdir(cache.path)
    assert cache.is_temporary
    cache.close()
    assert not os.path.exists(cache.path)
    cache.close()
