"""Maps in a loader's recipe give the same output with any number of threads and processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Array, ClassLabel, DataLoader, Dataset, Map, Text, Tokens, Value
from penstock.augment import Pad, Resize, imagenet_eval
from penstock.cache import ConfigError, MapError, NotPicklableError, RecipeError, WorkerError
from penstock.pipeline import World
from tests.pipeline.feed.mapping import functions
from tests.torch_datasets import Squares, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:Labels cluster inside shards"),
    pytest.mark.filterwarnings("ignore:Sample .* is bad"),
]

SIZE = 16
RETURNS: Any = {"vector": Array("float32", (3,)), "word": Text()}


def length(image: bytes) -> int:
    return len(image)


def make(path: Path, *maps: Any, fields: Any = ("image", "label", "id"), **options: Any) -> Any:
    given = {"batch_size": 10, "shuffle": True, "seed": 7, "num_workers": 1, **options}
    recipe = given.pop("rest", imagenet_eval(SIZE) if "image" in fields else [])
    return DataLoader(Dataset(str(path), fields=fields), augment=[*maps, *recipe], **given)


def drawn(processes: int = 0) -> Map:
    return Map(functions.draw, ("label", "id"), returns=RETURNS, processes=processes)


class TestOut:
    def test_new_fields_come_last(self, pack: Path) -> None:
        with make(pack, drawn()) as loader:
            images, labels, ids, vectors, words = next(iter(loader))
        assert images.shape == (10, 3, SIZE, SIZE)
        assert vectors.dtype == torch.float32
        assert vectors[:, 0].tolist() == labels.tolist()
        assert vectors[:, 1].tolist() == ids.tolist()
        assert [word.split(":")[0] for word in words] == [str(i) for i in ids.tolist()]

    def test_fields_change_where_they_are(self, pack: Path) -> None:
        with make(pack, Map(lambda label: float(label), "label", returns=FLOAT)) as loader:
            _, labels, _ = next(iter(loader))
        assert labels.dtype == torch.float32

    def test_by_name_without_images_and_padded(self, pack: Path) -> None:
        op = Map(lambda i: list(range(int(i) % 4)), "id", returns={"tokens": Tokens()})
        with make(
            pack, op, rest=[Pad("tokens", to=4, value=-1)], fields=("label", "id"), as_dict=True
        ) as loader:
            batch = next(iter(loader))
        assert list(batch) == ["label", "id", "tokens"]
        for i, row in zip(batch["id"].tolist(), batch["tokens"].tolist(), strict=True):
            assert row == [*range(i % 4), *[-1] * (4 - i % 4)]

    def test_a_mapping_names_the_field(self, pack: Path) -> None:
        with DataLoader(
            Dataset(str(pack), fields=("image", "label")),
            8,
            augment={"label": [Map(lambda label: 6 - label)], "image": [Resize((SIZE, SIZE))]},
        ) as loader:
            images, labels = next(iter(loader))
        assert images.shape == (8, 3, SIZE, SIZE)
        with DataLoader(Dataset(str(pack), fields=("label",)), 8) as other:
            assert (6 - labels).tolist() == next(iter(other))[0].tolist()

    def test_images_are_seen_as_they_are_stored(self, folder: Path) -> None:
        with make(folder, Map(length, "image", returns={"bytes": Value("int64")})) as loader:
            dataset = loader.dataset
            sizes = {
                i: os.path.getsize(folder / name)
                for i, name in enumerate(dataset.names(range(len(dataset))))
            }
            for _, _, ids, lengths in loader:
                assert lengths.tolist() == [sizes[i] for i in ids.tolist()]


FLOAT: Any = {"label": Value("float32")}


class TestExact:
    @pytest.mark.parametrize("processes", [0, 1, 3])
    def test_any_number_of_processes_and_worlds(self, pack: Path, processes: int) -> None:
        """Two epochs; what a sample has is its own."""

        def words(loader: Any) -> dict[int, list[str]]:
            found: dict[int, list[str]] = {}
            for _ in range(2):
                for batch in loader:
                    for i, word in zip(batch[1].tolist(), batch[3], strict=True):
                        found.setdefault(i, []).append(word)
            return found

        fields = ("label", "id")
        with make(pack, drawn(), fields=fields) as loader:
            reference = words(loader)
        assert all(one != other for one, other in reference.values())
        found: dict[int, list[str]] = {}
        for rank in range(2):
            with make(
                pack, drawn(processes), fields=fields, world=World(rank, 2), drop_last=True
            ) as loader:
                for i, both in words(loader).items():
                    found.setdefault(i, []).extend(both)
        for i, some in found.items():
            assert set(some) <= set(reference[i])

    @pytest.mark.parametrize("processes", [0, 2])
    def test_resume_at_some_steps(self, pack: Path, processes: int) -> None:
        with make(pack, drawn()) as loader:
            whole = list(loader)
        for stop in range(0, len(whole), 3 if not processes else 7):
            with make(pack, drawn(processes)) as first:
                passing = iter(first)
                head = [next(passing) for _ in range(stop)]
                state = json.loads(json.dumps(first.state_dict()))
            with make(pack, drawn(processes)) as second:
                second.load_state_dict(state)
                assert all(map(same, [*head, *second], whole))

    def test_images_that_stay_in_memory(self, pack: Path) -> None:
        """A function is called in each epoch, as its random numbers differ."""
        with make(pack, drawn(), resident=True) as one, make(pack, drawn()) as other:
            for _ in range(2):
                assert all(map(same, one, other))
            assert one.statistics().resident_hits > 0

    def test_threads_that_read_change_nothing(self, pack: Path, folder: Path) -> None:
        """A folder is read by four threads."""
        found = []
        for path in (folder, folder):
            with make(path, drawn(), read="pread") as loader:
                found.append(list(loader))
        assert all(map(same, *found))
        with make(pack, drawn(2), read="pread") as one, make(pack, drawn()) as other:
            assert all(map(same, one, other))


class TestBadSamples:
    @pytest.mark.parametrize("processes", [0, 1])
    def test_a_function_may_call_a_sample_bad(self, pack: Path, processes: int) -> None:
        op = Map(functions.third_is_bad, "id", returns={"x": Value("int64")}, processes=processes)
        with make(pack, op, max_bad=0.5) as loader:
            own = list(loader.sampler)
            columns = [(b[2].tolist(), b[3].tolist()) for b in loader]
            pairs = [pair for ids, xs in columns for pair in zip(ids, xs, strict=True)]
            statistics = loader.statistics()
        assert all(i == x and i % 3 for i, x in pairs)
        assert statistics.bad == sum(i % 3 == 0 for i in own)
        lines = [json.loads(line) for line in Path(statistics.quarantine).read_text().splitlines()]
        assert {line["reason"] for line in lines} == {"it is a third"}
        assert {line["id"] for line in lines} == {i for i in own if i % 3 == 0}

    def test_in_a_padded_batch_they_are_marked(self, pack: Path) -> None:
        op = Map(functions.third_is_bad, "id", returns={"x": Value("int64")})
        is_marked = False
        with make(pack, op, shuffle=False, pad="mask", max_bad=1.0) as loader:
            for _, _, ids, xs, valid in loader:
                for i, x, is_valid in zip(*(t.tolist() for t in (ids, xs, valid)), strict=True):
                    assert x == i if is_valid else True
                    assert not is_valid or i % 3
                    is_marked |= not is_valid and i % 3 == 0 and x == 0 != i
        assert is_marked

    def test_bad_by_chance_is_bad_in_its_epoch_only(self, pack: Path) -> None:
        op = Map(functions.sometimes_bad, "id", returns={"x": Value("int64")})
        fields = ("label", "id")
        with make(pack, op, fields=fields, max_bad=1.0) as loader:
            both = [[b[2].tolist() for b in loader] for _ in range(2)]
        with make(pack, op, fields=fields, max_bad=1.0) as loader:
            loader.set_epoch(1)
            assert [b[2].tolist() for b in loader] == both[1]


class TestRefused:
    @pytest.mark.parametrize(
        ("maps", "options", "error", "words"),
        [
            ([Map(length, "caption")], {}, RecipeError, "unknown field .caption."),
            (
                [Map(abs, "id", returns={"label": Value("int64")})],
                {"fields": ("image",)},
                RecipeError,
                'returns "label", a field of the dataset .* leaves out',
            ),
            ([Map(length, "image")], {}, RecipeError, "only stored bytes"),
            ([Resize(8), Map(length, "label")], {}, RecipeError, "comes after Resize"),
            ([Map(length)], {}, RecipeError, "such as fields="),
            ([Map(lambda x: x, "label", processes=1)], {}, NotPicklableError, "can't be sent"),
            (
                [Map(length, "image", returns={"n": Value("int64")})],
                {"resident": True},
                ConfigError,
                "resident=True",
            ),
        ],
    )
    def test_before_any_work(
        self, pack: Path, maps: Any, options: Any, error: Any, words: str
    ) -> None:
        with pytest.raises(error, match=words):
            make(pack, *maps, **options)

    def test_torch_datasets_have_their_own_code(self) -> None:
        with pytest.raises(ConfigError, match="Map in augment="):
            DataLoader(Squares(8), 2, seed=1, augment=[Map(length, "x")])

    @pytest.mark.parametrize("processes", [0, 1])
    def test_what_does_not_fit_stops_the_loader(self, pack: Path, processes: int) -> None:
        op = Map(functions.tokens, "label", processes=processes)
        with make(pack, op) as loader:
            with pytest.raises(AttributeError, match="encode") as caught:
                next(iter(loader))
            assert any("was processing sample" in note for note in caught.value.__notes__)
        with (
            make(pack, Map(length_of_name, "id", returns={"x": ClassLabel(("a",))})) as loader,
            pytest.raises(MapError, match=r"At sample \d+ \(.*\): Map\(length_of_name\) returned"),
        ):
            next(iter(loader))

    def test_a_stop_iteration_does_not_end_the_epoch(self, pack: Path) -> None:
        op = Map(lambda _: next(iter(())), "label")
        with make(pack, op) as loader, pytest.raises(RuntimeError, match="raised StopIteration"):
            list(loader)

    def test_a_killed_process_is_an_error_and_asking_again_goes_on(self, pack: Path) -> None:
        op = Map(functions.killed_at_seven, "id", returns={"x": Value("int64")}, processes=2)
        with make(pack, op, shuffle=False, fields=("label", "id"), batch_size=5) as loader:
            passing = iter(loader)
            assert next(passing)[1].tolist() == [0, 1, 2, 3, 4]
            for _ in range(2):
                with pytest.raises(WorkerError, match="was killed by SIGKILL"):
                    next(passing)


def length_of_name(number: Any) -> int:
    return 5 + int(number)


def test_the_statistics_tell_what_it_took(pack: Path) -> None:
    with make(pack, drawn()) as loader:
        list(loader)
        statistics = loader.statistics()
    assert statistics.map_s > 0
    assert statistics.facts.map is not None
    assert statistics.facts.map.name == "Map(draw)"
