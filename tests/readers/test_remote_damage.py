"""Remote data that is damaged, changed or unreadable is fetched again, or raises."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import warnings
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache import (
    CorruptSampleError,
    CorruptShardError,
    DatasetNotFoundError,
    FetchError,
    PenstockWarning,
    ordered,
)
from penstock.readers import Dataset, build_index
from penstock.readers.index import Index
from penstock.readers.reading import OpenShards
from tests import images
from tests.readers.remote_sets import (
    KINDS,
    SAMPLES,
    blobs_of,
    everything,
    filled,
    flip,
    replace,
    rows_of,
    samples_of,
)
from tests.servers import Server, serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.readers.formats import OpenShard


def truncate(path: Path) -> None:
    replace(path, path.read_bytes()[:-100])


def zero_tail(path: Path) -> None:
    data = path.read_bytes()
    replace(path, data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def zero(path: Path) -> None:
    replace(path, bytes(path.stat().st_size))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("damage", [flip, truncate, zero_tail, zero])
@pytest.mark.parametrize("mode", ["copy", "pread"])
@pytest.mark.usefixtures("no_hedges")
def test_damage_in_the_cache_is_never_delivered_but_fetched_again(
    server: Server, tmp_path: Path, kind: str, damage: Callable[[Path], None], mode: str
) -> None:
    url, cache = f"{server.url}/{KINDS[kind]}", tmp_path / "cache"
    with Dataset(url, cache=cache) as dataset:
        expected = filled(dataset)
        damaged = blobs_of(cache, dataset)[0]
        size_bytes = int(dataset.index.shard_bytes[0])
    damage(damaged)
    with Dataset(url, cache=cache) as dataset:
        server.reset()
        for _ in range(2):  # the second read loads bytes that the bad samples didn't need
            assert everything(dataset, mode) == expected
        assert dataset.traffic().refetched == 1 or damage is truncate
        assert dataset.traffic().retries == dataset.traffic().hedges == 0
        assert 0 < server.bytes_sent <= size_bytes
        server.reset()
        assert everything(dataset, mode) == expected
        assert server.requests == 0


@pytest.mark.parametrize("kind", ["pack", "tars"])
def test_two_swapped_blobs_are_fetched_again(server: Server, tmp_path: Path, kind: str) -> None:
    url, cache = f"{server.url}/{KINDS[kind]}", tmp_path / "cache"
    with Dataset(url, cache=cache) as dataset:
        expected = filled(dataset)
        one, two = blobs_of(cache, dataset)[:2]
    kept = one.read_bytes()
    shutil.copyfile(two, one)
    two.write_bytes(kept)
    with Dataset(url, cache=cache) as dataset:
        assert everything(dataset) == expected


@pytest.mark.usefixtures("no_hedges")
def test_damage_while_a_shard_is_open_is_fetched_once_for_all_threads(
    server: Server, tmp_path: Path
) -> None:
    url, cache = f"{server.url}/pack", tmp_path / "cache"
    with Dataset(url, cache=cache) as dataset:
        expected = everything(dataset)
        rows = rows_of(dataset)
        size_bytes = int(dataset.index.shard_bytes[0])
        flip(blobs_of(cache, dataset)[0])
        server.reset()
        for batch in ordered(
            lambda _: samples_of(dataset.read(rows)), range(12), workers=6, ahead=12
        ):
            assert batch == expected
        assert dataset.traffic().refetched == 1
        assert dataset.traffic().retries == dataset.traffic().hedges == 0
        assert server.bytes_sent <= 1.02 * size_bytes


def test_a_shard_opened_before_its_damage_was_dropped_is_not_kept(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread opens the shard before the drop and returns after it."""
    cache = tmp_path / "cache"
    with Dataset(f"{server.url}/pack", cache=cache) as dataset:
        expected = everything(dataset)
        opened, begun, late = OpenShards(dataset.index), Event(), Event()
        (bad,) = opened.get([0])
        flip(blobs_of(cache, dataset)[0])
        real_open, real_drop = Index.open, Index.drop
        openers: list[OpenShard] = []

        def open_late(shards: Index, number: int) -> OpenShard:
            shard = real_open(shards, number)
            if threading.current_thread() is other:
                openers.append(shard)
                begun.set()
                assert late.wait(30)
            return shard

        def drop(shards: Index, number: int, *, opened: OpenShard | None = None) -> None:
            opened_shards.release([number])
            other.start()
            assert begun.wait(30)
            real_drop(shards, number, opened=opened)

        opened_shards = opened
        other = threading.Thread(target=opened.get, args=[[0]], name="late")
        monkeypatch.setattr(Index, "open", open_late)
        monkeypatch.setattr(Index, "drop", drop)
        fresh = opened.replace(0, bad)
        late.set()
        other.join(30)
        assert opened.get([0])[0] is fresh
        assert opened.replace(0, openers[0]) is fresh
        opened.close()
        monkeypatch.undo()
        assert everything(dataset) == expected
        assert dataset.traffic().refetched == 1


