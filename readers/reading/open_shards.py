"""Open shards when a batch needs them, keep a bounded number of them open, and name the samples in
them that can't be read."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from penstock.cache import (
    ClosedError,
    CorruptSampleError,
    CorruptShardError,
    IndexChangedError,
    ordered,
    watch,
)
from penstock.readers.byte_source import REINDEX
from penstock.readers.types import UNFIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.readers.formats import OpenShard
    from penstock.readers.index import Index
    from penstock.readers.reading.parallel_copies import CopyThreads

T = TypeVar("T")

# The cost is mostly address space: 1,024 maps of 64 MiB are 64 GiB of it, plus 48 bytes of memory
# per sample for their tables. A plan that needs more open shards works, but reopens them often.
OPEN_SHARDS = 1024

# Of all datasets of a process, whose parts in a mixture may be thousands: a shard has one or two
# maps, and Linux allows a process 65,530 of them (vm.max_map_count).
PROCESS_SHARDS = 2**13
_OPENINGS_A_CHECK = 2**9
_USES = itertools.count()

# Opening a remote shard takes one or two requests; this many at once hide their latency.
OPENERS = 16

WRONG_CRC = "its bytes aren't those that were indexed: its CRC-32C is wrong"


class Shards(Protocol):
    """The open shards of one dataset or of several, by number; see `OpenShards`."""

    def get(self, numbers: Sequence[int]) -> list[OpenShard]: ...
    def read(
        self, number: int, shard: OpenShard, read: Callable[[OpenShard], tuple[T, bool]]
    ) -> T: ...
    def replace(self, number: int, shard: OpenShard) -> OpenShard: ...
    def corruption(self, number: int, row: int, reason: str) -> Exception: ...
    def copy_threads(self) -> CopyThreads: ...


class OpenShards:
    """The open shards of a dataset, of which it keeps a bounded number. Safe for several threads.
    The blob of an open shard stays in the cache.

    index: of the dataset.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._lock = threading.Lock()
        self._replacing = threading.Lock()
        self._shards: OrderedDict[int, OpenShard] = OrderedDict()
        self._used: dict[int, int] = {}  # when each was used last, in calls of the process
        self._drops: Counter[int] = Counter()
        self._copy_threads: CopyThreads | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._shards)

    def get(self, numbers: Sequence[int]) -> list[OpenShard]:
        """Return shards by number, opening those that aren't open; the least recently used are
        closed. Raises ClosedError and what `Index.open` raises."""
        found: dict[int, OpenShard] = {}
        now = next(_USES)
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.index.url} is closed; make a new dataset.")
            for number in numbers:
                shard = self._shards.get(number)
                # A shard that is read past the cache is opened again once the cache has its blob.
                if shard is not None and not shard.source.is_outdated:
                    self._shards.move_to_end(number)
                    self._used[number] = now
                    found[number] = shard
            if len(found) == len(numbers):
                return [*found.values()]
            drops = {number: self._drops[number] for number in numbers if number not in found}
        # Outside the lock, as opening may download. Two threads may open one shard; one is kept.
        new = self._open(list(drops))
        found |= new
        with self._lock:
            if not self._closed:
                # A shard opened before its damaged bytes were dropped still has them.
                kept = {n: each for n, each in new.items() if drops[n] == self._drops[n]}
                self._shards |= kept
                self._used |= dict.fromkeys(kept, now)
                while len(self._shards) > max(OPEN_SHARDS, len(numbers)):
                    del self._used[self._shards.popitem(last=False)[0]]
        _of_process.add(self, len(new))
        return [found[number] for number in numbers]

    def uses(self) -> list[int]:
        """Return when each open shard was used last, in no order."""
        with self._lock:
            return [*self._used.values()]

    def close_unused(self, since: int) -> None:
        """Close the shards that weren't used since then; views of them stay valid."""
        with self._lock:
            old = [number for number, used in self._used.items() if used < since]
        self.release(old)

    def _open(self, numbers: list[int]) -> dict[int, OpenShard]:
        """Open shards, those that need the remote concurrently."""
        index = self.index
        far = [number for number in numbers if not index.is_near(number)]
        new: dict[int, OpenShard] = {}
        if len(far) > 1:
            workers = min(len(far), OPENERS)
            found = ordered(index.open, far, workers=workers, ahead=workers, name="open")
            new |= zip(far, found, strict=True)
        return new | {n: index.open(n) for n in numbers if n not in new}

    def release(self, numbers: Iterable[int]) -> None:
        """Close some shards; views of them stay valid."""
        with self._lock:
            for number in numbers:
                self._shards.pop(number, None)
                self._used.pop(number, None)

    def give_back(self) -> None:
        """Close shards whose blobs the cache needn't keep for this dataset's jobs, or has removed,
        because other shards may be waiting for their room."""
        with self._lock:
            shards = list(self._shards.items())
        self.release([number for number, shard in shards if shard.source.is_spare])

    def replace(self, number: int, shard: OpenShard) -> OpenShard:
        """Reopen a remote shard after dropping its damaged bytes; if several threads report it,
        only the first does so."""
        with self._replacing:
            with self._lock:
                current = self._shards.get(number)
                is_new = current is not None and not _same_bytes(current, shard)
            if not is_new:
                self.index.drop(number, opened=shard)
                with self._lock:
                    self._drops[number] += 1
                    self._shards.pop(number, None)
                    self._used.pop(number, None)
            (fresh,) = self.get([number])
            return fresh

    def read(self, number: int, shard: OpenShard, read: Callable[[OpenShard], tuple[T, bool]]) -> T:
        """Return what `read` returns for a shard. If bytes in the cache are wrong or unreadable,
        they are fetched again, and then read past the cache.

        read: returns also False if bytes are wrong. Raises what it raises.
        """
        for attempt in range(3):
            try:
                found, is_right = read(shard)
            except (CorruptShardError, OSError, EOFError) as error:
                shard.source.refuse(error, attempt)
            else:
                if is_right or attempt or not shard.source.is_fetched:
                    return found
            shard = self.replace(number, shard)
        raise AssertionError("not reached")

    def copy_threads(self) -> CopyThreads:
        """Return the threads that copy large arrays."""
        if self._copy_threads is None:
            from penstock.readers.reading.parallel_copies import CopyThreads

            # Two threads may make one each; the unused one ends when its user drops it.
            self._copy_threads = CopyThreads()
        return self._copy_threads

    def corruption(self, number: int, row: int, reason: str) -> Exception:
        """Return the error for a sample that can't be read. reason: `WRONG_CRC`, or what its file
        or decoder said."""
        index = self.index
        (shard,) = self.get([number])
        sample_id = int(index.starts[number]) + row
        shown = f"{shard.name(row)} (sample {sample_id} of {index.url})"
        if reason == WRONG_CRC and not index.is_self_contained:
            return IndexChangedError(
                f"{shown}: its bytes aren't those that were indexed: the file was changed in "
                f"place, or the disk is failing. {REINDEX}"
            )
        if reason == WRONG_CRC:
            why = (
                "its checksum (CRC-32C) is wrong. The shard was changed, or the disk is failing: "
                "fetch or pack that shard again."
            )
        else:
            # Some reasons have their own remedy.
            fix = "" if reason.endswith(UNFIT) else ". Get that file again, or leave the sample out"
            why = f"{reason}{fix}; a loader replaces and counts such samples, up to max_bad=."
        return CorruptSampleError(f"{shown}: {why}", sample_id=sample_id)

    def close(self) -> None:
        """Close all shards, and end the threads. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._shards.clear()
            self._used.clear()
        if self._copy_threads is not None:
            self._copy_threads.close()


class _OfProcess:
    """The open shards of all datasets, of which about `PROCESS_SHARDS` stay open."""

    def __init__(self) -> None:
        self._each: weakref.WeakSet[OpenShards] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._unchecked = 0

        watch(self)

    def disown(self) -> None:
        """Replace the lock in a forked child, as another thread of the parent may have held it."""
        self._lock = threading.Lock()

    def add(self, shards: OpenShards, count: int) -> None:
        """Count openings of a dataset; now and then close the shards that were used least
        recently."""
        self._unchecked += count
        with self._lock:
            self._each.add(shards)
            if self._unchecked < min(_OPENINGS_A_CHECK, PROCESS_SHARDS):
                return
            self._unchecked, each = 0, [*self._each]
        uses = np.array([use for one in each for use in one.uses()])
        if len(uses) > PROCESS_SHARDS:
            most = PROCESS_SHARDS - PROCESS_SHARDS // 8
            since = int(np.partition(uses, len(uses) - most)[len(uses) - most])
            for one in each:
                one.close_unused(since)


_of_process = _OfProcess()


def _same_bytes(a: OpenShard, b: OpenShard) -> bool:
    """Return True if two open shards read the same copy of the shard's bytes."""
    return a is b or (a.source.inode is not None and a.source.inode == b.source.inode)
