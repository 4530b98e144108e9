"""What is pinned, what is evicted, and that the limit holds."""

from __future__ import annotations

import os
import random
import sqlite3
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError
from penstock.cache.base import BlobSpans
from penstock.cache.blobs import CachedBlob
from penstock.cache.disk import SLACK_BYTES, DiskCache, JobRow, admin, fair_shares
from tests.cache.blobs.remotes import MIB, SIZES, cache_of, content, job_of, many, single

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.blobs import Remote
    from tests.stores import MemoryStore


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
    blobs, size = admin.evict(cache_of(remote).path, to_bytes=SIZES[0] + 4096, label="mem://set")
    assert (blobs, size) == (1, 303_104)
    assert admin.evict(cache_of(remote).path, to_bytes=0) == (1, 200_704)
