"""Test that remote datasets equal local ones with any server and cache, and list cached shares."""

from __future__ import annotations

import os
import threading
import warnings
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from penstock.cache import ConfigError, DatasetError, DiskCache, FetchError, PenstockWarning, base
from penstock.cache.disk import FolderLayout, ReadableFolder
from penstock.readers import Dataset, concat, open_index, pack
from penstock.readers.index import Index
from tests import images
from tests.files import upload
from tests.readers.remote_sets import (
    KINDS,
    QUICK,
    SAMPLES,
    blobs_of,
    everything,
    filled,
    flip,
    locally,
)
from tests.servers import Server, moto, serving
from tests.servers.moto import HAS_MOTO

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.readers.formats import OpenShard


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("mode", ["copy", "pread"])
def test_a_remote_dataset_reads_as_the_local_one(
    built: Path, memory: str, tmp_path: Path, kind: str, mode: str
) -> None:
    expected = locally(built, kind, tmp_path)
    url = f"{memory}/{KINDS[kind]}"
    with Dataset(url, cache=tmp_path / "cache") as dataset:
        assert everything(dataset, mode) == expected
        first = dataset.traffic()
        assert everything(dataset, mode) == expected
        again = dataset.traffic()
        assert again.bytes_remote == first.bytes_remote
        assert again.hits == first.hits + SAMPLES
        assert all(blob.exists() for blob in blobs_of(tmp_path / "cache", dataset))
        names = dataset.names(range(SAMPLES))
    with Dataset(url, cache=tmp_path / "cache") as warm:
        assert everything(warm, mode) == expected
        assert warm.bytes_fetched == 0
        assert warm.names(range(SAMPLES)) == names
    with Dataset(url) as dataset:
        with pytest.warns(PenstockWarning, match="cache="):
            dataset.open(verify=images.verify)
        assert everything(dataset, mode) == expected
        folder = dataset._scratch.disk_cache().path
        assert os.path.isdir(folder)
    assert not os.path.exists(folder)


@pytest.mark.parametrize("kind", list(KINDS))
def test_data_without_room_in_the_cache_is_read_past_it(
    built: Path, memory: str, tmp_path: Path, kind: str
) -> None:
    expected = locally(built, kind, tmp_path)
    with Dataset(f"{memory}/{KINDS[kind]}", cache=tmp_path / "cache") as dataset:
        dataset.open(verify=images.verify)
        assert dataset.remote is not None
        keys = dataset.index.keys
        job = dataset.remote.join(keys, [2**60] * len(keys))
        assert job is not None
        for key in keys:  # building the index has filled the tar files
            (tmp_path / "cache" / "blobs" / key).unlink(missing_ok=True)
        assert everything(dataset) == expected
        assert everything(dataset, "pread") == expected
        assert not any(blob.exists() for blob in blobs_of(tmp_path / "cache", dataset))
        assert dataset.traffic().bytes_passed > 0
        # Shards that are read past the cache are reopened once the cache has them.
        dataset.remote.leave(job)
        for number in range(len(keys)):
            dataset.remote.fill(dataset.index.source(number))
        fetched = dataset.bytes_fetched
        assert everything(dataset) == expected
        assert dataset.bytes_fetched == fetched


