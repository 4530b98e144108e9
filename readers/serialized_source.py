"""Serialize a source without secrets for workers on other machines, which open it again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError
from penstock.readers.dataset import Dataset
from penstock.readers.index import DatasetAddress, pickle_with

if TYPE_CHECKING:
    from penstock.readers.sources import Source

_MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SerializedSource:
    """A source for a worker, without secrets. source: pickled. indexes: folders that hold the
    indexes of its datasets, which the worker's machine must reach."""

    source: bytes
    indexes: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, source: Source) -> SerializedSource:
        """Serialize an open source. Raises ConfigError if it can't be sent to other machines."""
        indexes: list[bytes] = []

        def reduce(value: Any) -> Any:
            return _for_worker(value, indexes) if isinstance(value, Dataset) else NotImplemented

        pickled = pickle_with(source, reduce)
        if len(pickled) > _MAX_BYTES:
            raise ConfigError(
                f"{source.url}: this selection takes {len(pickled):,} bytes, and each task of an "
                "executor would carry it. Pack it in ranks, under torchrun or Slurm, or pack the "
                "whole dataset and select from the pack."
            )
        return cls(source=pickled, indexes=tuple(indexes))


def _for_worker(dataset: Dataset, indexes: list[bytes]) -> tuple[Any, ...]:
    """Reduce a dataset for pickling to another machine: with an absolute address, without secrets,
    and with its index. The index's folder is appended to indexes."""
    make, (url, arguments, *names) = dataset.__reduce__()
    address = DatasetAddress.of(
        url,
        storage_options=arguments["storage_options"],
        filesystem=arguments["filesystem"],
        cache=arguments["cache"],
    )
    index = arguments["index"]
    if not dataset.index.is_self_contained and os.path.isdir(dataset.index.place):
        index = os.path.abspath(dataset.index.place)
        indexes.append(os.fsencode(index))
    return make, (address.url, {**arguments, "index": index, "cache": address.cache}, *names)
