"""Loaders over parts and concatenations of datasets are exact and resumable."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest

from penstock import concat
from penstock.augment import imagenet_train
from penstock.cache import ConfigError, ResumeError
from penstock.cache.disk import DiskCache
from penstock.pipeline import DataLoader, Order, World
from penstock.pipeline.feed import warm
from penstock.readers import Dataset
from tests.conftest import SAMPLES
from tests.pipeline.feed.test_bad_samples import bad_ids, build
from tests.sources import Values
from tests.tars import archive, photographs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from penstock.readers import Source

pytestmark = pytest.mark.filterwarnings("ignore:Labels cluster inside shards")

SIZE = 16
RECIPE = imagenet_train(SIZE)


def make(source: Source, **options: Any) -> DataLoader:
    sized = {} if "global_batch_size" in options else {"batch_size": 8}
    return DataLoader(source, **{"shuffle": True, "seed": 5, **sized, **options})


def ids_of(source: Source) -> list[int]:
    rows = source.contents.rows(np.arange(len(source), dtype=np.int64))
    ids: list[int] = source.ids(rows).tolist()
    return ids


def ids_in(batches: Any) -> list[list[int]]:
    """Of each batch, whose last field they are."""
    return [batch[-1].tolist() for batch in batches]


def flat(lists: Iterable[list[int]]) -> list[int]:
    return [number for each in lists for number in each]


def by_id(batches: Any) -> dict[int, Any]:
    """The first field of each sample."""
    return {int(i): x for batch in batches for i, x in zip(batch[-1], batch[0], strict=True)}


@pytest.fixture(scope="module")
def whole(pack: Path) -> Iterator[Dataset]:
    with Dataset(str(pack), fields=("image", "label", "id")) as found:
        yield found


@pytest.fixture(scope="module")
def labels(pack: Path) -> Iterator[Dataset]:
    """The same, without decoding."""
    with Dataset(str(pack), fields=("label", "id")) as found:
        yield found


def test_an_epoch_holds_each_selected_sample_once_with_the_pixels_of_the_whole(
    whole: Dataset,
) -> None:
    chosen = sorted(np.random.default_rng(0).permutation(SAMPLES)[:90].tolist())
    with make(whole.subset(chosen), augment=RECIPE) as loader, make(whole, augment=RECIPE) as all_:
        for _ in range(2):
            found, wanted = by_id(loader), by_id(all_)
            assert sorted(found) == chosen == sorted(loader.sampler)
            assert all(found[i].equal(wanted[i]) for i in chosen)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_world_shares_the_same_batches(labels: Dataset, size: int) -> None:
    some = labels.subset(range(0, SAMPLES, 2))
    with make(some, global_batch_size=10, drop_last=True) as one:
        wanted = ids_in(one)
    ranks = []
    for rank in range(size):
        world = World(rank, size)
        with make(some, global_batch_size=10, drop_last=True, world=world) as loader:
            ranks.append(ids_in(loader))
    assert [flat(batches) for batches in zip(*ranks, strict=True)] == wanted


def test_any_step_resumes_at_another_world(labels: Dataset) -> None:
    train, _ = labels.split(0.6, 0.4, seed=1, by="label")
    options: dict[str, Any] = {"global_batch_size": 12, "drop_last": True}
    with make(train, **options) as loader:
        states, batches = [], []
        for batch in loader:
            states.append(loader.state_dict())
            batches.append(sorted(batch[-1].tolist()))
    for step, state in enumerate(states[:-1]):
        rest: list[list[list[int]]] = []
        for rank in range(3):
            with make(train, **options, world=World(rank, 3)) as loader:
                loader.load_state_dict(state)
                rest.append(ids_in(loader))
        again = [sorted(flat(parts)) for parts in zip(*rest, strict=True)]
        assert again == batches[step + 1 :]


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_part_is_evaluated_exactly_once(labels: Dataset, size: int) -> None:
    _, test = labels.split(0.8, 0.2, seed=1)
    seen: list[int] = []
    for rank in range(size):
        with make(test, shuffle=False, pad="mask", world=World(rank, size)) as loader:
            for _, ids, valid in loader:
                seen += ids[valid].tolist()
    assert sorted(seen) == ids_of(test)


def test_a_state_belongs_to_the_samples_that_it_was_saved_for(labels: Dataset) -> None:
    train, test = labels.split(0.5, 0.5, seed=1)
    both = concat([train, test])
    sources = [labels, train, test, both, concat([test, train]), labels.subset(range(100))]
    states = []
    for source in sources:
        with make(source) as loader:
            next(iter(loader))
            states.append(loader.state_dict())
    for mine, source in enumerate(sources):
        for other, state in enumerate(states):
            with make(source) as loader:
                if other == mine:
                    loader.load_state_dict(state)
                    continue
                with pytest.raises(ResumeError, match="is a dataset of its own"):
                    loader.load_state_dict(state)
    again, _ = labels.split(0.5, 0.5, seed=1)
    with make(again) as loader:
        loader.load_state_dict(states[1])


def test_what_is_in_the_fingerprint_and_what_is_not(
    labels: Dataset, whole: Dataset, ordered_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of the fingerprint are those of earlier releases."""

    def fingerprint(source: Source, **options: Any) -> Any:
        with make(source, **{"order": Order(lanes=2, window=4), **options}) as loader:
            return loader.state_dict()["fingerprint"]

    first = fingerprint(labels)
    assert fingerprint(labels, batch_size=16) == first
    assert fingerprint(labels, world=World(1, 4), drop_last=True) == first
    assert fingerprint(Dataset(labels.url, fields=("id",))) == first
    assert fingerprint(whole, augment=RECIPE) == first
    different = [
        fingerprint(Dataset(str(ordered_pack), fields=("label", "id"))),
        fingerprint(labels, seed=6),
        fingerprint(labels, order=Order(lanes=4, window=4)),
        fingerprint(labels, order=Order(lanes=2, window=5)),
        fingerprint(labels, order=Order(lanes=2, window=4, reshuffle=0.5)),
        fingerprint(labels, shuffle=False, order=Order()),
        fingerprint(labels.subset(range(150))),
        fingerprint(labels.subset(range(1, 151))),
        fingerprint(concat([labels, labels])),
    ]
    monkeypatch.setattr("penstock.pipeline.plan.order.ORDER_VERSION", 1000)
    different.append(fingerprint(labels))
    assert len({first, *different}) == len(different) + 1


