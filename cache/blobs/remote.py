"""The front of a remote dataset's objects: blobs, small objects, names and jobs.

A blob that the cache keeps is filled as it is read: exact ranges for the samples of a batch, big
ranges by a filler in the background, both into the same file, each byte once a node. A blob that it
doesn't keep passes: its samples come by exact ranges into fresh memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.blobs.blob_opener import BlobOpener
from penstock.cache.blobs.blob_reader import BlobReader
from penstock.cache.blobs.dataset_cache import DatasetCache
from penstock.cache.blobs.demand_fills import DemandFills
from penstock.cache.blobs.fill_failures import FillFailures
from penstock.cache.blobs.memberships import Memberships
from penstock.cache.blobs.passing_reads import PassingReads
from penstock.cache.blobs.piece_requests import PieceRequests
from penstock.cache.blobs.requester import Requester
from penstock.cache.blobs.small_objects import SmallObjects
from penstock.cache.blobs.store_names import StoreNames
from penstock.cache.blobs.store_upstream import StoreUpstream
from penstock.cache.blobs.whole_fills import WholeFills

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.base.blob import Blob, BlobSource, BlobSpans, ReadMode
    from penstock.cache.base.counters import Traffic
    from penstock.cache.base.store import ObjectInfo
    from penstock.cache.blobs.block_sums import BlockSums
    from penstock.cache.blobs.upstream import Upstream
    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.cache.disk.membership import Membership
    from penstock.cache.fetch.fetcher import Fetcher

    Bytes = NDArray[np.uint8]


class Remote:
    """Reads one dataset's objects through the node's cache.

    Safe for several threads; not across fork.

    fetcher: owned, closed with this. cache: None keeps nothing. group: names the dataset in the
    cache; label: the same for people. upstream: where bytes of blobs come from, the store unless
    told; small objects and names are the store's in any case. It is closed with this.
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
        self._memberships = Memberships(cache, group=group, label=label)
        self.upstream = upstream = upstream or StoreUpstream(fetcher)
        requester = Requester(upstream, failures)
        pieces = PieceRequests(range_bytes=upstream.range_bytes, meter=meter)
        self._demand_fills = demand_fills = DemandFills(
            upstream, requester, pieces, cache=dataset_cache, failures=failures, meter=meter
        )
        self._passing = PassingReads(requester, range_bytes=upstream.range_bytes, meter=meter)
        self._opener = BlobOpener(dataset_cache, self._memberships, ensure=demand_fills.ensure)
        self._reader = BlobReader(demand_fills, self._passing, cache=dataset_cache, meter=meter)
        self._whole_fills = WholeFills(
            upstream, requester, pieces, opener=self._opener, cache=dataset_cache
        )
        self._small_objects = SmallObjects(fetcher, dataset_cache, failures=failures)
        self._names = StoreNames(fetcher, dataset_cache)

    # -- blobs

    def open(self, source: BlobSource) -> Blob:
        """Open a blob; fetches nothing. Cached if the cache has it or has room for it."""
        return self._opener.open(source) or self._passing.open(source)

    def pass_by(self, source: BlobSource) -> Blob:
        """Open a blob whose bytes are kept nowhere, whatever the cache has; fetches nothing."""
        return self._passing.open(source)

    def is_whole(self, source: BlobSource) -> bool:
        """Whether a blob is on the local disk, all of it."""
        return not source.size_bytes or self._dataset_cache.has(source)

    def held(self) -> dict[str, float]:
        """What the cache has of each of its blobs, by key: 1.0 is all of it. Lists the folder's
        names."""
        return self._dataset_cache.held()

    def keeps(self, key: str) -> bool:
        """Whether the cache would keep a blob of this key for one of the jobs here."""
        return self._memberships.keeps(key)

    def load(self, wanted: Sequence[BlobSpans], *, mode: ReadMode = "mmap") -> list[list[Bytes]]:
        """Read the bytes of all spans: read-only uint8 arrays in the order asked. What is missing
        is fetched, over all blobs at once.

        mode: "pread" gives fresh memory, any other views of cached blobs; what passes comes in
        fresh memory in any case. Raises FetchError, StalledError, ClosedError; with "pread" OSError
        and EOFError of a failing disk or a file that was truncated.
        """
        return self._reader.load(wanted, mode=mode)

    @property
    def widening(self) -> int:
        """How many times as much is fetched as batches wait for, of what lies beside it and is
        missing too: fewer requests, and no byte that the cache wouldn't keep. May be set."""
        return self._demand_fills.times

    @widening.setter
    def widening(self, times: int) -> None:
        self._demand_fills.times = times

    def bring(self, wanted: Sequence[BlobSpans], *, here: int) -> None:
        """Fetch what spans of cached blobs miss, over all blobs at once, for who reads them through
        buffers then. here: samples beside these that are on the local disk, to be counted. Raises
        FetchError, StalledError, ClosedError."""
        self._reader.bring(wanted, here=here)

    def fill(
        self,
        source: BlobSource,
        *,
        progress: Callable[[int], None] | None = None,
        stop: threading.Event | None = None,
    ) -> int:
        """Fetch a whole blob into the cache; bytes that this call fetched (0: it was there, or
        others fetched it), -1 if the cache has no room for it or stop was set.

        progress: called with bytes as they come, on fetch threads. Raises FetchError, StalledError.
        """
        return self._whole_fills.fill(source, progress=progress, stop=stop)

    def is_left_to_others(self, source: BlobSource) -> bool:
        """Whether the fill of a blob shall wait for a while: another node of the job fetches it
        from the remote for this one too."""
        return self.upstream.is_left_to_others(source.key)

    def block_sums(self, blob: Blob) -> BlockSums | None:
        """The checksums of a whole blob's blocks; None of one that isn't whole or is kept nowhere,
        and where nobody has noted any."""
        from penstock.cache.blobs.block_sums import block_sums  # most samples have their own

        return block_sums(blob, self._dataset_cache)

    def check(self, source: BlobSource) -> None:
        """Drop a blob whose bytes aren't those that came: by the checksums of its blocks, for who
        reads where samples have none. What nobody has checksums of goes too, as a fill that was
        begun."""
        self._dataset_cache.use(lambda shelf: shelf.verifier.check(source.key))

    def drop(self, source: BlobSource, *, inode: int | None = None) -> None:
        """Forget a blob whose bytes were wrong; the next open fetches it again. inode: of the file
        that was wrong (CachedBlob.inode)."""
        if self._dataset_cache.drop(source, inode=inode):
            self.fetcher.meter.add(refetched=1)
        self.upstream.doubt(source.key)

    # -- small objects and names

    def object(self, path: str, *, size_bytes: int | None, version: str) -> bytes:
        """Give the local path of a manifest or a sidecar, fetched if it isn't here. Raises
        FetchError."""
        return self._small_objects.path(path, size_bytes=size_bytes, version=version)

    def drop_object(self, path: str, *, size_bytes: int | None, version: str) -> None:
        """Forget a small object whose bytes were wrong."""
        if self._small_objects.drop(path, size_bytes=size_bytes, version=version):
            self.fetcher.meter.add(refetched=1)

    def find(self, path: str) -> ObjectInfo | None:
        """Look a name up in the store; None if it isn't there. Where the remote can't be asked,
        this is what it said last, with a warning. Raises FetchError."""
        return self._names.find(path)

    # -- jobs, counters, the end

    def join(self, keys: Sequence[str], sizes: Iterable[int]) -> Membership | None:
        """Begin a job that reads these blobs in each epoch; what is pinned is decided here. It is
        the caller's, beside other jobs on this dataset, until `leave`. None without a cache."""
        return self._memberships.join(keys, sizes)

    def leave(self, job: Membership) -> None:
        """End a job. Safe to call twice."""
        self._memberships.leave(job)

    @property
    def jobs(self) -> int:
        """How many jobs were joined and not left."""
        return len(self._memberships)

    def traffic(self) -> Traffic:
        """The traffic that was counted so far."""
        return self.fetcher.meter.snapshot()

    def close(self) -> None:
        """End requests and threads; views stay valid. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._memberships.close()
        self._dataset_cache.close()
        self.upstream.close()
        self.fetcher.close()
        self._small_objects.close()
