"""Copies that are damaged, truncated or torn by a reboot: noticed, and fetched again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.cache.base import BlobSpans
from penstock.cache.blobs import CachedBlob
from penstock.cache.disk import admin
from tests.cache.blobs.remotes import SIZES, cache_of, single

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.blobs import Remote
    from tests.stores import MemoryStore


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


def test_pread_tells_of_a_file_that_was_truncated_under_it(
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
