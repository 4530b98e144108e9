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
        assert part[1] <= tokens
        count = sequence_count(part[1] - part[0], cut)
        found += [part[0] + n * cut.stride for n in range(count)]
    assert found == wanted


@given(lengths=LENGTHS, cut=WITHIN)
def test_pieces_hold_every_token_of_each_document_in_order(lengths: np.ndarray, cut: Cut) -> None:
    begins = np.cumsum(lengths) - lengths
    seen: list[list[int]] = [[] for _ in lengths]
    for start, length, document in zip(*cut_documents(lengths, cut), strict=True):
        offset = int(start - begins[document])
        assert 1 <= length <= cut.length
        overlap = cut.length - cut.stride if offset else 0
        seen[document] += range(offset + overlap, offset + int(length))
    assert seen == [list(range(length)) for length in lengths.tolist()]


@given(lengths=LENGTHS, cut=WITHIN, target=st.integers(1, 50))
def test_the_pieces_of_all_shards_are_those_of_the_whole_stream(
    lengths: np.ndarray, cut: Cut, target: int
) -> None:
    bounds = np.cumsum([0, *lengths.tolist()])
    found: list[tuple[int, ...]] = []
    for start, end in document_parts(bounds, cut, target=target):
        first, skip, mine = slice_documents(bounds, start, end)
        assert mine.sum() == end - start
        assert start - bounds[first] == skip
        starts, sizes, documents = cut_documents(mine, cut)
        columns = (starts + start, sizes, documents + first)
        found += zip(*(each.tolist() for each in columns), strict=True)
    whole = cut_documents(lengths, cut)
    assert found == list(zip(*(each.tolist() for each in whole), strict=True))


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
    pieces, bounds = pack_pieces(np.array(lengths, np.int64), room=room)
    assert sorted(pieces.tolist()) == list(range(len(lengths)))
    members = np.split(pieces, bounds[1:-1])
    assert all(sum(lengths[i] for i in some.tolist()) <= room for some in members)
    assert not lengths or [min(some) for some in members] == sorted(min(s) for s in members)


def test_documents_of_a_corpus_fill_their_sequences() -> None:
    rng = np.random.default_rng(7)
    lengths = np.clip(rng.lognormal(6, 1.2, 20_000), 1, 2048).astype(np.int64)
    _, bounds = pack_pieces(lengths, room=2048)
    assert lengths.sum() / (2048 * (len(bounds) - 1)) > 0.995