def test_a_failing_disk_is_bypassed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Dataset(f"{server.url}/pack", cache=tmp_path / "cache") as dataset:
        expected = everything(dataset)
        real, failing = os.preadv, {os.stat(blobs_of(tmp_path / "cache", dataset)[1]).st_ino}

        def preadv(fd: int, *args: Any) -> int:
            if os.fstat(fd).st_ino in failing:
                raise OSError(errno.EIO, "Input/output error")
            return real(fd, *args)

        monkeypatch.setattr(os, "preadv", preadv)
        assert everything(dataset, "pread") == expected
        assert dataset.traffic().refetched == 1

        def all_fail(*_: Any) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "preadv", all_fail)
        with pytest.warns(PenstockWarning, match="can't be used"):
            assert everything(dataset, "pread") == expected


def test_a_damaged_remote_object_is_a_bad_sample_or_an_error(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built / "pack", tmp_path / "srv" / "pack")
    flip(tmp_path / "srv" / "pack" / "shard-000001.arrow")
    with (
        serving(tmp_path / "srv") as server,
        Dataset(f"{server.url}/pack", cache=tmp_path / "cache") as dataset,
    ):
        rows, bad = rows_of(dataset), dict[int, str]()
        wrong = int(dataset.index.starts[1])
        with pytest.raises(CorruptSampleError, match=rf"{server.url}/pack") as caught:
            dataset.read(rows)
        assert caught.value.sample_id == wrong
        batch = dataset.read(rows, bad=bad)
        assert list(bad) == [wrong]
        assert len(batch.columns["image"].samples[wrong]) == 0
        assert (
            len(dataset.read(np.delete(rows, wrong, axis=0)).columns["image"].samples)
            == SAMPLES - 1
        )


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("change", ["gone", "another"])
def test_an_object_that_changed_is_an_error_and_no_bad_sample(
    indexed: Path, tmp_path: Path, kind: str, change: str
) -> None:
    shutil.copytree(indexed, tmp_path / "srv")
    root = tmp_path / "srv" / KINDS[kind].partition("/")[0]
    with (
        serving(tmp_path / "srv") as server,
        Dataset(f"{server.url}/{KINDS[kind]}", cache=tmp_path / "cache") as dataset,
    ):
        dataset.open()
        segments = dataset.index.source(0).segments
        victim = root / segments[0].path
        if change == "gone":
            victim.unlink()
        else:  # shorter
            victim.write_bytes(victim.read_bytes()[:-7])
        bad: dict[int, str] = {}
        with pytest.raises(FetchError, match=server.url):
            dataset.read(rows_of(dataset), bad=bad)
        assert not bad


