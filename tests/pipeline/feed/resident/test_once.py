"""With resident= each sample is read and decoded once; impossible requests are rejected."""

from __future__ import annotations

import gc
import io
import json
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.utils.data
from rich.console import Console

from benchmarks import resident as benchmark
from benchmarks.photographs import PHOTOGRAPHS
from penstock.cache import ConfigError, DiskCache
from penstock.pipeline import DataLoader
from penstock.pipeline.feed import ResidentImages
from penstock.readers import Dataset
from tests.conftest import SAMPLES
from tests.servers import serving

if TYPE_CHECKING:
    from pathlib import Path

from tests.pipeline.feed.resident.resident_loaders import (
    FIELDS,
    RECIPES,
    bits,
    epochs,
    make,
    pixels_of_all,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Labels cluster inside shards"),
    pytest.mark.filterwarnings("ignore:Sample .* is bad"),
    pytest.mark.filterwarnings("ignore:.* is remote and cache= isn't given"),
]


class TestOnce:
    def test_each_sample_is_read_once(self, pack: Path) -> None:
        dataset = Dataset(str(pack), fields=FIELDS)
        size = sum(
            int(table[:, 1].sum() - table[:, 0].sum())
            for table in (dataset.index.open(n).table for n in range(len(dataset.index.sizes)))
        )
        with DataLoader(
            dataset, 16, shuffle=True, seed=7, augment=RECIPES["train"], resident=True
        ) as loader:
            for _ in range(3):
                bits(loader)
            found = loader.statistics()
        assert dataset.traffic().bytes_disk == found.bytes_disk == size
        pixels = pixels_of_all()
        assert found.resident_bytes == pixels
        assert 2 * SAMPLES <= found.resident_hits < 3 * SAMPLES  # batches in flight among them
        assert 2 * pixels <= found.bytes_memory < 3 * pixels
        assert "came from memory" in str(found)

    @pytest.mark.parametrize("with_cache", [False, True])
    def test_a_remote_is_asked_for_each_sample_once(
        self, pack: Path, tmp_path: Path, with_cache: bool
    ) -> None:
        plain = epochs(pack, 4)[0]
        cache = DiskCache(tmp_path / "cache", max_bytes="64MiB") if with_cache else None
        with serving(pack.parent) as server:
            dataset = Dataset(f"{server.url}/{pack.name}", fields=FIELDS, cache=cache)
            with (
                dataset,
                DataLoader(
                    dataset, 16, shuffle=True, seed=7, augment=RECIPES["train"], resident=True
                ) as loader,
            ):
                found = [bits(loader), bits(loader)]
                fetched = loader.statistics().bytes_remote
                found += [bits(loader), bits(loader)]
                told = loader.statistics()
        assert found == plain
        assert told.bytes_remote == fetched
        assert told.resident_hits >= 3 * SAMPLES

    def test_without_it_nothing_is_kept(self, pack: Path) -> None:
        with make(pack) as loader:
            bits(loader)
            found = loader.statistics()
        assert (found.resident_bytes, found.resident_hits, found.bytes_memory) == (0, 0, 0)
        assert "came from memory" not in str(found)

    def test_the_memory_is_given_back(self, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        arenas: list[weakref.ref[Any]] = []
        images = ResidentImages.images

        def recorded(self: ResidentImages, ids: Any) -> list[Any]:
            found = images(self, ids)
            arenas.extend(weakref.ref(image.base) for image in found if image is not None)
            return found

        monkeypatch.setattr(ResidentImages, "images", recorded)
        loader = make(pack, resident=True)
        batches = list(loader)
        assert arenas[0]() is not None
        loader.close()
        gc.collect()
        assert arenas[0]() is None
        assert batches[0][0].isfinite().all()  # delivered batches have their own memory


class TestRefused:
    @pytest.mark.parametrize("value", ["yes", 1, 0, None, "device"])
    def test_other_values(self, pack: Path, value: object) -> None:
        with pytest.raises(ConfigError, match="resident must be True, False or 'auto'"):
            make(pack, resident=value)

    def test_without_images(self, pack: Path) -> None:
        dataset = Dataset(str(pack), fields=("label",))
        with pytest.raises(ConfigError, match="resident=True keeps decoded images"):
            DataLoader(dataset, 4, resident=True)
        with DataLoader(dataset, 4, resident="auto") as loader:
            assert len(list(loader)) == -(-SAMPLES // 4)

    def test_torch_datasets(self) -> None:
        dataset = torch.utils.data.TensorDataset(torch.arange(4))
        with pytest.raises(ConfigError, match="resident=True works on native datasets"):
            DataLoader(dataset, 2, resident=True)
        with DataLoader(dataset, 2, resident="auto") as loader:
            assert len(list(loader)) == 2


def test_the_benchmark_runs(tmp_path: Path) -> None:
    written = benchmark.measure(
        tmp_path,
        rounds=1,
        photographs=len(PHOTOGRAPHS),
        eval_images=len(PHOTOGRAPHS),
        small=40,
        results=tmp_path / "results",
        console=Console(file=io.StringIO()),
    )
    rounds = json.loads(written.read_text())["rounds"]
    assert {
        what: {name: len(told) for name, told in found.items()} for what, found in rounds.items()
    } == {what: {"plain": 2, "resident": 2} for what in ("photographs", "small")}