def test_folder_and_pack_end_to_end(folder: Path, ordered_pack: Path) -> None:
    """Containers of two kinds, as one."""
    fields = ("image", "label", "id")
    with Dataset(str(folder), fields=fields) as a, Dataset(str(ordered_pack), fields=fields) as b:
        both = concat([a, b])
        with make(both, augment=RECIPE, batch_size=16) as loader:
            labels = {int(i): int(n) for _, of, ids in loader for i, n in zip(ids, of, strict=True)}
        assert sorted(labels) == list(range(2 * SAMPLES))
        assert all(labels[i] == labels[SAMPLES + i] for i in range(SAMPLES))
        assert both.names([3, SAMPLES + 3]) == [*a.names([3]), *b.names([3])]
        column = both.column("label")
        assert np.asarray(column).tolist() == [labels[i] for i in range(2 * SAMPLES)]
        mixed = both.subset([0, 1, SAMPLES, SAMPLES + 1])
        with make(mixed, augment=RECIPE, batch_size=4) as loader:
            assert sorted(ids_in(loader)[0]) == [0, 1, SAMPLES, SAMPLES + 1]


def test_patients_stay_together_and_what_some_lack_is_chosen_by_a_mask(tmp_path: Path) -> None:
    members = photographs(0, 40)
    for number in range(40):
        said: dict[str, object] = {"patient": f"p{number % 9}", "age": number % 4}
        if number % 3:
            said["score"] = number / 3
        members[f"{number:05d}.json"] = json.dumps(said).encode()
    names = sorted(members)
    (tmp_path / "train.tar").write_bytes(archive([(name, members[name]) for name in names]))
    with Dataset(str(tmp_path / "train.tar")) as dataset:
        for by in ("patient", "age", lambda name: name[-5]):
            parts = dataset.split(0.7, 0.3, seed=2, by=by)
            assert sum(map(len, parts)) == 40
            if isinstance(by, str):
                assert not {*parts[0].column(by)} & {*parts[1].column(by)}
        with pytest.raises(ConfigError, match=r'14 samples of .* lack it.*"score.present"'):
            dataset.column("score")
        some = dataset.subset(dataset.column("score.present"))
        assert len(some) == 26
        assert np.asarray(some.column("score")).dtype == np.float32
        train, _ = some.split(0.5, 0.5, seed=0, by="label")
        with make(train, augment=RECIPE) as loader:
            assert sum(len(batch[0]) for batch in loader) == len(train)


def test_sources_of_numbers_need_no_decoder() -> None:
    source = Values([7, 5, 9]).subset(range(1, 20))
    with make(source, batch_size=4) as loader:
        pairs = [pair for values, ids in loader for pair in zip(values, ids, strict=True)]
    assert sorted((int(v), int(i)) for v, i in pairs) == [(1000 + i, i) for i in range(1, 20)]


@pytest.mark.filterwarnings("ignore:Sample .* is bad")
def test_substitutes_are_of_the_selection(tmp_path: Path) -> None:
    root = build(tmp_path / "set", bad={3, 10, 11}, samples=40)
    bad = bad_ids(root, {3, 10, 11})
    with Dataset(str(root), fields=("image", "label", "id")) as dataset:
        good = [i for i in range(40) if i not in bad]
        chosen = sorted([*bad, *good[:9]])
        some = dataset.subset(chosen)
        with make(some, augment=RECIPE, batch_size=4, max_bad=1.0) as loader:
            for _ in range(2):
                ids = [i for batch in ids_in(loader) for i in batch]
                assert set(ids) <= set(chosen) - bad
                assert set(good[:9]) <= set(ids)
                assert len(ids) == len(chosen)
            assert loader.statistics().bad == 2 * 3


