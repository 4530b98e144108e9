"""Bad samples are found, replaced by the same substitutes on all ranks, reported and limited."""

from __future__ import annotations

import io
import json
import os
import tempfile
import warnings
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from penstock.augment import imagenet_eval, imagenet_train
from penstock.cache import FetchError, PenstockWarning, TooManyBadSamplesError
from penstock.pipeline import DataLoader, Order, World
from penstock.pipeline.plan import ATTEMPTS, SAME_SHARD_ATTEMPTS, substitutes
from penstock.pipeline.report import QuarantineFile
from penstock.readers import Dataset, ImageFacts, Rejection, pack
from tests.conftest import photograph
from tests.properties import examples
from tests.sources import values_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers import Encoded

pytestmark = [
    pytest.mark.filterwarnings("ignore:Labels cluster inside shards"),
    pytest.mark.filterwarnings("ignore:Sample .* is bad"),
    pytest.mark.filterwarnings("ignore:The global batch goes from"),
]

SAMPLES, SIZE = 120, 16
DIMS = (40, 48)


def credulous(samples: Sequence[Encoded]) -> list[ImageFacts | Rejection]:
    """Believes anything to be an image."""
    return [ImageFacts(height=DIMS[0], width=DIMS[1], channels=3, codec="png") for _ in samples]


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    picture = np.resize(photograph(number), (*DIMS, 3))
    Image.fromarray(picture).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def damaged(number: int) -> bytes:
    """Three kinds: cut off, no header at all, a header of another size."""
    good = png(number)
    if number % 3 == 0:
        return b"\x89PNG\r\n\x1a\n" + b"no header " * 9
    if number % 3 == 1:
        return good[: len(good) * 6 // 10]
    buffer = io.BytesIO()
    Image.fromarray(photograph(number)[:20, :20]).save(buffer, "PNG")
    return buffer.getvalue()


def build(root: Path, bad: set[int], samples: int = SAMPLES) -> Path:
    for number in range(samples):
        path = root / f"class-{number % 4}" / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(damaged(number) if number in bad else png(number))
    Dataset(str(root)).open(verify=credulous)
    return root


def number_of(name: str) -> int:
    return int(Path(name).stem)


def bad_ids(root: Path, numbers: set[int]) -> set[int]:
    dataset = Dataset(str(root))
    return {
        i for i, name in enumerate(dataset.names(range(len(dataset)))) if number_of(name) in numbers
    }


RANDOM_30 = set(np.random.default_rng(4).choice(SAMPLES, SAMPLES * 3 // 10, replace=False).tolist())


@pytest.fixture(scope="module")
def thirty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 % of the samples are bad, at random; each passes its checksum."""
    return build(tmp_path_factory.mktemp("thirty") / "set", RANDOM_30)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


def make(path: Path, **options: Any) -> DataLoader:
    given = {
        "batch_size": 10,
        "shuffle": True,
        "seed": 7,
        "augment": imagenet_train(SIZE),
        "num_workers": 2,
        "max_bad": 1.0,
        "order": Order(lanes=2 if options.get("shuffle", True) else None),
        **options,
    }
    cache = given.pop("cache", None)
    return DataLoader(Dataset(str(path), fields=("image", "label", "id"), cache=cache), **given)


def ids_of(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch[2].tolist()]


def stand_ins(path: Path, *, epochs: int = 1, **options: Any) -> dict[tuple[int, int], int]:
    """(epoch, own id) -> id that was handed out, over all ranks of `worlds`."""
    found: dict[tuple[int, int], int] = {}
    size = options.pop("worlds", 1)
    for rank in range(size):
        with make(path, world=World(rank, size), **options) as loader:
            for epoch in range(epochs):
                own = list(loader.sampler)
                found |= {(epoch, o): i for o, i in zip(own, ids_of(loader), strict=True)}
    return found


class TestSubstitutes:
    @examples(100)
    @given(
        sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
        seed=st.integers(0, 2**70),
        epoch=st.integers(0, 99),
        data=st.data(),
    )
    def test_near_first_then_anywhere(
        self, sizes: list[int], seed: int, epoch: int, data: st.DataObject
    ) -> None:
        contents = values_of(sizes)
        place = data.draw(st.integers(0, contents.samples - 1))

        def found_for(sample_id: int) -> list[int]:
            starts, sizes = contents.starts, contents.sizes
            return list(substitutes(sample_id, seed=seed, epoch=epoch, starts=starts, sizes=sizes))

        found = found_for(place)
        assert found == found_for(place)
        assert len(found) == ATTEMPTS
        assert all(0 <= one < contents.samples for one in found)
        near = [place, *found[:SAME_SHARD_ATTEMPTS]]
        assert len(set(np.searchsorted(contents.starts, near, side="right").tolist())) == 1

    @given(
        sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
        occurrence=st.integers(0, 3),
        data=st.data(),
    )
    def test_within_a_part(self, sizes: list[int], occurrence: int, data: st.DataObject) -> None:
        contents = values_of(sizes)
        first_shard = data.draw(st.integers(0, len(sizes) - 1))
        end_shard = data.draw(st.integers(first_shard + 1, len(sizes)))
        first, end = sum(sizes[:first_shard]), sum(sizes[:end_shard])
        place = data.draw(st.integers(first, end - 1))

        def found_with(**more: Any) -> list[int]:
            starts, counts = contents.starts, contents.sizes
            return list(substitutes(place, seed=1, epoch=2, starts=starts, sizes=counts, **more))

        found = found_with(within=(first, end), occurrence=occurrence)
        assert all(first <= one < end for one in found)
        if (first, end) == (0, contents.samples):
            assert found == found_with(occurrence=occurrence)
        if occurrence and contents.samples > 3:
            assert found_with(occurrence=occurrence) != found_with()

    def test_every_bad_sample_is_replaced_and_no_good_one_is(self, thirty: Path) -> None:
        bad = bad_ids(thirty, RANDOM_30)
        found = stand_ins(thirty, epochs=2)
        assert len(found) == 2 * SAMPLES
        for (_, own), got in found.items():
            assert got not in bad
            assert (got == own) == (own not in bad)
        first = {own: got for (epoch, own), got in found.items() if epoch == 0}
        second = {own: got for (epoch, own), got in found.items() if epoch == 1}
        assert first != second  # another epoch, other substitutes

    def test_batch_and_world_do_not_change_them(self, thirty: Path) -> None:
        wanted = stand_ins(thirty)
        for options in (
            {"batch_size": 1, "prefetch_factor": 5},
            {"batch_size": 40},
            {"worlds": 2, "batch_size": 20, "drop_last": True},
            {"worlds": 3, "batch_size": 8, "drop_last": True},
        ):
            assert stand_ins(thirty, **options) == wanted

    def test_images_and_labels_are_the_substitutes_own(self, thirty: Path) -> None:
        """The same id has the same pixels and label wherever it stands, for itself or another."""
        seen: dict[int, tuple[int, bytes]] = {}
        with make(thirty) as loader:
            dataset: Any = loader.dataset
            for images, labels, ids in loader:
                for image, label, i in zip(images, labels.tolist(), ids.tolist(), strict=True):
                    now = (label, image.numpy().tobytes())
                    assert seen.setdefault(i, now) == now
            names = dataset.names(seen)
        assert [label for label, _ in seen.values()] == [number_of(n) % 4 for n in names]
        alone = build_alone(thirty)
        assert {i: pixels for i, (_, pixels) in seen.items()} == {i: alone[i] for i in seen}

    def test_resume_in_the_middle(self, thirty: Path) -> None:
        with make(thirty) as loader:
            batches = iter(loader)
            for _ in range(5):
                next(batches)
            state = json.loads(json.dumps(loader.state_dict()))
            rest = ids_of(batches)
            following = ids_of(loader)
        assert state["bad"] == 50 - good_in_first(thirty, 50)
        for batch_size in (10, 7):
            with make(thirty, batch_size=batch_size) as loader:
                loader.load_state_dict(state)
                assert loader.state_dict()["bad"] == state["bad"]
                # Another batch size sorts the same samples into other batches.
                assert sorted(ids_of(loader)) == sorted(rest)
                assert sorted(ids_of(loader)) == sorted(following)

    def test_one_bad_sample_in_every_batch(self, tmp_path: Path) -> None:
        numbers = set(range(0, SAMPLES, 10))
        path = build(tmp_path / "set", numbers)
        bad = bad_ids(path, numbers)
        with make(path, shuffle=False, augment=imagenet_eval(SIZE, resize=20)) as loader:
            for _ in range(3):
                got = ids_of(loader)
                assert [i for i in got if i in bad] == []
                assert [a for a, b in enumerate(got) if a != b] == sorted(bad)
            assert loader.statistics().bad == 3 * len(bad)

    def test_all_of_one_ranks_share_is_gone(self, tmp_path: Path) -> None:
        path = build(tmp_path / "set", set())
        loaders = [
            make(path, batch_size=20, drop_last=True, world=World(rank, 2)) for rank in range(2)
        ]
        shares = [list(loader.sampler) for loader in loaders]
        dataset: Any = loaders[0].dataset
        for name in dataset.names(shares[1]):
            (path / name).unlink()  # an index that is opened later would know
        first, second = (ids_of(loader) for loader in loaders)
        assert first == shares[0]
        assert set(second) <= set(first)
        assert [loader.statistics().bad for loader in loaders] == [0, len(shares[1])]
        for loader in loaders:
            loader.close()


def build_alone(path: Path) -> dict[int, bytes]:
    """Pixels of each good sample, decoded in batches of one."""
    with make(path, batch_size=1) as loader:
        return {int(ids[0]): images[0].numpy().tobytes() for images, _, ids in loader}


def good_in_first(path: Path, count: int) -> int:
    bad = bad_ids(path, RANDOM_30)
    with make(path) as loader:
        return sum(i not in bad for i in list(loader.sampler)[:count])


class TestKinds:
    def test_wrong_bytes_in_a_pack(self, tmp_path: Path) -> None:
        source = build(tmp_path / "set", set(), samples=40)
        pack(
            str(source),
            str(tmp_path / "pack"),
            shuffle=False,
            shard_bytes="64KiB",
            verify=credulous,
        )
        with Dataset(str(tmp_path / "pack")) as dataset:
            rows = np.array([(0, 3)], np.int64)
            wanted = bytes(dataset.read(rows).columns["image"].samples[0])
        shard = sorted((tmp_path / "pack").glob("*.arrow"))[0]
        data = bytearray(shard.read_bytes())
        data[data.index(wanted) + 60] ^= 1
        shard.write_bytes(data)
        for read in ("copy", "pread", "mmap"):
            with make(tmp_path / "pack", shuffle=False, read=read) as loader:
                got = ids_of(loader)
            assert [own for own, i in enumerate(got) if i != own] == [3]

    @pytest.mark.parametrize("harm", ["gone", "longer", "changed", "a folder"])
    def test_files_of_a_folder(self, tmp_path: Path, harm: str) -> None:
        path = build(tmp_path / "set", set(), samples=40)
        with make(path, shuffle=False, cache=tmp_path / "cache") as loader:
            dataset: Any = loader.dataset
            name = path / dataset.names([5])[0]
            data = bytearray(name.read_bytes())
            name.unlink()  # an index that is opened later would know
            if harm == "longer":
                name.write_bytes(data + b"x")
            elif harm == "changed":
                data[-30] ^= 1
                name.write_bytes(data)
            elif harm == "a folder":
                name.mkdir()
            got = ids_of(loader)
            told = Path(loader.statistics().quarantine).read_text().splitlines()
        assert [own for own, i in enumerate(got) if i != own] == [5]
        assert [json.loads(line)["id"] for line in told] == [5]

    def test_a_network_error_stays_an_error(
        self, thirty: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise FetchError("planted", uri="s3://x")

        with make(thirty) as loader:
            monkeypatch.setattr("penstock.readers.byte_source.FileSpan.copy", fail)
            with pytest.raises(FetchError, match="planted"):
                next(iter(loader))

    def test_without_images_only_the_bytes_count(self, thirty: Path) -> None:
        with DataLoader(Dataset(str(thirty), fields=("id",)), batch_size=10, max_bad=0) as loader:
            assert [i for (ids,) in loader for i in ids.tolist()] == list(range(SAMPLES))


class TestEvaluation:
    @pytest.mark.parametrize("size", [1, 3])
    def test_slots_keep_their_ids_and_are_not_valid(self, thirty: Path, size: int) -> None:
        bad = bad_ids(thirty, RANDOM_30)
        seen: list[int] = []
        counted = 0
        for rank in range(size):
            options: dict[str, Any] = {"shuffle": False, "pad": "mask", "world": World(rank, size)}
            recipe = imagenet_eval(SIZE, resize=20)
            with make(thirty, augment=recipe, batch_size=11, **options) as loader:
                for _ in range(2):  # in the second epoch they are known
                    slots = [s for b in loader for s in zip(*b, strict=True)]
                counted += loader.statistics().bad
            for image, _, i, valid in slots:
                if not valid:
                    assert bool(image.any()) == (int(i) not in bad)  # or a stand-in
                    continue
                seen.append(int(i))
                assert int(i) not in bad
                assert image.any()
            labels = [int(label) for _, label, _, _ in slots]
            names = Dataset(str(thirty)).names([int(i) for _, _, i, _ in slots])
            assert labels == [number_of(name) % 4 for name in names]
        assert sorted(seen) == sorted(set(range(SAMPLES)) - bad)
        assert counted == 2 * len(bad)  # a stand-in counts for nothing


class TestLimit:
    def test_past_the_limit_the_next_batch_is_refused_with_the_list(self, thirty: Path) -> None:
        bad = bad_ids(thirty, RANDOM_30)
        with make(thirty, max_bad=0.1) as loader:
            own = list(loader.sampler)
            batches = iter(loader)
            got: list[int] = []

            def walk() -> None:
                for batch in batches:
                    got.extend(batch[2].tolist())

            with pytest.raises(
                TooManyBadSamplesError, match=r"max_bad=0\.1 of 120.*penstock"
            ) as told:
                walk()
            met = [i for i in own[: len(got)] if i in bad]
            assert len(met) > 12 >= len([i for i in own[: len(got) - 10] if i in bad])
            assert told.value.sample_ids == tuple(sorted(met))
            assert str(told.value).count("; ") >= 9
            assert loader.statistics().quarantine in str(told.value)
            with pytest.raises(TooManyBadSamplesError):
                next(batches)

    @pytest.mark.parametrize("max_bad", [0, 0.001])
    def test_a_share_below_one_sample_is_strict_even_for_the_last_batch(
        self, tmp_path: Path, max_bad: float
    ) -> None:
        path = build(tmp_path / "set", {number for number in range(40)} & {7}, samples=40)
        (only,) = bad_ids(path, {7})
        with make(path, max_bad=max_bad, batch_size=40) as loader:
            batches = iter(loader)
            next(batches)
            with pytest.raises(TooManyBadSamplesError) as told:
                next(batches)
        (name,) = Dataset(str(path)).names([only])
        assert told.value.sample_ids == (only,)
        message = str(told.value)
        assert message.startswith("1 bad sample in epoch 0 is more than")
        assert f"Bad: {only}, {name} (" in message
        assert "DataLoader(…, max_bad=0.03) accepts 3% of" in message

    def test_counted_for_each_epoch(self, tmp_path: Path) -> None:
        path = build(tmp_path / "set", {7, 19}, samples=40)
        with make(path, max_bad=2 / 40) as loader:
            for _ in range(3):
                for _ in range(2):  # the same epoch again counts nothing twice
                    epoch = loader.epoch
                    list(loader)
                    loader.set_epoch(epoch)
                loader.set_epoch(epoch + 1)
            assert loader.statistics().bad == 12

    def test_a_restart_goes_on_counting(self, tmp_path: Path) -> None:
        path = build(tmp_path / "set", set(range(0, 40, 10)), samples=40)
        with make(path, batch_size=4, max_bad=3 / 40) as loader:
            batches = iter(loader)
            while loader.state_dict()["bad"] < 2:
                next(batches)
            state = loader.state_dict()
        with make(path, batch_size=4, max_bad=3 / 40) as loader:
            loader.load_state_dict(state)
            with pytest.raises(TooManyBadSamplesError, match="4 bad samples in epoch 0"):
                list(loader)
        state |= {"bad": "nonsense"}
        with make(path, batch_size=4, max_bad=3 / 40) as loader:
            loader.load_state_dict(state)
            list(loader)

    def test_states_are_the_same_on_ranks_that_met_different_bad_samples(
        self, thirty: Path
    ) -> None:
        states: list[list[dict[str, Any]]] = []
        for rank in range(2):
            with make(thirty, world=World(rank, 2), drop_last=True) as loader:
                batches = iter(loader)
                states.append([])
                for _ in range(3):
                    next(batches)
                    states[rank].append(loader.state_dict())
                assert loader.statistics().bad > 0
        assert states[0] == states[1]

    def test_when_all_are_bad_there_is_an_end(self, tmp_path: Path) -> None:
        path = build(tmp_path / "set", set(range(20)), samples=20)
        with make(path) as loader, pytest.raises(TooManyBadSamplesError, match="64 substitutes"):
            next(iter(loader))


class TestReport:
    def test_one_warning_and_a_line_for_each(self, thirty: Path, tmp_path: Path) -> None:
        bad = bad_ids(thirty, RANDOM_30)
        with make(thirty, cache=tmp_path / "cache") as loader:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                list(loader)
                list(loader)
            statistics, state = loader.statistics(), loader.state_dict()
        told = [w for w in caught if issubclass(w.category, PenstockWarning)]
        assert [
            statistics.quarantine in str(w.message) for w in told if "is bad" in str(w.message)
        ] == [True]
        assert statistics.bad == 2 * len(bad)
        file = Path(statistics.quarantine)
        assert file.parent == tmp_path / "cache" / "quarantine"
        assert file.stat().st_mode & 0o777 == 0o600
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert {line["id"] for line in lines} == bad
        assert len(lines) == len(bad)
        assert all(line["epoch"] == 0 and line["reason"] for line in lines)
        assert {number_of(line["name"]) for line in lines} == RANDOM_30
        assert state["bad"] == 0  # of the epoch that begins
        assert len(json.dumps(state)) < 1000

    def test_without_a_cache_folder_it_lies_in_the_users(
        self, thirty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        (tmp_path / "temporary").mkdir()
        place = tmp_path / "cache" / "penstock" / "quarantine"
        for number in range(3):
            with make(thirty) as loader:
                assert loader.statistics().quarantine == ""
                assert len(list(place.glob("*"))) == number
                with pytest.warns(PenstockWarning, match=f"listed in {place}"):
                    list(loader)
                file = Path(loader.statistics().quarantine)
                assert len(file.read_text().splitlines()) == len(bad_ids(thirty, RANDOM_30))
        assert list((tmp_path / "temporary").iterdir()) == []

    def test_old_lists_go(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(QuarantineFile, "most_files", 3)
        for number in range(5):
            report = QuarantineFile(None, name="set.jsonl")
            report.append([{"id": number}])
            os.utime(report.path, (number, number))
            report.append([{"id": number}])
            assert len(Path(report.path).read_text().splitlines()) == 2
        assert len(list((tmp_path / "penstock" / "quarantine").iterdir())) == 3
        assert Path(report.path).exists()

    def test_nothing_empty_is_left(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(os, "write", refuse)
        with pytest.warns(PenstockWarning, match="can't be written.*No space"):
            QuarantineFile(str(tmp_path / "c"), name="x").append([{"id": 1}])
        assert list(tmp_path.rglob("*quarantine*")) == []

    def test_a_disk_that_takes_nothing_costs_one_warning(
        self, thirty: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = os.open

        def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            if flags & os.O_APPEND:
                raise OSError(30, "Read-only file system", str(path))
            return opened(path, flags, *rest, **options)

        with make(thirty) as loader:
            monkeypatch.setattr(os, "open", refuse)
            with pytest.warns(PenstockWarning, match="can't be written.*Read-only") as caught:
                assert len(ids_of(loader)) == SAMPLES
            assert loader.statistics().quarantine == ""
        assert len([w for w in caught if "can't be written" in str(w.message)]) == 1

    def test_a_clean_dataset_says_nothing(self, tmp_path: Path) -> None:
        path = build(tmp_path / "set", set(), samples=20)
        with make(path, max_bad=0) as loader, warnings.catch_warnings():
            warnings.simplefilter("error")
            list(chain(loader, loader))
            assert loader.statistics().bad == 0
            assert torch.is_tensor(next(iter(loader))[0])
