"""Serialize a source, without any secrets, for workers on other machines, who open it there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError
from penstock.readers.dataset import Dataset
from penstock.readers.index import DatasetAddress, pickle_with

if TYPE_CHECKING:
    from penstock.readers.sources import Source

_MOST_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SerializedSource:
    """What a worker gets of a source, without secrets. source: pickled; indexes: folders in which
    the indexes of its datasets lie, and which the worker's machine must see."""

    source: bytes
    indexes: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, source: Source) -> SerializedSource:
        """Of what is open here. Raises ConfigError for what can't travel."""
        indexes: list[bytes] = []

        def carried(value: Any) -> Any:
            return _for_worker(value, indexes) if isinstance(value, Dataset) else NotImplemented

        made = pickle_with(source, carried)
        if len(made) > _MOST_BYTES:
            raise ConfigError(
                f"{source.url}: this selection takes {len(made):,} bytes, and each task of an "
                "executor would carry it. Pack it in ranks, under torchrun or Slurm, or pack the "
                "whole dataset and select of the pack."
            )
        return cls(source=made, indexes=tuple(indexes))


def _for_worker(dataset: Dataset, indexes: list[bytes]) -> tuple[Any, ...]:
    """A dataset as it is pickled for another machine: absolute, without secrets, and with the index
    that it has here. indexes: its folder is added."""
    make, (url, arguments, *names) = dataset.__reduce__()
    reach = DatasetAddress.of(
        url,
        storage_options=arguments["storage_options"],
        filesystem=arguments["filesystem"],
        cache=arguments["cache"],
    )
    index = arguments["index"]
    if not dataset.index.is_self_contained and os.path.isdir(dataset.index.place):
        index = os.path.abspath(dataset.index.place)
        indexes.append(os.fsencode(index))
    return make, (reach.url, {**arguments, "index": index, "cache": reach.cache}, *names)
