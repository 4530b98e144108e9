"""Read the objects of one remote dataset: its blobs, its small objects, names and jobs.

A blob that the cache keeps is filled as it is read: batches fetch exact ranges for their samples,
and background fills fetch large ranges into the same file, each byte once per node. Samples of a
passing blob, which the cache doesn't keep, are fetched by exact ranges into new memory.
"""

from __future__ import annotations

import mmap
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.blobs.blob_fills import BlobFills, Demand, demand_of
from penstock.cache.blobs.dataset_cache import BlockSums, CachedBlob, DatasetCache
from penstock.cache.blobs.small_objects import SmallObjects
from penstock.cache.blobs.upstream import (
    BlobRange,
    BlobRequest,
    Requester,
    Upstream,
    object_changed,
)
from penstock.cache.disk import BLOCK_BYTES, DISK_ERRORS, Segments
from penstock.cache.errors import CorruptShardError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import (
        Answer,
        Blob,
        BlobSource,
        BlobSpans,
        ObjectInfo,
        ReadMode,
        Traffic,
        TrafficMeter,
    )
    from penstock.cache.disk import DiskCache, PinnedShare
    from penstock.cache.fetch import Fetcher

    Bytes = NDArray[np.uint8]
    Spans = Sequence[tuple[int, int]]

_MAP_NORESERVE = 0x4000  # Linux; Python's module names it from 3.12 on


