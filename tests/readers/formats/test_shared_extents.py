"""What one batch fetches others wait for: one claims, and whatever comes of it nobody hangs."""

from __future__ import annotations

import gc
import threading

from penstock.readers.formats import SharedExtents


class Holder:
    """Who has what came."""


def test_one_claims_and_others_wait_until_it_is_settled() -> None:
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
    # What didn't come, or is gone with who had it, is fetched by whoever asks next.
    assert list(extents.claim([1, 2])[0]) == [1]
    del holder
    found.clear()
    gc.collect()
    assert waiting[2].wait(30) is None
    assert list(extents.claim([2])[0]) == [2]


def test_the_chunks_of_an_extent_are_known_once_they_were_decoded() -> None:
    extents: SharedExtents[Holder] = SharedExtents()
    assert extents.chunks(1) == ()
    extents.note([1, 2], 7)
    extents.note([1], 8)
    assert sorted(extents.chunks(1)) == [7, 8]
    assert extents.chunks(2) == (7,)


def test_what_takes_too_long_isnt_waited_for() -> None:
    extents: SharedExtents[Holder] = SharedExtents()
    extents.claim([1])
    assert extents.claim([1])[1][1].wait(0) is None
