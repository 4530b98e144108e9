"""Chunks and native arrays are exact with any world, batch, threads, cache and restart."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock import DataLoader, Dataset, DiskCache, Order, World, pack
from penstock.readers.formats import candidates, check_sampling
from penstock.readers.formats.npy import npy_pieces
from penstock.readers.formats.tables import table_files
from penstock.readers.formats.tokens import token_listing
from penstock.readers.formats.zarr import zarr_format
from tests.chunk_sets import SETS
from tests.field_sets import plain
from tests.files import upload

if TYPE_CHECKING:
    from pathlib import Path

GLOBAL_BATCH = 8

pytestmark = pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide datasets of a few kB into several shards."""
    for module in (candidates, table_files, npy_pieces, token_listing, zarr_format):
        monkeypatch.setattr(module, "PART_BYTES", 600)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write each dataset and return its path."""
    places = {}
    for name, each in SETS.items():
        root = tmp_path_factory.mktemp(name.replace(" ", "-"))
        places[name] = root / each.write(root)
    return places


def opened(name: str, url: Any, **more: Any) -> Dataset:
    dataset = Dataset(url, **SETS[name].options, **more)
    return dataset.select(*dataset.fields, "id")


def loader(dataset: Dataset, rank: int = 0, size: int = 1, **options: Any) -> DataLoader[Any]:
    options = {
        "global_batch_size": GLOBAL_BATCH,
        "seed": 11,
        "shuffle": True,
        "as_dict": True,
        **options,
    }
    if size > 1:
        options["pad"] = "mask"
    return DataLoader(dataset, world=World(rank, size), **options)


def epoch(dataset: Dataset, **options: Any) -> list[list[dict[str, Any]]]:
    with loader(dataset, **options) as batches:
        return [plain(batch) for batch in batches]


def id_of(sample: dict[str, Any]) -> int:
    return int(np.frombuffer(sample["id"][2], np.int64)[0])


@pytest.mark.parametrize("name", SETS)
def test_every_value_is_the_one_that_was_written(name: str, written: dict[str, Path]) -> None:
    each = SETS[name]
    with opened(name, written[name]) as dataset:
        assert len(dataset.index.sizes) >= 2 or name == "npz deflated"  # that is one chunk
        samples = [sample for batch in epoch(dataset) for sample in batch]
    assert sorted(map(id_of, samples)) == list(range(each.count))
    for sample in samples:
        for field, value in each.wanted(id_of(sample)).items():
            if isinstance(value, str | bytes):
                assert sample[field] == value
                continue
            dtype, shape, data = sample[field]
            assert shape == value.shape, field
            assert np.array_equal(np.frombuffer(data, dtype).reshape(shape), value), field


@pytest.mark.parametrize(
    "size", [*(pytest.param(size, marks=pytest.mark.grid) for size in (2, 3)), 5]
)
@pytest.mark.parametrize("name", SETS)
def test_a_global_batch_is_the_same_in_every_world(
    name: str, size: int, written: dict[str, Path]
) -> None:
    with opened(name, written[name]) as dataset:
        alone = epoch(dataset)
        ranks = [epoch(dataset, rank=rank, size=size) for rank in range(size)]
    for number, wanted in enumerate(alone):
        together = [
            {k: v for k, v in sample.items() if k != "valid"}
            for batches in ranks
            for sample in batches[number]
            if np.frombuffer(sample["valid"][2], np.bool_)[0]
        ]
        assert together == wanted


@pytest.mark.parametrize("name", SETS)
def test_batches_threads_and_memory_change_no_sample(name: str, written: dict[str, Path]) -> None:
    def samples(**options: Any) -> dict[int, Any]:
        given = {key: options.pop(key) for key in ("decoded_bytes",) if key in options}
        with opened(name, written[name], **given) as dataset:
            batches = epoch(dataset, **{"order": Order(lanes=2, window=2), **options})
        return {id_of(sample): sample for batch in batches for sample in batch}

    wanted = samples()
    for options in (
        {"global_batch_size": 3, "read": "pread"},
        {"global_batch_size": 40, "read": "mmap", "prefetch_factor": 5},
        {"num_workers": 3, "decoded_bytes": 1},
        {"shuffle": False, "order": Order()},
    ):
        assert samples(**options) == wanted, options


@pytest.mark.parametrize("name", SETS)
def test_every_steps_state_goes_on_exactly(name: str, written: dict[str, Path]) -> None:
    with opened(name, written[name]) as dataset:
        whole = epoch(dataset)
        with loader(dataset) as first:
            states = [first.state_dict() for _ in first]
        for done, state in enumerate(states[:-1], start=1):
            with loader(dataset) as again:
                again.load_state_dict(state)
                assert [plain(batch) for batch in again] == whole[done:]


@pytest.mark.parametrize("name", SETS)
def test_a_remote_and_its_cache_give_the_same(
    name: str, written: dict[str, Path], tmp_path: Path
) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    place = f"/chunks-{tmp_path.name}/{written[name].name}"
    if written[name].is_file():
        memory.pipe(place, written[name].read_bytes())
    else:
        upload(written[name], memory, place)
    try:
        with opened(name, written[name]) as dataset:
            wanted = epoch(dataset)
        index = tmp_path / "index"
        with opened(name, f"memory:/{place}", index=index) as dataset:
            assert epoch(dataset) == wanted
        for max_bytes in ("64MiB", "64MiB", 20_000):
            with (
                closing(DiskCache(tmp_path / f"cache-{max_bytes}", max_bytes=max_bytes)) as cache,
                opened(name, f"memory:/{place}", cache=cache, index=index) as dataset,
            ):
                assert epoch(dataset) == wanted
    finally:
        memory.rm(f"/chunks-{tmp_path.name}", recursive=True)


def samples_of_pack(folder: Path) -> dict[int, Any]:
    with Dataset(folder) as packed, packed.select(*packed.fields, "id") as dataset:
        return {id_of(s): s for batch in epoch(dataset, shuffle=False) for s in batch}


@pytest.mark.parametrize("name", SETS)
def test_a_pack_of_it_has_the_same_samples(
    name: str, written: dict[str, Path], tmp_path: Path
) -> None:
    with opened(name, written[name]) as dataset:
        wanted = {id_of(s): s for batch in epoch(dataset, shuffle=False) for s in batch}
    options = dict(SETS[name].options)
    format = options.pop("format", "auto")
    sampling = check_sampling(**options)
    for workers in (1, 3):
        folder = tmp_path / f"pack-{workers}"
        pack(
            written[name], folder, shuffle=False, workers=workers, format=format, sampling=sampling
        )
        assert samples_of_pack(folder) == wanted
    pack(written[name], tmp_path / "shuffled", format=format, sampling=sampling)
    plain_values = sorted(repr({k: v for k, v in s.items() if k != "id"}) for s in wanted.values())
    shuffled = samples_of_pack(tmp_path / "shuffled").values()
    assert sorted(repr({k: v for k, v in s.items() if k != "id"}) for s in shuffled) == plain_values
