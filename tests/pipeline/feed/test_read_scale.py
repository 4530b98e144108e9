"""The number of reading threads and of batches ahead depends on the size of a sample."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock import DataLoader, Dataset
from penstock.cache import Ordered
from penstock.pipeline.feed import READ_THREADS, runner, sample_bytes_of
from penstock.readers import blocks as blocks_module

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES, SHAPE = 40, (300_000,)  # 1.2 MB
SAMPLE_BYTES = 4 * SHAPE[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("arrays")
    with (place / "metadata.jsonl").open("w") as lines:
        for number in range(SAMPLES):
            np.save(place / f"{number:03d}.npy", np.full(SHAPE, number, np.float32))
            line = {"file_name": f"{number:03d}.npy", "label": number, "tokens": [1] * number}
            lines.write(json.dumps(line) + "\n")
    return place


def test_a_sample_takes_what_the_fields_that_are_read_take(folder: Path) -> None:
    with Dataset(folder) as dataset:
        assert sample_bytes_of(dataset, ["array"]) == SAMPLE_BYTES
        assert sample_bytes_of(dataset, ["array", "label", "id"]) == SAMPLE_BYTES + 8
        assert sample_bytes_of(dataset, ["label"]) == 8
        assert 0 <= sample_bytes_of(dataset, ["tokens"]) < 2000


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
def test_large_arrays_have_a_thread_a_core(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    monkeypatch.setattr(runner, "usable_cores", lambda: cores)
    with Dataset(folder, fields=("array",)) as dataset, DataLoader(dataset, 2, seed=1) as loader:
        assert read_threads_of(loader) == max(2, min(4, cores))
    with Dataset(folder, fields=("label",)) as dataset, DataLoader(dataset, 2, seed=1) as loader:
        assert read_threads_of(loader) == READ_THREADS


def read_threads_of(loader: DataLoader) -> int:
    engine: Any = loader._engine
    return int(engine.assembly.runner.read_threads)


def test_what_is_read_ahead_is_bounded_in_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def most(ahead_bytes: int) -> int:
        monkeypatch.setattr(runner, "AHEAD_BYTES", ahead_bytes)
        made: list[int] = []

        def counted(*arguments: Any, ahead: int, **options: Any) -> Any:
            made.append(ahead)
            return Ordered(*arguments, ahead=ahead, **options)

        monkeypatch.setattr(runner, "Ordered", counted)
        with (
            Dataset(folder, fields=("array", "id")) as dataset,
            DataLoader(dataset, 4, shuffle=True, seed=1) as loader,
        ):
            for values, ids in loader:
                assert torch.equal(values[:, 0], ids.float())
        return max(made)

    assert most(2**30) == 2  # turns of several batches
    assert most(4 * 4 * SAMPLE_BYTES + 100) == 2
    assert most(1) == 1


def test_a_long_loop_takes_its_memory_from_a_few_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: set[int] = set()
    make_array = blocks_module.Blocks.array

    def counted(self: Any, *args: Any) -> Any:
        array = make_array(self, *args)
        addresses.add(array.ctypes.data)
        return array

    monkeypatch.setattr(blocks_module.Blocks, "array", counted)
    kept: list[torch.Tensor] = []
    with Dataset(folder, fields=("array", "id")) as dataset:
        with DataLoader(dataset, 2, shuffle=True, seed=1) as loader:
            for _ in range(10):
                for values, ids in loader:
                    assert torch.equal(values[:, 0], ids.float())
                    if len(kept) < 3:  # what a user keeps is never used again
                        kept.append(values[1])
        batches = 10 * (SAMPLES // 2)
        # Batches being read, waiting, in the loop and kept; and a thread that was stopped after
        # it delivered its batch still holds it.
        most = 3 * runner.MOST_LARGE_IN_A_TURN + 1 + 2 + 3 + READ_THREADS
        assert 1 < len(addresses) <= most < batches // 8
    for view in kept:
        assert (view == view[0]).all()


def test_tensors_outlive_their_loader_and_its_free_memory_goes(folder: Path) -> None:
    with Dataset(folder, fields=("array", "id")) as dataset:
        loader = DataLoader(dataset, 2, shuffle=True, seed=1)
        feeds = [each for each in gc.get_objects() if type(each).__name__ == "BatchReader"]
        batches = list(loader)[:4]
        loader.close()
        own = [each for each in feeds if each.blocks._closed]
        assert own
        assert all(not each.blocks.free_bytes for each in own)
    gc.collect()
    for values, ids in batches:
        assert torch.equal(values[:, 0], ids.float())
        assert torch.equal(values[:, -1], ids.float())
    batches.clear()
    assert all(not each.blocks.free_bytes for each in own)
