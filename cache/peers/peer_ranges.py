"""What one request asks peers for: a range of a blob, or several small ones of the same.

A batch wants several samples of a shard at once. Each request costs a signature, a look into the
other cache, two heads and two threads that are woken, as much as 100 KB of data.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from penstock.cache.base.store import Answer
from penstock.cache.fetch.object_range import ObjectRange
from penstock.cache.peers.protocol import MOST_RANGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.cache.base.store import Store
    from penstock.cache.blobs.upstream import BlobRange
    from penstock.cache.peers.peer_client import Keep
    from penstock.cache.peers.protocol import Span

_SMALL_BYTES = 2**20
"""A range of so much is worth a request of its own."""
_MOST_BYTES = 2**22
"""Of several ranges in one request: more come faster by two."""

NOT_THERE = Answer(data=b"", version="", object_bytes=-1)
"""The answer for a range that no peer gave."""


class RangesStore(Protocol):
    """A store that is asked for peer ranges."""

    def ranges(self, wanted: PeerRanges) -> Answer:
        """Ask the peers: `Given`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRanges(ObjectRange):
    """Peer ranges are spans of a blob of so many bytes; start and end tell their bytes in all.

    numbers: of each span, for who asks. keep: takes the bytes of all, stretch by stretch.
    """

    key: str
    blob_bytes: int
    spans: tuple[Span, ...]
    numbers: tuple[int, ...]
    keep: Keep | None = None

    def read(self, store: Store) -> Answer:
        """Ask the peers. Raises what keep raises."""
        return cast("RangesStore", store).ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given(Answer):
    """The answer to peer ranges: one for each span."""

    answers: tuple[Answer, ...]
    given_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return self.given_bytes


def peer_ranges(
    ranges: Sequence[BlobRange],
    numbers: Sequence[int],
    keep_of: Callable[[int], Keep | None],
) -> list[PeerRanges]:
    """Make requests for some of the ranges, in their order; small ones of a blob share some.
    keep_of: what keeps the bytes of a number's range as they come, None where its answer does."""
    shared: dict[str, list[int]] = {}
    found: list[list[int]] = []
    for number in numbers:
        one = ranges[number]
        if one.end - one.start >= _SMALL_BYTES:
            found.append([number])
        elif (together := shared.get(one.blob.key)) is None:
            found.append(shared.setdefault(one.blob.key, [number]))
        else:
            together.append(number)
    return [
        _request(ranges, some, keep_of) for together in found for some in _cut(ranges, together)
    ]


def _cut(ranges: Sequence[BlobRange], numbers: list[int]) -> Iterator[list[int]]:
    """Cut numbers of ranges of a blob into such as one request may have: ascending, disjoint."""
    some: list[int] = []
    at = left = 0
    for number in sorted(numbers, key=lambda number: ranges[number].start):
        one = ranges[number]
        size_bytes = one.end - one.start
        if some and (one.start < at or size_bytes > left or len(some) == MOST_RANGES):
            yield some
            some = []
        if not some:
            left = _MOST_BYTES
        some.append(number)
        at, left = one.end, left - size_bytes
    yield some


def _request(
    ranges: Sequence[BlobRange], numbers: list[int], keep_of: Callable[[int], Keep | None]
) -> PeerRanges:
    spans = tuple([(ranges[number].start, ranges[number].end) for number in numbers])
    blob = ranges[numbers[0]].blob
    return PeerRanges(
        path=f"blob/{blob.key}",
        start=0,
        end=sum([end - start for start, end in spans]),
        version=None,
        key=blob.key,
        blob_bytes=blob.size_bytes,
        spans=spans,
        numbers=tuple(numbers),
        keep=_keep(spans, [keep_of(number) for number in numbers]),
    )


def _keep(spans: Sequence[Span], keeps: list[Keep | None]) -> Keep | None:
    """What keeps each stretch by the span in which it lies; None where not all are kept."""
    each = [keep for keep in keeps if keep is not None]
    if len(each) < len(keeps):
        return None
    if len(each) == 1:
        return each[0]
    starts = [start for start, _ in spans]
    return lambda start, data, crc: each[bisect_right(starts, start) - 1](start, data, crc)