class PassingBlob:
    """A blob that is read without the cache.

    requester: sends its requests. range_bytes: the most bytes of one request. meter: counts the
    fetched bytes.
    """

    is_cached = False
    is_whole = False

    def __init__(
        self, source: BlobSource, requester: Requester, *, range_bytes: int, meter: TrafficMeter
    ) -> None:
        self.source = source
        self._requester, self._range_bytes, self._meter = requester, range_bytes, meter
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
        self._requester.send(self._into(array, 0, ranges))
        return pa.py_buffer(memoryview(self._memory).toreadonly())

    def address(self) -> int | None:
        """Return None: no file is mapped."""
        return None

    def _ranges(self, start: int, end: int) -> Iterator[BlobRange]:
        """Cut bytes [start, end) into ranges of one object each, of at most range_bytes."""
        agreed = self._version if self._table.is_of_one_object else None
        count = max(1, -(-(end - start) // self._range_bytes))
        for low, high in pairwise(start + (end - start) * i // count for i in range(count + 1)):
            for stretch in self._table.stretches(low, high):
                yield BlobRange.of_stretch(self.source, stretch, version=agreed)

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
            raise object_changed(self.source, wanted.segment)
        self._meter.add(bytes_passed=len(memoryview(answer.data)))
        return answer.data


class Remote:
    """The objects of one remote dataset, which are read through the node's cache.

    fetcher: makes the requests to the store. cache: the node's cache; None caches nothing. group:
    the id of the dataset in the cache. label: the dataset's name in listings. upstream: the source
    of blobs, by default the store; small objects and names always come from the store. fills: the
    fills of its blobs. The fetcher and the upstream are closed with this object. Safe for several
    threads; not across fork.
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
        self.upstream = upstream = upstream or Upstream(fetcher)
        self._meter = meter = fetcher.meter
        self._blobs = blobs = DatasetCache(cache, group=group, label=label)
        self._requester = requester = Requester(upstream)
        self.fills = BlobFills(upstream, requester, blobs, meter=meter)
        self._small_objects = SmallObjects(fetcher, blobs, failures=requester.failures)

    # -- blobs

    def open(self, source: BlobSource) -> Blob:
        """Open a blob, as a cached one if the cache has it or can keep it; fetches nothing."""
        return self.fills.open(source) or self.pass_by(source)

    def pass_by(self, source: BlobSource) -> PassingBlob:
        """Open a blob without the cache, even if the cache has it; fetches nothing."""
        range_bytes = self.upstream.range_bytes
        return PassingBlob(source, self._requester, range_bytes=range_bytes, meter=self._meter)

    def is_whole(self, source: BlobSource) -> bool:
        """Return True if the whole blob is on the local disk."""
        return not source.size_bytes or bool(
            self._blobs.look(lambda folder: folder.has(source.key))
        )

    def held(self) -> dict[str, float]:
        """List the folder of the cache; return the present share of each blob by key, in [0, 1]."""
        found: dict[str, float] | None = self._blobs.look(lambda folder: folder.held())
        return found or {}

    def keeps(self, key: str) -> bool:
        """Return True if the cache would keep a blob for one of this process's jobs."""
        return self._blobs.keeps(key)

    def load(self, wanted: Sequence[BlobSpans], *, mode: ReadMode = "mmap") -> list[list[Bytes]]:
        """Read the bytes of all spans as read-only uint8 arrays, in the order of `wanted`. Missing
        bytes of all blobs are fetched at once.

        mode: "pread" returns new memory, other modes return views of cached blobs; passing blobs
        always use new memory. Raises FetchError, StalledError, ClosedError; with "pread" OSError
        and EOFError for a failing disk or a truncated file.
        """
        cold = [
            number
            for number, want in enumerate(wanted)
            if not isinstance(want.blob, CachedBlob) or want.blob.fill is not None
        ]
        results: dict[int, list[Bytes] | None] = {}
        if cold:
            wanted_cold = [wanted[number] for number in cold]
            passed, missed = self._fetch(wanted_cold)
            if passed is None:  # the cache can't be written any more, so read without it
                passed = self._read_past(wanted_cold)
            results.update(zip(cold, passed, strict=True))
            # Below all spans from the disk count as hits, including those just fetched.
            passing = sum(len(found) for found in passed if found is not None)
            self._meter.add(misses=missed, hits=passing - missed)
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
                demand, missing = demand_of(want.blob, want.starts, want.ends)
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
            self._blobs.give_up(error)
            return None, missed
        finally:
            self._meter.add(remote_wait_s=time.perf_counter() - began)
        return passed, missed

    def _read_past(self, wanted: Sequence[BlobSpans]) -> list[list[Bytes] | None]:
        """Read spans without the cache. Raises FetchError."""
        found: list[list[Bytes] | None] = []
        requests: list[BlobRequest] = []
        for want in wanted:
            arrays, more = self.pass_by(want.blob.source).requests(want.starts, want.ends)
            found.append(arrays)
            requests += more
        self._requester.send(requests)
        return found

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
        return self.fills.fill(source, progress=progress, stop=stop)

    def block_sums(self, blob: Blob) -> BlockSums | None:
        """Return the checks of a whole blob's blocks; None if the blob isn't whole, isn't cached,
        or has no recorded checksums. Raises CorruptShardError if it was removed since it was
        opened, so that it can't be checked any more."""
        if not isinstance(blob, CachedBlob) or blob.fill is not None:
            return None
        row = self._blobs.use(lambda folder: folder.catalogue.blob(blob.source.key))
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
        self._blobs.use(lambda folder: folder.check(source.key))

    def drop(self, source: BlobSource, *, inode: int | None = None) -> None:
        """Remove a blob whose bytes were wrong; the next open fetches it again. inode: remove only
        the file with this inode (CachedBlob.inode)."""
        if self._blobs.drop(source, inode=inode):
            self._meter.add(refetched=1)
        self.upstream.mark_wrong(source.key)

    # -- small objects and names

    def object(self, path: str, *, size_bytes: int | None, version: str) -> bytes:
        """Return the local path of a manifest or a sidecar, fetching it if necessary. Raises
        FetchError."""
        return self._small_objects.path(path, size_bytes=size_bytes, version=version)

    def drop_object(self, path: str, *, size_bytes: int | None, version: str) -> None:
        """Remove a small object whose bytes were wrong."""
        if self._small_objects.drop(path, size_bytes=size_bytes, version=version):
            self._meter.add(refetched=1)

    def find(self, path: str) -> ObjectInfo | None:
        """Look a name up in the store; return None if there is no such object. If the store can't
        be reached, return its last answer and warn. Raises FetchError."""
        return self._small_objects.find(path)

    # -- jobs, counters, the end

    def join(self, keys: Sequence[str], sizes: Iterable[int]) -> PinnedShare | None:
        """Begin a job that reads these blobs in each epoch, and compute its pinned share; None
        without a cache. The job lasts until `leave`; a dataset may have several jobs."""
        return self._blobs.join(keys, sizes)

    def leave(self, job: PinnedShare) -> None:
        """End a job. Safe to call twice."""
        self._blobs.leave(job)

    @property
    def jobs(self) -> int:
        """The number of jobs that have joined and not left."""
        return len(self._blobs.jobs)

    def traffic(self) -> Traffic:
        """Return the traffic that was counted so far."""
        return self._meter.snapshot()

    def close(self) -> None:
        """End requests and threads; views stay valid. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._blobs.close()
        self.upstream.close()
        self.fetcher.close()
        self._small_objects.close()
