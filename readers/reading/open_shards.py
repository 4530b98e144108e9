"""Open shards when a batch needs them, and keep a bounded number of them open."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from penstock.cache import ClosedError, ordered
from penstock.readers.formats import BlobShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.readers.formats import OpenShard
    from penstock.readers.index import Index

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
            find = self._shards.get if self._index.remote is None else self._find
            found = [find(number) for number in numbers]
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
        shard, remote = self._shards.get(number), self._index.remote
        if not isinstance(shard, BlobShard) or shard.blob.is_cached or remote is None:
            return shard
        return None if remote.is_whole(shard.blob.source) else shard

    def _open(self, numbers: list[int]) -> dict[int, OpenShard]:
        """Open shards, those that need the remote concurrently."""
        index = self._index
        far = [number for number in numbers if not index.shards.is_near(number)]
        new: dict[int, OpenShard] = {}
        if len(far) > 1:
            workers = min(len(far), OPENERS)
            found = ordered(index.shards.open, far, workers=workers, ahead=workers, name="open")
            new |= zip(far, found, strict=True)
        return new | {n: index.shards.open(n) for n in numbers if n not in new}

    def release(self, numbers: Iterable[int]) -> None:
        """Close some shards; views of them stay valid."""
        with self._lock:
            for number in numbers:
                self._shards.pop(number, None)

    def give_back(self) -> None:
        """Close shards whose blobs the cache needn't keep for this dataset's jobs, or has removed,
        because other shards may be waiting for their room."""
        remote = self._index.remote
        if remote is None:
            return
        from penstock.cache.blobs import CachedBlob

        with self._lock:
            shards = list(self._shards.items())
        gone = []
        for number, shard in shards:
            blob = shard.blob if isinstance(shard, BlobShard) else None
            if isinstance(blob, CachedBlob) and not (
                remote.keeps(blob.source.key) and blob.has_name
            ):
                gone.append(number)
        self.release(gone)

    def replace(self, number: int, shard: OpenShard) -> OpenShard:
        """Reopen a remote shard after dropping its damaged bytes; if several threads report it,
        only the first does so."""
        with self._replacing:
            with self._lock:
                current = self._shards.get(number)
                is_new = current is not None and not _same_bytes(current, shard)
            if not is_new:
                self._index.shards.drop(number, opened=shard)
                with self._lock:
                    self._drops[number] += 1
                    self._shards.pop(number, None)
            (fresh,) = self.get([number])
            return fresh

    def close(self) -> None:
        """Close all shards. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._shards.clear()


def _same_bytes(a: OpenShard, b: OpenShard) -> bool:
    """Return True if two open shards read the same copy of the shard's bytes."""
    if a is b:
        return True
    inodes = {getattr(s.blob, "inode", None) if isinstance(s, BlobShard) else None for s in (a, b)}
    return len(inodes) == 1 and None not in inodes
