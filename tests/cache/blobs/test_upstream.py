"""Test blobs from sources other than the store: the same bytes, verified alike,
counted separately."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.cache import FetchError
from penstock.cache.base import Answer, BlobSpans
from penstock.cache.blobs import Upstream
from penstock.cache.disk import admin
from penstock.cache.fetch import Fetcher
from tests.cache.blobs.remotes import SIZES, cache_of, content, joined, single
from tests.cache.blobs.upstream_contract import UpstreamTests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.cache.base import BlobSource
    from penstock.cache.blobs import BlobRange, Remote
    from tests.stores import MemoryStore


class FolderUpstream(Upstream):
    """Gives what a folder of whole blobs has, by key, and asks the store for the rest."""

    def __init__(self, folder: Path, fetcher: Fetcher) -> None:
        super().__init__(fetcher)
        self._folder = folder
        self.bytes_given = 0

    def fetch(
        self,
        ranges: Sequence[BlobRange],
        deliver: Callable[[int, Answer], None],
        *,
        urgent: bool = True,
    ) -> None:
        left = []
        for number, one in enumerate(ranges):
            data = self._read(one)
            if data is None:
                left.append(number)
                continue
            self.bytes_given += len(data)
            size_bytes = one.segment.whole_bytes
            deliver(number, Answer(data=data, version="", object_bytes=size_bytes))

        super().fetch(
            [ranges[number] for number in left],
            lambda place, answer: deliver(left[place], answer),
            urgent=urgent,
        )

    def _read(self, one: BlobRange) -> bytes | None:
        if one.stored.version is not None:  # its version is unknown
            return None
        try:
            data = (self._folder / one.blob.key).read_bytes()
        except OSError:
            return None
        return data[one.start : one.end] if len(data) == one.blob.size_bytes else None

    def is_near(self, key: str) -> bool:
        return (self._folder / key).is_file()


def keep(folder: Path, store: MemoryStore, source: BlobSource) -> None:
    folder.mkdir(exist_ok=True)
    (folder / source.key).write_bytes(content(store, source))


@pytest.fixture
def fetcher(store: MemoryStore) -> Iterator[Fetcher]:
    fetcher = Fetcher(store)
    yield fetcher
    fetcher.close()


class TestStore(UpstreamTests):
    @pytest.fixture
    def upstream(self, fetcher: Fetcher) -> Upstream:
        return Upstream(fetcher)


class TestFolder(UpstreamTests):
    """One blob is in the folder, another is there but truncated, and the rest is the store's."""

    @pytest.fixture
    def upstream(self, store: MemoryStore, fetcher: Fetcher, tmp_path: Path) -> Upstream:
        folder = tmp_path / "peer"
        keep(folder, store, single(store, 0))
        keep(folder, store, single(store, 4))
        os.truncate(folder / single(store, 4).key, 1000)
        return FolderUpstream(folder, fetcher)


@pytest.fixture
def made() -> list[FolderUpstream]:
    return []


@pytest.fixture
def from_folder(
    store: MemoryStore, remotes: Callable[..., Remote], tmp_path: Path, made: list[FolderUpstream]
) -> Callable[..., Remote]:
    """Remotes that ask a folder first, which has o0, and o4 truncated."""
    folder = tmp_path / "peer"
    keep(folder, store, single(store, 0))
    keep(folder, store, single(store, 4))
    os.truncate(folder / single(store, 4).key, 1000)

    def upstream(fetcher: Fetcher) -> FolderUpstream:
        made.append(FolderUpstream(folder, fetcher))
        return made[-1]

    return lambda **more: remotes(store, upstream=upstream, **more)


def test_the_cache_keeps_the_same_verified_bytes_wherever_they_come_from(
    store: MemoryStore, from_folder: Callable[..., Remote], made: list[FolderUpstream]
) -> None:
    remote = from_folder()
    sources = [*(single(store, i) for i in range(len(SIZES))), joined(store)]
    blob = remote.open(sources[0])
    (found,) = remote.load([BlobSpans(blob=blob, starts=[5, 250_000], ends=[9000, 250_100])])
    assert found[0].tobytes() == store.objects["o0"][5:9000]
    assert found[1].tobytes() == store.objects["o0"][250_000:250_100]
    for source in sources:
        remote.fill(source)
    blobs = Path(cache_of(remote).path) / "blobs"
    for source in sources:
        assert (blobs / source.key).read_bytes() == content(store, source)
    verdict = admin.verify(blobs.parent)
    assert (verdict.checked, verdict.bad) == (len(sources), ())
    # What came from the folder was kept as the store's is, and isn't the store's traffic.
    traffic, given = remote.traffic(), made[0].bytes_given
    assert SIZES[0] <= given <= 1.01 * SIZES[0]
    assert traffic.bytes_filled == given + store.bytes_read
    assert traffic.bytes_remote == store.bytes_read
    assert {path for path, _, _ in store.reads} == set(store.objects)  # o0 as a segment


def test_what_passes_comes_from_there_too(
    store: MemoryStore, from_folder: Callable[..., Remote], made: list[FolderUpstream]
) -> None:
    remote = from_folder(max_bytes=None)
    for number in (0, 4):
        blob = remote.open(single(store, number))
        assert not blob.is_cached
        (found,) = remote.load([BlobSpans(blob=blob, starts=[0, 70_000], ends=[50, 99_000])])
        assert found[0].tobytes() == store.objects[f"o{number}"][:50]
        assert found[1].tobytes() == store.objects[f"o{number}"][70_000:99_000]
    assert made[0].bytes_given == 29_050
    assert remote.traffic().bytes_passed == 2 * 29_050
    assert remote.traffic().bytes_remote == store.bytes_read == 29_050


def test_a_folder_that_goes_away_in_the_middle_is_filled_up_from_the_store(
    store: MemoryStore,
    from_folder: Callable[..., Remote],
    made: list[FolderUpstream],
    tmp_path: Path,
) -> None:
    remote = from_folder()
    source = single(store, 0)
    blob = remote.open(source)
    for want, place in ((0, "folder"), (100_000, "store")):
        (found,) = remote.load([BlobSpans(blob=blob, starts=[want], ends=[want + 4096])])
        assert found[0].tobytes() == store.objects["o0"][want : want + 4096], place
        (tmp_path / "peer" / source.key).unlink(missing_ok=True)
    given = made[0].bytes_given
    assert 0 < given < SIZES[0]
    assert remote.fill(source) > 0
    assert made[0].bytes_given == given
    assert remote.is_whole(source)
    assert admin.verify(cache_of(remote).path).bad == ()


def test_without_either_the_error_names_the_object(
    store: MemoryStore, from_folder: Callable[..., Remote]
) -> None:
    remote = from_folder()
    source = single(store, 4)
    del store.objects["o4"]
    with pytest.raises(FetchError, match="mem://bucket/set/o4"):
        remote.fill(source)
