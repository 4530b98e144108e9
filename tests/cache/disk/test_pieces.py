"""How blobs of any segments are cut: pieces cover them, and requests ask for just those bytes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.base import BlobSource, Segment
from penstock.cache.disk import OBJECTS_AT_ONCE, PIECE_BYTES, BlobPieces

OBJECT_BYTES = 100_000


@st.composite
def segments(draw: st.DrawFn) -> tuple[Segment, ...]:
    """Ranges of a few objects, some in a row, and whole objects."""
    found: list[Segment] = []
    for number in range(draw(st.integers(1, 8))):
        if draw(st.booleans()):
            size = draw(st.integers(0, 20_000))
            found.append(Segment(path=f"whole-{number}", size_bytes=size, version=None))
            continue
        last = found[-1] if found else None
        goes_on = last is not None and last.object_bytes is not None and draw(st.booleans())
        start = last.start + last.size_bytes if goes_on and last else draw(st.integers(0, 50_000))
        found.append(
            Segment(
                path=last.path if goes_on and last else f"o{draw(st.integers(0, 2))}",
                size_bytes=draw(st.integers(0, min(20_000, OBJECT_BYTES - start))),
                version=None,
                start=start,
                object_bytes=OBJECT_BYTES,
            )
        )
    return tuple(found)


def where(source: BlobSource) -> list[tuple[str, int]]:
    """Of each byte of a blob its object, and its place there."""
    return [(one.path, one.start + at) for one in source.segments for at in range(one.size_bytes)]


@settings(max_examples=150, deadline=None)
@given(
    segments=segments(), range_bytes=st.integers(1, 40_000), span=st.tuples(*[st.floats(0, 1)] * 2)
)
def test_what_is_asked_for_at_a_time_is_the_pieces_and_no_more(
    segments: tuple[Segment, ...], range_bytes: int, span: tuple[float, float]
) -> None:
    size = sum(one.size_bytes for one in segments)
    source = BlobSource(key="0" * 40, uri="mem://x", segments=segments, size_bytes=size)
    pieces, places = BlobPieces(source), where(source)
    assert pieces.span((0, pieces.count)) == (0, size)
    start, end = sorted(int(share * size) for share in span)
    asked: list[int] = []
    for whole in pieces.covering([start], [end]):
        cuts = list(pieces.cut(whole, range_bytes=range_bytes))
        assert [cuts[0][0], *(b for _, b in cuts)] == [*(a for a, _ in cuts), whole[1]]
        for cut in cuts:
            stretches = list(pieces.stretches(cut))
            assert len(stretches) <= OBJECTS_AT_ONCE
            first, last = pieces.span(cut)
            if pieces.are_small and cut[1] - cut[0] > 1:
                assert last - first <= max(range_bytes, PIECE_BYTES)
            for one in stretches:
                wanted = [(one.segment.path, one.at + n) for n in range(one.end - one.start)]
                assert places[one.start : one.end] == wanted
                assert len(wanted) > 0
                ((low, high),) = pieces.covering([one.start], [one.end])
                assert pieces.span((low, high)) == (one.start, one.end)
                asked += range(one.start, one.end)
    assert set(range(start, end)) <= set(asked)
    assert len(set(asked)) == len(asked)
    if pieces.are_small:
        assert len(asked) < end - start + 2 * PIECE_BYTES
    assert pieces.is_of_one_object == (
        len(segments) == 1 or len({one.path for one in segments if one.size_bytes}) <= 1
    )
