"""One batch claims an extent, others wait for it, and none hangs if the fetch fails."""

from __future__ import annotations

import gc
import threading

from penstock.readers.formats import SharedExtents


class Holder:
    """The holder of fetched bytes."""


def test_one_batch_claims_and_others_wait_until_it_settles() -> None:
    extents: SharedExtents[Holder] = SharedExtents()
    mine, others = extents.claim([1, 2])
    assert sorted(mine) == [1, 2]
    assert not others
    again, waiting = extents.claim([2, 3])
    assert list(again) == [3]
    assert list(waiting) == [2]
    holder, found = Holder(), list[Holder | None]()
    thread = threading.Thread(target=lambda: found.append(waiting[2].wait(30)))
    thread.start()
    mine[2].settle(holder)
    mine[1].settle(None)
    mine[2].settle(None)  # too late
    thread.join(30)
    assert found == [holder]
    # If the fetch failed or the holder is gone, the next batch that needs the extent fetches it.
    assert list(extents.claim([1, 2])[0]) == [1]
    del holder
    found.clear()
    gc.collect()
    assert waiting[2].wait(30) is None
    assert list(extents.claim([2])[0]) == [2]


def test_the_chunks_decoded_from_an_extent_are_recorded() -> None:
    extents: SharedExtents[Holder] = SharedExtents()
    assert extents.chunks(1) == ()
    extents.note([1, 2], 7)
    extents.note([1], 8)
    assert sorted(extents.chunks(1)) == [7, 8]
    assert extents.chunks(2) == (7,)


def test_a_wait_ends_at_its_timeout() -> None:
    extents: SharedExtents[Holder] = SharedExtents()
    extents.claim([1])
    assert extents.claim([1])[1][1].wait(0) is None
