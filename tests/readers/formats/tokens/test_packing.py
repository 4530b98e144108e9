"""Packing by first-fit decreasing: the textbook's result, and well-filled sequences."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.readers.formats.tokens import first_fit, pack_pieces

LENGTHS = st.integers(1, 30).flatmap(
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


@given(drawn=LENGTHS)
def test_the_bins_are_those_of_the_textbook_algorithm(drawn: tuple[int, list[int]]) -> None:
    room, lengths = drawn
    descending = sorted(lengths, reverse=True)
    if lengths:
        assert first_fit(np.array(descending), room).tolist() == textbook(descending, room)


@given(drawn=LENGTHS)
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
