"""Describe a dataset to workers on other machines by plain values, without secrets.

Credentials are never sent: the owner of a worker's machine gives it a login of its own, as for any
other client of a store.
"""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from penstock.cache import ConfigError, DatasetNotFoundError, find_secrets, plain_query
from penstock.readers.files import printable
from penstock.readers.formats import MISSING, Candidates, Grouping, Spans
from penstock.readers.index.manifest_file import MANIFEST
from penstock.readers.origin import LocalFolder, Scratch, local_path, locate, show, status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    from penstock.cache.disk import DiskCache
    from penstock.readers.origin import Origin, Url

_LOGIN = (
    "Credentials aren't sent to workers, because their scheduler and logs would contain them. "
    "Leave them out, and give each machine a login of its own: the environment (AWS_ACCESS_KEY_ID, "
    "GOOGLE_APPLICATION_CREDENTIALS, AZURE_…), a profile, or the instance's role."
)


@dataclass(frozen=True, slots=True)
class DatasetAddress:
    """The address of a dataset's files for other machines. Raises ConfigError for arguments that
    can't be sent.

    url: made absolute. options: of its store. cache: the cache on each worker's machine.
    """

    url: Url
    options: Mapping[str, Any] = field(default_factory=dict)
    cache: DiskCache | str | None = None

    def __post_init__(self) -> None:
        for url in self.url if isinstance(self.url, list | tuple) else (self.url,):
            if isinstance(url, str) and "://" in url and _has_login(url):
                raise ConfigError(f"url: {show(url)} contained a login or a signature. {_LOGIN}")
        if find_secrets(dict(self.options)):
            secrets = [n for n, value in self.options.items() if find_secrets({n: value})]
            raise ConfigError(
                f"storage_options: got {', '.join(secrets)} together with executor=. {_LOGIN}"
            )

    @classmethod
    def of(
        cls,
        url: Url,
        *,
        storage_options: Mapping[str, Any] | None,
        filesystem: Any | None,
        cache: DiskCache | str | os.PathLike[str] | None,
    ) -> DatasetAddress:
        """Build the address from the arguments of `open_index` and `pack`. Raises ConfigError."""
        if filesystem is not None:
            raise ConfigError(
                "filesystem: got a file system object together with executor=, but it can't be "
                "sent to workers. Name the data by a URL that fsspec opens, with storage_options=."
            )
        if isinstance(cache, str | os.PathLike):
            cache = os.path.abspath(os.fspath(cache))
        return cls(_absolute(url), dict(storage_options or {}), cache)

    def open(self) -> tuple[Origin, Scratch]:
        """Open the dataset in a worker. Raises DatasetNotFoundError if this machine doesn't have
        its folder, and the same errors as `locate`."""
        scratch = Scratch(self.cache)
        origin = locate(self.url, storage_options=self.options, scratch=scratch)
        if isinstance(origin, LocalFolder) and status_of(origin.root) is None:
            raise DatasetNotFoundError(
                f"{origin.url} doesn't exist on this machine, although it exists on the machine of "
                "the driver. Mount it under the same path on every machine that runs workers, or "
                "name the data by the URL of a store."
            )
        return origin, scratch


def check_indexes(url: str, indexes: Iterable[bytes]) -> None:
    """Raise ConfigError if an index's folder doesn't exist on this machine: each process would
    build an index of its own."""
    for index in indexes:
        if status_of(os.path.join(index, MANIFEST)) is None:
            raise ConfigError(
                f"{url}: its index is in {printable(index)}, which doesn't exist on this machine. "
                "Write it to a folder that all machines see by `penstock index` with --out FOLDER, "
                "and pass that folder as the Dataset's index=."
            )


def _absolute(url: Any) -> Any:
    if isinstance(url, list | tuple):
        return tuple(map(_absolute, url))
    path = local_path(url)
    if path is None:
        return url
    absolute = os.path.abspath(path)
    # A trailing slash marks a folder.
    return os.fsdecode(absolute + b"/" if path.endswith(b"/") else absolute)


def _has_login(url: str) -> bool:
    parts = urlsplit(url)
    if parts.password or (parts.username and parts.scheme not in ("abfs", "abfss")):
        return True
    return len(parse_qsl(parts.query, keep_blank_values=True)) > len(plain_query(url))


class _Pickler(pickle.Pickler):
    """A pickler with a hook: reducer returns, for each object, what `reducer_override` returns."""

    def __init__(self, file: io.BytesIO, reducer: Callable[[Any], Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._reducer = reducer

    def reducer_override(self, value: Any) -> Any:
        return self._reducer(value)


def pickle_with(value: Any, reducer: Callable[[Any], Any]) -> bytes:
    """Pickle a value for a worker. reducer: see `pickle.Pickler.reducer_override`; it may raise for
    objects that must not be sent."""
    file = io.BytesIO()
    _Pickler(file, reducer).dump(value)
    return file.getvalue()


def selected_candidates(candidates: Candidates, positions: NDArray[np.int64]) -> Candidates:
    """Select some candidates for a worker: they form one shard, in this order."""
    used = [spans.files[positions] for spans in candidates.spans.values()]
    numbers = np.unique(np.concatenate([*used, np.empty(0, np.int64)]))
    numbers = numbers[numbers != MISSING]
    count = len(positions)
    return replace(
        candidates,
        files=tuple(candidates.files[number] for number in numbers.tolist()),
        names=tuple(candidates.names[position] for position in positions.tolist()),
        spans={
            name: _selected_spans(each, positions, numbers)
            for name, each in candidates.spans.items()
        },
        values={name: column.take(positions) for name, column in candidates.values.items()},
        present={name: each[positions] for name, each in candidates.present.items()},
        shards=Grouping(order=np.arange(count), bounds=np.array([0, count])),
        quarantined=[],
        passed_over={},
        left_out={},
    )


def _selected_spans(
    spans: Spans, positions: NDArray[np.int64], numbers: NDArray[np.int64]
) -> Spans:
    files = spans.files[positions]
    renumbered = np.where(files == MISSING, MISSING, np.searchsorted(numbers, files))
    return replace(
        spans,
        files=renumbered.astype(np.int64),
        starts=spans.starts[positions],
        sizes=spans.sizes[positions],
    )
