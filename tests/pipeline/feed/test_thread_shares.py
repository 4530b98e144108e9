"""Decode threads are divided among the image fields of a sample."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.feed import thread_shares
from penstock.readers import ImageRange


def sized(height: int, width: int) -> ImageRange:
    return ImageRange(min_height=height, max_height=height, min_width=width, max_width=width)


def test_an_only_image_has_all_threads() -> None:
    assert thread_shares(7, {"image": sized(3, 5)}) == {"image": 7}
    assert thread_shares(7, {}) == {}


def test_a_thumbnail_takes_none_from_a_photograph() -> None:
    assert thread_shares(4, {"a": sized(384, 512), "b": sized(96, 96)}) == {"a": 4, "b": 1}
    assert thread_shares(4, {"a": sized(8, 8), "b": sized(8, 8)}) == {"a": 2, "b": 2}


sides = st.integers(1, 5000)


@given(threads=st.integers(1, 64), sizes=st.lists(st.tuples(sides, sides), min_size=1, max_size=6))
def test_each_has_one_and_all_together_hardly_more(
    threads: int, sizes: list[tuple[int, int]]
) -> None:
    ranges = {str(i): sized(*size) for i, size in enumerate(sizes)}
    shares = thread_shares(threads, ranges)
    assert all(1 <= share <= threads for share in shares.values())
    assert threads <= sum(shares.values()) < threads + len(shares)
