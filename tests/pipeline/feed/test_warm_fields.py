"""A cache that was warmed has all fields of its samples: several files a sample, arrays, parts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from penstock import concat
from penstock.cache.disk import DiskCache
from penstock.pipeline import DataLoader
from penstock.pipeline.cli import main
from penstock.pipeline.feed import warm
from penstock.readers import Dataset
from tests import field_sets
from tests.servers.faulty import serving

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.readers import Source

SAMPLES = 24
KINDS = ["folder", "tar", "numbers", "folder-pack", "numbers-pack"]

pytestmark = pytest.mark.filterwarnings("ignore:Labels cluster inside shards")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sets")
    field_sets.write_folder(place / "folder", SAMPLES)
    field_sets.write_tars(place / "tar", SAMPLES)
    field_sets.write_numbers(place / "numbers", SAMPLES)
    for kind in ("folder", "numbers"):
        field_sets.pack_of(place / kind, place / f"{kind}-pack")
    return place


def afar(place: Path, cache: Path) -> Dataset:
    """The set as a remote one, with all its fields."""
    files = fsspec.filesystem("file", skip_instance_cache=True)
    kept = DiskCache(cache, max_bytes="64MiB")
    dataset = Dataset(str(place), filesystem=files, cache=kept)
    return dataset.select(*dataset.schema, "id")


def samples_of(source: Source) -> dict[int, dict[str, Any]]:
    """All samples by id, whole."""
    with DataLoader(source, batch_size=5, shuffle=True, seed=3, as_dict=True) as loader:
        found = [each for batch in loader for each in field_sets.plain(batch)]
    return {int.from_bytes(each["id"][2], "little"): each for each in found}


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_warm_up_no_field_asks_the_remote(sets: Path, tmp_path: Path, kind: str) -> None:
    with afar(sets / kind, tmp_path / "cache") as dataset:
        result = warm(dataset, seed=3, global_batch_size=5)
        assert (result.failed, result.left_out) == ((), 0)
        # What tar files are indexed from stays in the cache.
        assert result.objects + result.skipped == len(dataset.index.sizes)
        assert result.node_bytes == int(dataset.index.shard_bytes.sum())
        before = dataset.traffic().bytes_remote
        found = samples_of(dataset)
        traffic = dataset.traffic()
        assert traffic.bytes_remote == before
        assert traffic.hit_ratio == 1.0
        assert traffic.bytes_disk > 0
    local = Dataset(sets / kind)
    with local.select(*local.schema, "id") as near:
        assert found == samples_of(near)
    local.close()


def test_a_second_warm_up_finds_all_of_it(sets: Path, tmp_path: Path) -> None:
    with afar(sets / "folder", tmp_path / "cache") as dataset:
        warm(dataset)
    with afar(sets / "folder", tmp_path / "cache") as dataset:
        again = warm(dataset)
        assert (again.objects, again.bytes) == (0, 0)
        assert again.skipped == len(dataset.index.sizes)


def test_parts_with_many_fields_are_warmed_as_one(sets: Path, tmp_path: Path) -> None:
    with (
        afar(sets / "numbers-pack", tmp_path / "a") as packed,
        afar(sets / "numbers", tmp_path / "b") as files,
    ):
        whole = concat([packed.subset(range(SAMPLES // 2)), files.subset([1, 5])])
        warm(whole, seed=3, global_batch_size=5)
        remote = whole.remote_shards
        assert remote is not None
        before = remote.traffic().bytes_remote
        found = samples_of(whole)
        assert len(found) == SAMPLES // 2 + 2
        assert remote.traffic().bytes_remote == before


def test_the_command_takes_fields_of_folders_and_tells_what_it_fetched(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--cache", str(tmp_path / "cache"), "--max-bytes", "64MiB", "--json")
    with serving(sets) as server:
        url = f"{server.url}/folder"
        assert main(["warm", url, *given, "--fields", "image=images,mask=masks"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["objects"], told["failed"]) == (1, [])
        streets = map(field_sets.street, range(SAMPLES))
        assert told["bytes"] == sum(len(each.image) + len(each.mask_png) for each in streets)
        # Of all that the folder holds, further files are another virtual shard.
        assert main(["warm", url, *given]) == 0
        assert json.loads(capsys.readouterr().out)["bytes"] > told["bytes"]
    assert main(["cache", "verify", str(tmp_path / "cache")]) == 0
