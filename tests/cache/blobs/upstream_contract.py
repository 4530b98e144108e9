"""The conformance tests of `cache.blobs.upstream.Upstream`: every implementation passes them."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from penstock.cache import FetchError, ObjectChangedError
from penstock.cache.blobs import BlobRange
from tests.cache.blobs.remotes import SIZES, content, joined, single

if TYPE_CHECKING:
    from penstock.cache.base import Answer, BlobSource
    from penstock.cache.blobs import Upstream
    from tests.stores import MemoryStore


def range_of(
    source: BlobSource, number: int, start: int, end: int, *, version: str | None = None
) -> BlobRange:
    """Bytes [start, end) of a segment, as a range of its blob."""
    segment = source.segments[number]
    offset = sum(one.size_bytes for one in source.segments[:number])
    return BlobRange(
        blob=source,
        segment=segment,
        at=start,
        start=offset + start,
        end=offset + end,
        version=version,
    )


class UpstreamTests:
    """To be subclassed with a fixture `upstream` over the fixture `store`."""

    def test_each_range_comes_once_with_its_bytes(
        self, store: MemoryStore, upstream: Upstream
    ) -> None:
        whole = joined(store)
        wanted = [range_of(whole, i, 0, size) for i, size in enumerate(SIZES)]
        wanted += [range_of(single(store, 0), 0, at, at + 10_000) for at in (0, 10_000, 290_000)]
        found: dict[int, Answer] = {}

        def deliver(number: int, answer: Answer) -> None:
            assert number not in found, "delivered twice"
            found[number] = answer

        upstream.fetch(wanted, deliver, urgent=False)
        assert sorted(found) == list(range(len(wanted)))
        for number, one in enumerate(wanted):
            answer = found[number]
            assert bytes(answer.data) == content(store, one.blob)[one.start : one.end]
            assert answer.object_bytes == one.segment.size_bytes
            assert answer.version in ("", store.version(one.segment.path))

    def test_nothing_is_fetched_for_no_ranges(self, store: MemoryStore, upstream: Upstream) -> None:
        upstream.fetch([], lambda *_: None)
        assert not store.reads

    def test_an_exception_of_deliver_is_raised_and_ends_it(
        self, store: MemoryStore, upstream: Upstream
    ) -> None:
        source = single(store, 0)
        wanted = [range_of(source, 0, at, at + 1000) for at in range(0, 300_000, 1000)]
        delivered: list[int] = []

        def deliver(number: int, _answer: Answer) -> None:
            delivered.append(number)
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            upstream.fetch(wanted, deliver)
        assert len(delivered) < len(wanted)
        known = list(delivered)
        upstream.fetch(wanted[:1], lambda *_: None)
        assert delivered == known

    def test_an_object_that_no_source_has_is_an_error_with_its_name(
        self, store: MemoryStore, upstream: Upstream
    ) -> None:
        source = single(store, 3)
        del store.objects["o3"]
        with pytest.raises(FetchError) as caught:
            upstream.fetch([range_of(source, 0, 0, 10)], lambda *_: None)
        assert caught.value.uri == upstream.uri("o3")
        assert caught.value.missing

    def test_bytes_of_another_version_are_refused(
        self, store: MemoryStore, upstream: Upstream
    ) -> None:
        one = range_of(single(store, 3), 0, 0, 10, version="before")
        with pytest.raises(ObjectChangedError) as caught:
            upstream.fetch([one], lambda *_: None)
        assert caught.value.uri == upstream.uri("o3")

    def test_several_threads_at_once(self, store: MemoryStore, upstream: Upstream) -> None:
        sources = [single(store, 0), single(store, 4), joined(store)]

        def read(seed: int) -> None:
            rng = random.Random(seed)
            for source in rng.sample(sources, 3):
                start = rng.randrange(SIZES[0] // 2)
                one = range_of(source, 0, start, start + 5000)
                found: list[bytes] = []
                upstream.fetch([one], lambda _, answer: found.append(bytes(answer.data)))  # noqa: B023
                assert found == [content(store, source)[start : start + 5000]]

        with ThreadPoolExecutor(6) as pool:
            for _ in pool.map(read, range(6), timeout=60):
                pass

    def test_fills_are_granted_while_no_batch_waits(self, upstream: Upstream) -> None:
        with upstream.reserve_fills("a", 1000) as room:
            assert room > 0
            with upstream.reserve_fills("b", 1000) as more:
                assert more == 0
        with upstream.reserve_fills("a", 1) as one:  # the rest is others'
            assert one == 1
            with upstream.reserve_fills("b", 1000) as more:
                assert more == room - 1
        with upstream.reserve_fills("a", 1000) as again:
            assert again == room

    def test_connections_of_fills_are_set(self, upstream: Upstream) -> None:
        seen: list[tuple[int, int]] = []

        def room(now: int, most: int) -> int:
            seen.append((now, most))
            return 3

        upstream.limit_fills(room)
        upstream.limit_fills(room)
        assert all(0 < now <= most for now, most in seen)
        assert seen[-1][0] == 3
        assert upstream.request_time() == (0.0, 0.0)
        assert upstream.range_bytes > 0
        assert upstream.timeout_s > 0