def test_an_outage_is_not_reported_as_missing_files(tmp_path: Path) -> None:
    (tmp_path / "srv").mkdir()
    with serving(tmp_path / "srv") as server:
        url, cache = f"{server.url}/train-{{0..3}}.tar", tmp_path / "cache"
        with pytest.raises(DatasetNotFoundError, match="4 of 4 files don't exist"):
            Dataset(url, cache=cache).open()
    dataset = Dataset(url, cache=cache, storage_options={"retry_timeout": 0.2})
    with (
        pytest.warns(PenstockWarning, match="can't be reached"),
        pytest.raises(FetchError, match="can't be reached, and 4 of 4 files didn't exist"),
    ):
        dataset.open()


@pytest.mark.parametrize("place", ["cache", "index"])
def test_the_command_in_an_error_rebuilds_the_index_that_is_used(
    built: Path, tmp_path: Path, place: str
) -> None:
    """A command for another place would leave the old index in use."""
    shutil.copytree(built / "tars", tmp_path / "srv" / "tars")
    index = tmp_path / "index" if place == "index" else None
    with serving(tmp_path / "srv") as server:
        url = f"{server.url}/{KINDS['tars']}"
        with Dataset(url, cache=tmp_path / "cache", index=index) as dataset:
            dataset.open(verify=images.verify)
            (tmp_path / "srv/tars/train-000001.tar").unlink()
            for shard in range(len(dataset.index.sizes)):
                dataset.index.drop(shard)  # the indexing has cached them
            with pytest.raises(FetchError) as caught:
                dataset.read(rows_of(dataset))
    option = f"--out {index}" if index else f"--cache {tmp_path / 'cache'}"
    assert f"run `penstock index '{url}' {option}` again" in str(caught.value)


def test_damaged_manifests_and_sidecars_in_the_cache_are_fetched_again(
    server: Server, tmp_path: Path
) -> None:
    for kind in KINDS:
        url, cache = f"{server.url}/{KINDS[kind]}", tmp_path / kind
        with Dataset(url, cache=cache) as dataset:
            expected = everything(dataset)
            data = {blob.name for blob in blobs_of(cache, dataset)}
        for path in (cache / "blobs").iterdir():
            if path.name not in data:
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 8
                replace(path, bytes(content))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with Dataset(url, cache=cache) as dataset:
                assert everything(dataset) == expected
                assert dataset.traffic().refetched >= 1
        # A pack has no sidecars; its manifest is fetched again silently.
        assert [each.category for each in warned] == [PenstockWarning] * (kind != "pack")


@pytest.mark.parametrize("kind", ["set", "pack"])
@pytest.mark.parametrize(
    "content",
    [lambda whole: whole[: len(whole) // 2], lambda whole: b"\n<!DOCTYPE HTML><p>log in" + whole],
    ids=["half", "web page"],
)
def test_a_bad_manifest_or_part_of_an_index_is_named_by_its_url(
    built: Path, tmp_path: Path, kind: str, content: Callable[[bytes], bytes]
) -> None:
    root = tmp_path / "remote"
    shutil.copytree(built / kind, root / kind)
    if kind == "set":
        build_index(root / kind, out=root / "index", verify=images.verify)
    place = root / ("index" if kind == "set" else "pack")
    names = ["manifest.arrow"] if kind == "pack" else ["manifest.arrow", "sidecars"]
    for name in names:
        damaged = next(path for path in sorted(place.rglob("*")) if name in str(path)
                       and path.is_file())  # fmt: skip
        whole = damaged.read_bytes()
        damaged.write_bytes(content(whole))
        with serving(root) as wrong, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            index = None if kind == "pack" else f"{wrong.url}/index"
            url, cache = f"{wrong.url}/{kind}", tmp_path / f"cache-{name}"
            dataset = Dataset(url, cache=cache, index=index)
            with dataset, pytest.raises(CorruptShardError) as raised:
                everything(dataset)
            assert f"{wrong.url}/{damaged.relative_to(root)}" in str(raised.value)
            assert str(tmp_path) not in str(raised.value)
            is_page = b"DOCTYPE" in damaged.read_bytes()
            assert not is_page or "sent a web page" in str(raised.value) or name == "sidecars"
            assert not is_page or "penstock pack" not in str(raised.value)
        damaged.write_bytes(whole)