def test_an_unusable_cache_is_one_warning(built: Path, memory: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"not a folder")
    for kind in KINDS:
        expected = locally(built, kind, tmp_path)
        with Dataset(f"{memory}/{KINDS[kind]}", cache=tmp_path / "file") as dataset:
            with pytest.warns(PenstockWarning, match="can't be used"):
                dataset.open(verify=images.verify)
            assert everything(dataset) == expected


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("protocol", ["http", "s3"])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.usefixtures("no_hedges")
def test_every_kind_over_every_server(
    built: Path, bucket: Server, tmp_path: Path, kind: str, protocol: str, kept: bool
) -> None:
    server = bucket
    expected = locally(built, kind, tmp_path)
    start = f"{server.url}/" if protocol == "http" else "s3://"
    url = f"{start}all/{KINDS[kind]}"
    options = {} if protocol == "http" else server.s3_options
    cache = DiskCache(tmp_path / "cache", max_bytes="1GiB") if kept else None
    server.reset()
    with Dataset(url, cache=cache, storage_options=options) as dataset, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cache= isn't given")
        assert everything(dataset) == expected
        size_bytes = int(dataset.index.shard_bytes.sum())
        # Each byte once, apart from the index; an index next to the data needs no listing.
        data = sum(n for path, n in server.bytes_of.items() if "penstock/" not in path)
        assert data <= 1.02 * size_bytes
        server.reset()
        assert everything(dataset) == expected
        assert server.requests == 0
    if cache is not None:
        cache.close()


@pytest.mark.skipif(not HAS_MOTO, reason="moto[server] isn't installed")
def test_every_kind_on_moto(built: Path, indexed: Path, tmp_path: Path) -> None:
    with moto() as store:
        store.bucket("bucket")
        for path in indexed.rglob("*"):
            if path.is_file():
                store.put("bucket", str(path.relative_to(indexed)), path.read_bytes())
        for kind in KINDS:
            with Dataset(
                f"s3://bucket/{KINDS[kind]}",
                cache=tmp_path / "cache",
                storage_options=store.s3_options,
            ) as dataset:
                assert everything(dataset) == locally(built, kind, tmp_path)


def test_the_first_batch_fetches_little_more_than_its_bytes(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (160, 160, 3), np.uint8)
    files = {
        f"{'ab'[i % 2]}/{i:04d}.png": images.encoded(Image.fromarray(np.roll(noise, i, 0)), "PNG")
        for i in range(200)
    }
    images.write_folder(tmp_path / "set", files)
    pack(tmp_path / "set", tmp_path / "srv" / "p", shard_bytes="4MiB", verify=images.verify)
    with (
        serving(tmp_path / "srv") as server,
        Dataset(f"{server.url}/p", cache=tmp_path / "cache") as dataset,
    ):
        index = dataset.index
        assert len(index.sizes) > 2
        rows = np.array([(s, r) for s in range(len(index.sizes)) for r in (3, 17)], np.int64)
        manifest = server.bytes_sent
        batch = dataset.read(rows)
        wanted = sum(map(len, batch.columns["image"].samples))
        # Two pages around each sample, and head and tail of each shard.
        heads = sum(16 * 1024 + 60 * int(n) for n in index.sizes)
        assert server.bytes_sent - manifest <= wanted + 8192 * len(rows) + heads
        assert server.bytes_sent <= 4 * wanted
        assert server.bytes_sent < int(index.shard_bytes.sum()) / 4


@pytest.mark.filterwarnings("ignore:.*left out")
def test_keys_are_computed_without_any_request(server: Server, tmp_path: Path) -> None:
    for kind in KINDS:
        url = f"{server.url}/{KINDS[kind]}"
        with (
            Dataset(url, cache=tmp_path / "one") as one,
            Dataset(url, cache=tmp_path / "two") as two,
        ):
            shards = range(len(one.index.sizes))
            two.open()
            server.reset()
            sources = [one.index.source(shard) for shard in shards]
            assert [source.key for source in sources] == list(one.index.keys)
            assert one.index.keys == two.index.keys
            assert [s.size_bytes for s in sources] == one.index.shard_bytes.tolist()
            assert len({*one.index.keys}) == len(shards)
            assert [len(s.segments) for s in sources] == (
                [1] * len(shards) if kind != "set" else one.index.sizes.tolist()
            )
            assert server.requests == 0
            assert sum(p.size_bytes for s in sources for p in s.segments) == sum(
                s.size_bytes for s in sources
            )
    with Dataset(tmp_path) as local, pytest.raises(DatasetError):
        _ = local.index.keys


