"""Reads the encoded samples of an open index."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, get_args

import numpy as np

from penstock.cache.base.blob import ReadMode
from penstock.cache.base.counters import Traffic, TrafficMeter
from penstock.cache.errors import ConfigError, CorruptSampleError, IndexChangedError
from penstock.readers.fields.columns import DenseColumn, EncodedColumn, SampleBatch
from penstock.readers.formats.local_files import REINDEX
from penstock.readers.formats.shard import CRC, END, HEIGHT, LABEL, START, WIDTH
from penstock.readers.reading.blocks import Blocks
from penstock.readers.reading.checksums import checksums
from penstock.readers.reading.loading import load_blobs, load_local
from penstock.readers.reading.open_shards import OpenShards
from penstock.readers.reading.page_advice import PageAdvice
from penstock.readers.reading.visit import Visit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.fields.columns import Column
    from penstock.readers.index.index import Index
    from penstock.readers.types import Encoded

_EMPTY = np.empty(0, np.uint8)
_EMPTY.flags.writeable = False


class SampleReader:
    """Reads samples by (shard, row), each checked against its CRC-32C. Safe for several threads.

    url: of the dataset, for people. shards: those that are open. has_labels: whether batches get a
    column of labels.
    """

    def __init__(self, index: Index, *, url: str, has_labels: bool) -> None:
        self.index, self._url = index, url
        self.shards = OpenShards(index)
        self._has_labels = has_labels
        self._blocks = Blocks()
        self._advice = PageAdvice()
        self._local = TrafficMeter()

    def traffic(self) -> Traffic:
        """What was read so far, by tier; of a local dataset bytes_disk alone."""
        remote = self.index.remote
        return self._local.snapshot() if remote is None else remote.traffic()

    def read(
        self, rows: NDArray[np.int64], *, mode: ReadMode, bad: dict[int, str] | None
    ) -> SampleBatch:
        """Encoded samples in the order of rows; arguments and errors as for `Dataset.read`."""
        index = self.index
        _check_rows(rows, index, mode, self._url)
        # One visit per shard: samples sorted by shard, results put back in the order asked for.
        order = np.argsort(rows[:, 0], kind="stable")
        visit = self._visit(rows[order])
        began = time.perf_counter()
        marks: dict[int, str] | None = None if bad is None else {}
        encoded = self._load(visit, mode, marks)
        if index.remote is not None:
            began = time.perf_counter()  # the network's time isn't the disk's
        crcs = checksums(visit, encoded, mode, self._blocks)
        self._note(visit.table, time.perf_counter() - began)
        if crcs != (wanted := visit.table[:, CRC].tolist()):
            wrong = [i for i, crc in enumerate(crcs) if crc != wanted[i] and i not in (marks or ())]
            self._refetch(visit, encoded, rows[order], wrong, mode, marks)
        for i, reason in (marks or {}).items():
            assert bad is not None
            bad[int(order[i])] = reason
            encoded[i] = _EMPTY
        return self._batch(rows, order, visit.table, encoded)

    def close(self) -> None:
        """Forget all open shards; what was handed out stays valid. Safe to call twice."""
        self.shards.close()

    def _visit(self, rows: NDArray[np.int64]) -> Visit:
        """Open what rows need; rows are sorted by shard."""
        shards = rows[:, 0]
        starts = np.flatnonzero(np.diff(shards, prepend=-1))
        numbers = shards[starts].tolist()
        opened = self.shards.get(numbers)
        return Visit.of(numbers, opened, [*starts.tolist(), len(rows)], rows[:, 1])

    def _load(
        self, visit: Visit, mode: ReadMode, marks: dict[int, str] | None = None
    ) -> list[Encoded]:
        advise, remote = self._advice.is_on, self.index.remote
        if remote is None:
            return load_local(visit, mode, advise=advise, marks=marks)
        return load_blobs(visit, mode, remote=remote, opened=self.shards, advise=advise)

    def _note(self, table: NDArray[np.int64], seconds: float) -> None:
        size_bytes = int((table[:, END] - table[:, START]).sum())
        if self.index.remote is None:
            self._local.add(bytes_disk=size_bytes)
        self._advice.note(samples=len(table), size_bytes=size_bytes, seconds=seconds)

    def _refetch(
        self,
        visit: Visit,
        encoded: list[Encoded],
        rows: NDArray[np.int64],
        bad: list[int],
        mode: ReadMode,
        marks: dict[int, str] | None,
    ) -> None:
        """Fetch remote shards with bad samples once more; raise for what is bad even then, or mark
        it."""
        wanted = visit.table[:, CRC].tolist()
        crcs: dict[int, int] = {}  # of what was fetched again
        numbers = visit.numbers.index
        for number in np.unique(rows[bad, 0]).tolist():
            here = [i for i in bad if rows[i, 0] == number]
            if self.index.remote is not None:
                shard = self.shards.replace(number, visit.shards[numbers(number)])
                again = Visit.of([number], [shard], [0, len(here)], rows[here, 1])
                mended = self._load(again, mode)
                crcs |= zip(here, checksums(again, mended, mode, self._blocks), strict=True)
                for i, sample in zip(here, mended, strict=True):
                    encoded[i] = sample
                    wanted[i] = int(shard.table[rows[i, 1], CRC])
            for i in here:
                if i in (marks or ()) or crcs.get(i) == wanted[i]:
                    continue
                if marks is None:
                    raise self._corruption(number, int(rows[i, 1]))
                marks[i] = "its bytes aren't those that were indexed: its CRC-32C is wrong"

    def _corruption(self, number: int, row: int) -> Exception:
        index = self.index
        sample_id = int(index.starts[number]) + row
        (shard,) = self.shards.get([number])
        if not index.is_self_contained:
            return IndexChangedError(
                f"{shard.name(row)} (sample {sample_id} of {self._url}): its bytes aren't those "
                f"that were indexed; the file was changed in place, or the disk is failing. "
                f"{REINDEX}"
            )
        return CorruptSampleError(
            f"Sample {sample_id} of {self._url} ({shard.name(row)}): its checksum (CRC-32C) is "
            "wrong. The shard was changed or the disk is failing: fetch or pack that shard again.",
            sample_id=sample_id,
        )

    def _batch(
        self,
        rows: NDArray[np.int64],
        order: NDArray[np.int64],
        table: NDArray[np.int64],
        encoded: list[Encoded],
    ) -> SampleBatch:
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        table = table[back]
        images = EncodedColumn(
            [encoded[i] for i in back.tolist()], table[:, HEIGHT : WIDTH + 1].astype(np.int32)
        )
        columns: dict[str, Column] = {"image": images}
        if self._has_labels:
            columns["label"] = DenseColumn(table[:, LABEL].copy())
        return SampleBatch(
            ids=self.index.starts[rows[:, 0]] + rows[:, 1],
            columns=columns,
            bytes_read=int((table[:, END] - table[:, START]).sum()),
        )


def _check_rows(rows: NDArray[np.int64], index: Index, mode: ReadMode, url: str) -> None:
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
            f"rows: some of them don't exist; {url} has {len(index.sizes)} shards, and a row must "
            "be below its shard's size. The plan was made for another dataset."
        )
