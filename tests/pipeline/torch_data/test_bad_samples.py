"""Bad samples of map-style datasets: with max_bad= and seed=, the same substitutes replace them
anywhere."""

from __future__ import annotations

import errno
import json
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.data

from penstock.augment import RandomResizedCrop
from penstock.cache import (
    BadSampleError,
    ConfigError,
    CorruptSampleError,
    FetchError,
    PenstockWarning,
    TooManyBadSamplesError,
)
from penstock.pipeline import DataLoader, World
from penstock.pipeline.torch_data import is_sample_fault
from tests.torch_datasets import Streams, same

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore:Sample .* is bad")

SAMPLES = 60
BAD = {3, 7, 20, 41, 59}


class Holed(torch.utils.data.Dataset[Any]):
    """(index, a random number); some samples can't be read."""

    def __init__(self, samples: int = SAMPLES, bad: Any = BAD, error: Any = OSError) -> None:
        self.samples, self.bad, self.error = samples, set(bad), error

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, float]:
        draw = float(torch.rand(()))
        if index in self.bad:
            raise self.error(f"image file {index} is truncated")
        return index, draw


class HoledBatches(Holed):
    """Reads a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Pictures(Holed):
    """(pixels, index)."""

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return np.random.default_rng(index).integers(0, 255, (20, 24, 3), dtype=np.uint8), index


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Not tmp_path, which may be too long for the sockets of torch's workers.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield


def make(dataset: Any = None, **options: Any) -> DataLoader:
    given = {"batch_size": 8, "shuffle": True, "seed": 5, "max_bad": 0.2, **options}
    return DataLoader(Holed() if dataset is None else dataset, **given)


def pairs(batches: Any) -> list[tuple[int, float]]:
    return [
        pair for batch in batches for pair in zip(*(x.tolist() for x in batch[:2]), strict=True)
    ]


def own_order(loader: DataLoader) -> list[int]:
    return list(loader.sampler)


def stand_ins(**options: Any) -> dict[int, tuple[int, float]]:
    """Return what was delivered instead of each sample, in the first epoch, over all ranks."""
    found: dict[int, tuple[int, float]] = {}
    size = options.pop("worlds", 1)
    for rank in range(size):
        with make(world=World(rank, size), drop_last=size > 1, **options) as loader:
            found |= dict(zip(own_order(loader), pairs(loader), strict=True))
    return found


class TestSubstitutes:
    def test_good_samples_are_as_without_and_bad_ones_are_others(self) -> None:
        found = stand_ins()
        plain = stand_ins(dataset=Holed(bad=()))
        assert {i: found[i] for i in found if i not in BAD} == {
            i: plain[i] for i in plain if i not in BAD
        }
        for i in BAD:
            assert found[i][0] not in BAD
            assert (
                found[i] == plain[found[i][0]]
            )  # the same as without bad samples, its draws included

    @pytest.mark.parametrize(
        "options",
        [
            {"num_workers": 2},
            {"batch_size": 3},
            {"batch_size": None},
            {"worlds": 3, "batch_size": 4},
            {"num_workers": 1, "dataset": Holed(error=ValueError)},
        ],
        ids=["workers", "batches of 3", "samples", "worlds", "other errors"],
    )
    def test_they_are_the_same_anywhere(self, options: dict[str, Any]) -> None:
        expected = stand_ins()
        if options.get("batch_size", 8) is None:
            with make(batch_size=None) as loader:
                found = {
                    own: (int(i), float(draw))
                    for own, (i, draw) in zip(own_order(loader), loader, strict=True)
                }
        else:
            found = stand_ins(**options)
        assert {i: found[i] for i in found} == {i: expected[i] for i in found}
        assert len(found) >= SAMPLES - 12

    def test_they_differ_by_epoch_and_seed(self) -> None:
        def of(**options: Any) -> list[int]:
            return [stand_ins(**options)[i][0] for i in sorted(BAD)]

        with make() as loader:
            list(loader)
            second = dict(zip(own_order(loader), pairs(loader), strict=True))
        assert len({str(of()), str(of(seed=6)), str([second[i][0] for i in sorted(BAD)])}) == 3

    def test_datasets_that_read_batches_at_once(self) -> None:
        found = stand_ins(dataset=HoledBatches())
        assert {own for own, (i, _) in found.items() if own != i} == BAD
        assert {found[i][0] for i in BAD} == {stand_ins()[i][0] for i in BAD}

    def test_their_images_are_augmented_as_their_own(self) -> None:
        def handed_out(bad: set[int]) -> dict[int, tuple[int, Any]]:
            recipe = [RandomResizedCrop(16)]
            with make(Pictures(bad=bad), augment=recipe) as loader:
                own = own_order(loader)
                rows = [
                    row for images, ids in loader for row in zip(ids.tolist(), images, strict=True)
                ]
                return dict(zip(own, rows, strict=True))

        found, plain = handed_out(BAD), handed_out(set())
        for i in BAD:
            stand_in, image = found[i]
            assert stand_in not in BAD
            assert torch.equal(image, plain[stand_in][1])


class TestResume:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_at_every_step(self, workers: int) -> None:
        with make(num_workers=workers) as loader:
            whole = list(loader)
            total = loader.statistics().bad
        assert total == len(BAD)
        for stop in range(0, len(whole), 1 if not workers else 3):
            with make() as first:
                passing = iter(first)
                head = [next(passing) for _ in range(stop)]
                state = json.loads(json.dumps(first.state_dict()))
            with make(num_workers=workers) as second:
                second.load_state_dict(state)
                tail = list(second)
                assert state["mark"]["bad"] + second.statistics().bad == total
            assert all(map(same, [*head, *tail], whole))

    def test_the_limit_counts_what_was_before_a_restart(self) -> None:
        with make(max_bad=4 / SAMPLES) as loader:
            passing = iter(loader)
            while loader.statistics().bad < 4:
                next(passing)
            state = loader.state_dict()
        with make(max_bad=4 / SAMPLES) as loader:
            loader.load_state_dict(state)
            with pytest.raises(TooManyBadSamplesError, match="5 bad samples in epoch 0"):
                list(loader)


class TestTold:
    def test_they_are_counted_named_and_warned_of_once(self) -> None:
        with make() as loader:
            with pytest.warns(PenstockWarning, match="Sample .* is bad") as report:
                batches = [batch for _ in range(2) for batch in loader]
            statistics = loader.statistics()
        assert len(batches) == 2 * 8
        assert len(report) == 1
        assert statistics.bad == 2 * len(BAD)
        lines = [json.loads(line) for line in Path(statistics.quarantine).read_text().splitlines()]
        assert {line["id"] for line in lines} == BAD
        assert len(lines) == len(BAD)
        assert lines[0]["reason"].startswith("OSError: image file")

    @pytest.mark.parametrize("workers", [0, 2])
    def test_past_the_limit_it_stops_with_the_list(self, workers: int) -> None:
        with make(max_bad=2 / SAMPLES, num_workers=workers) as loader:
            handed_out: list[Any] = []
            with pytest.raises(TooManyBadSamplesError, match="truncated") as caught:
                handed_out.extend(iter(loader))
            assert len(caught.value.sample_ids) >= 3
            assert set(caught.value.sample_ids) <= BAD

    @pytest.mark.parametrize("workers", [0, 1])
    def test_where_all_are_bad_the_first_one_reports_it(self, workers: int) -> None:
        dataset = Holed(bad=range(SAMPLES), error=TypeError)
        with (
            make(dataset, max_bad=1.0, num_workers=workers) as loader,
            pytest.raises(
                TooManyBadSamplesError, match=r"substitutes that were tried.*own code"
            ) as e,
        ):
            next(iter(loader))
        assert len(e.value.sample_ids) > 30

    def test_a_padded_batch_marks_them(self) -> None:
        valid: dict[int, bool] = {}
        for rank in range(2):
            with make(
                world=World(rank, 2), pad="mask", shuffle=False, batch_size=7, max_bad=0.3
            ) as loader:
                rows = [row for batch in loader for row in batch[2].tolist()]
                valid |= dict(zip(own_order(loader), rows, strict=False))
        assert {i for i, is_valid in valid.items() if not is_valid} == BAD


class TestWhoAsks:
    def test_without_max_bad_the_error_names_the_sample(self) -> None:
        with make(max_bad=None) as loader, pytest.raises(OSError, match="truncated") as caught:
            list(loader)
        assert "while reading sample" in caught.value.__notes__[0]
        assert "; with max_bad=, the loader replaces bad" in caught.value.__notes__[0]

    def test_torchs_order_stays_torchs(self) -> None:
        with pytest.raises(ConfigError, match=r"max_bad=0.1 needs Penstock's order.*seed="):
            DataLoader(Holed(), 8, max_bad=0.1)
        with DataLoader(Holed(), 8) as loader, pytest.raises(OSError, match="truncated") as caught:
            list(loader)
        assert "; with seed= and max_bad=, the" in caught.value.__notes__[0]

    @pytest.mark.parametrize("seed", [None, 3])
    def test_streams_are_refused_with_the_reason(self, seed: int | None) -> None:
        with pytest.raises(ConfigError, match="an iterable dataset have no numbers"):
            DataLoader(Streams([4]), 2, max_bad=0.1, seed=seed)

    @pytest.mark.parametrize(
        ("error", "is_samples"),
        [
            (OSError("truncated"), True),
            (ValueError("x"), True),
            (RuntimeError("decoder"), True),
            (AttributeError("'NoneType' object has no attribute 'shape'"), True),
            (KeyError("x"), True),
            (FileNotFoundError(errno.ENOENT, "gone"), True),
            (BadSampleError("x"), True),
            (CorruptSampleError("x", sample_id=1), True),
            (NameError("x"), False),
            (ImportError("x"), False),
            (NotImplementedError(), False),
            (MemoryError(), False),
            (ConnectionResetError(), False),
            (TimeoutError(), False),
            (OSError(errno.EMFILE, "too many open files"), False),
            (OSError(errno.ESTALE, "stale handle"), False),
            (FetchError("x", uri="s3://x"), False),
            (ConfigError("x"), False),
        ],
    )
    def test_whose_fault_it_is(self, error: Exception, is_samples: bool) -> None:
        assert is_sample_fault(error) == is_samples

    def test_what_is_not_a_sample_s_fault_stops_the_loader(self) -> None:
        with (
            make(Holed(error=ConnectionError)) as loader,
            warnings.catch_warnings(),
            pytest.raises(ConnectionError),
        ):
            list(loader)
