"""Misplaced arguments raise an error that names the remedy when the loader is made."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data as torchs

import penstock
from penstock.augment import Pad, Resize, imagenet_train
from penstock.cache import ConfigError, DatasetError, NotPicklableError, ResumeError
from penstock.pipeline import DataLoader, parse_device
from penstock.pipeline.plan import local_rank
from penstock.readers import Dataset
from tests.torch_datasets import Squares

THEIRS = {"_snapshot": {"_main_snapshot": {}}, "_steps_since_snapshot": 1}


def native(pack: Path, **options: Any) -> DataLoader:
    return DataLoader(Dataset(str(pack), fields=("image", "id")), 8, num_workers=1, **options)


@pytest.mark.parametrize("path", ["/data/train", Path("/data/train"), b"/data/train", "s3://b/c"])
@pytest.mark.parametrize("options", [{}, {"seed": 1, "shuffle": True}])
def test_a_path_is_no_dataset(path: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"got the path '[^']*'.*DataLoader\(Dataset\('"):
        DataLoader(path, 4, **options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "got an object of type NoneType"),
        (5, "got an object of type int"),
        (object(), "__getitem__ and __len__"),
        (Squares, r"got the class Squares.*Squares\(\.\.\.\)"),
        (Dataset, r"got the class Dataset"),
        ((i for i in range(4)), "IterableDataset"),
        ({1, 2}, "IterableDataset"),
        (torchs.DataLoader(Squares(3)), r"Pass its \.dataset"),
    ],
)
def test_an_invalid_dataset(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataLoader(given, 4)


@pytest.mark.parametrize(
    ("call", "given", "words"),
    [
        (DataLoader, {"suffle": True}, "did you mean 'shuffle'"),
        (DataLoader, {"transform": None}, "did you mean 'augment'"),
        (DataLoader, {"augmentation": None}, "did you mean 'augment'"),
        (DataLoader, {"batch_size": {0: 8, 64: 16}}, "global_batch_size="),
        (DataLoader, {"batch_tokens": 100}, r"none differ in length\. Pass batch_size=\.$"),
        (Dataset, {"feilds": ("id",)}, "did you mean 'fields'"),
        (Dataset, {"transform": None}, "DataLoader's augment="),
    ],
)
def test_a_mistaken_argument_is_corrected(
    pack: Path, call: Any, given: dict[str, Any], words: str
) -> None:
    data = Dataset(pack, fields=("label", "id")) if call is DataLoader else pack
    with pytest.raises(ConfigError, match=words):
        call(data, **given)


def test_a_mistaken_name_is_corrected() -> None:
    with pytest.raises(AttributeError, match="did you mean 'RandomHorizontalFlip'"):
        penstock.HorizontalFlip  # type: ignore[attr-defined]  # noqa: B018


def test_what_isnt_a_loaders_state_is_named(pack: Path) -> None:
    with DataLoader(Dataset(pack, fields=("id",)), 8, shuffle=True) as loader:
        whole = {"model": {}, "loader": loader.state_dict()}
        with pytest.raises(ResumeError, match=r"keys \['model', 'loader'\].*state\['loader'\]"):
            loader.load_state_dict(whole)
        with pytest.raises(ResumeError, match=r"isn't a loader's state: it has the keys \[\]"):
            loader.load_state_dict({})


@pytest.mark.parametrize("given", [[1, 2, 3, 4], (1, 2, 3, 4), torch.arange(1, 5), range(1, 5)])
def test_what_torch_takes_passes(given: Any) -> None:
    assert [batch.tolist() for batch in DataLoader(given, 2)] == [[1, 2], [3, 4]]


WRAPPED = {
    "Subset": lambda d: torchs.Subset(d, [1, 2]),
    "random_split": lambda d: torchs.random_split(d, [0.5, 0.5])[0],
    "nested": lambda d: torchs.Subset(torchs.ConcatDataset([d]), [1]),
    "ConcatDataset": lambda d: torchs.ConcatDataset([Squares(3), d]),
    "ChainDataset": lambda d: torchs.ChainDataset([d]),
    "StackDataset": lambda d: torchs.StackDataset(d, d),
    "StackDataset by name": lambda d: torchs.StackDataset(a=d),
    "list": lambda d: [d, d],
    "tuple": lambda d: (d,),
    "dict": lambda d: {"train": d},
}


@pytest.mark.parametrize("kind", list(WRAPPED))
def test_a_native_dataset_in_another_states_what_to_do(kind: str, pack: Path) -> None:
    with pytest.raises(DatasetError, match="not by index") as caught:
        DataLoader(WRAPPED[kind](Dataset(str(pack))), 4)
    report = str(caught.value)
    assert "framework" not in report
    part = kind in ("Subset", "random_split", "nested")
    assert ("dataset.subset(ids)" if part else "penstock.concat([a, b])") in report


def test_samples_by_index_name_the_loader(pack: Path) -> None:
    with pytest.raises(ConfigError, match=r"through Penstock's DataLoader: loop over"):
        Dataset(str(pack)).__getitems__([3])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda image: image, "Apply.*__getitem__"),
        ([lambda image: image], "at place 0"),
        ([*imagenet_train(8), torch.nn.Identity()], r"Identity\(\) at place"),
        (torch.nn.Identity(), "wanted operations in a list"),
        ("imagenet", "wanted operations in a list"),
        (Resize(8), r"alone.*Put it in \[\.\.\.\]"),
        ({"image": Resize(8)}, r"alone.*Put it in \[\.\.\.\]"),
        ({}, "wanted a list of operations"),
        (7, "got 7"),
    ],
)
def test_augment_takes_operations(given: Any, message: str, pack: Path) -> None:
    for dataset in (Dataset(str(pack)), Squares(8)):
        with pytest.raises(ConfigError, match=message):
            DataLoader(dataset, 4, augment=given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"as_dict": True}, "as_dict=True works on native datasets"),
        ({"augment": {"image": [Resize(8)]}}, "augment= by field works on native"),
        ({"augment": [Resize((8, 8)), Pad("boxes")]}, "Pad in augment= works on native"),
    ],
)
def test_what_is_about_fields_is_for_native_datasets(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataLoader(Squares(8), 4, **options)


def test_augment_may_be_drawn_once(pack: Path) -> None:
    with native(pack, augment=iter(imagenet_train(16))) as loader:
        assert next(iter(loader))[0].shape == (8, 3, 16, 16)


def test_states_of_others_are_named(pack: Path) -> None:
    torch_loader = DataLoader(Squares(20, "int"), 4)
    with native(pack, augment=imagenet_train(16)) as loader:
        for ours, state, owner in (
            (loader, torch_loader.state_dict(), "a loader over a torch dataset"),
            (loader, THEIRS, "torchdata's StatefulDataLoader"),
            (torch_loader, loader.state_dict(), "a loader over a native dataset"),
            (torch_loader, THEIRS, "torchdata's StatefulDataLoader"),
            (torch_loader, {}, "no loader's state"),
            (torch_loader, None, "no loader's state"),
        ):
            with pytest.raises(ResumeError, match=owner) as caught:
                ours.load_state_dict(state)
            assert "damaged" not in str(caught.value)


def test_a_native_loader_is_not_pickled(pack: Path) -> None:
    with native(pack, augment=imagenet_train(16)) as loader:
        for thing in (loader, iter(loader)):
            with pytest.raises(NotPicklableError, match=r"state_dict\(\).*train_dataloader"):
                pickle.dumps(thing)
            with pytest.raises(TypeError, match="deep-copied"):
                copy.deepcopy(thing)


class Shapes(torchs.Dataset[torch.Tensor]):
    def __init__(self, *shapes: int) -> None:
        self.shapes = shapes

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> Any:
        size = self.shapes[index]
        return torch.zeros(size) if size else None


def refuse(samples: list[Any]) -> Any:
    raise ValueError(f"{len(samples)} samples")


def four(samples: list[Any]) -> Any:
    if len(samples) != 4 or samples[0].shape[0] == 3:
        raise ValueError("no")
    return samples


@pytest.mark.parametrize(
    ("dataset", "collate", "message"),
    [
        (Shapes(3, 3, 4, 3), None, "sample 2 doesn't match the others"),
        (Shapes(4, 3, 3, 3), None, "sample 0 doesn't match the others"),
        (Shapes(3, 3, 3, 0), None, "sample 3 can't be collated"),
        (Shapes(3, 3, 3, 3), refuse, "the samples 0, 1, 2, 3"),
        (Shapes(3, 3, 3, 3), four, "the samples 0, 1, 2, 3"),
        (Shapes(1, 2, 3, 4), None, "the samples 0, 1, 2, 3"),
        (Shapes(0, 0, 0, 0), None, "the samples 0, 1, 2, 3"),
    ],
)
def test_a_sample_is_blamed_only_if_it_is_the_reason(
    dataset: Any, collate: Any, message: str
) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        list(DataLoader(dataset, 4, collate_fn=collate))
    (note,) = caught.value.__notes__
    assert message in note
    assert ("sample " in note.replace("samples", "")) == message.startswith("sample ")


@pytest.mark.parametrize(
    ("rank", "current", "count", "wanted"),
    [
        (0, 0, 8, 0),
        (3, 0, 8, 3),  # no GPU is chosen yet: not the first GPU for every rank
        (3, 5, 8, 5),  # chosen by set_device
        (3, 0, 1, 0),  # the launcher shows each rank its own only
    ],
)
def test_cuda_is_the_local_ranks_own_device(
    rank: int, current: int, count: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert parse_device("cuda", local_rank=rank) == torch.device("cuda", wanted)
    if count > 1:
        assert parse_device("cuda:1", local_rank=rank) == torch.device("cuda", 1)


def test_more_ranks_than_devices_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.warns(UserWarning, match=r"local rank 3, but only 2 devices.*set_device"):
        assert parse_device("cuda", local_rank=3) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("message", "rank"),
    [
        ({}, 0),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, 1),
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "3", "NODE_RANK": "0"}, 3),  # no rank is known yet
        ({"LOCAL_RANK": "x"}, 0),
    ],
)
def test_the_local_rank_is_read_where_the_rank_is_not(message: dict[str, str], rank: int) -> None:
    assert local_rank(message) == rank
