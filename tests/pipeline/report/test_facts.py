"""A running loader collects facts from which the verdict names the cause.

The waits are set by hand, because real ones depend on the machine (test_planted).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import imagenet_eval
from penstock.cache import DiskCache
from penstock.pipeline import DataLoader
from penstock.pipeline.report import diagnose
from penstock.readers import Dataset, Source, pack
from tests.images import jpeg
from tests.servers import serving

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.pipeline.report import LoaderFacts

COUNT = 24
DECODING = {"step_s": 1.0, "wait_s": 9.0, "wait_read_s": 0.1, "wait_decode_s": 8.9}
READING = {"step_s": 1.0, "wait_s": 9.0, "wait_read_s": 8.9, "wait_decode_s": 0.1}


def facts_of(dataset: Source, **more: Any) -> LoaderFacts:
    asked: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 7, "num_workers": 1}
    asked["augment"] = imagenet_eval(32, resize=36)
    with dataset, DataLoader(dataset, **asked | more) as loader:
        batches = len(list(loader))
        found = loader.statistics().facts
    assert found is not None
    assert found.batches == batches - 1  # the first one doesn't count
    return found


def write(folder: Path, height: int, width: int, *, count: int = COUNT, **options: Any) -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:04d}.jpg").write_bytes(jpeg(number, height, width, **options))
    return folder


def test_progressive_images_are_counted_and_named(tmp_path: Path) -> None:
    some = write(tmp_path / "some", 60, 70, progressive=True)
    found = facts_of(Dataset(some))
    assert found.images is not None
    assert found.images.progressive == 1.0
    assert found.images.mean_pixels == 60 * 70
    assert found.shards is not None
    assert found.shards.are_files
    told = diagnose(replace(found, **DECODING))
    assert (told.limit, told.cause) == ("decode", "progressive")
    assert f"`penstock pack {some} DST --baseline`" in told.verdict


def test_the_command_of_a_verdict_survives_a_shell(tmp_path: Path) -> None:
    found = facts_of(Dataset(write(tmp_path / "a {b,c}", 60, 70, progressive=True)))
    told = diagnose(replace(found, **DECODING))
    assert f"`penstock pack '{tmp_path}/a {{b,c}}' DST --baseline`" in told.verdict


def test_no_command_names_a_list_of_urls(tmp_path: Path) -> None:
    tokens = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for path in tokens:
        np.arange(64, dtype=np.uint16).tofile(path)
    arguments: dict[str, Any] = {"format": "tokens", "dtype": "uint16", "sample": (4,)}
    several = facts_of(Dataset(tokens, **arguments), augment=None)
    assert several.source == "SRC"
    one = facts_of(Dataset(tokens[0], **arguments).subset(range(12)), augment=None)
    assert one.source == str(tokens[0])
    told = diagnose(replace(one, **READING, load_s=1.0, read_s=0.9))
    assert told.advice == "Larger batches take less time per sample."  # it has one field


def test_oversized_images_are_measured_and_named(tmp_path: Path) -> None:
    found = facts_of(Dataset(write(tmp_path / "some", 300, 400, count=8)))
    assert found.images is not None
    assert (found.images.mean_pixels, found.images.pack_short) == (120_000, 37)
    told = diagnose(replace(found, **DECODING))
    assert (told.limit, told.cause) == ("decode", "oversized")
    assert "DST --short-side 37`" in told.verdict


def test_plain_photographs_have_neither(folder: Path) -> None:
    found = facts_of(Dataset(folder))
    told = diagnose(replace(found, **DECODING))
    assert (told.limit, told.cause) == ("decode", "slow-decode")


def test_a_slow_disk_and_a_slow_model_are_told_from_waits(pack: Path) -> None:
    found = facts_of(Dataset(pack))
    cold = replace(found, **READING, read_s=0.0, gil_late=0.0, disk_bytes=2**40)
    assert diagnose(cold).cause == "slow-disk"
    assert diagnose(replace(found, step_s=10.0, wait_s=0.1, gil_late=0.0)).cause == "slow-model"
    assert diagnose(replace(found, step_s=10.0, wait_s=0.1, gil_late=0.9)).cause == "gil"


def far(place: Path, cache: Path, max_bytes: str | int) -> LoaderFacts:
    with serving(place.parent) as server:
        kept = DiskCache(cache, max_bytes=max_bytes)
        found = facts_of(Dataset(f"{server.url}/{place.name}", cache=kept))
        kept.close()
    assert found.remote is not None
    assert found.remote.traffic.requests > 0
    traffic = replace(found.remote.traffic, remote_wait_s=found.load_s)
    return replace(found, **READING, gil_late=0.0, remote=replace(found.remote, traffic=traffic))


def test_a_remote_that_is_waited_for_is_named(pack: Path, tmp_path: Path) -> None:
    found = far(pack, tmp_path / "cache", "64MiB")
    size = sum(path.stat().st_size for path in pack.glob("*.arrow"))
    assert found.remote is not None
    assert size <= found.remote.traffic.bytes_remote <= 1.5 * size
    assert found.remote.kept_bytes >= size
    assert diagnose(found).cause == "slow-remote"


def test_tiny_shards_are_named(folder: Path, tmp_path: Path) -> None:
    tiny = tmp_path / "tiny"
    pack(str(folder), str(tiny), seed=3, shard_bytes="4KiB")
    found = far(tiny, tmp_path / "cache", "64MiB")
    assert found.shards is not None
    assert found.shards.count == len(list(tiny.glob("*.arrow")))
    assert found.shards.mean_bytes < 2**16
    assert diagnose(found).cause == "tiny-shards"


def test_a_cache_that_is_too_small_is_named(pack: Path, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in pack.glob("*.arrow"))
    found = far(pack, tmp_path / "cache", size // 3 + 400 * 2**10)
    assert found.remote is not None
    assert found.remote.kept_bytes < found.remote.wanted_bytes
    assert diagnose(found).cause == "small-cache"
