"""Open shards when a batch needs them, and keep a bounded number of them open."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, TypeVar

from penstock.cache import ClosedError, CorruptShardError, ordered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.readers.formats import OpenShard
    from penstock.readers.index import Index

T = TypeVar("T")

# The cost is mostly address space: 1,024 maps of 64 MiB are 64 GiB of it, plus 48 bytes of memory
# per sample for their tables. A plan that needs more open shards works, but reopens them often.
OPEN_SHARDS = 1024

# Opening a remote shard takes one or two requests; this many at once hide their latency.
OPENERS = 16


class OpenShards:
    """The open shards of a dataset, of which it keeps a bounded number. Safe for several threads.
    The blob of an open shard stays in the cache."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._replacing = threading.Lock()
        self._shards: OrderedDict[int, OpenShard] = OrderedDict()
        self._drops: Counter[int] = Counter()
        self._closed = False

    def __len__(self) -> int:
        return len(self._shards)

    def get(self, numbers: Sequence[int]) -> list[OpenShard]:
        """Return shards by number, opening those that aren't open; the least recently used are
        closed. Raises ClosedError and what Shards.open raises."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._index.url} is closed; make a new dataset.")
            found = [self._find(number) for number in numbers]
            opened = [shard for shard in found if shard is not None]
            for number, shard in zip(numbers, found, strict=True):
                if shard is not None:
                    self._shards.move_to_end(number)
            if len(opened) == len(numbers):
                return opened
            drops = {number: self._drops[number] for number in numbers}
        pairs = zip(numbers, found, strict=True)
        # Outside the lock, as opening may download. Two threads may open one shard; one is kept.
        new = self._open(list(dict.fromkeys(n for n, shard in pairs if shard is None)))
        with self._lock:
            if not self._closed:
                # A shard that was opened before its damaged bytes were dropped still has them.
                self._shards |= {n: shard for n, shard in new.items() if drops[n] == self._drops[n]}
                while len(self._shards) > max(OPEN_SHARDS, len(numbers)):
                    self._shards.popitem(last=False)
        return [
            shard if shard is not None else new[number]
            for number, shard in zip(numbers, found, strict=True)
        ]

    def _find(self, number: int) -> OpenShard | None:
        """Return an open shard, unless it is read past the cache and the cache has its blob by
        now."""
        shard = self._shards.get(number)
        return None if shard is not None and shard.source.is_outdated else shard

    def _open(self, numbers: list[int]) -> dict[int, OpenShard]:
        """Open shards, those that need the remote concurrently."""
        index = self._index
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
                self._index.drop(number, opened=shard)
                with self._lock:
                    self._drops[number] += 1
                    self._shards.pop(number, None)
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

    def close(self) -> None:
        """Close all shards. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._shards.clear()


def _same_bytes(a: OpenShard, b: OpenShard) -> bool:
    """Return True if two open shards read the same copy of the shard's bytes."""
    return a is b or (a.source.inode is not None and a.source.inode == b.source.inode)
