"""Read the objects of one remote dataset: its blobs, its small objects and names.

A blob that the cache keeps is filled as it is read: batches fetch exact ranges for their samples,
and background fills fetch large ranges into the same file, each byte once per node. Samples of a
passing blob, which the cache doesn't keep, are fetched by exact ranges into new memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.base import BlobSource, Folder, ObjectInfo, Segment, blob_key, remove_own_folder
from penstock.cache.blobs.blob_fills import BlobFills, BlockSums, CachedBlob, DatasetCache, Demand
from penstock.cache.blobs.upstream import BlobRange, BlobRequest, Upstream, object_changed
from penstock.cache.disk import BLOCK_BYTES, DISK_ERRORS, Segments
from penstock.cache.errors import CorruptShardError, FetchError, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import Answer, Blob, BlobSpans, FileMap, ReadMode, Traffic
    from penstock.cache.disk import CacheFolder, DiskCache, PieceSpan, ReadableFolder
    from penstock.cache.fetch import Fetcher

    Bytes = NDArray[np.uint8]
    Spans = Sequence[tuple[int, int]]

_MAP_NORESERVE = 0x4000  # Linux; Python's module names it from 3.12 on


class PassingBlob:
    """A blob that is read without the cache. upstream: fetches its bytes."""

    is_cached = is_whole = False

    def __init__(self, source: BlobSource, upstream: Upstream) -> None:
        self.source, self._upstream = source, upstream
        self._version: str | None = None  # of the first answer, if the source names none
        self._memory: mmap.mmap | None = None
        self._table = Segments(source.segments)

    def requests(
        self, starts: Sequence[int], ends: Sequence[int]
    ) -> tuple[list[Bytes], list[BlobRequest]]:
        """Return arrays, and the requests that fill them when they are sent."""
        found: list[Bytes] = [np.empty(0, np.uint8)] * len(starts)
        requests: list[BlobRequest] = []
        for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
            ranges = list(self._ranges(start, end))
            if len(ranges) == 1:  # the answer's memory becomes the sample's
                (wanted,) = ranges
                requests.append(BlobRequest(wanted, partial(self._keep, wanted, found, place)))
            elif ranges:  # in several objects, or a large one
                array = np.empty(end - start, np.uint8)
                found[place] = array.view()
                found[place].flags.writeable = False
                requests += self._into(array, start, ranges)
        return found, requests

    def buffer(self, spans: Spans) -> Any:
        """Return a buffer in which these spans are filled; other pages use no memory."""
        import pyarrow as pa

        if self._memory is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._memory = mmap.mmap(-1, self.source.size_bytes, flags=flags)
        array = np.frombuffer(self._memory, np.uint8)
        ranges = (each for start, end in spans for each in self._ranges(start, end))
        self._upstream.send(self._into(array, 0, ranges))
        return pa.py_buffer(memoryview(self._memory).toreadonly())

    def address(self) -> int | None:
        """Return None: no file is mapped."""
        return None

    def _ranges(self, start: int, end: int) -> Iterator[BlobRange]:
        """Cut bytes [start, end) into ranges of one object each, of at most range_bytes."""
        agreed = self._version if self._table.is_of_one_object else None
        count = max(1, -(-(end - start) // self._upstream.range_bytes))
        for low, high in pairwise(start + (end - start) * i // count for i in range(count + 1)):
            for stretch in self._table.stretches(low, high):
                yield BlobRange(blob=self.source, version=agreed, **stretch._asdict())

    def _into(self, array: Bytes, start: int, ranges: Iterable[BlobRange]) -> list[BlobRequest]:
        """Return requests that store ranges in an array, which begins at byte `start`."""
        return [BlobRequest(each, partial(self._store, each, array, start)) for each in ranges]

    def _keep(self, wanted: BlobRange, found: list[Bytes], place: int, answer: Answer) -> None:
        found[place] = np.frombuffer(self._checked(wanted, answer), np.uint8)
        found[place].flags.writeable = False

    def _store(self, wanted: BlobRange, array: Bytes, start: int, answer: Answer) -> None:
        data = np.frombuffer(self._checked(wanted, answer), np.uint8)
        at = wanted.start - start
        array[at : at + len(data)] = data

    def _checked(self, wanted: BlobRange, answer: Answer) -> Any:
        """Return the bytes of an answer. Raises ObjectChangedError if they are another object's."""
        version, is_same = answer.version, True
        if self._table.is_of_one_object:
            if self._version is None and version:
                self._version = version
            is_same = not version or version == self._version
        if not is_same or answer.object_bytes != wanted.segment.whole_bytes:
            self._version = None
            raise object_changed(self.source, wanted.segment, reindex=self._upstream.reindex)
        self._upstream.meter.add(bytes_passed=len(memoryview(answer.data)))
        return answer.data


