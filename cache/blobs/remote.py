"""Objects of one store, read through the node's cache.

A blob that the cache keeps is filled as it is read: exact ranges for the samples of a batch, big
ranges by a filler in the background, both into the same file, each byte once a node. A blob that it
doesn't keep passes: its samples come by exact ranges into fresh memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import threading
import time
import warnings
from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.base.blob import BlobSource, Segment, blob_key
from penstock.cache.base.folders import remove_own_folder
from penstock.cache.base.locks import wait_for
from penstock.cache.base.store import ObjectInfo
from penstock.cache.blobs.fill_failures import FillFailures
from penstock.cache.blobs.open_blob import CachedBlob, PassingBlob
from penstock.cache.disk.access import DISK_ERRORS
from penstock.cache.disk.pieces import cut
from penstock.cache.errors import (
    ClosedError,
    FetchError,
    ObjectChangedError,
    PenstockError,
    PenstockWarning,
    StalledError,
)
from penstock.cache.fetch.object_range import ObjectRange

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base.blob import Blob, BlobSpans, ReadMode
    from penstock.cache.base.counters import Traffic
    from penstock.cache.base.mapping import Map
    from penstock.cache.base.store import Answer
    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.cache.disk.fills import Claims, Fill
    from penstock.cache.disk.layout import Layout
    from penstock.cache.disk.lookup import Lookup
    from penstock.cache.disk.membership import Membership
    from penstock.cache.disk.pieces import PieceSpan
    from penstock.cache.disk.shelf import Shelf
    from penstock.cache.fetch.fetcher import Fetcher

    Bytes = NDArray[np.uint8]

# Of a blob, that may be fetched twice so that two gaps become one range.
_WASTE_SHARE = 0.01
# A claimed range is fetched as a whole if so much of it is missing.
_WORTH_SHARE = 0.9
# What one fill holds at a time at most, in full ranges' bytes; the rest is free for other processes
# of the node.
_FULL_RANGES_AT_ONCE = 8
_OBJECTS_HELD = 1024
# A store that doesn't answer is waited for so long where its last answer is known.
_KNOWN_LIMIT_S = 5.0
# Samples that others are fetching are waited for so long, then fetched here too.
_OTHERS_S = 15.0


_ALL: PieceSpan = (0, 1)
"""The one piece of an object that is fetched whole."""


class _Stopped(Exception):
    """A fill was asked to stop."""


@dataclass(frozen=True, slots=True)
class _Task:
    """One range to fetch, and what to do with it. place: key of the blob and pieces, of a fill."""

    span: ObjectRange
    take: Callable[[Answer], None]
    place: tuple[str, PieceSpan] | None = None


class Remote:
    """One dataset's objects. Safe for several threads; not across fork.

    fetcher: owned, closed with this. cache: None keeps nothing. group: names the dataset in the
    cache; label: the same for people.
    """

    def __init__(
        self, fetcher: Fetcher, cache: DiskCache | None, *, group: str, label: str
    ) -> None:
        self.fetcher, self.cache = fetcher, cache
        self.group, self.label = group, label
        self._jobs: tuple[Membership, ...] = ()
        self._lock = threading.Lock()
        self._objects: OrderedDict[str, Map] = OrderedDict()
        self._own_folder: str | None = None
        self._own_finalizer: weakref.finalize[..., Remote] | None = None
        self._offline = False
        self._closed = False
        self._failures = FillFailures()

    # -- blobs

    def open(self, source: BlobSource) -> Blob:
        """Open a blob; fetches nothing. Cached if the cache has it or has room for it."""
        return self._cached(source) or PassingBlob(source, self._fetch_passing)

    def is_whole(self, source: BlobSource) -> bool:
        """Whether a blob is on the local disk, all of it."""
        return bool(self._look(lambda cache: cache.has(source.key)))

    def keeps(self, key: str) -> bool:
        """Whether the cache would keep a blob of this key for one of the jobs here."""
        jobs = self._jobs
        return self.cache is not None and (not jobs or any(job.pinned(key) for job in jobs))

    @property
    def jobs(self) -> int:
        """How many were joined and not left."""
        return len(self._jobs)

    def _use(self, act: Callable[[Shelf], Any]) -> Any:
        cache = self._open_cache()
        return cache.use(act) if cache is not None else None

    def _look(self, act: Callable[[Lookup], Any]) -> Any:
        """What a disk that is full, or can't be written, may still do."""
        cache = self._open_cache()
        return cache.look(act) if cache is not None else None

    def _open_cache(self) -> DiskCache | None:
        if self._closed:
            raise ClosedError(f"{self.label}: closed; make a new dataset.")
        return self.cache

    def _cached(self, source: BlobSource) -> CachedBlob | None:
        for _ in range(2):  # it may be published between the two looks
            found: CachedBlob | None = self._look(lambda cache: self._find(cache, source))
            if found is None and self.keeps(source.key):
                found = self._use(lambda shelf: self._begin(shelf, source))
            if found is not None:
                return found
        return None

    def _find(self, lookup: Lookup, source: BlobSource) -> CachedBlob | None:
        mapped = lookup.find(source.key, source.size_bytes)
        return None if mapped is None else self._blob(lookup.layout, source, mapped, None)

    def _begin(self, shelf: Shelf, source: BlobSource) -> CachedBlob | None:
        begun = shelf.filling.begin(source, group=self.group, pinned=bool(self._jobs))
        if begun is None:
            return None
        blob = self._blob(shelf.layout, source, begun[1], begun[0])
        blob.settle()  # who fetched the last piece may have died before it published
        return blob

    def _blob(
        self, layout: Layout, source: BlobSource, mapped: Map, fill: Fill | None
    ) -> CachedBlob:
        def publish(fill: Fill, data: Bytes) -> None:
            self._use(
                lambda shelf: shelf.filling.publish(
                    source, fill, data, group=self.group, kept=False
                )
            )

        return CachedBlob(
            layout,
            source,
            mapped,
            fill,
            inode=mapped.inode,
            publish=publish,
            ensure=self._ensure,
        )

    def check(self, source: BlobSource) -> None:
        """Drop a blob whose bytes aren't those that came: by the checksums of its blocks, for who
        reads where samples have none. What nobody has checksums of goes too, as a fill that was
        begun."""
        self._use(lambda shelf: shelf.verifier.check(source.key))

    def drop(self, source: BlobSource, *, inode: int | None = None) -> None:
        """Forget a blob whose bytes were wrong; the next open fetches it again. inode: of the file
        that was wrong (CachedBlob.inode)."""
        if self._use(lambda shelf: shelf.trash.drop(source.key, inode=inode)):
            self.fetcher.meter.add(refetched=1)

    # -- samples

    def load(self, wanted: Sequence[BlobSpans], *, mode: ReadMode = "mmap") -> list[list[Bytes]]:
        """The bytes of all spans, read-only uint8 arrays in the order asked; what is missing is
        fetched, over all blobs at once.

        mode: "pread" gives fresh memory, any other views of cached blobs; what passes comes in
        fresh memory in any case. Raises FetchError, StalledError, ClosedError; with "pread" OSError
        and EOFError of a failing disk or a file that was cut.
        """
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
                disk_bytes += sum(want.ends) - sum(want.starts)
                hits += len(found)
            loaded.append(found)
        self.fetcher.meter.add(bytes_disk=disk_bytes, hits=hits)
        return loaded

    def _bring(self, cold: Sequence[BlobSpans]) -> list[list[Bytes] | None]:
        """Fetch what isn't here: into the cache (None in its place), or for passing blobs the
        arrays themselves."""
        began = time.perf_counter()
        passed: list[list[Bytes] | None] = [None] * len(cold)
        tasks: list[_Task] = []
        filling: list[tuple[CachedBlob, list[PieceSpan]]] = []
        missed = passing = 0
        for number, want in enumerate(cold):
            if isinstance(want.blob, CachedBlob):
                runs, missing = _missing(want.blob, want)
                missed += missing
                if runs:
                    filling.append((want.blob, runs))
            else:
                assert isinstance(want.blob, PassingBlob)
                passed[number], more = self._passing_tasks(want.blob, want.starts, want.ends)
                tasks += more
                passing += len(want.starts)
        if tasks or filling:
            try:
                self._fill_runs(filling, tasks)
            except DISK_ERRORS as error:
                if isinstance(error, PenstockError) or self.cache is None:
                    raise
                self.cache.give_up(error)
                passed = self._pass_all(cold)
        self.fetcher.meter.add(
            # load() counts all that it gives from the disk as hits, what had to come first too.
            misses=missed + passing,
            hits=-missed,
            remote_wait_s=time.perf_counter() - began,
        )
        return passed

    def _pass_all(self, cold: Sequence[BlobSpans]) -> list[list[Bytes] | None]:
        """Read past a cache that can't be written any more."""
        passed: list[list[Bytes] | None] = []
        tasks: list[_Task] = []
        for want in cold:
            blob = PassingBlob(want.blob.source, self._fetch_passing)
            found, more = self._passing_tasks(blob, want.starts, want.ends)
            passed.append(found)
            tasks += more
        self._fetch(tasks)
        return passed

    def _fetch(self, tasks: Sequence[_Task], *, urgent: bool = True) -> None:
        if tasks:
            spans = [task.span for task in tasks]
            try:
                self.fetcher.fetch(
                    spans, lambda number, answer: tasks[number].take(answer), urgent=urgent
                )
            except FetchError as error:
                failed = [
                    task.place
                    for task in tasks
                    if task.place is not None and self._uri(task.span.path) == error.uri
                ]
                self._failures.note(failed, error)
                raise

    # -- passing blobs

    def _passing_tasks(
        self, blob: PassingBlob, starts: Sequence[int], ends: Sequence[int]
    ) -> tuple[list[Bytes], list[_Task]]:
        """Arrays that are filled by the tasks."""
        found: list[Bytes] = [np.empty(0, np.uint8)] * len(starts)
        tasks: list[_Task] = []
        for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
            spans = list(blob.spans(start, end))
            if len(spans) == 1:
                tasks.append(_Task(spans[0], self._take_one(blob, found, place)))
            elif spans:  # a sample over several objects
                room = np.empty(end - start, np.uint8)
                found[place] = room.view()
                found[place].flags.writeable = False
                at = 0
                for span in spans:
                    tasks.append(_Task(span, self._take_some(blob, room, at)))
                    at += span.end - span.start
        return found, tasks

    def _take_one(
        self, blob: PassingBlob, found: list[Bytes], place: int
    ) -> Callable[[Answer], None]:
        def take(answer: Answer) -> None:
            self._check_passing(blob, answer)
            sample = np.frombuffer(answer.data, np.uint8)
            sample.flags.writeable = False
            found[place] = sample

        return take

    def _take_some(self, blob: PassingBlob, room: Bytes, at: int) -> Callable[[Answer], None]:
        def take(answer: Answer) -> None:
            self._check_passing(blob, answer)
            data = np.frombuffer(answer.data, np.uint8)
            room[at : at + len(data)] = data

        return take

    def _check_passing(self, blob: PassingBlob, answer: Answer) -> None:
        if len(blob.source.segments) == 1:
            if blob.version is None:
                blob.version = answer.version
            if answer.version != blob.version or answer.object_bytes != blob.source.size_bytes:
                blob.version = None
                raise _changed(blob.source)
        self.fetcher.meter.add(bytes_passed=len(memoryview(answer.data)))

    def _fetch_passing(self, blob: PassingBlob, spans: Sequence[tuple[int, int]]) -> None:
        """Bring spans into a passing blob's buffer."""
        tasks: list[_Task] = []
        for start, end in spans:
            at = start
            for span in blob.spans(start, end):
                tasks.append(_Task(span, self._take_buffer(blob, at)))
                at += span.end - span.start
        self._fetch(tasks)

    def _take_buffer(self, blob: PassingBlob, at: int) -> Callable[[Answer], None]:
        def take(answer: Answer) -> None:
            self._check_passing(blob, answer)
            blob.put(at, answer.data)

        return take

    # -- fills

    def _ensure(self, blob: CachedBlob, spans: Sequence[tuple[int, int]]) -> None:
        fill = blob.fill
        if fill is not None:
            runs = fill.pieces.covering([a for a, _ in spans], [b for _, b in spans])
            began = time.perf_counter()
            self._fill_runs([(blob, runs)], [])
            self.fetcher.meter.add(remote_wait_s=time.perf_counter() - began)

    def _fill_runs(
        self, filling: Sequence[tuple[CachedBlob, list[PieceSpan]]], tasks: Sequence[_Task]
    ) -> None:
        """Fetch pieces until none of the runs misses any, and the tasks once beside the first."""
        first: Sequence[_Task] = tasks
        moved_s = began_s = time.monotonic()

        def settled() -> bool:
            nonlocal first, moved_s
            while True:
                # A stopped process may hold pieces for ever. Fetching them twice is no harm.
                force = time.monotonic() - moved_s > _OTHERS_S
                done, fetched = self._round(filling, first, force=force, began_s=began_s)
                first = ()
                if done or not fetched:
                    return done
                moved_s = time.monotonic()

        with self._forgetting_changed([blob for blob, _ in filling]):
            wait_for(settled, timeout_s=self._patience_s, what=self._at_work(filling))
        for blob, _ in filling:
            blob.settle()

    @contextlib.contextmanager
    def _forgetting_changed(self, blobs: Sequence[CachedBlob]) -> Iterator[None]:
        """What was filled from an object that isn't that one any more is of no use."""
        try:
            yield
        except ObjectChangedError as error:
            for blob in blobs:
                names = {self._uri(segment.path) for segment in blob.source.segments}
                if error.uri in (*names, blob.source.uri) and blob.fill is not None:
                    self._use(partial(_drop, key=blob.source.key, inode=blob.inode))
            raise

    def _uri(self, path: str) -> str:
        """As the errors of a fetch name an object."""
        return self.fetcher.uri(path)

    @property
    def _patience_s(self) -> float:
        """Longer than whoever holds pieces can take for them."""
        return 2 * self.fetcher.policy.retry_timeout_s

    def _at_work(self, filling: Sequence[tuple[CachedBlob, list[PieceSpan]]]) -> str:
        return filling[0][0].source.uri if filling else self.label

    def _round(
        self,
        filling: Sequence[tuple[CachedBlob, list[PieceSpan]]],
        extra: Sequence[_Task],
        *,
        force: bool,
        began_s: float,
    ) -> tuple[bool, bool]:
        """Claim what nobody fetches and fetch it: (nothing is missing any more, something came).
        force: fetch what others are at, too; began_s: since when this is waited for."""
        tasks = list(extra)
        with contextlib.ExitStack() as held:
            for blob, runs in filling:
                fill = blob.fill
                if fill is None or not (missing := fill.missing(runs)):
                    continue
                claims = fill.claims()
                held.callback(claims.close)
                for run in self._cut(fill, missing):
                    if claims.claim(run) or force:
                        for one in fill.missing([run]):
                            tasks += self._piece_tasks(blob, fill, one, None)
            # Behind the claims: what was just let go may have failed.
            wanted = (
                (blob.source.key, fill.missing(runs))
                for blob, runs in filling
                if (fill := blob.fill) is not None
            )
            if (failed := self._failures.since(began_s, wanted)) is not None:
                raise failed
            self._fetch(tasks)
        left = any((fill := blob.fill) and fill.missing(runs) for blob, runs in filling)
        return not left, bool(tasks)

    def _claim_and_fetch(
        self, blob: CachedBlob, fill: Fill, ranges: deque[PieceSpan], stop: threading.Event | None
    ) -> bool:
        """Fetch some of a fill's ranges, and take those that are there off the list. False if
        nothing came: others are at all of them, or batches need the connections."""
        with self.fetcher.room_for_fills() as room, contextlib.closing(fill.claims()) as claims:
            tasks = list(self._claimed(blob, fill, ranges, claims, room, stop))
            self._fetch(tasks, urgent=False)
        return bool(tasks)

    def _claimed(
        self,
        blob: CachedBlob,
        fill: Fill,
        ranges: deque[PieceSpan],
        claims: Claims,
        room: int,
        stop: threading.Event | None,
    ) -> Iterator[_Task]:
        """Tasks for at most `room` requests, whose pieces are claimed."""
        pieces = _FULL_RANGES_AT_ONCE * self._pieces_at_once(fill)
        for _ in range(len(ranges)):
            run = ranges.popleft()
            missing = fill.missing([run])
            if not missing:
                continue
            ranges.append(run)
            # A bridged range is one request, unless others have brought much of it.
            still = sum(high - low for low, high in missing)
            if fill.pieces.single and still >= _WORTH_SHARE * (run[1] - run[0]):
                missing = [run]
            for one in missing:
                if room > 0 and pieces > 0 and claims.claim(one) and fill.missing([one]):
                    yield from self._piece_tasks(blob, fill, one, stop)
                    room -= 1
                    pieces -= one[1] - one[0]

    def _piece_tasks(
        self, blob: CachedBlob, fill: Fill, run: PieceSpan, stop: threading.Event | None
    ) -> Iterator[_Task]:
        source = blob.source
        singles = [run] if fill.pieces.single else [(i, i + 1) for i in range(*run)]
        for one in singles:
            start, end = fill.pieces.span(one)
            segment = source.segments[0] if fill.pieces.single else source.segments[one[0]]
            if start == end:
                fill.write(one, memoryview(b""))
                continue
            low, high = (start, end) if fill.pieces.single else (0, end - start)
            version = segment.version or (fill.version if fill.pieces.single else None)
            span = ObjectRange(path=segment.path, start=low, end=high, version=version)
            take = self._take_piece(source, fill, one, segment, stop)
            yield _Task(span, take, (source.key, one))

    def _take_piece(
        self,
        source: BlobSource,
        fill: Fill,
        run: PieceSpan,
        segment: Segment,
        stop: threading.Event | None,
    ) -> Callable[[Answer], None]:
        def take(answer: Answer) -> None:
            if stop is not None and stop.is_set():
                raise _Stopped
            same = not fill.pieces.single or fill.agree(answer.version)
            if not same or answer.object_bytes != segment.size_bytes:
                raise _changed(source)
            data = memoryview(answer.data)
            fill.write(run, data)
            self.fetcher.meter.add(bytes_filled=len(data))

        return take

    def _cut(self, fill: Fill, missing: list[PieceSpan]) -> Iterator[PieceSpan]:
        """Runs of at most one request."""
        most = self._pieces_at_once(fill)
        for run in missing:
            yield from cut(run, most=most)

    def _pieces_at_once(self, fill: Fill) -> int:
        return max(1, self.fetcher.policy.range_bytes // 4096) if fill.pieces.single else 64

    def _ranges(self, fill: Fill) -> Iterator[PieceSpan]:
        """What a fill misses, as few requests: small gaps of what is there are fetched again."""
        missing = fill.missing([(0, fill.pieces.count)])
        if fill.pieces.single:
            missing = bridged(missing, waste=int(fill.pieces.count * _WASTE_SHARE))
        yield from self._cut(fill, missing)

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
        if not source.size_bytes:
            return 0
        blob = self._cached(source)
        if blob is None:
            return -1
        fill = blob.fill
        if fill is None:
            return 0
        fetched = 0
        # Decided once: what is bridged in each round anew would add up.
        ranges = deque(self._ranges(fill))

        def settled() -> bool:
            nonlocal fetched
            came = True
            while came and not (stop is not None and stop.is_set()):
                left = fill.missing_bytes()
                came = self._claim_and_fetch(blob, fill, ranges, stop)
                done = left - fill.missing_bytes()
                fetched += done
                if progress is not None and done:
                    progress(done)
            return not ranges

        try:
            with self._forgetting_changed([blob]):
                wait_for(settled, timeout_s=self._patience_s, what=source.uri, stop=stop)
            blob.settle()
        except _Stopped:
            return -1
        except StalledError:
            if stop is not None and stop.is_set():
                return -1
            raise
        except DISK_ERRORS as error:
            if isinstance(error, PenstockError) or self.cache is None:
                raise
            self.cache.give_up(error)
            return -1
        return fetched

    # -- small whole objects

    def object(self, path: str, *, size_bytes: int | None, version: str) -> bytes:
        """Local path of a manifest or a sidecar, fetched if it isn't here. Raises FetchError."""
        source = self._object_source(path, size_bytes, version)
        kept: str | None = self._look(
            lambda cache: self._held_object(cache, source, size_bytes)
        ) or self._use(lambda shelf: self._keep_object(shelf, source, size_bytes))
        if kept is None:
            kept = self._own_object(source, size_bytes)
        return os.fsencode(kept)

    def drop_object(self, path: str, *, size_bytes: int | None, version: str) -> None:
        """Forget one whose bytes were wrong."""
        source = self._object_source(path, size_bytes, version)
        with self._lock:
            self._objects.pop(source.key, None)
        self.drop(source)
        if self._own_folder is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._own_folder, source.key))

    def _object_source(self, path: str, size_bytes: int | None, version: str) -> BlobSource:
        uri = f"{self.fetcher.store.url}/{path}"
        key = blob_key(scope=self.fetcher.store.scope, uri=uri, version=version)
        segment = Segment(path=path, size_bytes=size_bytes or 0, version=None)
        return BlobSource(key=key, uri=uri, segments=(segment,), size_bytes=size_bytes or 0)

    def _held_object(
        self, lookup: Lookup, source: BlobSource, size_bytes: int | None
    ) -> str | None:
        """The path of an object that is here; its map is held, so that it stays."""
        path = lookup.layout.blob(source.key)
        with self._lock:
            if source.key in self._objects and lookup.has(source.key):
                return path
        mapped = lookup.find(source.key, size_bytes)
        if mapped is None:
            return None
        with self._lock:
            self._objects[source.key] = mapped
            while len(self._objects) > _OBJECTS_HELD:
                self._objects.popitem(last=False)
        return path

    def _keep_object(self, shelf: Shelf, source: BlobSource, size_bytes: int | None) -> str | None:
        # One of the node fetches it, the others wait.
        began_s = time.monotonic()
        with shelf.keys.holding(source.key, timeout_s=self._patience_s):
            held = self._held_object(shelf.lookup, source, size_bytes)
            if held is not None:
                return held
            if (failed := self._failures.since(began_s, [(source.key, [_ALL])])) is not None:
                raise failed
            try:
                answer = self.fetcher.whole(source.segments[0].path, size_bytes=size_bytes)
            except FetchError as error:
                self._failures.note([(source.key, _ALL)], error)
                raise
            data = memoryview(answer.data)
            if not shelf.filling.put(source, data, group=self.group, kept=True):
                return self._write_own(source, data)
            self.fetcher.meter.add(bytes_filled=len(data))
            return self._held_object(shelf.lookup, source, size_bytes)

    def _own_object(self, source: BlobSource, size_bytes: int | None) -> str:
        """Without a cache: a file in a temporary folder of this process."""
        path = os.path.join(self._own(), source.key)
        if not os.path.exists(path):
            answer = self.fetcher.whole(source.segments[0].path, size_bytes=size_bytes)
            self._write_own(source, memoryview(answer.data))
        return path

    def _write_own(self, source: BlobSource, data: memoryview) -> str:
        path = os.path.join(self._own(), source.key)
        temp = f"{path}.{threading.get_ident()}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temp, flags, 0o600), "wb") as file:
            file.write(data)
        os.replace(temp, path)
        return path

    def _own(self) -> str:
        import weakref

        with self._lock:
            if self._own_folder is None:
                self._own_folder = tempfile.mkdtemp(prefix="penstock-objects-")
                self._own_finalizer = weakref.finalize(
                    self, remove_own_folder, self._own_folder, os.getpid()
                )
            return self._own_folder

    def find(self, path: str) -> ObjectInfo | None:
        """What the store says of a name, None if it isn't there. Where the remote can't be asked,
        what it said last, with a warning. Raises FetchError."""
        name = "\0".join((self.fetcher.store.scope, self.fetcher.store.url, path))
        known, before = self._look(lambda cache: cache.recall(name)) or (False, None)
        try:
            found = self.fetcher.info(path, limit_s=_KNOWN_LIMIT_S if known else None)
        except FetchError as error:
            if not known:
                raise
            self._warn_offline(error)
            if before is None:
                return None
            return ObjectInfo(path=path, size_bytes=before[0], version=before[1])
        answer = None if found is None else (found.size_bytes, found.version)
        if not known or answer != before:
            self._use(lambda shelf: shelf.catalogue.names.remember(name, answer))
        return found

    def _warn_offline(self, error: FetchError) -> None:
        if not self._offline:
            self._offline = True
            warnings.warn(
                f"{self.label}: the remote can't be asked whether it has changed, so the cached "
                f"index is used as it is. {error}",
                PenstockWarning,
                stacklevel=4,
            )

    # -- life

    def join(self, keys: Sequence[str], sizes: Iterable[int]) -> Membership | None:
        """Begin a job that reads these blobs in each epoch; what is pinned is decided here. It is
        the caller's, beside other jobs on this dataset, until `leave`. None without a cache."""
        if self.cache is None:
            return None
        job = self.cache.join(self.group, label=self.label, keys=keys, sizes=sizes)
        with self._lock:
            self._jobs = (*self._jobs, job)
        return job

    def leave(self, job: Membership) -> None:
        """End a job. Safe to call twice."""
        with self._lock:
            self._jobs = tuple(other for other in self._jobs if other is not job)
        job.leave()

    def traffic(self) -> Traffic:
        """What was counted so far."""
        return self.fetcher.meter.snapshot()

    def close(self) -> None:
        """End requests and threads; views stay valid. Safe to call twice."""
        if self._closed:
            return
        for job in self._jobs:
            self.leave(job)
        self._closed = True
        self.fetcher.close()
        self._objects.clear()
        if self._own_finalizer is not None:
            self._own_finalizer()


