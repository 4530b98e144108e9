"""Test reads through the cache: the right bytes, each fetched once, also after damage and of small
objects.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.cache import FetchError, ObjectChangedError, PenstockWarning
from penstock.cache.base import BlobSpans, RequestError
from penstock.cache.blobs import CachedBlob
from penstock.cache.disk import FolderLayout, admin
from tests.cache.blobs.remotes import MIB, SIZES, cache_of, content, joined, of_ranges, single

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.blobs import Remote
    from tests.stores import MemoryStore


@pytest.mark.parametrize("mode", ["mmap", "pread"])
@pytest.mark.parametrize("max_bytes", [8 * MIB, None])
def test_any_spans_of_any_blobs(
    store: MemoryStore, remotes: Callable[..., Remote], mode: str, max_bytes: int | None
) -> None:
    remote = remotes(store, max_bytes=max_bytes)
    sources = [*(single(store, i) for i in range(len(SIZES))), joined(store)]
    # In a row, not in a row, empty, and of several objects.
    parts = [(0, 7, 5000), (0, 5000, 5001), (0, 9000, 90_000), (1, 5, 5), (0, 0, 7), (4, 3, 99_999)]
    sources += [of_ranges(store, *parts), of_ranges(store, (0, 100, 70_000))]
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
        assert store.bytes_read <= sum(source.size_bytes for source in sources)
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


def test_samples_of_segments_that_pass(store: MemoryStore, remotes: Callable[..., Remote]) -> None:
    remote = remotes(store, max_bytes=None)
    source = joined(store)
    blob = remote.open(source)
    at = SIZES[0] - 10  # over four objects
    (found,) = remote.load([BlobSpans(blob=blob, starts=[at], ends=[at + 20_000])])
    assert found[0].tobytes() == content(store, source)[at : at + 20_000]
    buffer = memoryview(blob.buffer([(at, at + 5000)]))
    assert bytes(buffer[at : at + 5000]) == content(store, source)[at : at + 5000]
    assert len(buffer) == source.size_bytes


def test_ranges_in_a_row_are_one_request_and_a_part_needs_no_more_than_itself(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    remote = remotes(store)
    rows = [(0, at, at + 1000) for at in range(50_000, 60_000, 1000)]
    source = of_ranges(store, *rows, (4, 8, 150_008))
    blob = remote.open(source)
    (found,) = remote.load([BlobSpans(blob=blob, starts=[0, 3000], ends=[2000, 10_000])])
    assert sorted(store.reads) == [("o0", 50_000, 52_000), ("o0", 53_000, 60_000)]
    assert found[0].tobytes() + found[1].tobytes() == (
        store.objects["o0"][50_000:52_000] + store.objects["o0"][53_000:60_000]
    )
    store.reads.clear()
    remote.load([BlobSpans(blob=blob, starts=[100_000], ends=[100_001])])
    assert store.bytes_read <= 4096
    store.reads.clear()
    # As large as ranges may be: 64 KiB.
    assert remote.fill(source) == source.size_bytes - 9000 - 4096
    assert len(store.reads) <= 5
    assert store.bytes_read <= 1.01 * source.size_bytes


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("ranges", [(), ((0, 0, 7000), (0, 90_000, SIZES[0] - 1))])
def test_an_object_that_changes_is_never_mixed(
    store: MemoryStore,
    remotes: Callable[..., Remote],
    cached: bool,
    ranges: tuple[tuple[int, int, int], ...],
) -> None:
    remote = remotes(store, max_bytes=8 * MIB if cached else None)
    source = of_ranges(store, *ranges) if ranges else single(store, 0)
    blob = remote.open(source)
    remote.load([BlobSpans(blob=blob, starts=[0], ends=[5000])])
    store.objects["o0"] = bytes(SIZES[0])
    with pytest.raises(ObjectChangedError, match=r"mem://(bucket/set/o0|ranges \(o0\)): "):
        remote.load([BlobSpans(blob=blob, starts=[100_000], ends=[105_000])])
    fresh = remote.open(source)
    (found,) = remote.load([BlobSpans(blob=fresh, starts=[0, 100_000], ends=[5000, 105_000])])
    assert found[0].tobytes() == bytes(5000) == found[1].tobytes()


def test_another_size_than_indexed_is_reported(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    sources = [single(store, 0), of_ranges(store, (0, 5, 99), (1, 5, 99))]
    store.objects["o0"] += b"more"
    for remote in (remotes(store), remotes(store, max_bytes=None)):
        for source in sources:
            with pytest.raises(FetchError, match=source.uri):
                remote.load([BlobSpans(blob=remote.open(source), starts=[0], ends=[10])])


def test_a_remote_that_fails_states_which_object(
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


def test_a_large_span_that_passes_is_several_requests(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    remote = remotes(store, max_bytes=None)  # which asks for 64 KiB at a time
    blob = remote.open(single(store, 0))
    (found,) = remote.load([BlobSpans(blob=blob, starts=[5, 7, 9], ends=[200_005, 90, 9])])
    assert not len(found[2])
    assert found[0].tobytes() == store.objects["o0"][5:200_005]
    assert found[1].tobytes() == store.objects["o0"][7:90]
    assert not found[0].flags.writeable
    assert sorted(end - start for _, start, end in store.reads) == [83, *[50_000] * 4]


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


def test_answers_of_the_remote_are_remembered(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    remote = remotes(store)
    found = remote.find("o0")
    assert remote.find("nothing") is None

    def gone(_path: str, _span: object) -> None:
        raise RequestError("refused", "no route")

    store.before = gone
    with pytest.warns(PenstockWarning, match="the remote can't be reached"):
        assert remote.find("o0") == found
    assert remote.find("nothing") is None  # one warning
    with pytest.raises(FetchError):
        remote.find("o1")


def test_dropping_fetches_again(store: MemoryStore, remotes: Callable[..., Remote]) -> None:
    remote = remotes(store)
    source = single(store, 0)
    remote.fill(source)
    blob = remote.open(source)
    path = Path(cache_of(remote).path) / "blobs" / source.key
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


def test_a_truncated_file_is_dropped_at_opening(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    remote = remotes(store)
    source = single(store, 4)
    remote.fill(source)
    os.truncate(os.path.join(cache_of(remote).path, "blobs", source.key), 5000)
    blob = remote.open(source)
    (found,) = remote.load([BlobSpans(blob=blob, starts=[0], ends=[SIZES[4]])])
    assert found[0].tobytes() == store.objects["o4"]


def test_pread_detects_a_file_that_was_truncated_under_it(
    store: MemoryStore, remotes: Callable[..., Remote]
) -> None:
    remote = remotes(store)
    source = single(store, 4)
    remote.fill(source)
    blob = remote.open(source)
    os.truncate(os.path.join(cache_of(remote).path, "blobs", source.key), 5000)
    with pytest.raises(EOFError):
        remote.load([BlobSpans(blob=blob, starts=[4000], ends=[6000])], mode="pread")


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
    FolderLayout(str(path)).note_boot("another boot")
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
