"""Test that datasets of any fields, containers and chunks are delivered exactly: whatever the
world, batch, threads, memory, cache, restart."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock import (
    DataLoader,
    Dataset,
    DiskCache,
    Order,
    RandomHorizontalFlip,
    RandomResizedCrop,
    World,
    pack,
)
from penstock.readers.fieldtypes import Array
from penstock.readers.formats import candidates, check_sampling
from penstock.readers.formats.npy import npy_format
from penstock.readers.formats.tables import table_files
from penstock.readers.formats.tokens import token_format
from penstock.readers.formats.zarr import zarr_format
from tests import field_sets
from tests.chunk_sets import SETS
from tests.files import uploaded

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 41
STREET = ("image", "mask", "boxes", "caption", "vector", "points", "label", "number", "id")
NUMBERS = ("signal", "tokens", "text", "target", "number", "id")
TOKENS = {"tokens": Array("int64", (None,))}
CROP = (RandomResizedCrop((12, 16)), RandomHorizontalFlip())
CONTAINERS = ("folder", "tar", "pack", "numbers", "packed numbers")

pytestmark = pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A dataset of the grid. fields: the selected ones; all of them and the ids if it is empty."""

    name: str
    path: Path
    fields: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    recipe: Any = None

    def open(self, url: Any = None, **options: Any) -> Dataset:
        dataset = Dataset(url or self.path, **self.options, **options)
        return dataset.select(*(self.fields or (*dataset.fields, "id")))

    def loader(
        self, dataset: Dataset, rank: int = 0, size: int = 1, **options: Any
    ) -> DataLoader[Any]:
        options = {"global_batch_size": 8, "seed": 11, "shuffle": True, "as_dict": True, **options}
        if size > 1:
            options["pad"] = "mask"
        world = World(rank, size)
        return DataLoader(dataset, world=world, augment=self.recipe, **options)

    def epoch(self, dataset: Dataset, **options: Any) -> list[list[dict[str, Any]]]:
        with self.loader(dataset, **options) as batches:
            return [field_sets.plain(batch) for batch in batches]


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide datasets of a few kB into several shards."""
    for module in (candidates, table_files, npy_format, token_format, zarr_format):
        monkeypatch.setattr(module, "PART_BYTES", 600)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Write each dataset."""
    root = tmp_path_factory.mktemp("sets")
    folder = field_sets.write_folder(root / "folder", COUNT)
    numbers = field_sets.write_numbers(root / "numbers", COUNT)
    paths = {
        "folder": folder,
        "tar": field_sets.write_tars(root / "tar", COUNT),
        "pack": field_sets.pack_of(folder, root / "pack", schema=field_sets.SCHEMA),
        "numbers": numbers,
        "packed numbers": field_sets.pack_of(numbers, root / "packed-numbers", schema=TOKENS),
    }
    found = {}
    for name, path in paths.items():
        fields, schema, recipe = (
            (NUMBERS, TOKENS, None) if "numbers" in name else (STREET, field_sets.SCHEMA, CROP)
        )
        options = {} if "pack" in name else {"schema": schema}
        found[name] = Case(name=name, path=path, fields=fields, options=options, recipe=recipe)
    for name, each in SETS.items():
        place = tmp_path_factory.mktemp(name.replace(" ", "-"))
        found[name] = Case(name=name, path=place / each.write(place), options=each.options)
    return found


@pytest.fixture
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


# Sets that differ from others in decoding alone; other tests read all their values.
DECODED_ALIKE = ("zarr 2", "npz", "npz deflated", "arrow zstd")
cases_by_reading = pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[pytest.mark.grid] if name in DECODED_ALIKE else [])
        for name in (*CONTAINERS, *SETS)
    ],
    indirect=True,
)
chunked_cases = pytest.mark.parametrize("case", SETS, indirect=True)


def id_of(sample: dict[str, Any]) -> int:
    return int(np.frombuffer(sample["id"][2], np.int64)[0])


def array(plain: tuple[str, tuple[int, ...], bytes]) -> Any:
    dtype, shape, data = plain
    return np.frombuffer(data, dtype).reshape(shape)


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_value_of_a_container_is_the_one_that_was_written(
    container: str, cases: dict[str, Case]
) -> None:
    case = cases[container]
    with (
        case.open() as dataset,
        DataLoader(dataset, 8, seed=1, as_dict=True, shuffle=True) as batches,
    ):
        found = [sample for batch in batches for sample in field_sets.plain(batch)]
    assert len(found) == COUNT
    seen = set()
    for sample in found:
        number = int(array(sample["number"]))
        seen.add(number)
        wanted: dict[str, Any]
        if "numbers" in container:
            wanted = field_sets.numbers(number)
            assert sample["text"] == wanted["text"]
            assert array(sample["signal"]).tobytes() == wanted["signal"].tobytes()
            assert array(sample["tokens"]).tolist() == wanted["tokens"].tolist()
            assert array(sample["target"]) == np.float32(wanted["target"])
            continue
        each = field_sets.street(number)
        assert np.array_equal(array(sample["image"]), each.pixels)
        assert np.array_equal(array(sample["mask"]), each.mask)
        for name in ("boxes", "vector", "points"):
            assert np.array_equal(array(sample[name]), getattr(each, name)), name
            assert array(sample[name]).dtype == getattr(each, name).dtype
        assert sample["caption"] == each.caption
        assert array(sample["label"]) == each.label
    assert seen == set(range(COUNT))