def _drop(shelf: Shelf, *, key: str, inode: int) -> None:
    shelf.trash.drop(key, inode=inode)


def bridged(runs: list[PieceSpan], *, waste: int) -> list[PieceSpan]:
    """Sorted runs joined over their smallest gaps, of at most `waste` pieces in all. Pure."""
    gaps = sorted(
        (after[0] - before[1], place)
        for place, (before, after) in enumerate(itertools.pairwise(runs))
    )
    closed = set()
    for gap, place in gaps:
        if gap > waste:
            break
        waste -= gap
        closed.add(place)
    result: list[PieceSpan] = []
    for place, run in enumerate(runs):
        if place - 1 in closed:
            result[-1] = (result[-1][0], run[1])
        else:
            result.append(run)
    return result


def _missing(blob: CachedBlob, want: BlobSpans) -> tuple[list[PieceSpan], int]:
    """Runs of pieces that spans miss, and of how many spans something is missing."""
    fill = blob.fill
    if fill is None:
        return [], 0
    runs = fill.missing(fill.pieces.covering(want.starts, want.ends))
    if not runs:
        return [], 0
    spans = [fill.pieces.span(run) for run in runs]
    first = np.array([a for a, _ in spans])
    last = np.array([b for _, b in spans])
    starts, ends = np.asarray(want.starts), np.asarray(want.ends)
    # The first missing span that ends behind a sample's start: does it begin before its end?
    place = np.searchsorted(last, starts, side="right")
    hit = (place < len(first)) & (first[np.minimum(place, len(first) - 1)] < ends)
    return runs, int(hit.sum())


def _changed(source: BlobSource) -> ObjectChangedError:
    return ObjectChangedError(
        f"{source.uri}: it was replaced while it was read, or isn't what was indexed. Nothing was "
        "mixed: run the job again, and don't write to a dataset in training.",
        uri=source.uri,
    )