def test_a_tar_file_is_one_blob_for_its_indexing_and_its_reading(
    built: Path, tmp_path: Path
) -> None:
    """It is one blob for two selections that hold it, too: each byte is fetched once."""
    with serving(built) as plain:
        url = f"{plain.url}/tars"
        for pattern in ("train-{000000..000001}.tar", "train-{000001..000002}.tar"):
            with Dataset(f"{url}/{pattern}", cache=tmp_path / "cache") as dataset:
                everything(dataset)
        for name in ("train-000000.tar", "train-000001.tar", "train-000002.tar"):
            size_bytes = (built / "tars" / name).stat().st_size
            assert plain.bytes_of[f"/tars/{name}"] == size_bytes


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("is_indexed", [True, False])
def test_cached_data_is_read_without_the_remote(
    built: Path, indexed: Path, tmp_path: Path, kind: str, is_indexed: bool
) -> None:
    with serving(indexed if is_indexed else built) as server:
        url = f"{server.url}/{KINDS[kind]}"
        with Dataset(url, cache=tmp_path / "cache") as dataset:
            expected = everything(dataset)
        server.go_away()
        with Dataset(url, storage_options=QUICK, cache=tmp_path / "cache") as dataset:
            with pytest.warns(PenstockWarning, match="the remote can't be reached") as warned:
                dataset.open()
            assert len(warned) == 1  # the store isn't asked again for an index next to the data
            assert everything(dataset) == expected
            assert dataset.bytes_fetched == 0
        with (
            Dataset(url, storage_options=QUICK, cache=tmp_path / "cold") as cold,
            pytest.raises(FetchError, match=server.url),
        ):
            cold.open()


def test_released_shards_are_opened_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    real = Index.open

    def open_shard(shards: Index, number: int) -> OpenShard:
        opened.append(number)
        return real(shards, number)

    monkeypatch.setattr(Index, "open", open_shard)
    with Dataset(f"{server.url}/pack", cache=tmp_path / "cache") as dataset:
        expected = everything(dataset)
        shards = list(range(len(dataset.index.sizes)))
        assert everything(dataset) == expected
        assert sorted(opened) == shards
        dataset.release(shards)
        assert everything(dataset) == expected
        assert sorted(opened) == sorted(2 * shards)


def test_a_folder_on_a_network_mount_is_read_through_the_cache(
    indexed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "is_network", lambda path: str(indexed) in path)
    for kind in KINDS:
        with (
            Dataset(indexed / KINDS[kind]) as plain,
            Dataset(indexed / KINDS[kind], cache=tmp_path / "cache") as cached,
        ):
            assert everything(cached) == everything(plain)
            assert plain.remote is None
            assert cached.remote is not None
            filled(cached)
            assert all(blob.exists() for blob in blobs_of(tmp_path / "cache", cached))
    with pytest.raises(ConfigError, match="contain each other"):
        pack(indexed / "set", indexed / "set" / "p", cache=tmp_path / "cache")


def test_a_users_file_system_object(built: Path, tmp_path: Path) -> None:
    fs = MemoryFileSystem()
    upload(built, fs, "/own")
    with Dataset("/own/pack", filesystem=fs, cache=tmp_path / "cache") as dataset:
        assert everything(dataset) == locally(built, "pack", tmp_path)
    index = open_index("/own/set", filesystem=fs, cache=tmp_path / "two", verify=images.verify)
    assert index.samples == SAMPLES
    made = pack("/own/pack", tmp_path / "made", filesystem=fs, shuffle=False, shard_bytes=3000)
    assert made.samples == SAMPLES
    fs.rm("/own", recursive=True)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("kept", [True, False])
