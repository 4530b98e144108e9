"""Open, fill and read the blobs that the node's cache keeps for one dataset.

Blobs belong to the dataset's group in the folder. The jobs of this process that read the dataset
decide which blobs are kept. A cached blob is read through a map of its file, which is complete or
being filled.

For a batch exactly the missing pieces are fetched, each byte once per node; the batch waits for
pieces that another process is fetching. Background fills fetch large ranges with the connections
that batches don't use. Both write into the same file.

`BlockSums` checks each block of a whole blob at its first read. It serves samples without checksums
of their own: the bytes as they were received are trusted, and later damage by the disk is detected.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.cache.base import Answer, BlobSource, FileMap, ReadMode, TrafficMeter, wait_for
from penstock.cache.blobs.upstream import BlobRange, BlobRequest, Upstream, object_changed
from penstock.cache.disk import BLOCK_BYTES, DISK_ERRORS, PinnedShare, bridge_gaps, merge_spans
from penstock.cache.errors import ClosedError, ObjectChangedError, PenstockError, StalledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.disk import CacheFolder, DiskCache, Fill, PieceSpan, ReadableFolder

    Bytes = NDArray[np.uint8]
    Spans = Sequence[tuple[int, int]]
    Ints = NDArray[np.int64]
    Progress = Callable[[int], None]

# The share of a blob that may be fetched twice to join ranges across gaps.
_WASTE_SHARE = 0.01
# A claimed range is fetched as a whole if at least this share of it is missing.
_WORTH_SHARE = 0.9
# The most full ranges that one fill claims at a time, so that other processes of the node can claim
# the rest.
_FULL_RANGES_AT_ONCE = 8


class DatasetCache:
    """The blobs of a dataset in the node's cache, and the dataset's live jobs.

    cache: the cache; without one nothing is cached. group: the id of the dataset in the folder.
    label: the dataset's name in listings. jobs: those that have joined and not left. Safe for
    several threads.
    """

    def __init__(self, cache: DiskCache | None, *, group: str, label: str) -> None:
        self.cache = cache
        self.group, self.label = group, label
        self._lock = Lock()
        self.jobs: tuple[PinnedShare, ...] = ()
        self._closed = False

    def use(self, act: Callable[[CacheFolder], Any]) -> Any:
        """Return DiskCache.use(act); None without a folder. Raises ClosedError."""
        cache = self._open_cache()
        return cache.use(act) if cache is not None else None

    def look(self, act: Callable[[ReadableFolder], Any]) -> Any:
        """Return DiskCache.look(act); None without a folder. Raises ClosedError."""
        cache = self._open_cache()
        return cache.look(act) if cache is not None else None

    def _open_cache(self) -> DiskCache | None:
        if self._closed:
            raise ClosedError(f"{self.label}: closed; create a new dataset.")
        return self.cache

    def remove(self, source: BlobSource, *, inode: int | None = None) -> bool:
        """Remove a blob; return False if there was none. inode: remove only the file with this
        inode, not a newer one."""
        return bool(self.use(lambda folder: folder.space.drop(source.key, inode=inode)))

    def give_up(self, error: Exception) -> None:
        """Stop using the folder for a while after one of DISK_ERRORS. Raises the error again if it
        isn't the disk's, or there is no folder."""
        if isinstance(error, PenstockError) or self.cache is None:
            raise error
        self.cache.give_up(error)

    # -- jobs

    def keeps(self, key: str) -> bool:
        """Return True if the cache would keep a blob: a job pins it, or there is no job."""
        jobs = self.jobs
        return self.cache is not None and (not jobs or any(job.pins(key) for job in jobs))

    def join(self, keys: Sequence[str], sizes: Iterable[int]) -> PinnedShare | None:
        """Begin a job that reads these blobs in each epoch, and compute its pinned share; None
        without a cache. The job lasts until `leave`; a dataset may have several jobs."""
        if self.cache is None:
            return None
        use, group, label = self.cache.use, self.group, self.label
        job = PinnedShare(use, group=group, label=label, keys=keys, sizes=sizes)
        with self._lock:
            self.jobs = (*self.jobs, job)
        return job

    def leave(self, job: PinnedShare) -> None:
        """End a job. Safe to call twice."""
        with self._lock:
            self.jobs = tuple(other for other in self.jobs if other is not job)
        job.leave()

    def close(self) -> None:
        """End all jobs, and refuse all later calls. Safe to call twice."""
        for job in self.jobs:
            self.leave(job)
        self._closed = True


class CachedBlob:
    """A blob on the local disk, whole or being filled. Its map protects the file from eviction.

    fills: fetches missing spans before the buffer is read. fill: the blob's fill, None if the blob
    is whole.
    """

    is_cached = True

    def __init__(
        self,
        fills: BlobFills,
        folder: ReadableFolder,
        source: BlobSource,
        mapped: FileMap,
        fill: Fill | None = None,
    ) -> None:
        self.source, self.fill = source, fill
        self.inode, self._address = mapped.inode, mapped.address
        self._fills, self._layout = fills, folder.layout
        self._buffer = mapped.buffer()
        self.data: Bytes = np.frombuffer(self._buffer, np.uint8)

    @property
    def is_whole(self) -> bool:
        """True if all bytes are present."""
        fill = self.fill
        return fill is None or fill.is_whole

    @property
    def has_name(self) -> bool:
        """False once the cache has removed the file; its space is free when this map is closed."""
        for folder, name in self._layout.places(self.source.key):
            with contextlib.suppress(FileNotFoundError):
                if folder.stat(name).st_ino == self.inode:
                    return True
        return False

    def settle(self) -> None:
        """Publish the fill if it is complete."""
        fill = self.fill
        if fill is not None and fill.is_whole:
            cache, source, data = self._fills.cache, self.source, self.data
            cache.use(lambda folder: folder.publish(source, fill, data, group=cache.group))
            if self._layout.blobs.has(self.source.key):
                self.fill = None

    def buffer(self, spans: Spans) -> Any:
        """Return a buffer in which at least these spans are filled; see `Blob.buffer`."""
        self._fills.ensure(self, spans)
        return self._buffer

    def address(self) -> int | None:
        """Return the address of the map, for madvise."""
        return self._address

    def demand(self, starts: Sequence[int], ends: Sequence[int]) -> tuple[Demand | None, int]:
        """Return the demand for the missing pieces of spans, None if no piece is missing, and the
        number of spans with missing pieces."""
        fill = self.fill
        if fill is None or not (missing := fill.missing(fill.pieces.covering(starts, ends))):
            return None, 0
        first, last = np.array([fill.pieces.span(pieces) for pieces in missing]).T
        begins, stops = np.asarray(starts), np.asarray(ends)
        # A sample has missing bytes if the first missing span that ends after the sample's start
        # begins before its end.
        place = np.searchsorted(last, begins, side="right")
        hit = (place < len(first)) & (first[np.minimum(place, len(first) - 1)] < stops)
        return Demand(self, missing), int(hit.sum())

    def views(self, starts: Sequence[int], ends: Sequence[int]) -> list[Bytes]:
        """Return spans as views of the map."""
        data = self.data
        return [data[start:end] for start, end in zip(starts, ends, strict=True)]

    def copies(self, starts: Sequence[int], ends: Sequence[int]) -> list[Bytes]:
        """Return spans as copies read from the file. Raises OSError, EOFError (the file is too
        short)."""
        found: list[Bytes] = []
        fd = self._reopened()
        if fd is None:  # removed meanwhile: a file without a name can't be truncated
            return [view.copy() for view in self.views(starts, ends)]
        with open(fd, "rb", buffering=0):
            for start, end in zip(starts, ends, strict=True):
                copy = np.empty(end - start, np.uint8)
                view, got = copy.data, 0
                while got < len(view) and (more := os.preadv(fd, [view[got:]], start + got)):
                    got += more
                if got < len(view):
                    raise EOFError(f"{self.source.uri}: its copy ends before byte {end}")
                copy.flags.writeable = False
                found.append(copy)
        return found

    def _reopened(self) -> int | None:
        """Open the mapped file again; None if it was removed."""
        places = self._layout.places(self.source.key)
        for folder, name in (*places, places[0]):  # the fill may be published meanwhile
            with contextlib.suppress(FileNotFoundError):
                fd = folder.open(name)
                if os.fstat(fd).st_ino == self.inode:
                    return fd
                os.close(fd)
        return None


class BlockSums:
    """The checks of the blocks of one blob, each made at its first read.

    crcs: the checksums of the blocks, from the catalogue. Safe for several threads, two of which
    may check the same block.
    """

    def __init__(self, blob: CachedBlob, crcs: bytes) -> None:
        self._blob = blob
        self._wanted = np.frombuffer(crcs, "<u4")
        self._is_right = np.zeros(len(self._wanted), np.bool_)
        self._are_all_right = False

    def are_right(self, starts: Ints, ends: Ints, mode: ReadMode) -> bool:
        """Return True if the blocks that hold bytes [starts, ends) of the blob have right
        checksums.

        starts, ends: int64, shape (n,). mode: "pread" reads the file, and raises OSError, EOFError.
        """
        if self._are_all_right:
            return True
        some = ends > starts
        low, high = starts[some] // BLOCK_BYTES, (ends[some] - 1) // BLOCK_BYTES
        for first, last in zip(low.tolist(), high.tolist(), strict=True):
            for block in range(first, last + 1):
                if not self._is_right[block] and not self._check(block, mode):
                    return False
        self._are_all_right = bool(self._is_right.all())
        return True

    def _check(self, block: int, mode: ReadMode) -> bool:
        start = block * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, len(self._blob.data))
        read = self._blob.copies if mode == "pread" else self._blob.views
        (data,) = read([start], [end])
        self._is_right[block] = crc32c(data) == self._wanted[block]
        return bool(self._is_right[block])


class PieceRequests:
    """The construction of requests for the pieces of fills.

    range_bytes: the most bytes of one request. meter: counts the bytes that are stored. reindex:
    returns `Fetcher.reindex`, for errors.
    """

    def __init__(
        self,
        *,
        range_bytes: int,
        meter: TrafficMeter,
        reindex: Callable[[], str] = lambda: "penstock index",
    ) -> None:
        self.range_bytes, self._meter, self._reindex = range_bytes, meter, reindex

    def split(self, fill: Fill, missing: list[PieceSpan]) -> Iterator[PieceSpan]:
        """Cut spans into spans that are fetched together."""
        for pieces in missing:
            yield from fill.pieces.cut(pieces, range_bytes=self.range_bytes)

    def widened(
        self, fill: Fill, missing: list[PieceSpan], *, times: int
    ) -> Iterator[tuple[PieceSpan, list[PieceSpan]]]:
        """Cut missing spans into requests, and widen each to about `times` its size by missing
        neighbours. Yield each wide span and the exact spans in it.

        The sizes of widened spans are powers of two, so that different sizes leave no small
        gaps."""
        wide = missing
        if times > 1 and fill.pieces.are_small:
            wide = fill.missing(merge_spans([self._block(fill, span, times) for span in missing]))
        for low, high in self.split(fill, wide):
            exact = [(max(a, low), min(b, high)) for a, b in missing if a < high and low < b]
            if exact:
                yield (low, high), exact

    def _block(self, fill: Fill, pieces: PieceSpan, times: int) -> PieceSpan:
        low, high = pieces
        most = min(times * (high - low), fill.pieces.most(self.range_bytes))
        block = 1 << (max(1, most).bit_length() - 1)
        return low // block * block, min(-(-high // block) * block, fill.pieces.count)

    def ranges(self, fill: Fill) -> Iterator[PieceSpan]:
        """Cut all missing pieces of a fill into few requests; small present gaps between them are
        fetched again."""
        missing = fill.missing([(0, fill.pieces.count)])
        if fill.pieces.are_small:
            missing = bridge_gaps(missing, waste=int(fill.pieces.count * _WASTE_SHARE))
        yield from self.split(fill, missing)

    def of(
        self, source: BlobSource, fill: Fill, pieces: PieceSpan, *, stop: Event | None = None
    ) -> Iterator[BlobRequest]:
        """Make the requests for pieces, one for each stretch of an object. stop: once it is set,
        answers raise StalledError."""
        is_of_one_object = fill.pieces.is_of_one_object
        agreed = fill.version if is_of_one_object else None

        def check_stop() -> None:
            if stop is not None and stop.is_set():
                raise StalledError(f"{source.uri}: its fill was stopped.")

        def keep(start: int, data: memoryview, crc: int) -> None:
            check_stop()
            fill.put(start, data, crc)

        def receive(wanted: BlobRange, span: PieceSpan, answer: Answer) -> None:
            check_stop()
            is_same = not is_of_one_object or fill.agree(answer.version)
            if not is_same or answer.object_bytes != wanted.segment.whole_bytes:
                raise object_changed(source, wanted.segment, reindex=self._reindex())
            if answer.passed_bytes:
                fill.mark(span)
            else:
                fill.write(span, memoryview(answer.data))
            self._meter.add(bytes_filled=wanted.end - wanted.start)

        for stretch in fill.pieces.stretches(pieces):
            wanted = BlobRange(blob=source, version=agreed, keep=keep, **stretch._asdict())
            (span,) = fill.pieces.covering([wanted.start], [wanted.end])
            yield BlobRequest(wanted, partial(receive, wanted, span), span)


@dataclass(slots=True)
class Demand:
    """Pieces of a blob that a reader waits for."""

    blob: CachedBlob
    pieces: list[PieceSpan]

    def missing(self) -> list[PieceSpan]:
        """Return the pieces that are still missing."""
        fill = self.blob.fill
        return fill.missing(self.pieces) if fill is not None else []


class BlobFills:
    """The fills of a dataset's blobs.

    Those for batches fetch missing pieces and wait for those that other processes are fetching.
    Background fills fetch all missing pieces of a blob with the connections that batches don't use.
    widening: the factor by which requests for batches are widened by missing neighbours, which
    makes fewer requests and fetches only bytes that the cache keeps.
    """

    others_s = 15.0
    """Seconds to wait for pieces that another process fetches before fetching them, too."""

    def __init__(self, upstream: Upstream, cache: DatasetCache) -> None:
        self._upstream, self.cache, self._meter = upstream, cache, upstream.meter
        self._pieces = PieceRequests(
            range_bytes=upstream.range_bytes, meter=upstream.meter, reindex=lambda: upstream.reindex
        )
        self.widening = 1

    def open(self, source: BlobSource) -> CachedBlob | None:
        """Open a cached blob, or begin its fill; None if the cache doesn't keep it."""
        cache = self.cache

        def find(folder: ReadableFolder) -> CachedBlob | None:
            mapped = folder.find(source.key, source.size_bytes)
            return None if mapped is None else CachedBlob(self, folder, source, mapped)

        def begin(folder: CacheFolder) -> CachedBlob | None:
            begun = folder.begin(source, group=cache.group, pinned=bool(cache.jobs))
            if begun is None:
                return None
            fill, mapped = begun
            blob = CachedBlob(self, folder, source, mapped, fill)
            blob.settle()  # the process that fetched the last piece may have died before publishing
            return blob

        for _ in range(2):  # the fill may be published between find and begin
            found: CachedBlob | None = cache.look(find)
            if found is None and cache.keeps(source.key):
                found = cache.use(begin)
            if found is not None:
                return found
        return None

    def ensure(self, blob: CachedBlob, spans: Sequence[tuple[int, int]]) -> None:
        """Fetch the missing pieces of spans of one blob. Raises FetchError, StalledError."""
        fill = blob.fill
        if fill is not None:
            pieces = fill.pieces.covering([a for a, _ in spans], [b for _, b in spans])
            began = time.perf_counter()
            self.bring([Demand(blob, pieces)], [])
            self._meter.add(remote_wait_s=time.perf_counter() - began)

    @contextlib.contextmanager
    def _dropping_changed(self, blobs: Sequence[CachedBlob]) -> Iterator[None]:
        """Drop the fills of blobs whose object was replaced, because their pieces are useless."""
        try:
            yield
        except ObjectChangedError as error:
            for blob in blobs:
                names = {self._upstream.uri(segment.path) for segment in blob.source.segments}
                if error.uri in (*names, blob.source.uri) and blob.fill is not None:
                    self.cache.remove(blob.source, inode=blob.inode)
            raise

    # -- for batches

    def bring(self, demands: Sequence[Demand], passing: Sequence[BlobRequest]) -> None:
        """Fetch pieces until no demand misses any, and send the requests of passing blobs together
        with the first ones. Raises FetchError, StalledError."""
        first: Sequence[BlobRequest] = passing
        progress_s = began_s = time.monotonic()

        def settled() -> bool:
            nonlocal first, progress_s
            while True:
                # A stopped process may hold pieces forever, so after a while they are fetched
                # twice. Pieces that this process fetches will arrive, however slow the remote is.
                force = time.monotonic() - progress_s > self.others_s
                done, fetched = self._round(demands, first, force=force, began_s=began_s)
                first = ()
                if done or not fetched:
                    return done
                progress_s = time.monotonic()

        blobs = [demand.blob for demand in demands]
        what = blobs[0].source.uri if blobs else self.cache.label
        with self._dropping_changed(blobs):
            # Longer than a fetch that holds pieces can take.
            wait_for(settled, timeout_s=2 * self._upstream.timeout_s, what=what)
        for blob in blobs:
            blob.settle()

    def _round(
        self, demands: Sequence[Demand], passing: Sequence[BlobRequest], force: bool, began_s: float
    ) -> tuple[bool, bool]:
        """Claim and fetch unclaimed pieces. Return (no piece is missing, this call fetched some).
        force: fetch pieces that other processes have claimed, too. began_s: the start of the wait.
        """
        requests = list(passing)
        with contextlib.ExitStack() as held:
            for demand in demands:
                fill = demand.blob.fill
                if fill is None or not (missing := demand.missing()):
                    continue
                claims = fill.claims()
                held.callback(claims.close)
                source = demand.blob.source
                for pieces, exact in self._pieces.widened(fill, missing, times=self.widening):
                    own = [pieces]
                    if not claims.lock(pieces[0], pieces[1] - pieces[0]):
                        is_fetching = self._upstream.is_fetching
                        own = [
                            (low, high)
                            for low, high in exact
                            if claims.lock(low, high - low)
                            or (force and not is_fetching(source, (low, high)))
                        ]
                    for span in fill.missing(own):
                        requests += self._pieces.of(source, fill, span)
            # Checked after claiming, because a claim that was just released may have failed.
            wanted = ((demand.blob.source.key, demand.missing()) for demand in demands)
            if (failed := self._upstream.failures.since(began_s, wanted)) is not None:
                raise failed
            self._upstream.send(requests)
        return not any(demand.missing() for demand in demands), bool(requests)

    # -- in the background

    def fill(
        self, source: BlobSource, *, progress: Progress | None = None, stop: Event | None = None
    ) -> int:
        """Fetch a whole blob into the cache. Return the bytes that this call fetched (0 if the
        cache had it, or others fetched it), or -1 if the cache can't keep it or `stop` was set.

        progress: called with the number of bytes that were just fetched, on fetch threads. Raises
        FetchError, StalledError.
        """
        if not source.size_bytes:
            return 0
        blob = self.open(source)
        if blob is None:
            return -1
        fill = blob.fill
        if fill is None:
            return 0
        stop = stop or Event()
        try:
            fetched = self._fetch_all(blob, fill, progress, stop)
            blob.settle()
        except StalledError:
            if stop.is_set():
                return -1
            raise
        except DISK_ERRORS as error:
            self.cache.give_up(error)
            return -1
        return fetched

    def _fetch_all(
        self, blob: CachedBlob, fill: Fill, progress: Progress | None, stop: Event
    ) -> int:
        """Fetch until no piece is missing; return the fetched bytes."""
        fetched = 0
        # Computed once: gaps that were bridged again in each round would add up.
        ranges = deque(self._pieces.ranges(fill))

        def settled() -> bool:
            nonlocal fetched
            came = True
            while came and not stop.is_set():
                left = fill.missing_bytes()
                came = self._fetch_some(blob, fill, ranges, stop)
                done = left - fill.missing_bytes()
                fetched += done
                if progress is not None and done:
                    progress(done)
            return not ranges

        with self._dropping_changed([blob]):
            # Longer than a fetch that holds pieces can take.
            timeout_s = 2 * self._upstream.timeout_s
            wait_for(settled, timeout_s=timeout_s, what=blob.source.uri, stop=stop)
        return fetched

    def _fetch_some(
        self, blob: CachedBlob, fill: Fill, ranges: deque[PieceSpan], stop: Event
    ) -> bool:
        """Fetch some of a fill's ranges, and remove complete ones from the list. Return False if
        nothing was fetched, because others have claimed all or batches need the connections."""
        upstream, source = self._upstream, blob.source
        requests: list[BlobRequest] = []
        left = _FULL_RANGES_AT_ONCE * fill.pieces.most(upstream.range_bytes)
        with (
            # Only as many connections as the fill can use, so that other fills can run, too.
            upstream.reserve_fills(source.key, self._most_requests(fill, ranges)) as most,
            contextlib.closing(fill.claims()) as claims,
        ):
            for _ in range(len(ranges)):
                pieces = ranges.popleft()
                missing = fill.missing([pieces])
                if not missing:
                    continue
                ranges.append(pieces)
                # A bridged range is one request, unless other processes have filled much of it.
                still = sum(high - low for low, high in missing)
                if fill.pieces.are_small and still >= _WORTH_SHARE * (pieces[1] - pieces[0]):
                    missing = [pieces]
                for low, high in missing:
                    may_claim = most > 0 and left > 0 and claims.lock(low, high - low)
                    if may_claim and fill.missing([(low, high)]):
                        requests += self._pieces.of(source, fill, (low, high), stop=stop)
                        most, left = most - 1, left - (high - low)
            upstream.send(requests, urgent=False)
        return bool(requests)

    def _most_requests(self, fill: Fill, ranges: deque[PieceSpan]) -> int:
        """Return the number of requests that a fill could make now with enough connections."""
        left, count = _FULL_RANGES_AT_ONCE * fill.pieces.most(self._upstream.range_bytes), 0
        for pieces in ranges:
            for low, high in fill.missing([pieces]):
                left, count = left - (high - low), count + 1
            if left <= 0:
                break
        return max(1, count)