@chunked_cases
def test_every_value_of_a_chunked_set_is_the_one_that_was_written(case: Case) -> None:
    each = SETS[case.name]
    with case.open() as dataset:
        # The deflated npz is one chunk.
        assert len(dataset.index.sizes) >= 2 or case.name == "npz deflated"
        samples = [sample for batch in case.epoch(dataset) for sample in batch]
    assert sorted(map(id_of, samples)) == list(range(each.count))
    for sample in samples:
        for name, value in each.wanted(id_of(sample)).items():
            if isinstance(value, str | bytes):
                assert sample[name] == value
                continue
            assert array(sample[name]).shape == value.shape, name
            assert np.array_equal(array(sample[name]), value), name


@pytest.mark.parametrize(
    ("case", "size"),
    [
        pytest.param(name, size, marks=[pytest.mark.grid] if name != "folder" and size < 5 else [])
        for name in (*CONTAINERS, *SETS)
        for size in (2, 3, 5)
    ],
    indirect=["case"],
)
def test_a_global_batch_is_the_same_in_every_world(case: Case, size: int) -> None:
    with case.open() as dataset:
        alone = case.epoch(dataset)
        ranks = [case.epoch(dataset, rank=rank, size=size) for rank in range(size)]
    for number, wanted in enumerate(alone):
        together = [
            {k: v for k, v in sample.items() if k != "valid"}
            for batches in ranks
            for sample in batches[number]
            if np.frombuffer(sample["valid"][2], np.bool_)[0]
        ]
        assert together == wanted


@cases_by_reading
def test_batches_threads_and_memory_change_no_sample(case: Case) -> None:
    def samples(decoded_bytes: Any = None, **options: Any) -> dict[int, Any]:
        kept = {} if decoded_bytes is None else {"decoded_bytes": decoded_bytes}
        with case.open(**kept) as dataset:
            batches = case.epoch(dataset, **{"order": Order(lanes=2, window=2), **options})
        return {id_of(sample): sample for batch in batches for sample in batch}

    wanted = samples()
    for options in (
        {"global_batch_size": 3, "read": "pread"},
        {"global_batch_size": 40, "read": "mmap", "prefetch_factor": 5},
        {"num_workers": 3, "decoded_bytes": 1},
        {"shuffle": False, "order": Order()},
    ):
        assert samples(**options) == wanted, options


@cases_by_reading
def test_every_steps_state_continues_exactly(case: Case) -> None:
    with case.open() as dataset:
        whole = case.epoch(dataset)
        with case.loader(dataset) as first:
            states = [first.state_dict() for _ in first]
        for done, state in enumerate(states[:-1], start=1):
            with case.loader(dataset) as again:
                again.load_state_dict(state)
                assert [field_sets.plain(batch) for batch in again] == whole[done:]


@cases_by_reading
def test_a_remote_and_its_cache_give_the_same(case: Case, tmp_path: Path) -> None:
    with case.open() as dataset:
        wanted = case.epoch(dataset)
    index = {} if "pack" in case.name else {"index": tmp_path / "index"}
    with uploaded(case.path) as url:
        with case.open(url, **index) as dataset:
            assert case.epoch(dataset) == wanted
        least = [20_000] if case.name in SETS else []  # other sets have larger shards
        for max_bytes in ("64MiB", "64MiB", *least):
            with (
                closing(DiskCache(tmp_path / f"cache-{max_bytes}", max_bytes=max_bytes)) as cache,
                case.open(url, cache=cache, **index) as dataset,
            ):
                assert case.epoch(dataset) == wanted


def samples_by_id(case: Case, dataset: Dataset) -> dict[int, Any]:
    return {id_of(s): s for batch in case.epoch(dataset, shuffle=False) for s in batch}


def samples_of_pack(case: Case, folder: Path) -> dict[int, Any]:
    with Dataset(folder) as packed, packed.select(*packed.fields, "id") as dataset:
        return samples_by_id(case, dataset)


@chunked_cases
def test_a_pack_of_it_has_the_same_samples(case: Case, tmp_path: Path) -> None:
    with case.open() as dataset:
        wanted = samples_by_id(case, dataset)
    options = dict(case.options)
    format = options.pop("format", "auto")
    sampling = check_sampling(**options)
    for workers in (1, 3):
        folder = tmp_path / f"pack-{workers}"
        pack(case.path, folder, shuffle=False, workers=workers, format=format, sampling=sampling)
        assert samples_of_pack(case, folder) == wanted
    pack(case.path, tmp_path / "shuffled", format=format, sampling=sampling)
    plain_values = sorted(repr({k: v for k, v in s.items() if k != "id"}) for s in wanted.values())
    shuffled = samples_of_pack(case, tmp_path / "shuffled").values()
    assert sorted(repr({k: v for k, v in s.items() if k != "id"}) for s in shuffled) == plain_values


def test_masks_and_boxes_stay_with_their_pixels(cases: dict[str, Case]) -> None:
    """Each class of a mask lies in its box, however they were cut and mirrored."""
    with cases["pack"].open() as dataset, cases["pack"].loader(dataset) as batches:
        seen = 0
        for batch in batches:
            assert batch["mask"].shape[1:] == batch["image"].shape[2:]
            for mask, boxes in zip(batch["mask"], batch["boxes"], strict=True):
                for number, (left, top, right, bottom) in enumerate(boxes.tolist(), start=1):
                    rows, columns = torch.where(mask == number)
                    if not len(rows):
                        continue
                    seen += 1
                    # A nearest pixel stands for one whose centre is up to a pixel's width away.
                    assert left - 1.5 <= int(columns.min())
                    assert int(columns.max()) <= right + 1.5
                    assert top - 1.5 <= int(rows.min())
                    assert int(rows.max()) <= bottom + 1.5
    assert seen > 20
