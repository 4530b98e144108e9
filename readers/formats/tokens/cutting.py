"""How streams of tokens are cut: into sequences, and shards that hold whole ones. Pure arithmetic.

A document is cut into pieces of at most `length` tokens, one every `stride`; the last is what is
left. A file's stream is cut alike where sequences run across documents, but without that last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

UNCUT = 2**40
"""In place of a sequence's length: documents aren't cut."""

_BLOCK = 2**16


class Cut(NamedTuple):
    """Tokens of a sequence at most, and from one to the next."""

    length: int
    stride: int


class Part(NamedTuple):
    """A contiguous part of a file's tokens that is a shard: [start, end), and how many sequences
    it holds, 0 where that isn't known yet."""

    start: int
    end: int
    sequences: int


def ranges(firsts: Ints, counts: Ints) -> Ints:
    """The numbers [first, first + count) of each, end to end."""
    ends = np.cumsum(counts)
    return np.repeat(firsts - (ends - counts), counts) + np.arange(
        int(ends[-1]) if len(ends) else 0
    )


def sequences(tokens: int, cut: Cut) -> int:
    """Whole sequences of so many tokens."""
    return 0 if tokens < cut.length else (tokens - cut.length) // cut.stride + 1


def stream_parts(tokens: int, cut: Cut, *, target: int) -> Iterator[Part]:
    """Shards of a stream, of about `target` tokens each and equal to a sequence. A part holds the
    end of its last sequence, where that overlaps the next part's first."""
    count = sequences(tokens, cut)
    parts = min(count, max(1, round(count * cut.stride / target))) if count else 0
    for number in range(parts):
        first, last = count * number // parts, count * (number + 1) // parts
        end = (last - 1) * cut.stride + cut.length
        yield Part(first * cut.stride, end, last - first)


def pieces_of(lengths: NDArray[np.integer], cut: Cut) -> Ints:
    """Into how many pieces documents are cut, int64, shape (documents,); an empty one into none."""
    long = lengths.astype(np.int64)
    more = -(-np.maximum(long - cut.length, 0) // cut.stride)
    return np.where(long > 0, 1 + more, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The pieces of some documents, all int64, shape (pieces,). documents: number of each one's;
    offsets: of its first token in that; starts: in the stream; lengths: tokens."""

    documents: Ints
    offsets: Ints
    starts: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.starts)


def pieces(lengths: NDArray[np.integer], cut: Cut) -> Pieces:
    """The pieces of documents that lie end to end, in order."""
    counts = pieces_of(lengths, cut)
    long = lengths.astype(np.int64)
    documents = np.repeat(np.arange(len(long)), counts)
    nth = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = nth * cut.stride
    return Pieces(
        documents=documents,
        offsets=offsets,
        starts=(np.cumsum(long) - long)[documents] + offsets,
        lengths=np.minimum(long[documents] - offsets, cut.length),
    )


class Slice(NamedTuple):
    """The documents of a part of a stream. first: number of the first one; skip: tokens of it that
    lie before the part; lengths: of each one's tokens in the part."""

    first: int
    skip: int
    lengths: NDArray[np.integer]


class Documents:
    """The documents of a file, end to end. lengths: tokens of each, any integers, shape (n,): there
    may be 10^8, so nothing here is as long as they are."""

    def __init__(self, lengths: NDArray[np.integer]) -> None:
        self.lengths = lengths
        starts = np.arange(0, len(lengths), _BLOCK)
        sums = [int(lengths[at : at + _BLOCK].sum(dtype=np.int64)) for at in starts.tolist()]
        self._ends = np.cumsum(sums, dtype=np.int64)

    @property
    def tokens(self) -> int:
        """Tokens of all."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def find(self, token: int) -> tuple[int, int]:
        """The document that a token is of, and its place there; behind the last: (n, 0)."""
        if token >= self.tokens:
            return len(self.lengths), 0
        block = int(np.searchsorted(self._ends, token, side="right"))
        at = block * _BLOCK
        ends = np.cumsum(self.lengths[at : at + _BLOCK], dtype=np.int64)
        inside = token - (int(self._ends[block - 1]) if block else 0)
        place = int(np.searchsorted(ends, inside, side="right"))
        return at + place, inside - (int(ends[place - 1]) if place else 0)

    def slice(self, start: int, end: int) -> Slice:
        """The documents of tokens [start, end), at least one of them."""
        first, skip = self.find(start)
        last, _ = self.find(end - 1)
        lengths = self.lengths[first : last + 1].copy()
        lengths[0] -= skip
        lengths[-1] -= int(lengths.sum(dtype=np.int64)) - (end - start)
        return Slice(first, skip, lengths)

    def parts(self, cut: Cut, *, target: int) -> Iterator[Part]:
        """Shards of about `target` tokens that hold whole pieces, each once."""
        total, begin = self.tokens, 0
        count = max(1, round(total / target))
        for number in range(1, count + 1):
            border, halo = self._border(total * number // count, cut)
            if border > begin:
                yield Part(begin, border + halo, 0)
                begin = border

    def _border(self, token: int, cut: Cut) -> tuple[int, int]:
        """Where a piece begins, at or before a token, and what the one before it has beyond."""
        document, offset = self.find(token)
        if document == len(self.lengths):
            return self.tokens, 0
        count = int(pieces_of(self.lengths[document : document + 1], cut)[0])
        nth = min(offset // cut.stride, count - 1)
        return token - offset + nth * cut.stride, (cut.length - cut.stride) if nth else 0
