"""A dataset: samples by (shard, row), as encoded bytes, from any thread."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import numpy as np

from penstock.cache.base.blob import READ_MODE, ReadMode
from penstock.cache.base.counters import Traffic, TrafficMeter
from penstock.cache.base.limits import usable_cores
from penstock.cache.errors import (
    ClosedError,
    ConfigError,
    CorruptSampleError,
    DatasetError,
    FetchError,
    IndexChangedError,
)
from penstock.readers.files.names import printable
from penstock.readers.formats.local_files import REINDEX
from penstock.readers.formats.pack.shard import ArrowColumns
from penstock.readers.formats.shard import CRC, END, HEIGHT, LABEL, START, WIDTH
from penstock.readers.index.opening import Format, Opener, check_format
from penstock.readers.origin.locate import locate
from penstock.readers.origin.scratch import Scratch
from penstock.readers.origin.urls import show
from penstock.readers.reading.blocks import Blocks
from penstock.readers.reading.loading import Visit, checksums, load_blobs, load_local
from penstock.readers.reading.open_shards import OpenShards
from penstock.readers.types import EncodedBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.blobs.remote import Remote
    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.readers.index.index import Index
    from penstock.readers.index.opening import Folder
    from penstock.readers.origin.urls import Url
    from penstock.readers.types import Encoded, Verify

# Reading through a map is checksumming it: about 10 GB/s (one core, measured) where the pages are
# in memory, under 0.1 where each fault waits for the disk. After a batch this many times slower
# than warm the next ones are read ahead; several, since on a fast disk an advised batch looks warm.
# Advice costs about 4 us a sample, so warm batches do without.
_WARM_BYTES_PER_S = 8e9
_WARM_SAMPLE_S = 2e-6
_COLD_FACTOR = 5.0
ADVISED_BATCHES = 16

_EMPTY = np.empty(0, np.uint8)
_EMPTY.flags.writeable = False


class Dataset:
    """A folder of images, tar files or a pack, by URL.

    Opens at first use; several threads may read.

    url: a local path or any fsspec URL; tar files by a pattern such as train-{000000..000009}.tar
    too. fields: of "image", "label", "id", in the order in which batches shall have them; None is
    all that is there but "id". format: "auto", "folder", "tar" or "arrow". index: folder of the
    index of images or tar files, of remote ones also a URL of the same store; None is beside them,
    else the cache folder, else the user's cache directory. cache: a DiskCache that remote data is
    read through (data on a network mount too), or a folder for one: its limit is what it was made
    with, or 90 % of the free space. storage_options: of the store (docs/datasets.md). filesystem:
    any fsspec file system object; url is then a path in it.

    Raises ConfigError here for arguments that can't be; what opening raises (`open_index`) comes
    with the first use.
    """

    def __init__(
        self,
        url: Url,
        *,
        fields: Sequence[str] | None = None,
        format: Format = "auto",
        index: Folder | None = None,
        cache: DiskCache | Folder | None = None,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: Any | None = None,
    ) -> None:
        self.url = show(url)
        check_format(format)
        self._wanted = _checked_fields(fields)
        self._scratch = Scratch(cache)
        self._source, self._format, self._index_folder = url, format, index
        self._cache = cache
        self._storage_options, self._filesystem = storage_options, filesystem
        self._opening = threading.Lock()
        self._local = TrafficMeter()
        self._blocks = Blocks()
        self._index: Index | None = None
        self._shards: OpenShards | None = None
        self._advise = ADVISED_BATCHES  # until enough batches say otherwise
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        """For a spawned worker: the same dataset, opened anew there."""
        arguments: dict[str, Any] = {
            "fields": self._wanted,
            "format": self._format,
            "index": self._index_folder,
            "cache": self._cache,
            "storage_options": self._storage_options,
            "filesystem": self._filesystem,
        }
        return partial(Dataset, **arguments), (self._source,)

    def open(self, *, verify: Verify | None = None, workers: int | None = None) -> Index:
        """Open the index, or build it; again, it costs nothing. verify, workers, and what is
        raised: as for `open_index`. Raises ConfigError for fields that aren't there."""
        with self._opening:
            if self._closed:
                raise ClosedError(f"{self!r} is closed; make a new one.")
            if self._index is None:
                origin = locate(
                    self._source,
                    storage_options=self._storage_options,
                    scratch=self._scratch,
                    filesystem=self._filesystem,
                )
                opener = Opener(
                    origin=origin,
                    scratch=self._scratch,
                    index=self._index_folder,
                    verify=verify,
                    workers=workers or usable_cores(),
                )
                try:
                    index = opener.open(self._format)
                    self._check_fields(index)
                except BaseException:
                    origin.close()
                    raise
                self._shards = OpenShards(index)
                self._index = index
            return self._index

    @property
    def index(self) -> Index:
        """What is there; opens it at first use."""
        return self._index if self._index is not None and not self._closed else self.open()

    @property
    def fields(self) -> tuple[str, ...]:
        """What a batch has, in order."""
        return self._wanted if self._wanted is not None else self.index.fields

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names by label; empty without labels."""
        return self.index.classes

    @property
    def kept_folder(self) -> str | None:
        """The user's cache folder; None where there is none."""
        return self._scratch.folder() if self._scratch.is_kept else None

    @property
    def remote(self) -> Remote | None:
        """What a remote dataset is read through; None for a local one, and before it is open."""
        return self._index.remote if self._index is not None else None

    @property
    def bytes_fetched(self) -> int:
        """Bytes downloaded so far; 0 for a local dataset."""
        return self.traffic().bytes_remote

    def traffic(self) -> Traffic:
        """What was read so far, by tier; of a local dataset bytes_disk alone."""
        remote = self.remote
        return self._local.snapshot() if remote is None else remote.traffic()

    def release(self, shards: Iterable[int]) -> None:
        """Forget open shards, so that the cache may drop their blobs; batches that were handed out
        keep theirs."""
        if self._shards is not None:
            self._shards.release(shards)

    def give_back(self) -> None:
        """Forget those open shards that the cache needn't keep for this dataset's loaders."""
        if self._shards is not None:
            self._shards.give_back()

    def __len__(self) -> int:
        return self.index.samples

    def __getitem__(self, index: object) -> NoReturn:
        """Always raises ConfigError: samples are read by shards, through the loader."""
        raise ConfigError(
            f"Sample {index!r} of {self.url} was asked for by index. A native dataset is read by "
            "shards, through Penstock's DataLoader only: loop over DataLoader(dataset, ...), and "
            "for a part or a mixture of datasets make folders or packs of their own. If a "
            "framework asked, it has rebuilt that loader as torch's own, which would shard again "
            "and leave out decoding: docs/trainers.md says what to switch off, such as "
            "`ignore_data_skip=True` in the HF Trainer."
        )

    def __repr__(self) -> str:
        samples = f", {self._index.samples} samples" if self._index is not None else ""
        return f"Dataset({self.url!r}{samples})"

    def read(
        self,
        rows: NDArray[np.int64],
        *,
        mode: ReadMode = READ_MODE,
        bad: dict[int, str] | None = None,
    ) -> EncodedBatch:
        """Encoded samples in the order of rows, each checked against its CRC-32C.

        rows: (shard, row), int64, shape (n, 2), n ≥ 0. mode: "copy" copies each sample out of
        the map of its shard and checks the copy, which nobody else can change; "pread" reads into
        fresh memory (for mounts whose files may shrink under a map); "mmap" gives read-only views:
        who writes to the file behind the check changes what is decoded.
        bad: None, or a dict that is told which samples are bad, as position in rows -> reason: a
        wrong checksum even after a second fetch; a folder's file that is gone, changed or can't be
        read. Those come empty, with their ids and columns, instead of an error for all.

        Raises CorruptSampleError (carries sample_id), CorruptShardError, IndexChangedError (files
        aren't what was indexed), FetchError, ClosedError, ConfigError (rows that don't exist).
        """
        index = self.index
        self._check_rows(rows, index, mode)
        # One visit per shard: samples sorted by shard, results put back in the order asked for.
        order = np.argsort(rows[:, 0], kind="stable")
        visit = self._visit(rows[order])
        began = time.perf_counter()
        marks: dict[int, str] | None = None if bad is None else {}
        encoded = self._load(index, visit, mode, marks)
        if index.remote is not None:
            began = time.perf_counter()  # the network's time isn't the disk's
        crcs = checksums(visit, encoded, mode, self._blocks)
        self._note_rate(visit.table, time.perf_counter() - began, is_local=index.remote is None)
        if crcs != (wanted := visit.table[:, CRC].tolist()):
            wrong = [i for i, crc in enumerate(crcs) if crc != wanted[i] and i not in (marks or ())]
            self._mend(index, visit, encoded, rows[order], wrong, mode, marks)
        for i, reason in (marks or {}).items():
            assert bad is not None
            bad[int(order[i])] = reason
            encoded[i] = _EMPTY
        return self._batch(index, rows, order, visit.table, encoded)

    def names(self, ids: Iterable[int] | NDArray[np.int64]) -> list[str]:
        """The samples' names for people: file names below the folder; of a pack those in what it
        was made from, or where it doesn't tell them, shard and row.

        Raises ConfigError for ids that don't exist.
        """
        index = self.index
        wanted = np.asarray(list(ids), np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < index.samples):
            raise ConfigError(f"ids: got {wanted.tolist()[:5]}…, wanted 0 to {index.samples - 1}.")
        shards = np.searchsorted(index.starts, wanted, side="right") - 1
        rows = wanted - index.starts[shards]
        if index.kind == "arrow":
            return self._source_names(index, shards, rows)
        opened = self._opened().get(shards.tolist())
        return [shard.name(row) for shard, row in zip(opened, rows.tolist(), strict=True)]

    def _source_names(
        self, index: Index, shards: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> list[str]:
        """A shard at a time: only one's names are in memory."""
        names = [""] * len(shards)
        for number in np.unique(shards).tolist():
            try:
                (shard,) = self._opened().get([number])
                known = shard.source_names() if isinstance(shard, ArrowColumns) else None
            except (DatasetError, FetchError):  # the names of its samples are asked for a report
                known = None
            for place in np.flatnonzero(shards == number).tolist():
                row = int(rows[place])
                names[place] = (
                    f"{index.shard_name(number)}[{row}]" if known is None else printable(known[row])
                )
        return names

    def close(self) -> None:
        """Unmap shards and remove temporary downloads; views that were handed out stay valid. Safe
        to call twice."""
        with self._opening:
            self._closed = True
            if self._shards is not None:
                self._shards.close()
            if self._index is not None:
                self._index.origin.close()
            self._scratch.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_fields(self, index: Index) -> None:
        there = (*index.fields, "id")
        missing = [field for field in self._wanted or () if field not in there]
        if missing:
            raise ConfigError(
                f"fields: got {missing[0]!r}, and {self.url} has {list(there)}. Ask for those"
                + ("; labels need one sub-folder a class." if "label" in missing else ".")
            )

    def _check_rows(self, rows: NDArray[np.int64], index: Index, mode: ReadMode) -> None:
        if rows.ndim != 2 or rows.shape[1] != 2:
            raise ConfigError(f"rows: got shape {rows.shape}, wanted (n, 2) of (shard, row).")
        if mode not in get_args(ReadMode):
            raise ConfigError(f"mode: got {mode!r}, wanted one of {list(get_args(ReadMode))}.")
        if not len(rows):
            return
        shards, row = rows[:, 0], rows[:, 1]
        if (
            not (shards.min() >= 0 and shards.max() < len(index.sizes) and row.min() >= 0)
            or (row >= index.sizes[shards]).any()
        ):
            raise ConfigError(
                f"rows: some of them don't exist; {self.url} has {len(index.sizes)} shards, row is "
                "below its shard's size. The plan was made for another dataset."
            )

    def _opened(self) -> OpenShards:
        if self._shards is None or self._closed:
            raise ClosedError(f"{self!r} is closed; make a new one.")
        return self._shards

    def _visit(self, rows: NDArray[np.int64]) -> Visit:
        """Open what rows need; rows are sorted by shard."""
        shards = rows[:, 0]
        starts = np.flatnonzero(np.diff(shards, prepend=-1))
        numbers = shards[starts].tolist()
        opened = self._opened().get(numbers)
        return Visit.of(numbers, opened, [*starts.tolist(), len(rows)], rows[:, 1])

    def _load(
        self, index: Index, visit: Visit, mode: ReadMode, marks: dict[int, str] | None = None
    ) -> list[Encoded]:
        advise = bool(self._advise)
        if index.remote is None:
            return load_local(visit, mode, advise=advise, marks=marks)
        return load_blobs(visit, mode, remote=index.remote, opened=self._opened(), advise=advise)

    def _note_rate(self, table: NDArray[np.int64], seconds: float, *, is_local: bool) -> None:
        """Remember for the next batches whether this one waited for the disk."""
        size_bytes = int((table[:, END] - table[:, START]).sum())
        if is_local:
            self._local.add(bytes_disk=size_bytes)
        warm_s = size_bytes / _WARM_BYTES_PER_S + len(table) * _WARM_SAMPLE_S
        is_cold = seconds > _COLD_FACTOR * warm_s
        self._advise = ADVISED_BATCHES if is_cold else max(0, self._advise - 1)

    def _mend(
        self,
        index: Index,
        visit: Visit,
        encoded: list[Encoded],
        rows: NDArray[np.int64],
        bad: list[int],
        mode: ReadMode,
        marks: dict[int, str] | None,
    ) -> None:
        """Fetch remote shards with bad samples once more; raise for what is bad even then, or tell
        marks."""
        wanted = visit.table[:, CRC].tolist()
        crcs: dict[int, int] = {}  # of what was fetched again
        numbers = visit.numbers.index
        for number in np.unique(rows[bad, 0]).tolist():
            here = [i for i in bad if rows[i, 0] == number]
            if index.remote is not None:
                shard = self._opened().replace(number, visit.shards[numbers(number)])
                again = Visit.of([number], [shard], [0, len(here)], rows[here, 1])
                mended = self._load(index, again, mode)
                crcs |= zip(here, checksums(again, mended, mode, self._blocks), strict=True)
                for i, sample in zip(here, mended, strict=True):
                    encoded[i] = sample
                    wanted[i] = int(shard.table[rows[i, 1], CRC])
            for i in here:
                if i in (marks or ()) or crcs.get(i) == wanted[i]:
                    continue
                if marks is None:
                    raise self._corrupt(index, number, int(rows[i, 1]))
                marks[i] = "its bytes aren't those that were indexed: its CRC-32C is wrong"

    def _corrupt(self, index: Index, number: int, row: int) -> Exception:
        sample_id = int(index.starts[number]) + row
        (shard,) = self._opened().get([number])
        if index.kind != "arrow":
            return IndexChangedError(
                f"{shard.name(row)} (sample {sample_id} of {self.url}): its bytes aren't those "
                f"that were indexed; the file was changed in place, or the disk is failing. "
                f"{REINDEX}"
            )
        return CorruptSampleError(
            f"Sample {sample_id} of {self.url} ({shard.name(row)}): its checksum (CRC-32C) is "
            "wrong. The shard was changed or the disk is failing: fetch or pack that shard again.",
            sample_id=sample_id,
        )

    def _batch(
        self,
        index: Index,
        rows: NDArray[np.int64],
        order: NDArray[np.int64],
        table: NDArray[np.int64],
        encoded: list[Encoded],
    ) -> EncodedBatch:
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        table = table[back]
        columns = {"label": table[:, LABEL].copy()} if "label" in self.fields else {}
        return EncodedBatch(
            ids=index.starts[rows[:, 0]] + rows[:, 1],
            encoded=[encoded[i] for i in back.tolist()],
            dims=table[:, HEIGHT : WIDTH + 1].astype(np.int32),
            columns=columns,
        )


def _checked_fields(fields: Sequence[str] | None) -> tuple[str, ...] | None:
    if fields is None:
        return None
    known = ("image", "label", "id")
    wanted = (fields,) if isinstance(fields, str) else tuple(fields)
    unknown = [field for field in wanted if field not in known]
    if unknown or not wanted or len(set(wanted)) < len(wanted):
        raise ConfigError(f"fields: got {list(wanted)}, wanted some of {list(known)}, each once.")
    return wanted
