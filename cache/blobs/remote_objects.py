"""Read the objects of one remote dataset: its blobs, its small objects, names and jobs.

A blob that the cache keeps is filled as it is read: batches fetch exact ranges for their samples,
and background fills fetch large ranges into the same file, each byte once per node. Samples of a
passing blob, which the cache doesn't keep, are fetched by exact ranges into new memory.

Small objects (the manifests and sidecars of an index) are fetched whole, into the cache or into a
temporary folder of the process. The cache also stores the store's last answer about each name,
which is used while the store can't be reached.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.base import BlobSource, ObjectInfo, Segment, blob_key, remove_own_folder
from penstock.cache.blobs.blob_fills import (
    Demand,
    DemandFills,
    PieceRequests,
    WholeFills,
    demand_of,
)
from penstock.cache.blobs.blob_requests import BlobRequest, FillFailures, Requester, object_changed
from penstock.cache.blobs.dataset_cache import BlobOpener, CachedBlob, DatasetCache, DatasetJobs
from penstock.cache.blobs.upstream import BlobRange, StoreUpstream
from penstock.cache.disk import DISK_ERRORS, Segments
from penstock.cache.errors import FetchError, PenstockWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import (
        Answer,
        Blob,
        BlobSpans,
        FileMap,
        ReadMode,
        Traffic,
        TrafficMeter,
    )
    from penstock.cache.blobs.dataset_cache import BlockSums
    from penstock.cache.blobs.upstream import Upstream
    from penstock.cache.disk import CacheFolder, DiskCache, Lookup, PieceSpan, PinnedShare
    from penstock.cache.fetch import Fetcher

    Bytes = NDArray[np.uint8]
    Spans = Sequence[tuple[int, int]]

_MAP_NORESERVE = 0x4000  # Linux; Python's module names it from 3.12 on


class PassingBlob:
    """A blob that is read without the cache. fetch: fetches spans into its buffer."""

    is_cached = False
    is_whole = False
    path: bytes | None = None

    def __init__(self, source: BlobSource, fetch: Callable[[PassingBlob, Spans], None]) -> None:
        self.source = source
        self.version: str | None = None  # of the first answer, if the source names none
        self._fetch = fetch
        self._memory: mmap.mmap | None = None
        self._table: Segments | None = None  # made at first use

    @property
    def segments(self) -> Segments:
        """The table of the objects that hold its bytes."""
        if self._table is None:
            self._table = Segments(self.source.segments)
        return self._table

    def ranges(self, start: int, end: int) -> Iterator[BlobRange]:
        """Divide bytes [start, end) into one range for each object that holds some of them."""
        table = self.segments
        agreed = self.version if table.is_of_one_object else None
        for stretch in table.stretches(start, end):
            yield BlobRange.of_stretch(self.source, stretch, version=agreed)

    def buffer(self, spans: Spans) -> Any:
        """Return a buffer in which these spans are filled; other pages use no memory."""
        import pyarrow as pa

        if self._memory is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._memory = mmap.mmap(-1, self.source.size_bytes, flags=flags)
        self._fetch(self, spans)
        return pa.py_buffer(memoryview(self._memory).toreadonly())

    def put(self, start: int, data: Any) -> None:
        """Write bytes into the buffer."""
        assert self._memory is not None
        view = memoryview(data)
        self._memory[start : start + len(view)] = view

    def address(self) -> int | None:
        """Return None: no file is mapped."""
        return None


class PassingReads:
    """The reads of passing blobs.

    range_bytes: the most bytes of one request. meter: counts the fetched bytes.
    """

    def __init__(self, requester: Requester, *, range_bytes: int, meter: TrafficMeter) -> None:
        self._requester, self._meter = requester, meter
        self._range_bytes = range_bytes

    def open(self, source: BlobSource) -> PassingBlob:
        """Open a blob that isn't cached; fetches nothing."""
        return PassingBlob(source, self._fill_buffer)

    def requests(
        self, blob: PassingBlob, starts: Sequence[int], ends: Sequence[int]
    ) -> tuple[list[Bytes], list[BlobRequest]]:
        """Return arrays, and the requests that fill them when they are sent."""
        found: list[Bytes] = [np.empty(0, np.uint8)] * len(starts)
        requests: list[BlobRequest] = []
        for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
            ranges = self._ranges(blob, start, end)
            if len(ranges) == 1:
                (wanted,) = ranges
                receive = partial(self._store_sample, blob, wanted, found, place)
                requests.append(BlobRequest(wanted, receive))
            elif ranges:  # in several objects, or a large one
                array = np.empty(end - start, np.uint8)
                found[place] = array.view()
                found[place].flags.writeable = False
                requests += [
                    BlobRequest(part, partial(self._store_part, blob, part, array, start))
                    for part in ranges
                ]
        return found, requests

    def read(self, wanted: Sequence[BlobSpans]) -> list[list[Bytes]]:
        """Read the bytes of all spans without the cache. Raises FetchError."""
        found: list[list[Bytes]] = []
        requests: list[BlobRequest] = []
        for want in wanted:
            arrays, more = self.requests(self.open(want.blob.source), want.starts, want.ends)
            found.append(arrays)
            requests += more
        self._requester.send(requests)
        return found

    def _ranges(self, blob: PassingBlob, start: int, end: int) -> list[BlobRange]:
        """Cut bytes [start, end) into ranges of at most range_bytes."""
        count = max(1, -(-(end - start) // self._range_bytes))
        cuts = pairwise(start + (end - start) * i // count for i in range(count + 1))
        return [part for low, high in cuts for part in blob.ranges(low, high)]

    def _fill_buffer(self, blob: PassingBlob, spans: Sequence[tuple[int, int]]) -> None:
        """Fetch spans into a blob's buffer."""
        self._requester.send(
            [
                BlobRequest(part, partial(self._put, blob, part))
                for start, end in spans
                for part in self._ranges(blob, start, end)
            ]
        )

    def _store_sample(
        self, blob: PassingBlob, wanted: BlobRange, found: list[Bytes], place: int, answer: Answer
    ) -> None:
        sample = np.frombuffer(self._checked(blob, wanted, answer), np.uint8)
        sample.flags.writeable = False
        found[place] = sample

    def _store_part(
        self, blob: PassingBlob, wanted: BlobRange, array: Bytes, start: int, answer: Answer
    ) -> None:
        data = np.frombuffer(self._checked(blob, wanted, answer), np.uint8)
        at = wanted.start - start
        array[at : at + len(data)] = data

    def _put(self, blob: PassingBlob, wanted: BlobRange, answer: Answer) -> None:
        blob.put(wanted.start, self._checked(blob, wanted, answer))

    def _checked(self, blob: PassingBlob, wanted: BlobRange, answer: Answer) -> Any:
        """Return the bytes of an answer. Raises ObjectChangedError if they are another object's."""
        version, is_same = answer.version, True
        if blob.segments.is_of_one_object:
            if blob.version is None and version:
                blob.version = version
            is_same = not version or version == blob.version
        if not is_same or answer.object_bytes != wanted.segment.whole_bytes:
            blob.version = None
            raise object_changed(blob.source, wanted.segment)
        self._meter.add(bytes_passed=len(memoryview(answer.data)))
        return answer.data


class ProcessFolder:
    """A temporary folder of this process that stores files by key.

    It is created at first use, and removed at close() or when the process ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: str | None = None
        self._finalizer: weakref.finalize[..., ProcessFolder] | None = None

    def path(self, key: str) -> str:
        """Return the path of a key's file, which may not exist."""
        with self._lock:
            if self._folder is None:
                self._folder = tempfile.mkdtemp(prefix="penstock-objects-")
                self._finalizer = weakref.finalize(
                    self, remove_own_folder, self._folder, os.getpid()
                )
            return os.path.join(self._folder, key)

    def write(self, key: str, data: memoryview) -> str:
        """Create or replace the file of a key; return its path."""
        path = self.path(key)
        temp = f"{path}.{threading.get_ident()}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temp, flags, 0o600), "wb") as file:
            file.write(data)
        os.replace(temp, path)
        return path

    def remove(self, key: str) -> None:
        """Remove a file, if it exists."""
        if self._folder is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, key))

    def close(self) -> None:
        """Remove the folder. Safe to call twice."""
        if self._finalizer is not None:
            self._finalizer()


_MOST_HELD = 1024

_ALL: PieceSpan = (0, 1)
"""The single piece of an object that is fetched whole."""


class SmallObjects:
    """The small objects of a dataset, which are fetched into the cache once per node, or into a
    folder of this process. Safe for several threads."""

    def __init__(self, fetcher: Fetcher, cache: DatasetCache, *, failures: FillFailures) -> None:
        self._fetcher, self._cache, self._failures = fetcher, cache, failures
        self._lock = threading.Lock()
        self._held: OrderedDict[str, FileMap] = OrderedDict()
        self._own = ProcessFolder()

    def path(self, path: str, *, size_bytes: int | None, version: str) -> bytes:
        """Return the local path of a small object; see `Remote.object`."""
        source = self._source(path, size_bytes, version)
        kept: str | None = self._cache.look(
            lambda lookup: self._find(lookup, source, size_bytes)
        ) or self._cache.use(lambda folder: self._keep(folder, source, size_bytes))
        if kept is None:
            kept = self._own.path(source.key)
            if not os.path.exists(kept):
                answer = self._fetcher.fetch_object(path, size_bytes=size_bytes)
                self._own.write(source.key, memoryview(answer.data))
        return os.fsencode(kept)

    def drop(self, path: str, *, size_bytes: int | None, version: str) -> bool:
        """Remove a small object whose bytes were wrong; return True if the cache had it."""
        source = self._source(path, size_bytes, version)
        with self._lock:
            self._held.pop(source.key, None)
        dropped = self._cache.drop(source)
        self._own.remove(source.key)
        return dropped

    def close(self) -> None:
        """Release the maps and remove the folder. Safe to call twice."""
        self._held.clear()
        self._own.close()

    def _source(self, path: str, size_bytes: int | None, version: str) -> BlobSource:
        uri = f"{self._fetcher.store.url}/{path}"
        key = blob_key(scope=self._fetcher.store.scope, uri=uri, version=version)
        segment = Segment(path=path, size_bytes=size_bytes or 0, version=None)
        return BlobSource(key=key, uri=uri, segments=(segment,), size_bytes=size_bytes or 0)

    def _find(self, lookup: Lookup, source: BlobSource, size_bytes: int | None) -> str | None:
        """Return the path of a cached object, and hold its map, which protects it from eviction."""
        path = lookup.layout.blob(source.key)
        with self._lock:
            if source.key in self._held and lookup.has(source.key):
                return path
        mapped = lookup.find(source.key, size_bytes)
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
        patience_s = 2 * self._fetcher.policy.retry_timeout_s
        with folder.keys.holding(source.key, timeout_s=patience_s):
            found = self._find(folder.lookup, source, size_bytes)
            if found is not None:
                return found
            if (failed := self._failures.since(began_s, [(source.key, [_ALL])])) is not None:
                raise failed
            try:
                answer = self._fetcher.fetch_object(source.segments[0].path, size_bytes=size_bytes)
            except FetchError as error:
                self._failures.note([(source.key, _ALL)], error)
                raise
            data = memoryview(answer.data)
            if not folder.writer.put(source, data, group=self._cache.group, kept=True):
                return self._own.write(source.key, data)
            self._fetcher.meter.add(bytes_filled=len(data))
            return self._find(folder.lookup, source, size_bytes)


# Seconds to wait for the store if its last answer is known.
_KNOWN_LIMIT_S = 5.0


class StoreNames:
    """The lookups of objects by name. The cache stores each answer, which is used while the store
    can't be reached."""

    def __init__(self, fetcher: Fetcher, cache: DatasetCache) -> None:
        self._fetcher, self._cache = fetcher, cache
        self._warned = False

    def find(self, path: str) -> ObjectInfo | None:
        """Look a name up; see `Remote.find`."""
        name = "\0".join((self._fetcher.store.scope, self._fetcher.store.url, path))
        known, before = self._cache.look(lambda lookup: lookup.recall(name)) or (False, None)
        try:
            found = self._fetcher.info(path, limit_s=_KNOWN_LIMIT_S if known else None)
        except FetchError as error:
            if not known:
                raise
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self._cache.label}: the remote can't be reached to check for changes, so "
                    f"the cached index is used. {error}",
                    PenstockWarning,
                    stacklevel=4,
                )
            if before is None:
                return None
            return ObjectInfo(path=path, size_bytes=before[0], version=before[1])
        answer = None if found is None else (found.size_bytes, found.version)
        if not known or answer != before:
            self._cache.use(lambda folder: folder.catalogue.names.remember(name, answer))
        return found


