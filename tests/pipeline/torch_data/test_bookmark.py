"""The position of a loader over a torch dataset, and the epoch of the dataset: each alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.utils.data

from penstock.cache import ResumeError
from penstock.pipeline import LoaderOptions
from penstock.pipeline.torch_data import Bookmark, DatasetEpoch, Mark, StreamOrder, WorkerPosition

if TYPE_CHECKING:
    from collections.abc import Iterator


class Ten(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

    def __len__(self) -> int:
        return 10


def setup(**options: Any) -> StreamOrder:
    """Return the setup of a stream that promises ten samples: three batches of four."""
    return StreamOrder(
        dataset=Ten(),
        options=LoaderOptions(kind="stream", batch_size=4, device=torch.device("cpu"), **options),
    )


class TestBookmark:
    def test_the_latest_pass_moves_it(self) -> None:
        bookmark, stream = Bookmark(), setup()
        first, second = bookmark.open(stream), bookmark.open(stream)
        bookmark.start(first, Mark(batches=9), "old")
        bookmark.move(first, Mark(batches=1))
        assert (bookmark.mark, bookmark.source) == (Mark(), None)
        assert bookmark.has_begun  # by whichever pass
        bookmark.start(second, Mark(base_seed=3), "source")
        bookmark.move(second, Mark(batches=1))
        assert (bookmark.mark, bookmark.source) == (Mark(batches=1), "source")

    def test_an_epoch_that_was_left_begins_again(self) -> None:
        bookmark, stream = Bookmark(), setup()
        bookmark.move(bookmark.open(stream), Mark(epoch=2, batches=1, base_seed=7))
        bookmark.open(stream)
        assert bookmark.mark == Mark(epoch=2)

    def test_a_stream_that_gave_what_it_promised_continues_with_the_next(self) -> None:
        bookmark, stream = Bookmark(), setup()
        bookmark.move(bookmark.open(stream), Mark(epoch=2, batches=3))
        bookmark.open(stream)
        assert bookmark.mark == Mark(epoch=3)
        left = setup(drop_last=True)
        bookmark.move(bookmark.number, Mark(epoch=3, batches=2))
        bookmark.open(left)
        assert bookmark.mark == Mark(epoch=4)

    def test_a_restored_place_is_spent_by_the_first_batch(self) -> None:
        bookmark, stream = Bookmark(), setup()
        saved = Mark(epoch=1, batches=2)
        bookmark.restore(saved)
        for _ in range(2):  # some trainers call iter() twice
            number = bookmark.open(stream)
            assert bookmark.mark == saved
        bookmark.go_to(1, stream)
        assert (bookmark.mark, bookmark.is_restored) == (saved, True)
        bookmark.move(number, replace(saved, batches=3))
        assert not bookmark.is_restored

    def test_a_decision_outlives_the_pass_that_it_was_made_in(self) -> None:
        bookmark, stream = Bookmark(), setup()
        bookmark.decide(Mark(base_seed=5))
        bookmark.open(stream)
        assert bookmark.mark.base_seed == 5
        bookmark.move(bookmark.number, Mark(base_seed=5, batches=1))
        bookmark.open(stream)
        assert bookmark.mark == Mark()

    def test_another_epoch_makes_passes_old(self) -> None:
        bookmark, stream = Bookmark(), setup(num_workers=2, persistent_workers=True)
        number = bookmark.open(stream)
        workers = (WorkerPosition(batches=1), WorkerPosition(batches=1, over=True))
        bookmark.move(number, Mark(batches=2, workers=workers))
        bookmark.go_to(4, stream)
        assert bookmark.mark.epoch == 4
        # Persistent workers keep their streams: one was left, one came to its end.
        assert [worker.past for worker in bookmark.mark.workers] == ["left", "ended"]
        bookmark.move(number, Mark(batches=9))
        assert bookmark.mark.epoch == 4


class WithSetEpoch:
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class TestDatasetEpoch:
    def test_a_dataset_without_epochs_is_unchanged(self) -> None:
        epochs = DatasetEpoch(Ten())
        epochs.set(3)
        epochs.advance(3)
        epochs.restore(3)
        assert epochs.now() is None

    def test_the_last_epoch_is_kept(self) -> None:
        dataset, sampler = WithSetEpoch(), WithSetEpoch()
        epochs = DatasetEpoch(dataset)
        assert epochs.now() is None
        epochs.set(3, sampler, None)
        assert (dataset.epochs, sampler.epochs, epochs.now()) == ([3], [3], 3)
        epochs.advance(2)  # not the dataset's epoch
        epochs.advance(3)
        assert (dataset.epochs, epochs.now()) == ([3, 4], 4)
        epochs.restore(1)
        epochs.restore(None)
        assert (dataset.epochs, epochs.now()) == ([3, 4, 1], 1)

    def test_its_own_attribute_goes_first(self) -> None:
        dataset: Any = WithSetEpoch()
        dataset.epoch = 8
        epochs = DatasetEpoch(dataset)
        epochs.set(3)
        assert epochs.now() == 8


class TestMark:
    def test_it_comes_back_from_json_types(self) -> None:
        position = WorkerPosition(batches=3, since=1, state={"dataset": {"at": [1, 2]}})
        mark = Mark(epoch=1, batches=3, base_seed=2**63 - 1, workers=(position,), next_worker=0)
        assert Mark.from_dict(mark.to_dict()) == mark

    @pytest.mark.parametrize(
        "damage",
        [
            {"epoch": -1},
            {"batches": 1.5},
            {"nonsense": 1},
            {"rng": "not base64!"},
            {"workers": [{"past": "lost"}]},
            {"workers": None},
        ],
    )
    def test_damage_is_named(self, damage: dict[str, Any]) -> None:
        with pytest.raises(ResumeError, match="State is damaged"):
            Mark.from_dict({**Mark().to_dict(), **damage})