def test_packs_of_a_remote_dataset_equal_those_of_the_local_one(
    built: Path, server: Server, tmp_path: Path, kind: str, kept: bool
) -> None:
    options: dict[str, Any] = dict(seed=5, shard_bytes=4000, verify=images.verify)
    pack(built / KINDS[kind], tmp_path / "local", **options)
    cache = DiskCache(tmp_path / "cache", max_bytes="8MiB") if kept else None
    pack(f"s3://{KINDS[kind]}", tmp_path / "remote", cache=cache,
         storage_options=server.s3_options, **options)  # fmt: skip
    for path in (tmp_path / "local").glob("*.arrow"):
        assert path.read_bytes() == (tmp_path / "remote" / path.name).read_bytes()
    assert len(list((tmp_path / "remote").glob("*.arrow"))) > 2
    if cache is not None:
        cache.close()


def test_packing_rejects_damaged_bytes_in_the_cache(
    server: Server, built: Path, tmp_path: Path
) -> None:
    url, cache = f"{server.url}/pack", tmp_path / "cache"
    with Dataset(url, cache=cache) as dataset:
        everything(dataset)
        flip(blobs_of(cache, dataset)[1])
    pack(url, tmp_path / "made", cache=cache, shuffle=False, shard_bytes=3000)
    with Dataset(tmp_path / "made") as made:
        assert everything(made) == locally(built, "pack", tmp_path)


def test_secrets_are_shown_nowhere(
    indexed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    secrets = ["hush-key-hush", "hush-secret-hush", "pass-word-x", "signature-xyz"]
    shown: list[str] = []
    with serving(indexed) as server:
        host = server.url.removeprefix("http://")
        urls: dict[str, dict[str, Any]] = {
            "s3://pack": {"key": secrets[0], "secret": secrets[1], "endpoint_url": server.url},
            f"http://me:{secrets[2]}@{host}/pack?sig={secrets[3]}": {},
        }
        for url, options in urls.items():
            cache = tmp_path / f"cache-{len(shown)}"
            # Long enough for the server on a busy machine to answer the first reads.
            options |= {**QUICK, "retry_timeout": 4}
            with Dataset(url, cache=cache, storage_options=options) as dataset:
                everything(dataset)
                server.go_away()
                dataset.index.drop(0)
                dataset.release([0])
                with pytest.raises(FetchError) as caught:
                    everything(dataset)
                server.come_back()
                index = dataset.index
                shown += [str(caught.value), repr(caught.value), repr(dataset), dataset.url]
                shown += [index.url, index.place, repr(index.source(0)), repr(index.remote)]
                assert caught.value.__cause__ is None
            for path in cache.rglob("*"):
                shown.append(str(path))
                if path.is_file():
                    shown.append(path.read_bytes().decode("latin-1"))
    shown += [record.getMessage() for record in caplog.records]
    for secret in secrets:
        assert not [text for text in shown if secret in text]


def held(source: Any) -> list[float]:
    return [round(float(share), 6) for share in source.remote_shards.held_shares()]


def test_whole_shards_and_parts_of_shards_count(pack: Path, tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
    files = fsspec.filesystem("file", skip_instance_cache=True)
    with Dataset(str(pack), filesystem=files, cache=cache) as dataset:
        count = len(dataset.contents.sizes)
        assert held(dataset) == [0.0] * count
        assert dataset.remote_shards is not None
        dataset.remote_shards.fill(1, progress=lambda _: None, stop=threading.Event())
        assert held(dataset) == [0.0, 1.0] + [0.0] * (count - 2)
        dataset.read(np.array([[2, 0]]))  # a sample by its range
        shares = held(dataset)
        assert 0 < shares[2] < 1
        assert held(concat([dataset, dataset.subset(range(5))]))[:count] == shares
    cache.close()


def test_a_large_folder_is_listed_without_opening_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
    cache.open()
    layout = FolderLayout(str(tmp_path / "cache"))
    for number in range(300):
        (tmp_path / "cache" / "blobs" / f"{number:040x}").touch()
    opened: list[str] = []
    monkeypatch.setattr(layout.blobs, "open", opened.append)
    assert len(ReadableFolder(layout).held()) == 300
    assert not opened
    cache.close()
