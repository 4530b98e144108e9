"""What was given for a dataset, where that can't be one: said when the loader is made."""

from __future__ import annotations

import os
from typing import Any

import torch.utils.data

from penstock.cache.errors import ConfigError, DatasetError
from penstock.readers.source import Source

_LOOKED_AT = 64  # elements of a list
_SEVERAL_OF = (
    torch.utils.data.ConcatDataset,
    torch.utils.data.ChainDataset,
    torch.utils.data.StackDataset,
)
_PART = (
    "take dataset.subset(ids), or dataset.split(0.9, 0.1, seed=0), and give that to the DataLoader"
)
_SEVERAL = (
    "give penstock.concat([a, b]) to one DataLoader to read them end to end, or make a DataLoader "
    "for each"
)


def check_dataset(dataset: Any) -> None:
    """Raise ConfigError for what isn't a dataset, DatasetError for a native one inside another.

    A torch dataset passes, and whatever has samples by index, as with torch.
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
    _refuse_wrapped(dataset)
    is_known = isinstance(dataset, torch.utils.data.Dataset)
    if not is_known and not any(hasattr(dataset, n) for n in ("__getitem__", "__getitems__")):
        remedy = (
            "One that is only iterated must be a torch.utils.data.IterableDataset: wrap it in one "
            "whose __iter__ gives its samples"
            if hasattr(dataset, "__iter__")
            else "Pass a penstock.Dataset, a torch dataset, or an object with __getitem__ and "
            "__len__"
        )
        raise ConfigError(
            f"dataset: got an object of type {type(dataset).__name__}, wanted a dataset. {remedy}."
        )


def _refuse_wrapped(dataset: Any) -> None:
    inside = _parts(dataset)
    if not any(_is_native(part) for part in inside):
        return
    name = type(dataset).__name__
    remedy = _PART if isinstance(dataset, torch.utils.data.Subset) else _SEVERAL
    raise DatasetError(
        f"{name} holds a native dataset (penstock.Dataset), which is read whole and by shards, "
        f"never by index, so torch's wrappers and lists can't hold one. Instead {remedy}."
    )


def _parts(dataset: Any) -> list[Any]:
    if isinstance(dataset, torch.utils.data.Subset):
        return [dataset.dataset]
    if isinstance(dataset, _SEVERAL_OF):
        inside: Any = dataset.datasets
        return list(inside.values() if isinstance(inside, dict) else inside)
    if type(dataset) in (list, tuple):
        return list(dataset[:_LOOKED_AT])
    if type(dataset) is dict:
        return list(dataset.values())[:_LOOKED_AT]
    return []


def _is_native(part: Any) -> bool:
    return isinstance(part, Source) or any(_is_native(inner) for inner in _parts(part))