class BlobReader:
    """The reads of spans of many blobs at once; it counts hits and misses."""

    def __init__(
        self,
        demand_fills: DemandFills,
        passing: PassingReads,
        *,
        cache: DatasetCache,
        meter: TrafficMeter,
    ) -> None:
        self._demand_fills, self._passing = demand_fills, passing
        self._cache, self._meter = cache, meter

    def load(self, wanted: Sequence[BlobSpans], *, mode: ReadMode = "mmap") -> list[list[Bytes]]:
        """Read the bytes of all spans; see `Remote.load`."""
        cold = [
            number
            for number, want in enumerate(wanted)
            if not isinstance(want.blob, CachedBlob) or want.blob.fill is not None
        ]
        passed = self._bring([wanted[number] for number in cold]) if cold else []
        results: dict[int, list[Bytes]] = {
            number: found for number, found in zip(cold, passed, strict=True) if found is not None
        }
        disk_bytes = 0
        hits = 0
        loaded = []
        for number, want in enumerate(wanted):
            found = results.get(number)
            if found is None:
                blob = want.blob
                assert isinstance(blob, CachedBlob)
                read = blob.copies if mode == "pread" else blob.views
                found = read(want.starts, want.ends)
                size_bytes = sum(want.ends) - sum(want.starts)
                disk_bytes += size_bytes if want.touched_bytes is None else want.touched_bytes
                hits += len(found) if want.touched_bytes != 0 else 0
            loaded.append(found)
        self._meter.add(bytes_disk=disk_bytes, hits=hits)
        return loaded

    def bring(self, wanted: Sequence[BlobSpans], *, here: int) -> None:
        """Fetch the missing pieces of cached blobs; see `Remote.bring`."""
        began, demands, missed = time.perf_counter(), list[Demand](), 0
        for want in wanted:
            if isinstance(want.blob, CachedBlob):
                demand, missing = demand_of(want.blob, want.starts, want.ends)
                missed += missing
                demands += [demand] if demand is not None else []
        if demands:
            try:
                self._demand_fills.bring(demands, [])
            except DISK_ERRORS as error:  # the later read raises it again, for each shard
                self._cache.give_up(error)
        hits = here + sum(len(want.starts) for want in wanted) - missed
        waited_s = time.perf_counter() - began if demands else 0.0
        self._meter.add(hits=hits, misses=missed, remote_wait_s=waited_s)

    def _bring(self, cold: Sequence[BlobSpans]) -> list[list[Bytes] | None]:
        """Fetch missing spans: into the cache (None in the result), or into arrays for passing
        blobs."""
        began = time.perf_counter()
        passed: list[list[Bytes] | None] = [None] * len(cold)
        requests: list[BlobRequest] = []
        demands: list[Demand] = []
        missed = passing = 0
        for number, want in enumerate(cold):
            if isinstance(want.blob, CachedBlob):
                demand, missing = demand_of(want.blob, want.starts, want.ends)
                missed += missing
                if demand is not None:
                    demands.append(demand)
            else:
                assert isinstance(want.blob, PassingBlob)
                passed[number], more = self._passing.requests(want.blob, want.starts, want.ends)
                requests += more
                passing += len(want.starts)
        if requests or demands:
            try:
                self._demand_fills.bring(demands, requests)
            except DISK_ERRORS as error:
                self._cache.give_up(error)
                # The cache can't be written any more, so read without it.
                passed = list(self._passing.read(cold))
        self._meter.add(
            # load() counts all spans from the disk as hits, including those just fetched.
            misses=missed + passing,
            hits=-missed,
            remote_wait_s=time.perf_counter() - began,
        )
        return passed


