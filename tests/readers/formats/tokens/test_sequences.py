"""Test how tokens become sequences: cut, or packed by first-fit decreasing, each token once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.readers.formats.tokens import (
    Cut,
    cut_documents,
    document_parts,
    first_fit,
    pack_pieces,
    sequence_count,
    slice_documents,
    stream_parts,
)

CUTS = st.tuples(st.integers(1, 9), st.integers(1, 12)).map(lambda each: Cut(*each))


WITHIN = st.tuples(st.integers(1, 9), st.integers(0, 8)).map(
    lambda each: Cut(each[0], max(1, each[0] - each[1]))
)


LENGTHS = st.lists(st.integers(0, 40), max_size=30).map(lambda each: np.array(each, np.int32))


@given(tokens=st.integers(0, 300), cut=CUTS, target=st.integers(1, 60))
def test_a_stream_is_cut_every_stride_for_any_shard_size(
    tokens: int, cut: Cut, target: int
) -> None:
    wanted = [start for start in range(0, tokens, cut.stride) if start + cut.length <= tokens]
    assert sequence_count(tokens, cut) == len(wanted)
    found = []
    for part in stream_parts(tokens, cut, target=target):
        assert part.end <= tokens
        assert sequence_count(part.end - part.start, cut) == part.sequences
        found += [part.start + n * cut.stride for n in range(part.sequences)]
    assert found == wanted


@given(lengths=LENGTHS, cut=WITHIN)
def test_pieces_hold_every_token_of_each_document_in_order(lengths: np.ndarray, cut: Cut) -> None:
    found = cut_documents(lengths, cut)
    starts = np.cumsum(lengths) - lengths
    seen: list[list[int]] = [[] for _ in lengths]
    for place in range(len(found)):
        document = int(found.documents[place])
        offset, length = int(found.offsets[place]), int(found.lengths[place])
        assert 1 <= length <= cut.length
        assert found.starts[place] == starts[document] + offset
        overlap = cut.length - cut.stride if offset else 0
        seen[document] += range(offset + overlap, offset + length)
    assert seen == [list(range(length)) for length in lengths.tolist()]


@given(lengths=LENGTHS, cut=WITHIN, target=st.integers(1, 50))
def test_the_pieces_of_all_shards_are_those_of_the_whole_stream(
    lengths: np.ndarray, cut: Cut, target: int
) -> None:
    whole, bounds = cut_documents(lengths, cut), np.cumsum([0, *lengths.tolist()])
    found: list[tuple[int, ...]] = []
    for part in document_parts(bounds, cut, target=target):
        first, skip, mine = slice_documents(bounds, part.start, part.end)
        assert mine.sum() == part.end - part.start
        some = cut_documents(mine, cut)
        offsets = some.offsets + np.where(some.documents == 0, skip, 0)
        found += zip(
            (some.documents + first).tolist(),
            offsets.tolist(),
            (some.starts + part.start).tolist(),
            some.lengths.tolist(),
            strict=True,
        )
    columns = (whole.documents, whole.offsets, whole.starts, whole.lengths)
    assert found == list(zip(*(each.tolist() for each in columns), strict=True))


TEXTBOOK_LENGTHS = st.integers(1, 30).flatmap(
    lambda room: st.tuples(st.just(room), st.lists(st.integers(1, room), max_size=150))
)


def textbook(lengths: list[int], room: int) -> list[int]:
    rooms: list[int] = []
    bins = []
    for length in lengths:
        place = next((i for i, left in enumerate(rooms) if left >= length), len(rooms))
        if place == len(rooms):
            rooms.append(room)
        rooms[place] -= length
        bins.append(place)
    return bins


@given(drawn=TEXTBOOK_LENGTHS)
def test_the_bins_are_those_of_the_textbook_algorithm(drawn: tuple[int, list[int]]) -> None:
    room, lengths = drawn
    descending = sorted(lengths, reverse=True)
    if lengths:
        assert first_fit(np.array(descending), room).tolist() == textbook(descending, room)


@given(drawn=TEXTBOOK_LENGTHS)
def test_each_piece_is_in_exactly_one_sequence_that_has_room(drawn: tuple[int, list[int]]) -> None:
    room, lengths = drawn
    packing = pack_pieces(np.array(lengths, np.int64), room=room)
    assert sorted(packing.pieces.tolist()) == list(range(len(lengths)))
    members = np.split(packing.pieces, packing.bounds[1:-1])
    assert all(sum(lengths[i] for i in some.tolist()) <= room for some in members)
    assert not lengths or [min(some) for some in members] == sorted(min(s) for s in members)


def test_documents_of_a_corpus_fill_their_sequences() -> None:
    rng = np.random.default_rng(7)
    lengths = np.clip(rng.lognormal(6, 1.2, 20_000), 1, 2048).astype(np.int64)
    packing = pack_pieces(lengths, room=2048)
    assert lengths.sum() / (2048 * len(packing)) > 0.995
