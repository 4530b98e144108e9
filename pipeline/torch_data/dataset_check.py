"""Check that an object is a dataset that torch's workers can read."""

from __future__ import annotations

import os
from typing import Any

import torch.utils.data

from penstock.cache import ConfigError, DatasetError
from penstock.readers import Source

_CHECKED_ELEMENTS = 64  # of a list or dict
_WRAPPERS_OF_SEVERAL = (
    torch.utils.data.ConcatDataset,
    torch.utils.data.ChainDataset,
    torch.utils.data.StackDataset,
)
_PART_REMEDY = (
    "pass dataset.subset(ids), or a part of dataset.split(0.9, 0.1, seed=0), to the DataLoader"
)
_SEVERAL_REMEDY = (
    "pass penstock.concat([a, b]) to one DataLoader to read them end to end, or make one "
    "DataLoader per dataset"
)


def check_dataset(dataset: Any) -> None:
    """Raise ConfigError if this isn't a dataset, DatasetError if it holds a native one.

    Torch datasets pass, and objects with samples by index, as with torch.
    """
    if isinstance(dataset, str | bytes | os.PathLike):
        shown = os.fsdecode(dataset)
        raise ConfigError(
            f"dataset: got the path {shown!r}, wanted a dataset. Pass "
            f"DataLoader(Dataset({shown!r}), ...), with penstock's Dataset."
        )
    if isinstance(dataset, type):
        raise ConfigError(
            f"dataset: got the class {dataset.__name__}, wanted an instance of it. Pass "
            f"{dataset.__name__}(...)."
        )
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise ConfigError(
            f"dataset: got a {type(dataset).__name__}, wanted the dataset that it reads. Pass its "
            ".dataset."
        )
    if any(_is_native(part) for part in _inner_datasets(dataset)):
        name = type(dataset).__name__
        remedy = _PART_REMEDY if isinstance(dataset, torch.utils.data.Subset) else _SEVERAL_REMEDY
        raise DatasetError(
            f"{name} holds a native dataset (penstock.Dataset), which is read by shards and not by "
            f"index, so torch's wrappers and lists can't hold one. Instead {remedy}."
        )
    is_known = isinstance(dataset, torch.utils.data.Dataset)
    if not is_known and not any(hasattr(dataset, n) for n in ("__getitem__", "__getitems__")):
        remedy = (
            "An object that can only be iterated must be a torch.utils.data.IterableDataset: wrap "
            "it in one whose __iter__ yields its samples"
            if hasattr(dataset, "__iter__")
            else "Pass a penstock.Dataset, a torch dataset, or an object with __getitem__ and "
            "__len__"
        )
        raise ConfigError(
            f"dataset: got an object of type {type(dataset).__name__}, wanted a dataset. {remedy}."
        )


def _inner_datasets(dataset: Any) -> list[Any]:
    if isinstance(dataset, torch.utils.data.Subset):
        return [dataset.dataset]
    if isinstance(dataset, _WRAPPERS_OF_SEVERAL):
        inner: Any = dataset.datasets
        return list(inner.values() if isinstance(inner, dict) else inner)
    if type(dataset) in (list, tuple):
        return list(dataset[:_CHECKED_ELEMENTS])
    if type(dataset) is dict:
        return list(dataset.values())[:_CHECKED_ELEMENTS]
    return []


def _is_native(part: Any) -> bool:
    return isinstance(part, Source) or any(_is_native(inner) for inner in _inner_datasets(part))
