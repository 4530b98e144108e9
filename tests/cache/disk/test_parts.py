"""Test each part of an open cache folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from penstock.cache import ConfigError, StalledError
from penstock.cache.base import BlobSource, ReaderLocks, Segment
from penstock.cache.disk import CacheFolder, ReadableFolder, boot_id, crcs_of, crcs_of_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 2**20
KIB_64 = 65_536


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[CacheFolder]:
    made = CacheFolder(str(tmp_path / "cache"), max_bytes=4 * MIB)
    yield made
    made.close()


def source(number: int, size_bytes: int = KIB_64) -> BlobSource:
    segment = Segment(path=f"o{number}", size_bytes=size_bytes, version=None)
    return BlobSource(
        key=f"{number:040x}", uri=f"mem://o{number}", segments=(segment,), size_bytes=size_bytes
    )


def put(folder: CacheFolder, number: int, size_bytes: int = KIB_64) -> BlobSource:
    blob = source(number, size_bytes)
    data = memoryview(bytes([number % 251]) * size_bytes)
    assert folder.put(blob, data, group="g", kept=False)
    return blob


def test_a_fill_is_published_when_its_pieces_are_there(folder: CacheFolder) -> None:
    blob = source(1)
    begun = folder.begin(blob, group="g", pinned=True)
    assert begun is not None
    fill, mapped = begun
    folder.publish(blob, fill, mapped.buffer(), group="g")
    assert not folder.has(blob.key)  # nothing is there yet
    fill.write((0, fill.pieces.count), memoryview(b"x" * KIB_64))
    folder.publish(blob, fill, mapped.buffer(), group="g")
    found = folder.find(blob.key, KIB_64)
    assert found is not None
    assert found.inode == mapped.inode
    assert bytes(found.buffer()) == b"x" * KIB_64
    row = folder.catalogue.blob(blob.key)
    assert row is not None
    assert (row.state, row.crcs) == ("ready", crcs_of(memoryview(b"x" * KIB_64)))
    fill.close()


def test_a_fill_may_get_the_inode_of_a_file_that_is_being_evicted(
    folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = source(1)
    begun = folder.begin(blob, group="g", pinned=True)
    assert begun is not None
    fill, mapped = begun
    inode = fill.inode
    fill.close()
    del begun, mapped
    evictor = folder.layout.locks("readers")
    assert evictor.lock(inode)
    acquire, refused = ReaderLocks.acquire, []

    def acquire_or_unlock(readers: ReaderLocks, inode: int) -> bool:
        if acquire(readers, inode):
            return True
        refused.append(inode)
        evictor.unlock(inode)
        return False

    monkeypatch.setattr(ReaderLocks, "acquire", acquire_or_unlock)
    begun = folder.begin(blob, group="g", pinned=True)
    assert begun is not None
    assert refused == [inode]
    begun[0].close()
    evictor.close()


def test_unmapped_blobs_are_evicted_and_mapped_ones_stay(folder: CacheFolder) -> None:
    mapped = folder.find(put(folder, 1).key, None)
    put(folder, 2)
    assert folder.space.evict_to(0) == (1, KIB_64)
    assert folder.has(source(1).key)
    assert not folder.has(source(2).key)
    del mapped
    assert folder.space.evict_to(0) == (1, KIB_64)
    assert folder.catalogue.used_bytes == 0


def test_who_has_a_share_takes_what_others_have_mapped(folder: CacheFolder) -> None:
    mapped = [folder.find(put(folder, number).key, None) for number in range(1, 4)]
    free = folder.space.budget_bytes - folder.catalogue.used_bytes
    with folder.catalogue.writing():
        assert not folder.space.make_space(free + KIB_64, group=None)
        assert folder.catalogue.counts() == {"ready": 3}
        assert not folder.space.make_space(free + KIB_64, group="mine")  # not free yet
        assert folder.catalogue.counts() == {"ready": 2, "trash": 1}
    mapped.clear()
    with folder.catalogue.writing():
        assert folder.space.make_space(free + KIB_64, group="mine")


def test_more_than_the_limit_is_never_reserved(folder: CacheFolder) -> None:
    assert folder.begin(source(1, 8 * MIB), group="g", pinned=True) is None
    assert folder.catalogue.blobs() == []


def test_a_dropped_blob_is_in_the_trash_while_it_is_mapped(folder: CacheFolder) -> None:
    blob = put(folder, 1)
    mapped = folder.find(blob.key, None)
    assert mapped is not None
    assert not folder.space.drop(blob.key, inode=mapped.inode + 1)  # another's fresh one
    assert folder.space.drop(blob.key, inode=mapped.inode)
    assert not folder.has(blob.key)
    assert folder.catalogue.counts() == {"trash": 1}
    assert bytes(mapped.buffer()) == bytes([1]) * KIB_64
    del mapped
    folder.space.empty_trash()
    assert folder.catalogue.counts() == {}
    assert not folder.space.drop(blob.key)


def test_a_doubted_blob_stays_if_its_checksums_are_right(folder: CacheFolder) -> None:
    right, wrong = put(folder, 1), put(folder, 2)
    with open(folder.layout.blob(wrong.key), "r+b") as file:
        file.write(b"flip")
    for blob in (right, wrong):
        folder.check(blob.key)
    assert folder.has(right.key)
    assert not folder.has(wrong.key)


def test_blobs_of_before_a_reboot_are_verified_at_their_first_use(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    folder = CacheFolder(str(root), max_bytes=4 * MIB)
    right, wrong = put(folder, 1), put(folder, 2)
    with open(folder.layout.blob(wrong.key), "r+b") as file:
        file.write(b"flip")
    folder.layout.note_boot("another boot")
    folder.close()
    folder = CacheFolder(str(root), max_bytes=4 * MIB)
    assert folder.layout.boot == boot_id()
    assert sorted(folder.layout.names("unverified")) == [right.key, wrong.key]
    assert folder.find(right.key, None) is not None
    assert folder.find(wrong.key, None) is None
    assert folder.layout.names("unverified") == []
    folder.close()


def test_a_fill_without_a_worker_is_a_leftover(folder: CacheFolder) -> None:
    blob = source(1)
    begun = folder.begin(blob, group="g", pinned=True)
    assert begun is not None
    assert folder.space.remove_fills() == 0
    begun[0].close()
    del begun
    assert folder.space.remove_fills() == 1
    assert folder.layout.names("fills") == []
    assert folder.catalogue.blobs() == []


def test_a_key_is_held_by_one(folder: CacheFolder) -> None:
    with folder.layout.holding("ab" * 20):
        with folder.layout.trying("ab" * 20) as is_free:
            assert not is_free
        with folder.layout.trying("cd" * 20) as is_free:
            assert is_free
        with (
            pytest.raises(StalledError, match="another process"),
            folder.layout.holding("ab" * 20, timeout_s=0.0),
        ):
            pass
    with folder.layout.trying("ab" * 20) as is_free:
        assert is_free


@pytest.mark.usefixtures("folder")
def test_one_folder_has_one_limit(tmp_path: Path) -> None:
    again = CacheFolder(str(tmp_path / "cache"), max_bytes=None)
    assert again.max_bytes == 4 * MIB
    with pytest.raises(ConfigError, match="a folder has one limit"):
        CacheFolder(str(tmp_path / "cache"), max_bytes=5 * MIB)
    assert again.space.steady_budget_bytes <= again.space.budget_bytes < again.max_bytes
    again.close()


def test_a_lookup_that_may_not_write_changes_nothing(folder: CacheFolder, tmp_path: Path) -> None:
    blob = put(folder, 1)
    folder.catalogue.remember("x", (5, "v"))
    folder.close()
    before = sorted(os.listdir(tmp_path / "cache"))
    lookup = ReadableFolder.at(str(tmp_path / "cache"))
    assert lookup is not None
    assert lookup.has(blob.key)
    assert lookup.find(blob.key, KIB_64) is not None
    assert lookup.find(blob.key, 5) is None  # not that blob
    assert lookup.has(blob.key)
    assert lookup.recall("x") == (True, (5, "v"))
    assert ReadableFolder.at(str(tmp_path / "nowhere")) is None
    assert sorted(os.listdir(tmp_path / "cache")) == before


def test_checksums_of_a_file_are_those_of_its_bytes(tmp_path: Path) -> None:
    for size_bytes in (0, 1, MIB, MIB + 1, 3 * MIB):
        (tmp_path / "f").write_bytes(bytes(size_bytes))
        with open(tmp_path / "f", "rb") as file:
            crcs = crcs_of_file(file.fileno())
        assert crcs == crcs_of(memoryview(bytes(size_bytes)))
        assert len(crcs) == 4 * -(-size_bytes // MIB)