class Remote:
    """The objects of one remote dataset, which are read through the node's cache.

    fetcher: makes the requests to the store. cache: the node's cache; None caches nothing. group:
    the id of the dataset in the cache. label: the dataset's name in listings. upstream: the source
    of blobs, by default the store; small objects and names always come from the store. The fetcher
    and the upstream are closed with this object. Safe for several threads; not across fork.
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
        self.fetcher, self.cache = fetcher, cache
        self.group, self.label = group, label
        self._closed = False
        meter, failures = fetcher.meter, FillFailures()
        self._dataset_cache = dataset_cache = DatasetCache(cache, group=group, label=label)
        self._jobs = DatasetJobs(cache, group=group, label=label)
        self.upstream = upstream = upstream or StoreUpstream(fetcher)
        requester = Requester(upstream, failures)
        pieces = PieceRequests(range_bytes=upstream.range_bytes, meter=meter)
        self._demand_fills = demand_fills = DemandFills(
            upstream, requester, pieces, cache=dataset_cache, failures=failures, meter=meter
        )
        self._passing = PassingReads(requester, range_bytes=upstream.range_bytes, meter=meter)
        self._opener = BlobOpener(dataset_cache, self._jobs, ensure=demand_fills.ensure)
        self._reader = BlobReader(demand_fills, self._passing, cache=dataset_cache, meter=meter)
        self._whole_fills = WholeFills(
            upstream, requester, pieces, opener=self._opener, cache=dataset_cache
        )
        self._small_objects = SmallObjects(fetcher, dataset_cache, failures=failures)
        self._names = StoreNames(fetcher, dataset_cache)

    # -- blobs

    def open(self, source: BlobSource) -> Blob:
        """Open a blob, as a cached one if the cache has it or can keep it; fetches nothing."""
        return self._opener.open(source) or self._passing.open(source)

    def pass_by(self, source: BlobSource) -> Blob:
        """Open a blob without the cache, even if the cache has it; fetches nothing."""
        return self._passing.open(source)

    def is_whole(self, source: BlobSource) -> bool:
        """Return True if the whole blob is on the local disk."""
        return not source.size_bytes or self._dataset_cache.has(source)

    def held(self) -> dict[str, float]:
        """List the folder of the cache; return the present share of each blob by key, in [0, 1]."""
        return self._dataset_cache.held()

    def keeps(self, key: str) -> bool:
        """Return True if the cache would keep a blob for one of this process's jobs."""
        return self._jobs.keeps(key)

    def load(self, wanted: Sequence[BlobSpans], *, mode: ReadMode = "mmap") -> list[list[Bytes]]:
        """Read the bytes of all spans as read-only uint8 arrays, in the order of `wanted`. Missing
        bytes of all blobs are fetched at once.

        mode: "pread" returns new memory, other modes return views of cached blobs; passing blobs
        always use new memory. Raises FetchError, StalledError, ClosedError; with "pread" OSError
        and EOFError for a failing disk or a truncated file.
        """
        return self._reader.load(wanted, mode=mode)

    @property
    def widening(self) -> int:
        """The factor by which requests for a batch are widened by missing neighbours, which makes
        fewer requests and fetches only bytes that the cache keeps. It can be set."""
        return self._demand_fills.times

    @widening.setter
    def widening(self, times: int) -> None:
        self._demand_fills.times = times

    def bring(self, wanted: Sequence[BlobSpans], *, here: int) -> None:
        """Fetch the missing bytes of spans of all cached blobs at once, before they are read
        through buffers. here: the number of other samples on the local disk, counted as hits.
        Raises FetchError, StalledError, ClosedError."""
        self._reader.bring(wanted, here=here)

    def fill(
        self,
        source: BlobSource,
        *,
        progress: Callable[[int], None] | None = None,
        stop: threading.Event | None = None,
    ) -> int:
        """Fetch a whole blob into the cache. Return the bytes that this call fetched (0 if the
        cache had it, or others fetched it), or -1 if the cache can't keep it or `stop` was set.

        progress: called with the number of bytes that were just fetched, on fetch threads. Raises
        FetchError, StalledError.
        """
        return self._whole_fills.fill(source, progress=progress, stop=stop)

    def is_left_to_others(self, source: BlobSource) -> bool:
        """Return True if the fill of a blob should wait, because another node of the job fetches it
        from the remote for this one, too."""
        return self.upstream.is_left_to_others(source.key)

    def block_sums(self, blob: Blob) -> BlockSums | None:
        """Return the checks of a whole blob's blocks; None if the blob isn't whole, isn't cached,
        or has no recorded checksums. Raises CorruptShardError if it was removed since it was
        opened, so that it can't be checked any more."""
        from penstock.cache.blobs.dataset_cache import block_sums  # most samples have their own

        return block_sums(blob, self._dataset_cache)

    def check(self, source: BlobSource) -> None:
        """Drop a blob unless the checksums of its blocks are right, for samples without checksums.
        Blobs and fills without checksums are dropped, too."""
        self._dataset_cache.use(lambda folder: folder.verifier.check(source.key))

    def drop(self, source: BlobSource, *, inode: int | None = None) -> None:
        """Remove a blob whose bytes were wrong; the next open fetches it again. inode: remove only
        the file with this inode (CachedBlob.inode)."""
        if self._dataset_cache.drop(source, inode=inode):
            self.fetcher.meter.add(refetched=1)
        self.upstream.mark_wrong(source.key)

    # -- small objects and names

    def object(self, path: str, *, size_bytes: int | None, version: str) -> bytes:
        """Return the local path of a manifest or a sidecar, fetching it if necessary. Raises
        FetchError."""
        return self._small_objects.path(path, size_bytes=size_bytes, version=version)

    def drop_object(self, path: str, *, size_bytes: int | None, version: str) -> None:
        """Remove a small object whose bytes were wrong."""
        if self._small_objects.drop(path, size_bytes=size_bytes, version=version):
            self.fetcher.meter.add(refetched=1)

    def find(self, path: str) -> ObjectInfo | None:
        """Look a name up in the store; return None if there is no such object. If the store can't
        be reached, return its last answer and warn. Raises FetchError."""
        return self._names.find(path)

    # -- jobs, counters, the end

    def join(self, keys: Sequence[str], sizes: Iterable[int]) -> PinnedShare | None:
        """Begin a job that reads these blobs in each epoch, and compute its pinned share; None
        without a cache. The job lasts until `leave`; a dataset may have several jobs."""
        return self._jobs.join(keys, sizes)

    def leave(self, job: PinnedShare) -> None:
        """End a job. Safe to call twice."""
        self._jobs.leave(job)

    @property
    def jobs(self) -> int:
        """The number of jobs that have joined and not left."""
        return len(self._jobs)

    def traffic(self) -> Traffic:
        """Return the traffic that was counted so far."""
        return self.fetcher.meter.snapshot()

    def close(self) -> None:
        """End requests and threads; views stay valid. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._jobs.close()
        self._dataset_cache.close()
        self.upstream.close()
        self.fetcher.close()
        self._small_objects.close()