_MOST_HELD = 1024
_KNOWN_LIMIT_S = 5.0
"""Seconds to wait for the store if its last answer is known."""

_ALL: PieceSpan = (0, 1)
"""The single piece of an object that is fetched whole."""


class Remote(DatasetCache):
    """The objects of one remote dataset, which are read through the node's cache.

    fetcher: makes the requests to the store. cache: the node's cache; None caches nothing. group:
    the id of the dataset in the cache. label: the dataset's name in listings. upstream: the source
    of blobs, by default the store; small objects and names always come from the store. fills: the
    fills of its blobs. fill: `BlobFills.fill`. offline: set once the store couldn't be reached;
    folders of one store share it. The fetcher and the upstream are closed with this object. Safe
    for several threads; not across fork.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        cache: DiskCache | None,
        *,
        group: str,
        label: str,
        upstream: Upstream | None = None,
    ) -> None:
        super().__init__(cache, group=group, label=label)
        self.fetcher, self.upstream = fetcher, upstream or Upstream(fetcher)
        self._meter = fetcher.meter
        self.fills = BlobFills(self.upstream, self)
        self.fill = self.fills.fill
        self._held: OrderedDict[str, FileMap] = OrderedDict()
        self._own: Folder | None = None  # a temporary folder of this process
        self._remove: weakref.finalize[..., Remote] | None = None
        self.offline = threading.Event()

    # -- blobs

    def open(self, source: BlobSource) -> Blob:
        """Open a blob, as a cached one if the cache has it or can keep it; fetches nothing."""
        return self.fills.open(source) or self.pass_by(source)

    def pass_by(self, source: BlobSource) -> PassingBlob:
        """Open a blob without the cache, even if the cache has it; fetches nothing."""
        return PassingBlob(source, self.upstream)

    def is_whole(self, source: BlobSource) -> bool:
        """Return True if the whole blob is on the local disk."""
        return not source.size_bytes or bool(self.look(lambda folder: folder.has(source.key)))

    def held(self) -> dict[str, float]:
        """List the folder of the cache; return the present share of each blob by key, in [0, 1]."""
        found: dict[str, float] | None = self.look(lambda folder: folder.held())
        return found or {}

    def load(self, wanted: Sequence[BlobSpans], *, mode: ReadMode = "mmap") -> list[list[Bytes]]:
        """Read the bytes of all spans as read-only uint8 arrays, in the order of `wanted`. Missing
        bytes of all blobs are fetched at once.

        mode: "pread" returns new memory, other modes return views of cached blobs; passing blobs
        always use new memory. Raises FetchError, StalledError, ClosedError; with "pread" OSError
        and EOFError for a failing disk or a truncated file.
        """
        passed, missed = self._fetch(wanted)
        if passed is None:  # the cache can't be written any more, so read without it
            passed, _ = self._fetch([self._past_cache(want) for want in wanted])
            assert passed is not None
        # All spans from the disk count as hits, unless they were fetched just now.
        loaded, disk_bytes, hits = [], 0, -missed
        for want, found in zip(wanted, passed, strict=True):
            spans = found
            if spans is None:
                blob = want.blob
                assert isinstance(blob, CachedBlob)
                read = blob.copies if mode == "pread" else blob.views
                spans = read(want.starts, want.ends)
                size_bytes = sum(want.ends) - sum(want.starts)
                disk_bytes += size_bytes if want.touched_bytes is None else want.touched_bytes
            if found is not None or want.touched_bytes != 0:
                hits += len(spans)
            loaded.append(spans)
        self._meter.add(bytes_disk=disk_bytes, hits=hits, misses=missed)
        return loaded

    def _past_cache(self, wanted: BlobSpans) -> BlobSpans:
        """Return spans to be read without the cache, unless it has the whole blob."""
        blob = wanted.blob
        is_here = isinstance(blob, CachedBlob) and blob.fill is None
        return wanted if is_here else replace(wanted, blob=self.pass_by(blob.source))

    def bring(self, wanted: Sequence[BlobSpans], *, here: int) -> None:
        """Fetch the missing bytes of spans of all cached blobs at once, before they are read
        through buffers. here: the number of other samples on the local disk, counted as hits.
        Raises FetchError, StalledError, ClosedError."""
        cached = [want for want in wanted if isinstance(want.blob, CachedBlob)]
        _, missed = self._fetch(cached)  # after an error of the disk, each later read raises it
        self._meter.add(
            hits=here + sum(len(want.starts) for want in wanted) - missed, misses=missed
        )

    def _fetch(self, wanted: Sequence[BlobSpans]) -> tuple[list[list[Bytes] | None] | None, int]:
        """Fetch missing spans: into the cache (None in the result), or into arrays for passing
        blobs. Return the results, or None for all if the cache can't be written any more, and the
        number of spans with missing bytes."""
        passed: list[list[Bytes] | None] = [None] * len(wanted)
        requests: list[BlobRequest] = []
        demands: list[Demand] = []
        missed = 0
        for number, want in enumerate(wanted):
            if isinstance(want.blob, CachedBlob):
                demand, missing = want.blob.demand(want.starts, want.ends)
                missed += missing
                demands += [demand] if demand is not None else []
            else:
                assert isinstance(want.blob, PassingBlob)
                passed[number], more = want.blob.requests(want.starts, want.ends)
                requests += more
                missed += len(want.starts)
        if not requests and not demands:
            return passed, missed
        began = time.perf_counter()
        try:
            self.fills.bring(demands, requests)
        except DISK_ERRORS as error:
            if not demands:  # it isn't the disk's
                raise
            self.give_up(error)
            return None, missed
        finally:
            self._meter.add(remote_wait_s=time.perf_counter() - began)
        return passed, missed

    def block_sums(self, blob: Blob) -> BlockSums | None:
        """Return the checks of a whole blob's blocks; None if the blob isn't whole, isn't cached,
        or has no recorded checksums. Raises CorruptShardError if it was removed since it was
        opened, so that it can't be checked any more."""
        if not isinstance(blob, CachedBlob) or blob.fill is not None:
            return None
        row = self.use(lambda folder: folder.catalogue.blob(blob.source.key))
        if row is None or not blob.has_name:  # another thread may have found damage and dropped it
            raise CorruptShardError(
                f"{blob.source.uri}: its copy was removed from the cache before it was checked."
            )
        if row.crcs is None or len(row.crcs) != -(-len(blob.data) // BLOCK_BYTES) * 4:
            return None
        return BlockSums(blob, row.crcs)

    def check(self, source: BlobSource) -> None:
        """Drop a blob unless the checksums of its blocks are right, for samples without checksums.
        Blobs and fills without checksums are dropped, too."""
        self.use(lambda folder: folder.check(source.key))

    def drop(self, source: BlobSource, *, inode: int | None = None) -> None:
        """Remove a blob whose bytes were wrong; the next open fetches it again. inode: remove only
        the file with this inode (CachedBlob.inode)."""
        if self.remove(source, inode=inode):
            self._meter.add(refetched=1)
        self.upstream.mark_wrong(source.key)

    # -- small objects and names

    def object(self, path: str, *, size_bytes: int | None, version: str) -> bytes:
        """Return the local path of a manifest or a sidecar, fetching it if necessary. Raises
        FetchError."""
        source = self._source(path, size_bytes, version)
        kept: str | None = self.look(
            lambda folder: self._find(folder, source, size_bytes)
        ) or self.use(lambda folder: self._keep(folder, source, size_bytes))
        if kept is None:
            kept = os.path.join(self._own_folder().path, source.key)
            if not os.path.exists(kept):
                answer = self.fetcher.fetch_object(path, size_bytes=size_bytes)
                self._own_folder().write_whole(source.key, memoryview(answer.data))
        return os.fsencode(kept)

    def drop_object(self, path: str, *, size_bytes: int | None, version: str) -> None:
        """Remove a small object whose bytes were wrong."""
        source = self._source(path, size_bytes, version)
        with self._lock:
            self._held.pop(source.key, None)
        if self.remove(source):
            self._meter.add(refetched=1)
        if self._own is not None:
            self._own.remove(source.key)

    def find(self, path: str) -> ObjectInfo | None:
        """Look a name up in the store; return None if there is no such object. If the store can't
        be reached, return its last answer, if there is one, and warn once; it isn't asked again
        then. Raises FetchError."""
        name = "\0".join((self.fetcher.store.scope, self.fetcher.store.url, path))
        known, before = self.look(lambda folder: folder.recall(name)) or (False, None)
        last = before and ObjectInfo(path=path, size_bytes=before[0], version=before[1])
        if known and self.offline.is_set():
            return last
        try:
            found = self.fetcher.info(path, limit_s=_KNOWN_LIMIT_S if known else None)
        except FetchError as error:
            if not known:
                raise
            self.offline.set()
            text = "the remote can't be reached to check for changes, so the cached index is"
            warn(f"{self.label}: {text} used. {error}", stacklevel=2)
            return last
        answer = None if found is None else (found.size_bytes, found.version)
        if not known or answer != before:
            self.use(lambda folder: folder.catalogue.remember(name, answer))
        return found

    def _own_folder(self) -> Folder:
        """Return a folder that is removed at close() or when the process ends."""
        with self._lock:
            if self._own is None:
                path = tempfile.mkdtemp(prefix="penstock-objects-")
                self._remove = weakref.finalize(self, remove_own_folder, path, os.getpid())
                self._own = Folder(os.open(path, os.O_DIRECTORY | os.O_CLOEXEC), path, 0o700)
            return self._own

    def _source(self, path: str, size_bytes: int | None, version: str) -> BlobSource:
        uri = f"{self.fetcher.store.url}/{path}"
        key = blob_key(scope=self.fetcher.store.scope, uri=uri, version=version)
        segment = Segment(path=path, size_bytes=size_bytes or 0, version=None)
        return BlobSource(key=key, uri=uri, segments=(segment,), size_bytes=size_bytes or 0)

    def _find(
        self, folder: ReadableFolder, source: BlobSource, size_bytes: int | None
    ) -> str | None:
        """Return the path of a cached object, and hold its map, which protects it from eviction."""
        path = folder.layout.blob(source.key)
        with self._lock:
            if source.key in self._held and folder.has(source.key):
                return path
        mapped = folder.find(source.key, size_bytes)
        if mapped is None:
            return None
        with self._lock:
            self._held[source.key] = mapped
            while len(self._held) > _MOST_HELD:
                self._held.popitem(last=False)
        return path

    def _keep(self, folder: CacheFolder, source: BlobSource, size_bytes: int | None) -> str | None:
        # One process of the node fetches it; the others wait longer than that can take.
        began_s = time.monotonic()
        patience_s = 2 * self.fetcher.policy.retry_timeout_s
        with folder.layout.holding(source.key, timeout_s=patience_s):
            found = self._find(folder, source, size_bytes)
            if found is not None:
                return found
            failed = self.upstream.failures.since(began_s, [(source.key, [_ALL])])
            if failed is not None:
                raise failed
            try:
                answer = self.fetcher.fetch_object(source.segments[0].path, size_bytes=size_bytes)
            except FetchError as error:
                self.upstream.failures.note([(source.key, _ALL)], error)
                raise
            data = memoryview(answer.data)
            if not folder.put(source, data, group=self.group, kept=True):
                own = self._own_folder()
                own.write_whole(source.key, data)
                return os.path.join(own.path, source.key)
            self._meter.add(bytes_filled=len(data))
            return self._find(folder, source, size_bytes)

    # -- counters, the end

    def traffic(self) -> Traffic:
        """Return the traffic that was counted so far."""
        return self._meter.snapshot()

    def close(self) -> None:
        """End requests and threads; views stay valid. Safe to call twice."""
        if self._closed:
            return
        super().close()
        self.upstream.close()
        self.fetcher.close()
        self._held.clear()
        if self._remove is not None:
            self._remove()
