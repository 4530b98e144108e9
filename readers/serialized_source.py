"""Serialize a source without secrets for workers on other machines, which open it again."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError
from penstock.readers.dataset import Dataset
from penstock.readers.files import printable
from penstock.readers.index import MANIFEST
from penstock.readers.origin import status_of

if TYPE_CHECKING:
    from penstock.readers.sources import Source

_MAX_BYTES = 16 * 2**20


class _Pickler(pickle.Pickler):
    """A pickler of datasets without secrets. indexes: the folders of their indexes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.indexes: list[bytes] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Dataset):
            return NotImplemented
        make, (arguments,) = value.__reduce__()
        description = arguments.description.for_workers()
        place = os.path.abspath(value.index.place)
        if not value.index.is_self_contained and os.path.isdir(place):
            self.indexes.append(os.fsencode(place))
            description = replace(description, index=place)
        return make, (replace(arguments, description=description),)


@dataclass(frozen=True, slots=True, kw_only=True)
class SerializedSource:
    """A source for a worker, without secrets. source: pickled. indexes: folders that hold the
    indexes of its datasets, which the worker's machine must reach."""

    url: str
    source: bytes
    indexes: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, source: Source) -> SerializedSource:
        """Serialize an open source. Raises ConfigError if it can't be sent to other machines."""
        pickler = _Pickler(file := io.BytesIO())
        pickler.dump(source)
        pickled = file.getvalue()
        if len(pickled) > _MAX_BYTES:
            raise ConfigError(
                f"{source.url}: this selection takes {len(pickled):,} bytes, and each task of an "
                "executor would carry it. Pack it in ranks, under torchrun or Slurm, or pack the "
                "whole dataset and select from the pack."
            )
        return cls(url=source.url, source=pickled, indexes=tuple(pickler.indexes))

    def load(self) -> Source:
        """Unpickle the source in a worker. Raises ConfigError if its machine doesn't have an
        index."""
        for index in self.indexes:
            if status_of(os.path.join(index, MANIFEST)) is None:  # each would build its own
                raise ConfigError(
                    f"{self.url}: its index is in {printable(index)}, which doesn't exist on this "
                    "machine. Write it to a folder that all machines see by `penstock index` with "
                    "--out FOLDER, and pass that folder as the Dataset's index=."
                )
        # Unpickling is as safe as running the task: both come from the driver.
        source: Source = pickle.loads(self.source)
        return source