def test_small_selections_stay_decoded(whole: Dataset) -> None:
    train, test = whole.split(0.5, 0.25, seed=0)
    for part in (train, concat([test, train])):
        with (
            make(part, augment=RECIPE, resident=True) as kept,
            make(part, augment=RECIPE, resident=False) as read,
        ):
            for _ in range(2):
                for ours, theirs in zip(kept, read, strict=True):
                    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))
            assert kept.statistics().resident_bytes > 0


def test_a_selection_of_a_closed_dataset_is_reopened_where_it_is_unpickled(
    pack: Path, labels: Dataset
) -> None:
    train, _ = Dataset(str(pack), fields=("label", "id")).split(0.5, 0.5, seed=3)
    with make(pickle.loads(pickle.dumps(train))) as ours, make(train) as theirs:
        assert ids_in(ours) == ids_in(theirs)
    both = pickle.loads(pickle.dumps(concat([train, labels])))
    assert len(both) == len(train) + SAMPLES


# -- from afar


def afar(pack: Path, cache: DiskCache, fields: tuple[str, ...] = ("label", "id")) -> Dataset:
    files = fsspec.filesystem("file", skip_instance_cache=True)
    return Dataset(str(pack), fields=fields, filesystem=files, cache=cache)


def cache_at(path: Path) -> DiskCache:
    return DiskCache(path, max_bytes="64MiB")


def bytes_of(pack: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in pack.glob("*.arrow")}


def test_warm_fetches_the_shards_of_a_selection_alone(pack: Path, tmp_path: Path) -> None:
    with afar(pack, cache_at(tmp_path / "cache")) as dataset:
        sizes = dataset.contents.sizes
        some = dataset.subset(range(int(sizes[0]), int(sizes[:3].sum())))  # of two shards
        result = warm(some, global_batch_size=8)
        names = [dataset.index.shard_name(shard) for shard in (1, 2)]
        assert result.objects == 2
        assert result.bytes == sum(bytes_of(pack)[name] for name in names)
        before = dataset.traffic().bytes_remote
        with make(some) as loader:
            assert sorted(flat(ids_in(loader))) == ids_of(some)
            assert loader.statistics().hit_ratio == 1.0
        assert dataset.traffic().bytes_remote == before
        rest = warm(dataset, global_batch_size=8)
        assert (rest.skipped, rest.objects) == (2, len(sizes) - 2)


def test_parts_through_caches_of_their_own_and_a_local_one(
    pack: Path, ordered_pack: Path, folder: Path, tmp_path: Path
) -> None:
    """Each byte comes once; what is local isn't asked for."""
    with (
        afar(pack, cache_at(tmp_path / "a")) as a,
        afar(ordered_pack, cache_at(tmp_path / "b")) as b,
        Dataset(str(folder), fields=("label", "id")) as c,
    ):
        some = concat([a.subset(range(100)), b, c, a.subset(range(100, SAMPLES))])
        assert len(some) == 3 * SAMPLES
        result = warm(some, global_batch_size=16)
        wanted = sum(bytes_of(pack).values()) + sum(bytes_of(ordered_pack).values())
        assert result.bytes == wanted
        remote = some.remote_shards
        assert remote is not None
        assert len(remote.remotes) == len(remote.caches) == 2
        assert all(map(remote.is_whole, range(len(some.contents.sizes))))
        fetched = remote.traffic().bytes_remote
        with make(some, batch_size=16) as loader:
            for _ in range(2):
                assert sorted(flat(ids_in(loader))) == ids_of(some)
            found = loader.statistics()
        assert remote.traffic().bytes_remote == fetched
        assert found.cache_max_bytes == 2 * 64 * 2**20


def test_parts_from_afar_are_filled_while_they_are_read(
    pack: Path, ordered_pack: Path, tmp_path: Path
) -> None:
    cache, fields = cache_at(tmp_path / "cache"), ("image", "id")
    with (
        afar(pack, cache, fields) as a,
        afar(ordered_pack, cache, fields) as b,
        Dataset(str(ordered_pack), fields=fields) as local,
    ):
        some = concat([a, local, b])
        with make(some, augment=RECIPE) as loader:
            for _ in range(3):
                assert sorted(flat(ids_in(loader))) == ids_of(some)
        wanted = sum(bytes_of(pack).values()) + sum(bytes_of(ordered_pack).values())
        remote = some.remote_shards
        assert remote is not None
        assert all(map(remote.is_whole, range(len(some.contents.sizes))))
        assert remote.traffic().bytes_remote <= 1.05 * wanted


def test_a_local_selection_has_nothing_to_warm(labels: Dataset) -> None:
    with pytest.raises(ConfigError, match="is local: there is nothing to warm"):
        warm(labels.subset([1, 2]))
